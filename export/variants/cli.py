"""Command `export-variants`: artifact in, faster artifacts that answer as well out."""

from __future__ import annotations

from collections.abc import Sequence

from export.variants.config import VariantsConfig
from scheduler_core.command import run_command


def main(args: Sequence[str] | None = None) -> int:
    """Console script `export-variants`; returns the exit code."""
    return run_command(
        "export-variants", VariantsConfig, _run, positionals=("artifact",), extra="export", args=args
    )


def _run(config: VariantsConfig) -> int:
    from export.variants.run import export_variants

    export_variants(config)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
