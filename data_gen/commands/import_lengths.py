"""The command `import-lengths`: convert logs, traces and public data sets to samples or a trace."""

from __future__ import annotations

from scheduler_core.shell.command import command

main = command(
    "import-lengths",
    "data_gen.importers.config:ImportLengthsConfig",
    "data_gen.importers.import_lengths:run",
    positionals=("kind", "file"),
    extra="gen",
)


if __name__ == "__main__":
    raise SystemExit(main())
