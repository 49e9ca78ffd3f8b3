"""Command `package-artifact`: an artifact in the form that another serving stack loads."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_core.command import entry_point, run_command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from export.packaging import PackageConfig


@entry_point("package-artifact", extra="export")
def main(args: Sequence[str] | None = None) -> int:
    """Console script `package-artifact`; returns the exit code."""
    from export.packaging import PackageConfig

    return run_command(
        "package-artifact",
        PackageConfig,
        _run,
        positionals=("target", "artifact"),
        extra="export",
        args=args,
    )


def _run(config: PackageConfig) -> None:
    from export.packaging import package

    package(config)


if __name__ == "__main__":
    raise SystemExit(main())
