"""Scores of predictions: predicted distributions against outputs, predicted parameters and rankings against fits.

All scores of distributions respect censoring, that is outputs truncated at max_tokens:

- pit: u = F(x), the predicted probability of an output at most as long. Of a truncated output only u >= F(max_tokens)
  is observed.
- coverage at level p: how often a length is at most its predicted p-quantile q, that is u <= p. If q is below max_tokens,
  this is observed for all outputs, truncated or not. Whether q is below max_tokens depends on the prediction only, so the
  fraction among the outputs of such prompts is an unbiased estimate. `low` and `high` bound the coverage over all
  outputs: truncated outputs with q above max_tokens are all longer, or all shorter, than q.
- pinball loss and CRPS: of the served length min(X, max_tokens), which is observed even for truncated outputs; the predicted
  quantile is min(q, max_tokens) too. In tokens, and in ln tokens, where long outputs weigh no more than short ones.
- nll: -ln f(x), for truncated outputs -ln(1 - F(x)); in nats, x in tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit
from scipy.stats import kendalltau
from sklearn.metrics import (
    mean_absolute_error,
    mean_absolute_percentage_error,
    r2_score,
    root_mean_squared_error,
)

from scheduler_core.lengths import LogQuantiles, LogT

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
Rows = NDArray[np.bool_] | NDArray[np.intp] | slice
COVERAGE_LEVELS = (0.5, 0.9, 0.99)
CALIBRATION_LEVELS = tuple(round(0.05 * step, 2) for step in range(1, 20))
#: CRPS is twice the mean pinball loss over all levels; this grid is its midpoint rule.
CRPS_LEVELS = (np.arange(100) + 0.5) / 100
PIT_BINS = 20
#: Probabilities closer than this are equal.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class OutputLengths:
    """N outputs of G prompts."""

    owner: NDArray[np.intp]  # prompt of each output [N]
    lengths: FloatArray  # in tokens [N]; of a truncated output the length it was truncated at
    finished: BoolArray  # False where the output was truncated [N]
    max_tokens: FloatArray  # limit of the outputs of each prompt in tokens, infinite if there is none [G]

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, slots=True)
class OutputScores:
    """Scores of N outputs under predicted distributions; CRPS and nll are [N]."""

    finished: BoolArray  # False where the output was truncated [N]
    pit: FloatArray  # F(x) [N], of a truncated output at the length it was truncated at
    pit_at_limit: FloatArray  # F(max_tokens of its prompt) [N], 1 without a limit
    pinball_tokens: FloatArray  # at each of COVERAGE_LEVELS [N, 3]
    crps_tokens: FloatArray
    crps_log: FloatArray
    nll: FloatArray

    def coverage(self, level: float, rows: Rows = slice(None)) -> dict[str, float | None]:
        """Observed coverage of the predicted quantile of a level over some outputs, at least one.

        Returns:
            level; estimate (None if no quantile lies below max_tokens); observed_fraction, the fraction of outputs it is
            made from; low and high, bounds over all outputs.
        """
        pit, finished = self.pit[rows], self.finished[rows]
        covered = finished & (pit <= level + _ROUNDING)
        # At q = max_tokens the output that was truncated there is longer than q.
        observed = self.pit_at_limit[rows] >= level - _ROUNDING
        uncertain = ~finished & (pit < level - _ROUNDING)
        return {
            "level": level,
            "estimate": float(covered[observed].mean()) if observed.any() else None,
            "observed_fraction": float(observed.mean()),
            "low": float(covered.mean()),
            "high": float((covered | uncertain).mean()),
        }

    def pit_histogram(self, rows: Rows = slice(None)) -> list[float]:
        """Fraction of outputs in each of 20 equal bins of [0, 1]; a truncated output counts evenly over [F(x), 1]."""
        pit, finished = self.pit[rows], self.finished[rows]
        counts = np.histogram(pit[finished], bins=PIT_BINS, range=(0.0, 1.0))[0].astype(np.float64)
        truncated = np.minimum(pit[~finished], 1 - 1e-12)
        edges = np.linspace(0.0, 1.0, PIT_BINS + 1)
        for number in range(PIT_BINS if len(truncated) else 0):
            overlap = np.clip(edges[number + 1] - np.maximum(truncated, edges[number]), 0.0, None)
            counts[number] += float((overlap / (1 - truncated)).sum())
        total = counts.sum()
        return [float(count / total) if total else 0.0 for count in counts]

    def summary(self, rows: Rows = slice(None)) -> dict[str, Any]:
        """Means over the chosen outputs; see `docs/evaluation-format.md`."""
        if not len(self.pit[rows]):
            return dict(NO_SUMMARY)
        pinball = self.pinball_tokens[rows].mean(axis=0)
        return {
            "coverage": {percent(level): self.coverage(level, rows) for level in COVERAGE_LEVELS},
            "calibration": [self.coverage(level, rows) for level in CALIBRATION_LEVELS],
            "pit": self.pit_histogram(rows),
            "pinball_tokens": {
                percent(level): finite(loss) for level, loss in zip(COVERAGE_LEVELS, pinball, strict=True)
            },
            "crps_tokens": finite(self.crps_tokens[rows].mean()),
            "crps_log_tokens": finite(self.crps_log[rows].mean()),
            "nll": finite(self.nll[rows].mean()),
        }


#: The summary of no outputs, or of a predictor without a distribution.
NO_SUMMARY: dict[str, Any] = {
    "coverage": {},
    "calibration": [],
    "pit": [],
    "pinball_tokens": {},
    "crps_tokens": None,
    "crps_log_tokens": None,
    "nll": None,
}


def percent(level: float) -> str:
    """Name of a level: p50, p90, p99."""
    return f"p{100 * level:g}"


def standard_quantiles(levels: FloatArray, nu: float | FloatArray) -> FloatArray:
    """Quantiles of Student-t(nu) [G or 1, L] at levels [L], for one nu or one for each prompt [G]; inf is normal."""
    values, inverse = np.unique(np.atleast_1d(np.asarray(nu, dtype=np.float64)), return_inverse=True)
    return np.asarray(stdtrit(values[:, None], levels)[inverse])


def score_outputs(
    mu: FloatArray,
    sigma: FloatArray,
    nu: float | FloatArray,
    outputs: OutputLengths,
    quantiles: FloatArray | None = None,
) -> OutputScores:
    """Scores N outputs under the log-t predicted for their prompts: mu and sigma [G] in log tokens, nu one for all or [G]; or,
    where there are `quantiles` [G, K], under `LogQuantiles`."""
    owner, lengths = outputs.owner, outputs.lengths

    def lengths_of(rows: Rows) -> LogT | LogQuantiles:
        if quantiles is not None:
            return LogQuantiles(quantiles[rows])
        return LogT(mu[rows], sigma[rows], nu if np.ndim(nu) == 0 else np.asarray(nu)[rows])

    each = lengths_of(owner)
    log_sf = np.asarray(each.logsf(lengths))
    has_limit = np.isfinite(outputs.max_tokens)
    at_limit = np.ones(len(mu))
    if has_limit.any():
        at_limit[has_limit] = -np.expm1(lengths_of(has_limit).logsf(outputs.max_tokens[has_limit]))
    served = np.minimum(lengths, outputs.max_tokens[owner])
    with np.errstate(divide="ignore"):
        log_served, log_limits = np.log(served), np.log(outputs.max_tokens)

    def pinball(levels: FloatArray) -> Iterator[tuple[FloatArray, FloatArray]]:
        """Losses of the quantile of each level, in tokens and in log tokens."""
        for z, level in zip(standard_quantiles(levels, nu).T, levels.tolist(), strict=True):
            predicted = mu + sigma * z if quantiles is None else LogQuantiles(quantiles).logppf(level)
            quantile = np.minimum(predicted, log_limits)
            with np.errstate(over="ignore"):
                gaps = served - np.exp(quantile)[owner], log_served - quantile[owner]
            yield tuple(np.maximum(level * gap, (level - 1) * gap) for gap in gaps)

    crps_tokens, crps_log = np.zeros(len(lengths)), np.zeros(len(lengths))
    for tokens, logs in pinball(CRPS_LEVELS):
        crps_tokens += tokens * (2 / len(CRPS_LEVELS))
        crps_log += logs * (2 / len(CRPS_LEVELS))
    return OutputScores(
        finished=outputs.finished,
        pit=np.asarray(each.cdf(lengths)),
        pit_at_limit=at_limit[owner],
        pinball_tokens=np.stack([tokens for tokens, _ in pinball(np.array(COVERAGE_LEVELS))], axis=1),
        crps_tokens=crps_tokens,
        crps_log=crps_log,
        nll=-np.where(outputs.finished, each.logpdf(lengths), log_sf),
    )


def regression(true: FloatArray, predicted: FloatArray | None) -> dict[str, float | None]:
    """R2, MAE, RMSE and MAPE of predictions [N]; R2 is None where the truth does not vary, MAPE where it is not positive."""
    if predicted is None or len(true) == 0:
        return dict.fromkeys(("r2", "mae", "rmse", "mape"))
    return {
        "r2": float(r2_score(true, predicted)) if np.ptp(true) > 0 else None,
        "mae": float(mean_absolute_error(true, predicted)),
        "rmse": float(root_mean_squared_error(true, predicted)),
        "mape": float(mean_absolute_percentage_error(true, predicted)) if (true > 0).all() else None,
    }


def kendall_tau(one: ArrayLike, other: ArrayLike) -> float | None:
    """Kendall's tau-b of two rankings [N], in O(N log N); None if one of them ranks nothing."""
    first, second = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    if len(first) < 2 or (first == first[0]).all() or (second == second[0]).all():
        return None
    return float(kendalltau(first, second).statistic)


