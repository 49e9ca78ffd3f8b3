"""Calibration of a checkpoint on samples that it was not trained on, by the batch fit of `Correction`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from data_gen.splits import unit_hash
from predictors.modules.checkpoint import KIND, Checkpoint, load_checkpoint, save_checkpoint
from predictors.modules.config import Calibration
from scheduler_core.errors import InputError
from scheduler_core.prediction.linear_correction import Coefficients, fit_each
from scheduler_core.prediction.outcome import Outcome
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.shell.command import CHECK_FAILED
from scheduler_core.shell.files import existing_file, folder_target, sha256_file, writable_target
from scheduler_core.shell.versions import versions_of
from training.correcting.comparison import DECIDING, METRICS, SIDES, Comparison, corrected
from training.correcting.config import CalibrateConfig
from training.evaluating.batch_predictor import DEFAULT_NU, InferenceOptions, distinct, predict_rows
from training.evaluating.rows import EvaluationRows, of_split, warn_of_training_prompts
from training.fitting.fits import FitOptions, read_fits_or_fit
from training.network.inference import pick_device

log = logging.getLogger(__name__)
_COPIED_FILES = ("metrics.csv", "run.json")


def calibrate_command(config: CalibrateConfig) -> int:
    """Runs the command; returns 3 if the predictions did not become better, else 0."""
    return 0 if calibrate(config)["is_better"] else CHECK_FAILED


def calibrate(config: CalibrateConfig) -> dict[str, Any]:
    """Calibrates a checkpoint; returns the summary, which is also stored in the new checkpoint."""
    existing_file(config.data, "data")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    out = folder_target(config.out, KIND, overwrite=config.overwrite)
    checkpoint = load_checkpoint(config.predictor)
    if checkpoint.config.heads.length is None:
        raise InputError("predictor", config.predictor, "a checkpoint with a length head")
    checkpoint.model.set_calibration(None)
    checkpoint.model.to(pick_device("auto"))
    conditioning = checkpoint.config.conditioning
    names = () if conditioning is None else conditioning.served_models
    report = None if config.report is None else writable_target(config.report, "report")
    rows = _rows(config, checkpoint)
    warn_of_training_prompts(checkpoint.training_info.get("data", {}), rows.prompts, config.split)
    options = InferenceOptions(config.batch_size, config.threads, config.progress)
    outcomes = _outcomes(checkpoint, rows, names, options)
    is_held_back = _held_back(rows, config)[rows.outputs.owner]
    fitting, before = (
        [outcome for outcome, is_out in zip(outcomes, is_held_back, strict=True) if is_out == side]
        for side in (False, True)
    )
    fitted = fit_each(fitting)
    corrections = {name: fitted.get(name, fitted[""]) for name in ("", *names)}
    prompt = distinct(rows.prompts)[1][rows.outputs.owner][is_held_back]
    groups = np.unique(prompt, return_inverse=True)[1]
    comparison = Comparison(before, corrected(before, corrections), groups, config.seed)
    calibration = _calibration([corrections[name] for name in ("", *names)])
    summary = {
        **asdict(calibration),
        "served_models": list(names),
        "held_back": {
            name: [None if np.isnan(each.estimate) else each.estimate for each in comparison.metrics[name]]
            for name in METRICS
        },
        "is_better": comparison.is_better,
        "data": {
            "name": Path(config.data).name,
            "sha256": sha256_file(config.data),
            "split": config.split,
            "num_rows": len(rows),
            "num_samples": len(outcomes),
        },
        "config": asdict(config),
        "versions": versions_of(("numpy", "torch")),
    }
    checkpoint.model.set_calibration(calibration)
    save_checkpoint(
        out,
        checkpoint.model,
        checkpoint.tokenizer,
        checkpoint.training_info | {"calibration": summary},
        extra_files={
            name: checkpoint.path / name for name in _COPIED_FILES if (checkpoint.path / name).is_file()
        },
        overwrite=config.overwrite,
    )
    if report is not None:
        lead = (
            f"Fitted to {len(fitting)} samples of {Path(config.data).name}, compared on {len(before)} samples of prompts that "
            "were held back."
        )
        comparison.page("Calibration", lead, corrections).write(report)
    for name, *sides in (("metric", *SIDES), *comparison.table()):
        log.info("%-18s%28s%28s%28s", name, *sides)
    if not comparison.is_better:
        advice = "%s IS NOT BETTER THAN BEFORE on held-back prompts: use %s, or calibrate on more prompts"
        log.warning(advice, DECIDING, config.predictor)
    return summary


def _rows(config: CalibrateConfig, checkpoint: Checkpoint) -> EvaluationRows:
    length = checkpoint.config.heads.length
    assert length is not None
    options = FitOptions(
        nu=DEFAULT_NU if length.learn_nu else length.nu, keys=config.keys, max_tokens=config.max_tokens
    )
    fits = read_fits_or_fit(config.data, options, min_samples=1, form=checkpoint.config.form)
    fits = of_split(fits, checkpoint.training_info.get("data", {}), config.split)
    conditioning = checkpoint.config.conditioning
    if conditioning is not None and conditioning.unknown_is_mean:
        # The prediction for an unknown served model averages over the calibrated known ones, so it needs no calibration.
        names = fits.groups.column("model") or [None] * len(fits)
        fits = fits.take(np.flatnonzero([conditioning.number_of(name) > 0 for name in names]))
    return EvaluationRows.of(fits)


def _outcomes(
    checkpoint: Checkpoint, rows: EvaluationRows, names: Sequence[str], options: InferenceOptions
) -> list[Outcome]:
    """The samples of all rows with the checkpoint's predictions; served models that it does not know have no name."""
    predicted = predict_rows(checkpoint, rows.prompts, rows.served_models, rows.temperatures, options)
    assert predicted.mu is not None and predicted.sigma is not None  # noqa: PT018
    nu = np.broadcast_to(np.asarray(predicted.nu, dtype=np.float64), len(rows)).tolist()
    quantiles = [()] * len(rows) if predicted.quantiles is None else map(tuple, predicted.quantiles.tolist())
    columns = zip(predicted.mu.tolist(), predicted.sigma.tolist(), nu, quantiles, strict=True)
    predictions = [LengthPrediction(mu, sigma, each, quantiles=values) for mu, sigma, each, values in columns]
    limits = [int(limit) if np.isfinite(limit) else None for limit in rows.outputs.max_tokens.tolist()]
    served_models = [name if name in names else None for name in rows.served_models]
    samples = zip(
        rows.outputs.owner.tolist(),
        rows.outputs.lengths.tolist(),
        rows.outputs.finished.tolist(),
        strict=True,
    )
    return [
        Outcome(
            output_tokens=int(length),
            finished=is_finished,
            max_tokens=limits[row],
            served_model=served_models[row],
            prediction=predictions[row],
        )
        for row, length, is_finished in samples
    ]


def _held_back(rows: EvaluationRows, config: CalibrateConfig) -> NDArray[np.bool_]:
    """Mask of the rows held back from fitting, by a hash of the prompt's text."""
    texts = set(rows.prompts)
    held_back = {
        text for text in texts if unit_hash(f"held back\x00{config.seed}\x00{text}") < config.held_back
    }
    if not held_back or held_back == texts:
        raise InputError("data, prompts", len(texts), "enough of them for two parts by a hash of the text")
    return np.array([text in held_back for text in rows.prompts])


def _calibration(corrections: Sequence[Coefficients]) -> Calibration:
    """The tables of a checkpoint, which does not have ln prompt_tokens: the outcomes have none, so those coefficients are 0."""
    count = len(corrections)
    return Calibration(
        (1.0,) * count,
        (0.0,) * count,
        tuple(each.location[:3] for each in corrections),
        tuple(each.log_scale[:3] for each in corrections),
    )
