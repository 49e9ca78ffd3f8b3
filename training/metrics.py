"""Numbers that say how good predicted length distributions are; all of them know about cut answers.

Parameters are compared with each prompt's own fit. Distributions are compared with the answers themselves:
- coverage at level p: how often a length is at most its predicted p-quantile. u = F(x) is uniform if the prediction is
  right; a cut answer is a right-censored u. Coverage is the Kaplan-Meier estimate of P(u <= p), with the bounds that
  result if all cut answers that might lie below the quantile did not, or did.
- pinball loss and CRPS: of the served length min(X, cap), which a cut answer shows exactly (it is the cap); the
  predicted quantile is min(q, cap) too.
- nll: mean of -ln f(x), for cut answers -ln(1 - F(x)); in nats, x in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scheduler_core.lengths import LogT

FloatArray = NDArray[np.float64]
COVERAGE_LEVELS = (0.5, 0.9, 0.99)
CALIBRATION_LEVELS = tuple(round(0.05 * step, 2) for step in range(1, 20))
# CRPS is twice the mean pinball loss over all levels; this grid is its midpoint rule.
CRPS_LEVELS = (np.arange(100) + 0.5) / 100


def regression(true: ArrayLike, predicted: ArrayLike) -> dict[str, float | None]:
    """R2, MAE, RMSE and MAPE of predictions [N]; R2 is None where the truth does not vary."""
    truth = np.asarray(true, dtype=np.float64)
    error = np.asarray(predicted, dtype=np.float64) - truth
    if len(truth) == 0:
        return {"r2": None, "mae": None, "rmse": None, "mape": None}
    spread = float(((truth - truth.mean()) ** 2).sum())
    positive = bool((truth > 0).all())
    return {
        "r2": 1 - float((error**2).sum()) / spread if spread > 0 else None,
        "mae": float(np.abs(error).mean()),
        "rmse": float(np.sqrt((error**2).mean())),
        "mape": float((np.abs(error) / truth).mean()) if positive else None,
    }


def kendall_tau(one: ArrayLike, other: ArrayLike) -> float | None:
    """Kendall's tau-b of two rankings [N]; None if one of them ranks nothing."""
    from scipy import stats

    first, second = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    if len(np.unique(first)) < 2 or len(np.unique(second)) < 2:
        return None
    return float(stats.kendalltau(first, second).statistic)


def coverage(
    u: FloatArray, finished: NDArray[np.bool_], levels: Sequence[float] = COVERAGE_LEVELS
) -> list[dict[str, float]]:
    """Observed coverage of predicted quantiles.

    Args:
        u: F(x) of each answer under its prediction [N], N >= 1.
        finished: False where the answer was cut [N].
        levels: Nominal probabilities.

    Returns:
        For each level: the level, the estimate, and its bounds low and high.
    """
    order = np.lexsort((~finished, u))  # where u is equal, ends before cuts
    values, ends = u[order], finished[order]
    at_risk = np.arange(len(u), 0, -1)
    survival = np.cumprod(np.where(ends, 1 - 1 / at_risk, 1.0))
    rows = []
    for level in levels:
        below = int(np.searchsorted(values, level, side="right"))
        ended = int(ends[:below].sum())
        rows.append(
            {
                "level": float(level),
                "estimate": float(1 - survival[below - 1]) if below else 0.0,
                "low": ended / len(u),
                "high": below / len(u),
            }
        )
    return rows


def pinball(served: FloatArray, quantile: FloatArray, level: float) -> float:
    """Mean pinball loss in tokens of predicted quantiles [N] of served lengths [N]."""
    gap = served - quantile
    return float(np.maximum(level * gap, (level - 1) * gap).mean())


def distribution_metrics(
    distribution: LogT,
    group: NDArray[np.intp],
    lengths: FloatArray,
    finished: NDArray[np.bool_],
    caps: FloatArray,
) -> dict[str, Any]:
    """Coverage, calibration, pinball losses, CRPS and negative log-likelihood.

    Args:
        distribution: Predictions for G prompts.
        group: Prompt of each answer [N].
        lengths: Answer lengths in tokens [N].
        finished: False where the answer was cut [N].
        caps: Cap of each answer in tokens, infinite if there is none [N].
    """
    if len(lengths) == 0:
        return {"coverage": {}, "calibration": [], "pinball_tokens": {}, "crps_tokens": None, "nll": None}
    answers = LogT(distribution.mu[group], distribution.sigma[group], distribution.nu)
    u = np.asarray(answers.cdf(lengths), dtype=np.float64)
    likelihood = np.where(finished, answers.logpdf(lengths), answers.logsf(lengths))
    served = np.minimum(lengths, caps)

    def loss(level: float) -> float:
        # One quantile for each prompt, then spread over its answers.
        quantile = np.asarray(distribution.ppf(level), dtype=np.float64)[group]
        return pinball(served, np.minimum(quantile, caps), level)

    return {
        "coverage": {_percent(row["level"]): row for row in coverage(u, finished)},
        "calibration": coverage(u, finished, CALIBRATION_LEVELS),
        "pinball_tokens": {_percent(level): _finite(loss(level)) for level in COVERAGE_LEVELS},
        "crps_tokens": _finite(2 * float(np.mean([loss(float(level)) for level in CRPS_LEVELS]))),
        "nll": _finite(-float(likelihood.mean())),
    }


def _percent(level: float) -> str:
    return f"p{100 * level:g}"


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
