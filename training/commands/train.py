"""The command `train`: train a predictor of output lengths or urgency on prompts and samples."""

from __future__ import annotations

from scheduler_core.shell.command import command
from training.commands import prepare_models

main = command(
    "train",
    "training.network.config:TrainConfig",
    "training.network.train:run",
    extra="train",
    prepare=prepare_models,
)


if __name__ == "__main__":
    raise SystemExit(main())
