"""The command `evaluate`: scores of a predictor on sampled or logged outputs."""

from __future__ import annotations

from scheduler_core.shell.command import command
from training.commands import prepare_models

main = command(
    "evaluate",
    "training.evaluating.config:EvaluateConfig",
    "training.evaluating.run:run",
    positionals=("predictor",),
    extra="train,export",
    prepare=prepare_models,
)


if __name__ == "__main__":
    raise SystemExit(main())
