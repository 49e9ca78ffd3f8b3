"""Command `package-artifact`: an artifact in the form that another serving stack loads."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_core.command import entry_point, run_command


@entry_point("package-artifact", extra="export")
def main(args: Sequence[str] | None = None) -> int:
    """Console script `package-artifact`; returns the exit code."""
    from export.packages import PackageConfig, package

    return run_command(
        "package-artifact",
        PackageConfig,
        package,
        positionals=("target", "artifact"),
        extra="export",
        args=args,
    )


if __name__ == "__main__":
    raise SystemExit(main())
