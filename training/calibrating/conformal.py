"""Split conformal quantiles: for each level an offset q, so that exp(mu + q sigma) covers with a guarantee.

Let z_1, ..., z_n be the residuals of n calibration rows and z of a new one, exchangeable with them. With
k = ceil((n + 1) p) and q the k-th smallest of the z_i (infinite if k > n),

    P(z <= q) >= p,

for every n, every predictor and every distribution, and P(z <= q) <= p + 1/(n + 1) if no two residuals are equal
(Vovk et al.; Lei et al. 2018). The probability is over calibration rows and the new one together.

- Answers to one prompt are not exchangeable with those to another row by row, so one answer of each row counts, and for
  the quantiles of all models together one row of each prompt.
- A cut answer counts as infinitely long. What it would have been is at most that, so the guarantee holds whatever cuts
  the answers; the price is a quantile that is too long where many are cut, and infinite where it lies beyond them.
- A served model with too few rows for a finite quantile at a level, or fewer than 50, gets that of all models together;
  for it the guarantee holds on average over served models only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictors.manifest import CONFORMAL
from scheduler_core.errors import InputError
from training.calibrating.residuals import Residuals
from training.evaluating.scoring import COVERAGE_LEVELS, percent

FloatArray = NDArray[np.float64]
MIN_ROWS = 50
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
        """From what `to_json` gave.

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


def conformal_offset(z: FloatArray, finished: NDArray[np.bool_], level: float) -> float:
    """The k-th smallest residual, k = ceil((n + 1) level), cut answers infinite; infinite if k > n."""
    rank = math.ceil((len(z) + 1) * level - 1e-9)
    if rank > len(z):
        return math.inf
    return float(np.partition(np.where(finished, z, np.inf), rank - 1)[rank - 1])


def fit_conformal(
    residuals: Residuals,
    served_models: Sequence[str],
    rng: np.random.Generator,
    levels: Sequence[float] = COVERAGE_LEVELS,
) -> ConformalQuantiles:
    """Offsets of all models together and of each served model.

    Args:
        residuals: Of the calibrated predictor.
        served_models: That the predictor tells apart [M].
        rng: Draws the answer of each row, and the row of each prompt, that counts.
        levels: Ascending.
    """
    one_each = residuals.take(_one_of(residuals.row, rng))
    pooled = one_each.take(_one_of(one_each.prompt, rng))
    shape = (len(served_models) + 1, len(levels))
    offsets, counts, own = np.empty(shape), np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=bool)
    for column, level in enumerate(levels):
        together = conformal_offset(pooled.z, pooled.finished, level)
        for row in range(shape[0]):
            mine = one_each.take(one_each.model == row) if row else pooled
            is_enough = len(mine) >= MIN_ROWS and len(mine) >= level / (1 - level)
            own[row, column] = is_enough or row == 0
            chosen = mine if own[row, column] else pooled
            counts[row, column] = len(chosen)
            offsets[row, column] = (
                conformal_offset(mine.z, mine.finished, level) if own[row, column] else together
            )
    return ConformalQuantiles(tuple(levels), tuple(served_models), offsets, counts, own)


def _one_of(groups: NDArray[np.intp], rng: np.random.Generator) -> NDArray[np.intp]:
    """Position of one member of each group, drawn at random."""
    order = rng.permutation(len(groups))
    _, first = np.unique(groups[order], return_index=True)
    return np.sort(order[first])
