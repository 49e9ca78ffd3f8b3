"""Coverage of the conformal quantiles that `calibrate` keeps beside a predictor."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from predictors.manifest import CONFORMAL
from scheduler_core.errors import InputError
from training.calibrating.conformal import ConformalQuantiles
from training.evaluating.predictors import OpenedPredictor, Prediction
from training.evaluating.rows import EvaluationRows
from training.evaluating.scoring import percent


def conformal_coverage(
    predictor: OpenedPredictor, rows: EvaluationRows, prediction: Prediction
) -> dict[str, Any] | None:
    """Observed coverage of each level, over all answers and for each served model; None without such quantiles.

    As for other quantiles, over answers of prompts whose quantile lies below the cap.

    Raises:
        InputError: The file of quantiles is broken, or was made for other served models.
    """
    if predictor.folder is None or prediction.mu is None or prediction.sigma is None:
        return None
    path = predictor.folder / CONFORMAL
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(CONFORMAL, str(path), f"valid JSON ({error})") from error
    quantiles = ConformalQuantiles.from_json(content)
    if quantiles.served_models != tuple(predictor.served_models):
        raise InputError(CONFORMAL, list(quantiles.served_models), "the predictor's served models")
    numbers = {name: number for number, name in enumerate(quantiles.served_models, start=1)}
    model = np.array([numbers.get(name or "", 0) for name in rows.served_models], dtype=np.intp)
    bound = quantiles.quantiles(prediction.mu, prediction.sigma, model)
    answers, owner = rows.answers, rows.answers.owner
    names = np.array([name or "(unnamed)" for name in rows.served_models], dtype=object)[owner]
    parts = {"all": np.ones(len(owner), dtype=bool)} | {name: names == name for name in sorted(set(names))}
    found: dict[str, dict[str, float | None]] = {name: {} for name in parts}
    for column, level in enumerate(quantiles.levels):
        below = bound[:, column][owner]
        known = below <= answers.caps[owner]
        covered = answers.finished & (answers.lengths <= below)
        for name, own in parts.items():
            chosen = known & own
            found[name][percent(level)] = float(covered[chosen].mean()) if chosen.any() else None
    return {"levels": [percent(level) for level in quantiles.levels], "coverage": found}
