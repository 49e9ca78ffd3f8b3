"""Command `package-artifact`: packages an artifact for another serving stack."""

from __future__ import annotations

from scheduler_core.shell.command import command

main = command(
    "package-artifact",
    "export.packages:PackageConfig",
    "export.packages:package",
    positionals=("target", "artifact"),
    extra="export",
)


if __name__ == "__main__":
    raise SystemExit(main())
