"""Calibration of a checkpoint on samples that it was not trained on, and its report."""

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
from predictors.modules.checkpoint import KIND, Checkpoint, load_checkpoint, save_checkpoint
from scheduler_core.errors import InputError
from scheduler_core.report.page import Page
from scheduler_core.shell.files import existing_file, folder_target, sha256_file, writable_target, write_json
from scheduler_core.shell.versions import versions_of
from training.commands.calibrate import CalibrateConfig
from training.correcting.estimation import METHODS, Residuals, fit_conformal, select_calibration
from training.evaluating.batch_predictor import DEFAULT_NU, InferenceOptions, distinct, predict_rows
from training.evaluating.rows import EvaluationRows, of_split, warn_of_training_prompts
from training.evaluating.scores import COVERAGE_LEVELS, percent
from training.fitting.fits import FitOptions, read_fits_or_fit
from training.network.inference import pick_device

log = logging.getLogger(__name__)
#: Folds of the prompts, by hash of the text, for the cross-validation.
FOLDS = 5
_COPIED_FILES = ("metrics.csv", "run.json")


def calibrate_command(config: CalibrateConfig) -> int:
    """Runs the command; returns 3 if coverage became worse, else 0."""
    return 3 if calibrate(config)["is_worse"] else 0


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
    residuals = _residuals(checkpoint, rows, names, options)
    for_conformal, fitting = _parts(
        residuals, rows, f"conformal\x00{config.seed}", [config.conformal_fraction]
    )
    folds = _parts(fitting, rows, f"folds\x00{config.seed}", np.arange(1, FOLDS) / FOLDS)
    selected = select_calibration(
        folds, len(names), list(METHODS) if config.method == "auto" else [config.method]
    )
    calibrated = for_conformal.calibrated(selected.calibration)
    conformal = fit_conformal(calibrated, names, np.random.default_rng(config.seed))
    coverage = {"before": for_conformal.coverage(), "after": calibrated.coverage()}
    summary = {
        "method": selected.method,
        "pooling": selected.pooling,
        **asdict(selected.calibration),
        "served_models": list(names),
        "selected_by": "mean_largest_shift",
        "held_out_trials": selected.trials,
        "coverage_of_conformal_rows": coverage,
        "is_worse": coverage["after"]["mean_largest_shift"] > coverage["before"]["mean_largest_shift"],
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
    copies = {name: checkpoint.path / name for name in _COPIED_FILES if (checkpoint.path / name).is_file()}
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder) / CONFORMAL, conformal)
        save_checkpoint(
            out,
            checkpoint.model,
            checkpoint.tokenizer,
            checkpoint.training_info | {"calibration": summary},
            extra_files=copies | {CONFORMAL: Path(folder) / CONFORMAL},
            overwrite=config.overwrite,
        )
    if report is not None:
        _write_report(report, summary)
    points = {name: 100 * trial["mean_largest_shift"] for name, trial in selected.trials.items()}
    log.info(
        "method %s, pooling %g: %.1f points of coverage error in cross-validation (largest of P50, P90 and P99, mean over "
        "served models); uncalibrated: %s",
        selected.method,
        selected.pooling,
        points[f"{selected.method}, {selected.pooling:g}"],
        f"{points['identity, 1']:.1f}" if config.method == "auto" else "not evaluated",
    )
    shifts = {side: 100 * coverage[side]["mean_largest_shift"] for side in coverage}
    message = "coverage error on held-out prompts: %.1f points before, %.1f after"
    log.info(message, shifts["before"], shifts["after"])
    if summary["is_worse"]:
        advice = "COVERAGE IS WORSE THAN BEFORE on held-out prompts: use %s, or calibrate on more prompts"
        log.warning(advice, config.predictor)
    return summary


def _rows(config: CalibrateConfig, checkpoint: Checkpoint) -> EvaluationRows:
    length = checkpoint.config.heads.length
    assert length is not None
    options = FitOptions(
        nu=DEFAULT_NU if length.learn_nu else length.nu, keys=config.keys, max_tokens=config.max_tokens
    )
    conversations = checkpoint.config.conversations
    fits = read_fits_or_fit(config.data, options, min_samples=1, conversations=conversations)
    fits = of_split(fits, checkpoint.training_info.get("data", {}), config.split)
    conditioning = checkpoint.config.conditioning
    if conditioning is not None and conditioning.unknown_is_mean:
        # The prediction for an unknown served model averages over the calibrated known ones, so it needs no calibration.
        names = fits.groups.column("model") or [None] * len(fits)
        fits = fits.take(np.flatnonzero([conditioning.number_of(name) > 0 for name in names]))
    return EvaluationRows.of(fits)


def _residuals(
    checkpoint: Checkpoint, rows: EvaluationRows, names: Sequence[str], options: InferenceOptions
) -> Residuals:
    prediction = predict_rows(checkpoint, rows.prompts, rows.served_models, rows.temperatures, options)
    mu, sigma = prediction.mu, prediction.sigma
    assert mu is not None and sigma is not None  # noqa: PT018
    number = {name: number for number, name in enumerate(names, start=1)}
    model = np.array([number.get(name or "", 0) for name in rows.served_models], dtype=np.intp)
    _, prompt = distinct(rows.prompts)
    owner = rows.outputs.owner
    nu = np.broadcast_to(np.asarray(prediction.nu, dtype=np.float64), len(rows))
    quantiles = np.zeros((len(rows), 0))
    if prediction.quantiles is not None:
        quantiles = (prediction.quantiles - mu[:, None]) / sigma[:, None]
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
        quantiles=quantiles[owner],
    )


def _parts(
    residuals: Residuals, rows: EvaluationRows, purpose: str, bounds: Sequence[float] | NDArray[np.float64]
) -> list[Residuals]:
    """Splits residuals by a hash of the prompt's text in [0, 1) at the ascending `bounds`."""
    hashes = {text: unit_hash(f"{purpose}\x00{text}") for text in set(rows.prompts)}
    part = np.searchsorted(bounds, [hashes[text] for text in rows.prompts], side="right")
    parts = [residuals.take(part[residuals.row] == number) for number in range(len(bounds) + 1)]
    if not all(len(part) for part in parts):
        allowed = f"enough of them for {len(parts)} parts by a hash of the text"
        raise InputError("data, prompts", len(hashes), allowed)
    return parts


def _write_report(path: str | Path, summary: Mapping[str, Any]) -> None:
    """Writes the HTML page for the summary of `calibrate`."""
    names = ["unknown", *summary["served_models"]]
    sides = [summary["coverage_of_conformal_rows"][side]["by_model"] for side in ("before", "after")]
    levels = [percent(level) for level in COVERAGE_LEVELS]
    page = Page(
        "Calibration",
        f"Method {summary['method']}, pooling {summary['pooling']:g}: shift of mu and scale of sigma for each served "
        f"model, estimated from {summary['data']['num_samples']} samples of {summary['data']['num_rows']} rows.",
    )
    page.heading("Coverage on held-out prompts")
    header = ("served model", "mu shift", "sigma scale", *(f"{level}, before" for level in levels), *levels)
    rows = [
        (
            names[int(number)],
            summary["mu_shift"][int(number)],
            summary["sigma_scale"][int(number)],
            *(side[number][level] for side in sides for level in levels),
        )
        for number in sides[0]
    ]
    page.table(header, rows)
    page.note("Fraction of samples below the predicted quantile, for quantiles below max_tokens.")
    page.write(path)
