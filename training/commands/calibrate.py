"""The command `calibrate`: correct a checkpoint by prompts that it was not trained on."""

from __future__ import annotations

from scheduler_core.shell.command import command
from training.commands import prepare_models

main = command(
    "calibrate",
    "training.correcting.config:CalibrateConfig",
    "training.correcting.calibrate:calibrate_command",
    positionals=("predictor",),
    extra="train",
    prepare=prepare_models,
)


if __name__ == "__main__":
    raise SystemExit(main())
