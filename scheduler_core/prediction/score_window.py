"""Quality of predictions over the latest outputs: coverage, Kendall's tau and CRPS of several versions of a prediction."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from scheduler_core.lengths import LogQuantiles
from scheduler_core.lengths.standard import FloatArray
from scheduler_core.prediction.linear_correction import student_t_quantiles
from scheduler_core.prediction.outcome import Outcome
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.statistics import kendall_tau

COVERAGE_LEVELS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
#: The first levels are for the CRPS, twice the mean loss of their quantiles; the others are for coverage.
NUM_LEVELS = 32
_LEVELS = (*((number + 0.5) / NUM_LEVELS for number in range(NUM_LEVELS)), *COVERAGE_LEVELS.values())


class ScoreWindow:
    """The latest `size` outputs with `num_versions` predictions each, which differ in mu and sigma only."""

    def __init__(self, size: int, num_versions: int) -> None:
        self._num_versions = num_versions
        #: mu and sigma of each version, ln x, ln max_tokens, finished, and (q - mu) / sigma of the quantiles q at `_LEVELS`.
        self._rows = np.zeros((size, 2 * num_versions + 3 + len(_LEVELS)))
        self._num_added = 0

    def __len__(self) -> int:
        return min(self._num_added, len(self._rows))

    def add(self, versions: Sequence[LengthPrediction], outcome: Outcome) -> None:
        """Adds an output, unless it was aborted below its limit."""
        if not (outcome.is_finished or outcome.output_tokens == outcome.limit):
            return
        row = self._rows[self._num_added % len(self._rows)]
        row[: 2 * self._num_versions] = [number for each in versions for number in (each.mu, each.sigma)]
        limit = math.inf if outcome.limit is None else math.log(outcome.limit)
        start = 2 * self._num_versions
        row[start : start + 3] = math.log(outcome.output_tokens), limit, outcome.is_finished
        row[start + 3 :] = _standard_quantiles(versions[0])
        self._num_added += 1

    def scores(self, version: int) -> dict[str, Any]:
        """coverage (level -> fraction of outputs not longer than the quantile, among those whose quantile is below
        max_tokens), tau (Kendall's tau-b of mu and length) and crps (of ln min(X, max_tokens)); None if unknown."""
        rows = self._rows[: len(self)]
        if not len(rows):
            return {"coverage": dict.fromkeys(COVERAGE_LEVELS), "tau": None, "crps": None}
        start = 2 * self._num_versions
        mu, sigma = rows[:, 2 * version : 2 * version + 2].T
        log_length, log_limit, finished = rows[:, start : start + 3].T
        quantiles = mu[:, None] + sigma[:, None] * rows[:, start + 3 :]
        gaps = log_length[:, None] - np.minimum(quantiles[:, :NUM_LEVELS], log_limit[:, None])
        coverage: dict[str, float | None] = {}
        for name, quantile in zip(COVERAGE_LEVELS, quantiles[:, NUM_LEVELS:].T, strict=True):
            is_observed = quantile < log_limit
            covered = (finished > 0) & (log_length <= quantile)
            coverage[name] = float(covered[is_observed].mean()) if is_observed.any() else None
        losses = np.array(_LEVELS[:NUM_LEVELS]) * gaps - np.minimum(gaps, 0.0)
        tau = kendall_tau(mu, log_length)
        return {"coverage": coverage, "tau": tau, "crps": 2.0 * float(losses.mean())}


def _standard_quantiles(prediction: LengthPrediction) -> FloatArray:
    """(q - mu) / sigma of the predicted quantiles q of ln x at `_LEVELS`."""
    if prediction.quantiles:
        quantiles = LogQuantiles(prediction.quantiles).logppf(_LEVELS)
        return np.asarray((quantiles - prediction.mu) / prediction.sigma)
    return np.array(student_t_quantiles(prediction.nu, _LEVELS))
