"""Conformal quantiles of a predictor, which `calibrate` fits (see `training.calibrating.estimation`), and their coverage."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictors.manifest import CONFORMAL
from scheduler_core.errors import InputError
from training.evaluating.predictors import OpenedPredictor, PredictedRows
from training.evaluating.rows import EvaluationRows
from training.evaluating.scores import finite, percent

FloatArray = NDArray[np.float64]
SCHEMA = "conformal/1"


@dataclass(frozen=True, slots=True)
class ConformalQuantiles:
    """Offsets in units of the calibrated sigma.

    Attributes:
        levels: Ascending [L].
        served_models: Names [M].
        offsets: By number of the served model, 0 = unknown or all together; infinite where data do not reach [M + 1, L].
        num_rows: Rows behind each entry [M + 1, L].
        own: False where a served model uses those of all models together [M + 1, L].
    """

    levels: tuple[float, ...]
    served_models: tuple[str, ...]
    offsets: FloatArray
    num_rows: NDArray[np.int64]
    own: NDArray[np.bool_]

    def to_json(self) -> dict[str, Any]:
        """JSON content; an infinite offset is null."""
        names = ["unknown", *self.served_models]
        return {
            "schema": SCHEMA,
            "levels": list(self.levels),
            "served_models": list(self.served_models),
            "guarantee": "P(length <= exp(mu + offset sigma)) >= level for a row exchangeable with the calibration rows",
            "offsets": {
                name: {
                    percent(level): {
                        "offset": finite(self.offsets[row, column]),
                        "num_rows": int(self.num_rows[row, column]),
                        "own": bool(self.own[row, column]),
                    }
                    for column, level in enumerate(self.levels)
                }
                for row, name in enumerate(names)
            },
        }


def conformal_coverage(
    predictor: OpenedPredictor, rows: EvaluationRows, prediction: PredictedRows
) -> dict[str, Any] | None:
    """Coverage of the predictor's conformal quantiles, over all outputs and by served model; None if it has none.

    Over outputs of prompts whose quantile lies below max_tokens.

    Raises:
        InputError: The file of quantiles is broken, or was made for other served models.
    """
    if prediction.mu is None or prediction.sigma is None:
        return None
    path = predictor.folder / CONFORMAL
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']}")
        served_models, levels = content["served_models"], [percent(level) for level in content["levels"]]
        cells = [
            [content["offsets"][name][level] for level in levels] for name in ("unknown", *served_models)
        ]
        offsets = np.array([[cell["offset"] for cell in row] for row in cells], dtype=np.float64)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(CONFORMAL, str(error), "the tables that calibrate writes") from error
    if served_models != list(predictor.served_models):
        raise InputError(CONFORMAL, served_models, "the predictor's served models")
    offsets[np.isnan(offsets)] = np.inf
    numbers = {name: number for number, name in enumerate(served_models, start=1)}
    model = np.array([numbers.get(name or "", 0) for name in rows.served_models], dtype=np.intp)
    with np.errstate(over="ignore"):
        bound = np.exp(prediction.mu[:, None] + prediction.sigma[:, None] * offsets[model])
    outputs, owner = rows.outputs, rows.outputs.owner
    names = np.array([name or "(unnamed)" for name in rows.served_models], dtype=object)[owner]
    parts = {"all": np.ones(len(owner), dtype=bool)} | {name: names == name for name in sorted(set(names))}
    coverage: dict[str, dict[str, float | None]] = {name: {} for name in parts}
    for column, level in enumerate(levels):
        below = bound[:, column][owner]
        observed = below <= outputs.max_tokens[owner]
        covered = outputs.finished & (outputs.lengths <= below)
        for name, own in parts.items():
            chosen = observed & own
            coverage[name][level] = float(covered[chosen].mean()) if chosen.any() else None
    return {"levels": levels, "coverage": coverage}
