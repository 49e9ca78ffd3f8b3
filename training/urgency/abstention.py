"""The abstain threshold: the minimum confidence at which a predicted level replaces the declared tier.

Learn then Test (Angelopoulos et al. 2021) with Clopper-Pearson bounds: a fixed grid of thresholds is tested in a few
chains, each from its strictest threshold on. A chain stops at its first failure, so it certifies a threshold whose true
risk is above the allowed rate with probability at most delta / number of chains (fixed-sequence testing); over all
chains this probability is at most delta. This holds for texts exchangeable with the validation texts, for any number.

A threshold may have to meet two bounds: on failures among answered texts, and on how often a claim of urgency makes the
scheduled level more urgent. It is certified if both tests pass, each at the full level delta / number of chains
(intersection-union test).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from data_gen.urgency.seed_set import ClaimPair
from scheduler_core.errors import InputError
from scheduler_core.prediction.urgency import (
    NEAR_UNIFORM,
    UNDER_TRIAGE_COST,
    effective_level,
    expected_cost_levels,
)
from training.urgency.metrics import upper_bound

#: N texts -> probabilities [N, K], the most urgent level first.
Predict = Callable[[Sequence[str]], NDArray[np.float64]]
Risk = Literal["under-triage", "wrong"]
#: Strictest threshold of each chain; the first is for predictors that are seldom less sure than 0.9.
CHAIN_STARTS = (0.98, 0.9, 0.75, 0.6, 0.45)
STEP = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRows:
    """Predictions for P texts without and with a claim of urgency."""

    # plain, claimed: probabilities [P, K].
    plain: NDArray[np.float64]
    claimed: NDArray[np.float64]
    tiers: NDArray[np.int64]  # declared tiers [P], equal to the true levels of the texts
    max_promotion: int = 1  # maximum number of levels by which a text can raise its own priority
    under_triage_cost: float = UNDER_TRIAGE_COST  # cost of deciding one level too low

    @classmethod
    def of(cls, predict: Predict, pairs: Sequence[ClaimPair], **options: Any) -> ClaimRows:
        """Predicts all pairs of texts."""
        return cls(
            plain=predict([pair.text for pair in pairs]),
            claimed=predict([pair.claimed_text for pair in pairs]),
            tiers=np.array([pair.level_number for pair in pairs], dtype=np.int64),
            **options,
        )

    def scheduled(self, threshold: float) -> list[NDArray[np.int64]]:
        """Scheduled levels [P] without and with the claim; see `scheduler_core.prediction.urgency.effective_level`."""
        cost = self.under_triage_cost
        return [
            effective_level(rows, self.tiers, threshold, self.max_promotion, under_triage_cost=cost)
            for rows in (self.plain, self.claimed)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbstainThreshold:
    """A threshold and its guarantee."""

    # Minimum of the highest probability for which the prediction is used; 1: none certified, always abstain.
    threshold: float
    # Definition of a failure: under-triage = decided less urgent than true; wrong = decided differently from true.
    risk: Risk
    allowed_rate: float  # with confidence 1 - delta, at most this fraction of the answered texts fails
    delta: float  # probability that the guarantee does not hold
    # num_texts, num_answered, num_failures: validation texts; those at or above the threshold; failures among these.
    num_texts: int
    num_answered: int
    num_failures: int
    # Upper confidence bound of the failure rate; None if none is certified.
    bound: float | None
    under_triage_cost: float  # cost of deciding one level too low
    # Effect of claims of urgency at the threshold: allowed_rate, num_pairs (pairs whose plain text is scheduled below the
    # top level), num_jumps, bound; None if none is certified, or if claims were not measured.
    jumps: dict[str, Any] | None = None

    def answered(self, probabilities: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Whether the predictions [N, K] are used [N]."""
        return np.asarray((probabilities.max(axis=1) >= self.threshold) & (self.threshold < 1))


def failures(
    probabilities: NDArray[np.float64],
    true: NDArray[np.int64],
    risk: Risk,
    under_triage_cost: float = UNDER_TRIAGE_COST,
) -> NDArray[np.bool_]:
    """Whether the level of least expected cost for probabilities [N, K] is a failure for true levels [N], [N]; see
    `AbstainThreshold.risk`."""
    decided = expected_cost_levels(probabilities, under_triage_cost)
    return np.asarray(decided > true if risk == "under-triage" else decided != true)


def choose_threshold(
    probabilities: NDArray[np.float64],
    true: NDArray[np.int64],
    *,
    allowed_rate: float = 0.1,
    delta: float = 0.1,
    risk: Risk = "under-triage",
    under_triage_cost: float = UNDER_TRIAGE_COST,
    claims: ClaimRows | None = None,
    jump_rate: float = 0.05,
) -> AbstainThreshold:
    """The lowest threshold whose risk among answered texts is certified to be at most `allowed_rate`.

    With `claims`, the fraction of texts whose scheduled level becomes more urgent by a claim is certified too. The rates
    and delta are between 0 and 1.

    Args:
        probabilities, true: Predictions [N, K] and true levels [N] of validation texts that were not used for training.
        allowed_rate: Maximum fraction of failures among answered texts.
        delta: Probability, over validation sets, of certifying a threshold whose true risk is higher.
        risk: Definition of a failure.
        under_triage_cost: Cost of deciding one level too low.
        claims: Predictions of validation pairs that were not used for training; None: claims are not measured.
        jump_rate: Maximum fraction of pairs whose level becomes more urgent.
    """
    for name, value in (("allowed_rate", allowed_rate), ("delta", delta), ("jump_rate", jump_rate)):
        if not 0 < value < 1:
            raise InputError(name, value, "a number between 0 and 1")
    confidence = probabilities.max(axis=1)
    failed = failures(probabilities, true, risk, under_triage_cost)
    chain_delta = delta / len(CHAIN_STARTS)
    lowest = math.ceil(
        NEAR_UNIFORM / probabilities.shape[1] / STEP
    )  # predictors abstain below, whatever the threshold
    best: tuple[float, float | None, dict[str, Any] | None] = (1.0, None, None)
    for start in CHAIN_STARTS:
        for step in range(round(start / STEP), lowest - 1, -1):
            threshold = round(step * STEP, 10)
            answered = confidence >= threshold
            bound = upper_bound(int(failed[answered].sum()), int(answered.sum()), chain_delta)
            jumps = None if claims is None else _jumps(claims, threshold, jump_rate, chain_delta)
            if bound > allowed_rate or (jumps is not None and jumps["bound"] > jump_rate):
                break
            if threshold < best[0]:
                best = (threshold, bound, jumps)
    answered = (confidence >= best[0]) & (best[0] < 1)
    return AbstainThreshold(
        threshold=best[0],
        risk=risk,
        allowed_rate=allowed_rate,
        delta=delta,
        num_texts=len(true),
        num_answered=int(answered.sum()),
        num_failures=int(failed[answered].sum()),
        bound=best[1],
        under_triage_cost=under_triage_cost,
        jumps=best[2],
    )


def _jumps(claims: ClaimRows, threshold: float, jump_rate: float, delta: float) -> dict[str, Any]:
    plain, claimed = claims.scheduled(threshold)
    num_jumps, num_pairs = int(np.sum(claimed < plain)), int(np.sum(plain > 0))
    return {
        "allowed_rate": jump_rate,
        "num_pairs": num_pairs,
        "num_jumps": num_jumps,
        "bound": upper_bound(num_jumps, num_pairs, delta),
    }
