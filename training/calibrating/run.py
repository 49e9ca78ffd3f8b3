"""A calibrated checkpoint from a checkpoint and samples that it was not trained on."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from data_gen.splits import unit_hash
from predictors.manifest import CONFORMAL
from predictors.modules import Checkpoint, load_checkpoint, save_checkpoint
from predictors.modules.checkpoint import KIND
from scheduler_core.errors import InputError
from scheduler_core.files import existing_file, folder_target, sha256_file, write_json
from training.calibrating.config import CalibrateConfig
from training.calibrating.conformal import fit_conformal
from training.calibrating.residuals import Residuals
from training.calibrating.shift_and_scale import SelectedCalibration, fit_calibration, select_calibration
from training.evaluating.conformal import ConformalQuantiles
from training.evaluating.predictors import DEFAULT_NU, InferenceOptions, distinct, predict_rows
from training.evaluating.rows import EvaluationRows, implied_max_tokens, of_split, prompts_of
from training.fitting.fits import FitOptions, read_fits_or_fit
from training.prediction import pick_device
from training.versions import versions_of

log = logging.getLogger(__name__)
_COPIED_FILES = ("metrics.csv", "run.json")


def calibrate(config: CalibrateConfig) -> dict[str, Any]:
    """Runs the command; returns the summary that is written beside the calibrated predictor.

    Raises:
        InputError: Predictor, data or options cannot be used together.
    """
    existing_file(config.data, "data")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    out = folder_target(config.out, KIND, overwrite=config.overwrite)
    checkpoint = _uncalibrated(config.predictor)
    rows = _rows(config, checkpoint)
    residuals = _residuals(
        checkpoint, rows, InferenceOptions(config.batch_size, config.threads, config.progress)
    )
    names = _served_models(checkpoint)
    is_conformal = _uniform(rows, config.seed, "conformal") < config.conformal_fraction
    fitting, for_conformal = _parts(residuals, rows, [~is_conformal, is_conformal])
    selected = _select(fitting, rows, config, len(names))
    calibrated = for_conformal.calibrated(selected.calibration)
    conformal = fit_conformal(calibrated, names, np.random.default_rng(config.seed))
    summary = {
        "method": selected.method,
        "pooling": selected.pooling,
        **selected.calibration.to_json(),
        "served_models": list(names),
        "held_out_trials": selected.trials,
        "coverage_of_conformal_rows": {"before": for_conformal.coverage(), "after": calibrated.coverage()},
        "data": {
            "name": Path(config.data).name,
            "sha256": sha256_file(config.data),
            "split": config.split,
            "num_rows": len(rows),
            "num_samples": len(residuals),
        },
        "config": asdict(config),
        "versions": versions_of(("numpy", "scipy", "torch")),
    }
    checkpoint.model.set_calibration(selected.calibration)
    _write(out, checkpoint, conformal, summary, overwrite=config.overwrite)
    before, after = (summary["coverage_of_conformal_rows"][name] for name in ("before", "after"))
    log.info(
        "method %s, pooling %g; largest shift of coverage over served models and levels, on prompts it was not fitted to: "
        "%.1f points before, %.1f after",
        selected.method,
        selected.pooling,
        100 * before["largest_shift"],
        100 * after["largest_shift"],
    )
    return summary


def _uncalibrated(folder: str) -> Checkpoint:
    """The checkpoint without the calibration it may have, on CUDA where there is a device."""
    checkpoint = load_checkpoint(folder)
    if checkpoint.config.heads.length is None:
        raise InputError("predictor", folder, "a checkpoint with a length head")
    checkpoint.model.set_calibration(None)
    checkpoint.model.to(pick_device("auto"))
    return checkpoint


def _served_models(checkpoint: Checkpoint) -> tuple[str, ...]:
    conditioning = checkpoint.config.conditioning
    return () if conditioning is None else conditioning.served_models


def _rows(config: CalibrateConfig, checkpoint: Checkpoint) -> EvaluationRows:
    length = checkpoint.config.heads.length
    assert length is not None
    options = FitOptions(
        nu=DEFAULT_NU if length.learn_nu else length.nu,
        keys=config.keys,
        max_tokens=config.max_tokens or implied_max_tokens(config.data),
    )
    conversations = checkpoint.config.conversations
    fits = read_fits_or_fit(config.data, options, min_samples=1, conversations=conversations)
    prompts_of(fits)
    if config.split != "all":
        split = checkpoint.training_info.get("data", {}).get("split")
        if not isinstance(split, Mapping):
            raise InputError("split", config.split, "all: the predictor does not say how it split its data")
        fits = fits.take(of_split(fits, int(split["seed"]), split["fractions"], config.split))
    return EvaluationRows.of(fits)


def _residuals(checkpoint: Checkpoint, rows: EvaluationRows, options: InferenceOptions) -> Residuals:
    prediction = predict_rows(checkpoint, rows.prompts, rows.served_models, rows.temperatures, options)
    mu, sigma = prediction.mu, prediction.sigma
    assert mu is not None and sigma is not None  # noqa: PT018
    number = {name: number for number, name in enumerate(_served_models(checkpoint), start=1)}
    model = np.array([number.get(name or "", 0) for name in rows.served_models], dtype=np.intp)
    _, prompt = distinct(rows.prompts)
    owner = rows.outputs.owner
    nu = np.broadcast_to(np.asarray(prediction.nu, dtype=np.float64), len(rows))
    with np.errstate(divide="ignore"):
        z_limit = (np.log(rows.outputs.max_tokens) - mu) / sigma
    return Residuals(
        z=(np.log(rows.outputs.lengths) - mu[owner]) / sigma[owner],
        finished=rows.outputs.finished,
        z_limit=z_limit[owner],
        model=model[owner],
        prompt=prompt[owner],
        row=owner,
        nu=nu[owner],
    )


def _uniform(rows: EvaluationRows, seed: int, purpose: str) -> NDArray[np.float64]:
    """A number in [0, 1) for each row [R], equal for equal prompts."""
    numbers = {text: unit_hash(f"{purpose}\x00{seed}\x00{text}") for text in set(rows.prompts)}
    return np.array([numbers[text] for text in rows.prompts])


def _parts(residuals: Residuals, rows: EvaluationRows, masks: Sequence[NDArray[np.bool_]]) -> list[Residuals]:
    """Residuals of the rows in each mask.

    Raises:
        InputError: A part is empty.
    """
    parts = [residuals.take(mask[residuals.row]) for mask in masks]
    if not all(len(part) for part in parts):
        raise InputError(
            "data, prompts",
            len(set(rows.prompts)),
            f"enough of them for {len(parts)} parts by a hash of the text",
        )
    return parts


def _select(
    fitting: Residuals, rows: EvaluationRows, config: CalibrateConfig, num_models: int
) -> SelectedCalibration:
    if config.method != "auto":
        calibration = fit_calibration(fitting, num_models, config.method, config.pooling)
        return SelectedCalibration(config.method, config.pooling, calibration, {})
    fold = np.floor(_uniform(rows, config.seed, "folds") * config.folds)
    masks = [fold == number for number in range(config.folds)]
    return select_calibration(_parts(fitting, rows, masks), num_models)


def _write(
    out: Path,
    checkpoint: Checkpoint,
    conformal: ConformalQuantiles,
    summary: Mapping[str, Any],
    *,
    overwrite: bool,
) -> None:
    copies = {name: checkpoint.path / name for name in _COPIED_FILES if (checkpoint.path / name).is_file()}
    with tempfile.TemporaryDirectory() as folder:
        quantiles = Path(folder) / CONFORMAL
        write_json(quantiles, conformal.to_json())
        save_checkpoint(
            out,
            checkpoint.model,
            checkpoint.tokenizer,
            checkpoint.training_info | {"calibration": dict(summary)},
            extra_files=copies | {CONFORMAL: quantiles},
            overwrite=overwrite,
        )
