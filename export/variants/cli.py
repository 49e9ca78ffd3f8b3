"""Command `export-variants`: artifact in, faster artifacts that answer as well out."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_core.command import entry_point, run_command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from export.variants.config import VariantsConfig


@entry_point("export-variants", extra="export")
def main(args: Sequence[str] | None = None) -> int:
    """Console script `export-variants`; returns the exit code."""
    from export.variants.config import VariantsConfig

    return run_command(
        "export-variants", VariantsConfig, _run, positionals=("artifact",), extra="export", args=args
    )


def _run(config: VariantsConfig) -> None:
    from export.variants.run import export_variants

    export_variants(config)


if __name__ == "__main__":
    raise SystemExit(main())
