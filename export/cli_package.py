"""Command `package-artifact`: an artifact in the form that another serving stack loads."""

from __future__ import annotations

from collections.abc import Sequence

from export.packaging import PackageConfig, package
from scheduler_core.command import run_command


def main(args: Sequence[str] | None = None) -> int:
    """Console script `package-artifact`; returns the exit code."""
    return run_command(
        "package-artifact",
        PackageConfig,
        _run,
        positionals=("target", "artifact"),
        extra="export",
        args=args,
    )


def _run(config: PackageConfig) -> int:
    package(config)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
