"""The command `calibrate`: a predictor and answers it was not trained on in, a calibrated predictor out."""

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
from scheduler_core.errors import InputError
from scheduler_core.files import existing_file, folder_target, sha256_file
from training.calibrating.config import CalibrateConfig
from training.calibrating.conformal import fit_conformal
from training.calibrating.residuals import Residuals
from training.calibrating.shift_and_scale import Choice, choose, coverage_of, fit_calibration, moved_by
from training.calibrating.subject import Subject, open_subject
from training.evaluating.predictors import RunOptions, distinct
from training.evaluating.rows import EvaluationRows, known_cap, of_split, prompts_of
from training.fitting.fits_file import read_fits_or_fit
from training.fitting.options import FitOptions
from training.versions import versions_of

log = logging.getLogger(__name__)


def calibrate(config: CalibrateConfig) -> dict[str, Any]:
    """Runs the command; returns the summary that is written beside the calibrated predictor.

    Raises:
        InputError: Predictor, data or options cannot be used together.
    """
    existing_file(config.data, "data")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    options = RunOptions(config.batch_size, config.threads, config.progress)
    subject = open_subject(config.predictor, options)
    out = folder_target(config.out, subject.kind, overwrite=config.overwrite)
    rows = _rows(config, subject)
    residuals = uncalibrated_residuals(subject, rows)
    names = subject.served_models
    place = _places(rows, config.seed, "conformal") < config.conformal_share
    fitting, for_conformal = _parts(residuals, rows, [~place, place])
    choice = _choose(fitting, rows, config, len(names))
    calibration = choice.calibration
    moved = moved_by(for_conformal, calibration)
    conformal = fit_conformal(moved, names, np.random.default_rng(config.seed))
    summary = {
        "method": choice.method,
        "pooling": choice.pooling,
        **calibration.to_json(),
        "served_models": list(names),
        "held_out_trials": choice.trials,
        "coverage_of_conformal_rows": {
            "before": coverage_of(for_conformal),
            "after": coverage_of(moved),
        },
        "data": {
            "name": Path(config.data).name,
            "sha256": sha256_file(config.data),
            "split": config.split,
            "num_rows": len(rows),
            "num_answers": len(residuals),
        },
        "config": asdict(config),
        "versions": versions_of(("numpy", "scipy", "torch")),
    }
    subject.write(out, config.overwrite, calibration, conformal, summary)
    _say(summary)
    return summary


def uncalibrated_residuals(subject: Subject, rows: EvaluationRows) -> Residuals:
    """Residuals of all answers under the predictions before any calibration."""
    prediction = subject.predict(rows.prompts, rows.served_models, rows.temperatures)
    assert prediction.mu is not None and prediction.sigma is not None  # noqa: PT018
    number = [subject.number_of(name) for name in rows.served_models]
    _, prompt = distinct(rows.prompts)
    owner = rows.answers.owner
    mu, sigma = prediction.mu, prediction.sigma
    nu = np.broadcast_to(np.asarray(prediction.nu, dtype=np.float64), len(rows))
    with np.errstate(divide="ignore"):
        z_cap = (np.log(rows.answers.caps) - mu) / sigma
    return Residuals(
        z=(np.log(rows.answers.lengths) - mu[owner]) / sigma[owner],
        finished=rows.answers.finished,
        z_cap=z_cap[owner],
        model=np.array(number, dtype=np.intp)[owner],
        prompt=prompt[owner],
        row=owner,
        nu=nu[owner],
    )


def _rows(config: CalibrateConfig, subject: Subject) -> EvaluationRows:
    cap = config.max_tokens or known_cap(config.data)
    options = FitOptions(nu=subject.nu, keys=config.keys, max_tokens=cap)
    fits = read_fits_or_fit(config.data, options, min_samples=1, conversations=subject.conversations)
    prompts_of(fits)
    if config.split != "all":
        split = subject.split
        if split is None:
            raise InputError("split", config.split, "all: the predictor does not say how it split its data")
        fits = fits.take(of_split(fits, int(split["seed"]), split["fractions"], config.split))
    return EvaluationRows.of(fits)


def _places(rows: EvaluationRows, seed: int, name: str) -> NDArray[np.float64]:
    """A number in [0, 1) for each row [R], equal for equal prompts."""
    places = {text: unit_hash(f"{name}\x00{seed}\x00{text}") for text in set(rows.prompts)}
    return np.array([places[text] for text in rows.prompts])


def _parts(
    residuals: Residuals, rows: EvaluationRows, chosen: Sequence[NDArray[np.bool_]]
) -> list[Residuals]:
    """Residuals of the rows that each part has chosen.

    Raises:
        InputError: A part is empty.
    """
    parts = [residuals.take(part[residuals.row]) for part in chosen]
    if not all(len(part) for part in parts):
        raise InputError(
            "data, prompts",
            len(set(rows.prompts)),
            f"enough of them for {len(parts)} parts by a hash of the text",
        )
    return parts


def _choose(fitting: Residuals, rows: EvaluationRows, config: CalibrateConfig, num_models: int) -> Choice:
    if config.method != "auto":
        found = fit_calibration(fitting, num_models, config.method, config.pooling)
        return Choice(config.method, config.pooling, found, {})
    fold = np.floor(_places(rows, config.seed, "folds") * config.folds)
    return choose(_parts(fitting, rows, [fold == number for number in range(config.folds)]), num_models)


def _say(summary: dict[str, Any]) -> None:
    shifts = {name: found["largest_shift"] for name, found in summary["coverage_of_conformal_rows"].items()}
    log.info(
        "method %s, pooling %g; largest shift of coverage over served models and levels, on prompts it was not fitted to: %.1f points "
        "before, %.1f after",
        summary["method"],
        summary["pooling"],
        100 * shifts["before"],
        100 * shifts["after"],
    )
