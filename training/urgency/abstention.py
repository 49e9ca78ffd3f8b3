"""The abstain threshold: the least confidence at which a predicted level replaces the declared tier.

Learn then Test (Angelopoulos et al. 2021) with Clopper-Pearson bounds: thresholds are fixed in advance and tested from
the strictest on, in a few chains; a chain stops at its first failure, so that its chance of certifying any threshold
whose true risk is above the stated rate is at most its share of delta (fixed-sequence testing), and the chance that any
chain does so at most delta. That holds for texts exchangeable with the validation texts, at any number of them.

A threshold may have to meet two bounds: failures among answered texts, and how often a claim of urgency makes the
scheduled level more urgent. It is certified where both tests pass, each at the full share of delta: a threshold that is
bad for one reason passes that reason's test no more often (intersection-union test).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from data_gen.urgency.seed_set import ClaimPair
from scheduler_core.errors import InputError
from scheduler_core.urgency import UNDER_TRIAGE_COST, effective_level, expected_cost_levels
from training.urgency.metrics import upper_bound

#: N texts -> probabilities [N, K], the most urgent level first.
Predict = Callable[[Sequence[str]], NDArray[np.float64]]
Risk = Literal["under-triage", "wrong"]
CHAIN_STARTS = (0.9, 0.75, 0.6, 0.45)
STEP = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRows:
    """Predictions for P texts without and with a claim of urgency."""

    # plain, claimed: probabilities [P, K].
    plain: NDArray[np.float64]
    claimed: NDArray[np.float64]
    tiers: NDArray[np.int64]  # declared tiers [P], the true levels of the texts
    max_promotion: int = 1  # maximum number of levels that a text raises itself
    under_triage_cost: float = UNDER_TRIAGE_COST  # cost the levels are decided with

    @classmethod
    def of(cls, predict: Predict, pairs: Sequence[ClaimPair], **options: Any) -> ClaimRows:
        """Predictions for pairs of texts."""
        return cls(
            plain=predict([pair.text for pair in pairs]),
            claimed=predict([pair.claimed_text for pair in pairs]),
            tiers=np.array([pair.level_number for pair in pairs], dtype=np.int64),
            **options,
        )

    def scheduled(self, threshold: float | None) -> list[NDArray[np.int64]]:
        """Scheduled levels [P] without and with the claim; see `scheduler_core.urgency.effective_level`."""
        cost = self.under_triage_cost
        return [
            effective_level(rows, self.tiers, threshold, self.max_promotion, under_triage_cost=cost)
            for rows in (self.plain, self.claimed)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbstainThreshold:
    """A threshold and its guarantee."""

    # Least highest probability that counts; None: none could be certified, so abstain always.
    threshold: float | None
    # What counts as a failure: under-triage = decided less urgent than true; wrong = otherwise than true.
    risk: Risk
    allowed_rate: float  # with confidence 1 - delta, at most this fraction of the answered texts fails
    delta: float  # probability that the guarantee does not hold
    # num_texts, num_answered, num_failures: validation texts, those of them at or above the threshold, failures of
    # those.
    num_texts: int
    num_answered: int
    num_failures: int
    # Upper bound of the failure rate, at the confidence that was tested; None without threshold.
    bound: float | None
    under_triage_cost: float  # cost the levels were decided with
    # What claims of urgency gain at the threshold: allowed_rate, num_pairs (those whose plain text is not scheduled at
    # the top already), num_jumps, bound; None without a threshold, or where claims were not measured.
    jumps: dict[str, Any] | None = None


def failures(
    probabilities: NDArray[np.float64],
    true: NDArray[np.int64],
    risk: Risk,
    under_triage_cost: float = UNDER_TRIAGE_COST,
) -> NDArray[np.bool_]:
    """Whether the level of least expected cost out of probabilities [N, K] fails against true levels [N]; see
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

    With `claims` the fraction of texts whose scheduled level a claim makes more urgent is certified, too. The rates and
    delta are between 0 and 1.

    Args:
        probabilities, true: Of validation texts, which nothing else of the predictor was fitted to [N, K], and their levels [N].
        allowed_rate: Largest fraction of failures among answered texts.
        delta: Probability, over validation sets, of certifying a threshold that is worse.
        risk: What a failure is.
        under_triage_cost: Cost the levels are decided with.
        claims: Of validation pairs, which nothing was fitted to; None: claims are not measured.
        jump_rate: Largest fraction of pairs that may gain.
    """
    for name, value in (("allowed_rate", allowed_rate), ("delta", delta), ("jump_rate", jump_rate)):
        if not 0 < value < 1:
            raise InputError(name, value, "a number between 0 and 1")
    confidence = probabilities.max(axis=1)
    failed = failures(probabilities, true, risk, under_triage_cost)
    share = delta / len(CHAIN_STARTS)
    best: tuple[float, float, dict[str, Any] | None] | None = None
    for start in CHAIN_STARTS:
        for step in range(round(start / STEP), -1, -1):
            threshold = round(step * STEP, 10)
            answered = confidence >= threshold
            bound = upper_bound(int(failed[answered].sum()), int(answered.sum()), share)
            jumps = None if claims is None else _jumps(claims, threshold, jump_rate, share)
            if bound > allowed_rate or (jumps is not None and jumps["bound"] > jump_rate):
                break
            if best is None or threshold < best[0]:
                best = (threshold, bound, jumps)
    answered = confidence >= (np.inf if best is None else best[0])
    return AbstainThreshold(
        threshold=None if best is None else best[0],
        risk=risk,
        allowed_rate=allowed_rate,
        delta=delta,
        num_texts=len(true),
        num_answered=int(answered.sum()),
        num_failures=int(failed[answered].sum()),
        bound=None if best is None else best[1],
        under_triage_cost=under_triage_cost,
        jumps=None if best is None else best[2],
    )


def _jumps(claims: ClaimRows, threshold: float, jump_rate: float, share: float) -> dict[str, Any]:
    plain, claimed = claims.scheduled(threshold)
    num_jumps, num_pairs = int(np.sum(claimed < plain)), int(np.sum(plain > 0))
    return {
        "allowed_rate": jump_rate,
        "num_pairs": num_pairs,
        "num_jumps": num_jumps,
        "bound": upper_bound(num_jumps, num_pairs, share),
    }
