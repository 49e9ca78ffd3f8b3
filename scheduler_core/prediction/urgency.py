"""Scheduling level of a request from its predicted urgency: expected cost, abstention, limited or unlimited promotion.

All functions raise InputError for arguments outside their range.

The levels are those of semantic scheduling (0 = most urgent, 4 = least); `docs/urgency.md` defines them.
Sources: asymmetric expected cost, Elkan 2001 ("The foundations of cost-sensitive learning"); abstention, Chow
1970 ("On optimum recognition error and reject tradeoff").
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scheduler_core.errors import InputError

LEVELS = ("emergency", "interactive", "standard", "batch", "background")
# Cost of serving a request one level too late, relative to one level too early.
UNDER_TRIAGE_COST = 3.0
# Predictors abstain at least if the highest probability is below this multiple of a uniform one's.
NEAR_UNIFORM = 1.25


def abstains(probabilities: ArrayLike, threshold: float | None) -> NDArray[np.bool_]:
    """Whether a prediction says too little to be used, so that the declared tier counts instead: [N], or one value.

    `probabilities` are [N, K] or [K]. It is if they are nearly uniform, the highest below NEAR_UNIFORM / K, whatever the
    threshold, or if the highest one is below `threshold` (None: 0; 1: always, even if a probability is rounded to 1).
    """
    rows = np.asarray(probabilities, dtype=np.float64)
    lowest = max(threshold or 0.0, NEAR_UNIFORM / rows.shape[-1])
    return np.asarray((rows.max(axis=-1) < lowest) | (lowest >= 1))


def expected_cost_levels(
    probabilities: ArrayLike, under_triage_cost: float = UNDER_TRIAGE_COST
) -> NDArray[np.int64]:
    """The level of least expected cost [N], where each level too low costs c and each level too high costs 1.

    With cost c (d - e)+ + (e - d)+ of deciding d when e is true, the result is the 1/(1 + c) quantile of the
    predicted distribution: the smallest d with P(level <= d) >= 1/(1 + c). With c = 1 it is the median.

    `probabilities` are those of each level, most urgent first, [N, K], or [K] for a single row; rows sum to
    1. `under_triage_cost` is c, finite and above 0; values above 1 favor more urgent levels.
    """
    if not 0 < under_triage_cost < math.inf:
        raise InputError("under_triage_cost", under_triage_cost, "numbers > 0")
    rows = _checked_rows(probabilities)
    # Tolerate rounding of the cumulative sum.
    at_quantile = np.cumsum(rows, axis=-1) >= 1.0 / (1.0 + under_triage_cost) - 1e-9
    at_quantile[..., -1] = True
    return np.asarray(np.argmax(at_quantile, axis=-1), dtype=np.int64)


def effective_level(
    probabilities: ArrayLike,
    declared_tier: ArrayLike,
    threshold: float | None,
    max_promotion: int = 1,
    *,
    under_triage_cost: float = UNDER_TRIAGE_COST,
) -> NDArray[np.int64]:
    """The level at which a request is scheduled, from its declared tier and the prediction from its text.

    1. If the predictor abstains (`abstains`), the result is the declared tier.
    2. With `max_promotion` of at least K the text is trusted without limit, as in the paper: the result is the most
       probable level, the more urgent one for ties.
    3. Otherwise it is the level of least expected cost (`expected_cost_levels`), but never less urgent than the declared
       tier and at most `max_promotion` levels more urgent. This limits the gain of a deceptive prompt.

    Args:
        probabilities: Probability of each level, the most urgent first; [N, K] or [K].
        declared_tier: Level the client declared; one number or [N].
        threshold: See `abstains`.
        max_promotion: At least 0.
        under_triage_cost: See `expected_cost_levels`.

    Returns:
        Levels of the broadcast shape of the rows and the tiers, 0 = most urgent.
    """
    rows = _checked_rows(probabilities)
    tiers = np.asarray(declared_tier)
    if not np.issubdtype(tiers.dtype, np.integer) or np.any(tiers < 0) or np.any(tiers >= rows.shape[-1]):
        raise InputError("declared_tier", declared_tier, f"integers from 0 to {rows.shape[-1] - 1}")
    if isinstance(max_promotion, bool) or not isinstance(max_promotion, int) or max_promotion < 0:
        raise InputError("max_promotion", max_promotion, "integers >= 0")
    if threshold is not None and not 0 <= threshold <= 1:
        raise InputError("threshold", threshold, "numbers from 0 to 1, or None")
    if max_promotion >= rows.shape[-1]:
        levels = rows.argmax(axis=-1)
    else:
        decided = expected_cost_levels(rows, under_triage_cost)
        levels = np.minimum(np.maximum(decided, tiers - max_promotion), tiers)
    return np.asarray(np.where(abstains(rows, threshold), tiers, levels), dtype=np.int64)


def _checked_rows(probabilities: ArrayLike) -> NDArray[np.float64]:
    rows = np.asarray(probabilities, dtype=np.float64)
    if rows.ndim not in (1, 2) or rows.shape[-1] < 2:
        raise InputError("probabilities, shape", rows.shape, "[N, K] or [K] with K >= 2 levels")
    is_valid = np.all(rows >= 0, axis=-1) & (np.abs(rows.sum(axis=-1) - 1) <= 1e-4)
    if not is_valid.all():
        bad = int(np.argmin(is_valid))
        row = np.atleast_2d(rows)[bad].tolist()
        raise InputError(f"probabilities, row {bad}", row, "numbers >= 0 of sum 1")
    return rows