def ranking(score: ArrayLike, true: ArrayLike) -> dict[str, float | None]:
    """How well scores [N], larger = longer, order true lengths [N].

    Returns:
        tau: Kendall's tau-b.
        pair_accuracy: Fraction of the pairs of different true length that the scores order right; a pair of equal scores
            counts one half, as if ordered by chance. None where no two true lengths differ.
    """
    scores, truth = np.asarray(score, dtype=np.float64), np.asarray(true, dtype=np.float64)
    pairs = len(truth) * (len(truth) - 1) / 2
    untied = pairs - _tied_pairs(truth)
    if untied == 0:
        return {"tau": None, "pair_accuracy": None}
    tau = kendall_tau(scores, truth)
    if tau is None:
        return {"tau": None, "pair_accuracy": 0.5}
    # tau-b = (C - D) / sqrt((pairs untied in one) (pairs untied in the other))
    difference = tau * np.sqrt(untied) * np.sqrt(pairs - _tied_pairs(scores))
    return {"tau": tau, "pair_accuracy": float(0.5 + 0.5 * difference / untied)}


def _tied_pairs(values: FloatArray) -> float:
    counts = np.unique(values, return_counts=True)[1].astype(np.float64)
    return float((counts * (counts - 1) / 2).sum())


def finite(value: float) -> float | None:
    """`value`, or None if it is not finite, for JSON."""
    return float(value) if np.isfinite(value) else None
