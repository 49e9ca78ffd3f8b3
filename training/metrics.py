"""Numbers that say how good predicted length distributions are; all of them know about cut answers.

Parameters are compared with each prompt's own fit. Distributions are compared with the answers themselves:
- coverage at level p: how often a length is at most its predicted p-quantile q. Where q is below the cap that is seen
  of every answer, cut or not, and whether q is below the cap depends on the prediction alone: so the estimate is the
  share among the answers of such prompts, without bias. Beside it stand the bounds over all answers that result if the
  cut answers with q beyond their cap are all longer, or all shorter, than q.
- pinball loss and CRPS: of the served length min(X, cap), which a cut answer shows exactly (it is the cap); the
  predicted quantile is min(q, cap) too.
- nll: mean of -ln f(x), for cut answers -ln(1 - F(x)); in nats, x in tokens.
"""

from __future__ import annotations

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
    quantile: FloatArray, level: float, lengths: FloatArray, finished: NDArray[np.bool_], caps: FloatArray
) -> dict[str, float | None]:
    """Observed coverage of predicted quantiles.

    Args:
        quantile: Predicted quantile for each answer in tokens [N], N >= 1.
        level: Its nominal probability.
        lengths: Answer lengths in tokens [N].
        finished: False where the answer was cut [N].
        caps: Cap of each answer's prompt in tokens, infinite if there is none [N].

    Returns:
        level; estimate (None if no quantile lies below its cap); known_share, the share of answers it is made from;
        low and high, bounds over all answers.
    """
    covered = finished & (lengths <= quantile)
    # At q = cap the answer that was cut there is longer than q.
    known = quantile <= caps
    unknown = ~finished & (lengths < quantile)
    return {
        "level": level,
        "estimate": float(covered[known].mean()) if known.any() else None,
        "known_share": float(known.mean()),
        "low": float(covered.mean()),
        "high": float((covered | unknown).mean()),
    }


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
        distribution: Predictions for G prompts, one nu for all.
        group: Prompt of each answer [N].
        lengths: Answer lengths in tokens [N].
        finished: False where the answer was cut [N].
        caps: Cap of each answer's prompt in tokens, infinite if there is none [N].
    """
    if len(lengths) == 0:
        return {"coverage": {}, "calibration": [], "pinball_tokens": {}, "crps_tokens": None, "nll": None}
    answers = LogT(distribution.mu[group], distribution.sigma[group], distribution.nu)
    likelihood = np.where(finished, answers.logpdf(lengths), answers.logsf(lengths))
    served = np.minimum(lengths, caps)

    levels = np.unique([*COVERAGE_LEVELS, *CALIBRATION_LEVELS, *CRPS_LEVELS])
    standard = np.log(LogT(0.0, 1.0, distribution.nu).ppf(levels))
    z_of = {float(level): float(z) for level, z in zip(levels, standard, strict=True)}

    def quantile(level: float) -> FloatArray:
        with np.errstate(over="ignore"):
            return np.asarray(np.exp(answers.mu + answers.sigma * z_of[level]), dtype=np.float64)

    def loss(level: float) -> float:
        return pinball(served, np.minimum(quantile(level), caps), level)

    def covered(level: float) -> dict[str, float | None]:
        return coverage(quantile(level), level, lengths, finished, caps)

    return {
        "coverage": {_percent(level): covered(level) for level in COVERAGE_LEVELS},
        "calibration": [covered(level) for level in CALIBRATION_LEVELS],
        "pinball_tokens": {_percent(level): _finite(loss(level)) for level in COVERAGE_LEVELS},
        "crps_tokens": _finite(2 * float(np.mean([loss(float(level)) for level in CRPS_LEVELS]))),
        "nll": _finite(-float(likelihood.mean())),
    }


def _percent(level: float) -> str:
    return f"p{100 * level:g}"


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
