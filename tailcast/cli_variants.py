"""The command `export-variants`: variants by `export`, evaluated by `training`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scheduler_core.command import entry_point, run_command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from export.variants.config import VariantsConfig


@entry_point("export-variants", extra="export")
def main(args: Sequence[str] | None = None) -> int:
    """Entry point of `export-variants`."""
    from export.variants.config import VariantsConfig

    return run_command(
        "export-variants", VariantsConfig, _command, positionals=("artifact",), extra="export", args=args
    )


def _command(config: VariantsConfig) -> None:
    from export.variants.run import export_variants

    export_variants(config, _evaluate)


def _evaluate(config: VariantsConfig, variants: Mapping[str, Path], data: Path) -> Mapping[str, Any]:
    """Evaluates the artifact and its variants; an `export.variants.evaluate.Evaluate`."""
    from training.evaluating.config import EvaluateConfig
    from training.evaluating.run import evaluate

    return evaluate(
        EvaluateConfig(
            predictor=config.artifact,
            data=str(data),
            compare=[f"{name}={folder}" for name, folder in variants.items()],
            ceiling=False,
            group_by=config.group_by,
            max_groups=config.max_groups,
            max_tokens=config.max_tokens,
            seed=config.seed,
            threads=config.threads,
            progress=config.progress,
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())
