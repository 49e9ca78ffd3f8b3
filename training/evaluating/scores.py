"""Scores of predictions: predicted distributions against outputs, predicted parameters and rankings against fits.

All scores of distributions account for outputs truncated at max_tokens (censoring):

- pit: u = F(x), the predicted probability of an output of at most this length. For a truncated output only
  u >= F(max_tokens) is observed.
- coverage at level p: fraction of outputs at most as long as their predicted p-quantile q, that is with u <= p. If q is
  below max_tokens, this is observed for all outputs, truncated or not. Whether q is below max_tokens depends only on the
  prediction, so the fraction over the outputs of such prompts is an unbiased estimate. `low` and `high` bound the coverage
  over all outputs, by counting all truncated outputs with q above max_tokens as longer, or as shorter, than q.
- pinball loss and CRPS: for the served length min(X, max_tokens), which is observed even for truncated outputs, and the
  quantile min(q, max_tokens). In tokens, and in ln tokens, where long outputs have no more weight than short ones.
- nll: -ln f(x), for truncated outputs -ln(1 - F(x)); in nats, x in tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit
from sklearn.metrics import (
    mean_absolute_error,
    mean_absolute_percentage_error,
    r2_score,
    root_mean_squared_error,
)

from scheduler_core.lengths import LogQuantiles, LogT
from scheduler_core.lengths.quantiles import LEVELS
from scheduler_core.prediction.outcome import Outcome
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.statistics import kendall_tau, tied_pairs

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
Rows = NDArray[np.bool_] | NDArray[np.intp] | slice
COVERAGE_LEVELS = (0.5, 0.9, 0.99)
CALIBRATION_LEVELS = tuple(round(0.05 * step, 2) for step in range(1, 20))
#: CRPS is twice the mean pinball loss over all levels; this grid is its midpoint rule.
CRPS_LEVELS = (np.arange(100) + 0.5) / 100
PIT_BINS = 20
#: Probabilities that differ by less are considered equal.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class OutputLengths:
    """N outputs of G prompts."""

    owner: NDArray[np.intp]  # index of each output's prompt [N]
    lengths: FloatArray  # in tokens [N]; the truncated length for truncated outputs
    finished: BoolArray  # False if the output was truncated [N]
    max_tokens: FloatArray  # limit of the outputs of each prompt in tokens, infinite if unlimited [G]

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, slots=True)
class OutputScores:
    """Scores of N outputs under predicted distributions; CRPS and nll are [N]."""

    finished: BoolArray  # False if the output was truncated [N]
    pit: FloatArray  # F(x) [N], at the truncated length for truncated outputs
    pit_at_limit: FloatArray  # F(max_tokens of its prompt) [N], 1 without a limit
    pinball_tokens: FloatArray  # pinball loss at each of COVERAGE_LEVELS [N, 3]
    crps_tokens: FloatArray
    crps_log: FloatArray
    nll: FloatArray

    def coverage(self, level: float, rows: Rows = slice(None)) -> dict[str, float | None]:
        """Observed coverage of the predicted quantile of a level over the selected outputs, at least one.

        Returns:
            level; estimate (None if no quantile is below max_tokens); observed_fraction: fraction of outputs used for the
            estimate; low and high: bounds over all outputs.
        """
        pit, finished = self.pit[rows], self.finished[rows]
        covered = finished & (pit <= level + _ROUNDING)
        # At q = max_tokens, an output truncated at max_tokens is longer than q.
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
        """Fraction of outputs in each of 20 equal bins of [0, 1]; a truncated output is spread evenly over [F(x), 1]."""
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
        """Means over the selected outputs; see `docs/evaluation-format.md`."""
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


#: Summary for an empty set of outputs, or for a predictor without a distribution.
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
    """Name of a quantile level, such as p50, p90 or p99."""
    return f"p{100 * level:g}"


def standard_quantiles(levels: FloatArray, nu: float | FloatArray) -> FloatArray:
    """Quantiles [G or 1, L] of Student-t(nu) at levels [L], for a scalar nu or one per prompt [G]; nu = inf is normal."""
    values, inverse = np.unique(np.atleast_1d(np.asarray(nu, dtype=np.float64)), return_inverse=True)
    return np.asarray(stdtrit(values[:, None], levels)[inverse])


def score_outputs(
    mu: FloatArray,
    sigma: FloatArray,
    nu: float | FloatArray,
    outputs: OutputLengths,
    quantiles: FloatArray | None = None,
) -> OutputScores:
    """Scores N outputs under the distributions predicted for their prompts: log-t with mu and sigma [G] in log tokens and
    nu (scalar or [G]), or, with `quantiles` [G, K], `LogQuantiles`."""
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


def score_outcomes(rows: Sequence[tuple[Outcome, LengthPrediction]]) -> OutputScores:
    """Scores of predictions for outcomes, each with a length."""
    mu, sigma, nu = np.array([(each.mu, each.sigma, each.nu) for _, each in rows], dtype=np.float64).T
    lengths = np.array([outcome.output_tokens for outcome, _ in rows], dtype=np.float64)
    finished = np.array([outcome.is_finished for outcome, _ in rows])
    limits = np.array([outcome.limit or np.inf for outcome, _ in rows])
    # If the client disconnected, the length received so far is used as max_tokens.
    limits = np.where(finished, limits, np.minimum(limits, lengths))
    outputs = OutputLengths(np.arange(len(rows)), lengths, finished, limits)
    quantiles = None
    if any(prediction.quantiles for _, prediction in rows):
        quantiles = np.array([each.quantiles or each.distribution().logppf(LEVELS) for _, each in rows])
    return score_outputs(mu, sigma, nu, outputs, quantiles)


def regression(true: FloatArray, predicted: FloatArray | None) -> dict[str, float | None]:
    """R2, MAE, RMSE and MAPE of predictions [N]; R2 is None for a constant truth, MAPE unless all true values are positive."""
    if predicted is None or len(true) == 0:
        return dict.fromkeys(("r2", "mae", "rmse", "mape"))
    return {
        "r2": float(r2_score(true, predicted)) if np.ptp(true) > 0 else None,
        "mae": float(mean_absolute_error(true, predicted)),
        "rmse": float(root_mean_squared_error(true, predicted)),
        "mape": float(mean_absolute_percentage_error(true, predicted)) if (true > 0).all() else None,
    }


def ranking(score: ArrayLike, true: ArrayLike) -> dict[str, float | None]:
    """Ranking metrics of scores [N], larger = longer, against true lengths [N].

    Returns:
        tau: Kendall's tau-b.
        pair_accuracy: Fraction of correctly ordered pairs among those with different true lengths; a pair with equal
            scores counts one half, as if ordered by chance. None if all true lengths are equal.
    """
    scores, truth = np.asarray(score, dtype=np.float64), np.asarray(true, dtype=np.float64)
    pairs = len(truth) * (len(truth) - 1) / 2
    untied = pairs - tied_pairs(truth)
    if untied == 0:
        return {"tau": None, "pair_accuracy": None}
    tau = kendall_tau(scores, truth)
    if tau is None:
        return {"tau": None, "pair_accuracy": 0.5}
    # tau-b = (C - D) / sqrt((pairs untied in one) (pairs untied in the other))
    difference = tau * np.sqrt(untied) * np.sqrt(pairs - tied_pairs(scores))
    return {"tau": tau, "pair_accuracy": float(0.5 + 0.5 * difference / untied)}


def finite(value: float) -> float | None:
    """`value`, or None if it is not finite, for JSON."""
    return float(value) if np.isfinite(value) else None
