"""The command `adapt`: correct an artifact from a log of finished requests."""

from __future__ import annotations

from scheduler_core.shell.command import command

main = command(
    "adapt",
    "training.correcting.config:AdaptConfig",
    "training.correcting.adapt:adapt",
    positionals=("log",),
    extra="adapt",
)


if __name__ == "__main__":
    raise SystemExit(main())
