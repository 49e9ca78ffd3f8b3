"""Command `export-variants`: builds variants with `export` and evaluates them with `training`."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler_core.shell.command import command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from export.variants.run import VariantsConfig


def _export_variants(config: VariantsConfig) -> None:
    from export.variants.run import export_variants
    from training.evaluating.config import EvaluateConfig
    from training.evaluating.run import evaluate

    def compare(variants: Mapping[str, Path], data: Path) -> Mapping[str, Any]:
        options = ("max_groups", "seed", "threads", "progress")
        return evaluate(
            EvaluateConfig(
                predictor=config.artifact,
                data=str(data),
                compare=[f"{name}={folder}" for name, folder in variants.items()],
                ceiling=False,
                **{name: getattr(config, name) for name in options},
            )
        )

    export_variants(config, compare)


main = command(
    "export-variants",
    "export.variants.run:VariantsConfig",
    _export_variants,
    positionals=("artifact",),
    extra="export",
)
