"""Checkpoints as what `calibrate` works on: the tables go into the network's configuration."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from predictors.manifest import CONFORMAL
from predictors.modules import Calibration, Checkpoint, load_checkpoint, save_checkpoint
from predictors.modules.checkpoint import KIND
from scheduler_core.errors import InputError
from scheduler_core.files import write_json
from training.calibrating.conformal import ConformalQuantiles
from training.calibrating.subject import Subject, split_in
from training.evaluating.checkpoints import predict_rows
from training.evaluating.predictors import DEFAULT_NU, Prediction, RunOptions
from training.prediction import pick_device

_KEPT = ("metrics.csv", "run.json")


def checkpoint_subject(folder: Path, options: RunOptions) -> Subject:
    """Loads a checkpoint, on CUDA where there is a device, without the calibration it may have.

    Raises:
        InputError: It is broken or has no length head.
    """
    checkpoint = load_checkpoint(folder)
    length, conditioning = checkpoint.config.heads.length, checkpoint.config.conditioning
    if length is None:
        raise InputError("predictor", str(folder), "a checkpoint with a length head")
    checkpoint.model.set_calibration(None)
    checkpoint.model.to(pick_device("auto"))

    def predict(prompts: Any, served_models: Any, temperatures: Any) -> Prediction:
        return predict_rows(checkpoint, prompts, served_models, temperatures, options)

    return Subject(
        served_models=() if conditioning is None else conditioning.served_models,
        nu=DEFAULT_NU if length.learn_nu else length.nu,
        split=split_in(checkpoint.training_info.get("data")),
        predict=predict,
        kind=KIND,
        write=partial(_write, checkpoint),
        conversations=checkpoint.config.conversations,
    )


def _write(
    checkpoint: Checkpoint,
    out: Path,
    overwrite: bool,
    calibration: Calibration,
    conformal: ConformalQuantiles,
    summary: Mapping[str, Any],
) -> None:
    checkpoint.model.set_calibration(calibration)
    copies = {name: checkpoint.path / name for name in _KEPT if (checkpoint.path / name).is_file()}
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / CONFORMAL
        write_json(written, conformal.to_json())
        save_checkpoint(
            out,
            checkpoint.model,
            checkpoint.tokenizer,
            checkpoint.training_info | {"calibration": dict(summary)},
            extra_files=copies | {CONFORMAL: written},
            overwrite=overwrite,
        )
