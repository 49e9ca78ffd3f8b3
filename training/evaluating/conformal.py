"""Conformal quantiles of a predictor, which `calibrate` fits (see `training.calibrating.conformal`), and their coverage."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictors.manifest import CONFORMAL
from scheduler_core.errors import InputError
from training.evaluating.predictors import OpenedPredictor, PredictedRows
from training.evaluating.rows import EvaluationRows
from training.evaluating.scores import percent

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

    def quantiles(self, mu: FloatArray, sigma: FloatArray, model: NDArray[np.intp]) -> FloatArray:
        """Covering lengths in tokens [G, L], infinite where there is no bound.

        Args:
            mu, sigma: Calibrated parameters [G].
            model: Number of each served model [G].
        """
        with np.errstate(over="ignore"):
            return np.asarray(np.exp(mu[:, None] + sigma[:, None] * self.offsets[model]))

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
                        "offset": float(self.offsets[row, column])
                        if np.isfinite(self.offsets[row, column])
                        else None,
                        "num_rows": int(self.num_rows[row, column]),
                        "own": bool(self.own[row, column]),
                    }
                    for column, level in enumerate(self.levels)
                }
                for row, name in enumerate(names)
            },
        }

    @classmethod
    def from_json(cls, content: object) -> ConformalQuantiles:
        """Inverse of `to_json`.

        Raises:
            InputError: Something is missing or of another version.
        """
        if not isinstance(content, Mapping) or content.get("schema") != SCHEMA:
            raise InputError(CONFORMAL, content, f"a JSON object with schema {SCHEMA}")
        try:
            levels = tuple(float(level) for level in content["levels"])
            names = tuple(str(name) for name in content["served_models"])
            cells = [
                [content["offsets"][name][percent(level)] for level in levels] for name in ("unknown", *names)
            ]
            offsets = [
                [math.inf if cell["offset"] is None else float(cell["offset"]) for cell in row]
                for row in cells
            ]
            counts = [[int(cell["num_rows"]) for cell in row] for row in cells]
            own = [[bool(cell["own"]) for cell in row] for row in cells]
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(CONFORMAL, str(error), "the tables that calibrate writes") from error
        return cls(levels, names, np.array(offsets), np.array(counts), np.array(own))


def conformal_coverage(
    predictor: OpenedPredictor, rows: EvaluationRows, prediction: PredictedRows
) -> dict[str, Any] | None:
    """Coverage of the predictor's conformal quantiles, over all outputs and by served model; None if it has none.

    Over outputs of prompts whose quantile lies below max_tokens.

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
    outputs, owner = rows.outputs, rows.outputs.owner
    names = np.array([name or "(unnamed)" for name in rows.served_models], dtype=object)[owner]
    parts = {"all": np.ones(len(owner), dtype=bool)} | {name: names == name for name in sorted(set(names))}
    coverage: dict[str, dict[str, float | None]] = {name: {} for name in parts}
    for column, level in enumerate(quantiles.levels):
        below = bound[:, column][owner]
        observed = below <= outputs.max_tokens[owner]
        covered = outputs.finished & (outputs.lengths <= below)
        for name, own in parts.items():
            chosen = observed & own
            coverage[name][percent(level)] = float(covered[chosen].mean()) if chosen.any() else None
    return {"levels": [percent(level) for level in quantiles.levels], "coverage": coverage}
