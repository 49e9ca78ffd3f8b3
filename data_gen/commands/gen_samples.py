"""The command `gen-samples`."""

from __future__ import annotations

from scheduler_core.shell.command import command

main = command(
    "gen-samples",
    "data_gen.gen_samples:GenSamplesConfig",
    "data_gen.gen_samples:gen_samples",
    positionals=("prompts",),
    extra="gen",
)


if __name__ == "__main__":
    raise SystemExit(main())
