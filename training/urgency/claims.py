"""Claims of urgency: predicted levels of the same text with and without a claim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_gen.urgency.seed_set import ClaimPair, neutral_texts
from scheduler_core.errors import InputError
from scheduler_core.urgency import LEVELS, UNDER_TRIAGE_COST, effective_level, expected_cost_levels
from training.urgency.metrics import Rate

Predict = Callable[[Sequence[str]], NDArray[np.float64]]
ALLOWED_RATE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Jumps:
    """How a claim moves levels, over P pairs.

    Attributes:
        jumped: Pairs whose level becomes more urgent, out of those whose plain text is not at the top already.
        fell: Pairs whose level becomes less urgent, out of all.
        levels: Number of levels gained -> pairs.
        mean_levels: Mean levels gained of those that jumped; None if none did.
    """

    jumped: Rate
    fell: Rate
    levels: dict[int, int]
    mean_levels: float | None

    @classmethod
    def between(cls, plain: NDArray[np.int64], claimed: NDArray[np.int64]) -> Jumps:
        """From the levels of the plain texts [P] and of the claimed ones [P]."""
        gained = plain - claimed
        up = gained[gained > 0]
        return cls(
            jumped=Rate.of(gained > 0, plain > 0),
            fell=Rate.of(gained < 0),
            levels={int(step): int(np.sum(up == step)) for step in np.unique(up)},
            mean_levels=float(up.mean()) if len(up) else None,
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "jumped": self.jumped.to_json(),
            "fell": self.fell.to_json(),
            "levels": {str(step): count for step, count in self.levels.items()},
            "mean_levels": self.mean_levels,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AdversarialReport:
    """Effect of claims of urgency.

    Attributes:
        allowed_rate: Largest jump rate that passes.
        num_pairs: P.
        predicted: Of the most likely level.
        decided: Of the level of least expected cost.
        neutral: Of the decided level, with words that claim nothing instead of the claim: the effect of any added words. Not part of the verdict.
        scheduled: Of the level a scheduler uses: declared tier = true level, abstention and limited promotion.
        scheduled_max_levels: Most levels a claimed text is scheduled above its true level.
        by_language: Language -> jump rate of the decided level.
        by_position: Position of the claim -> jump rate of the decided level.
        by_level: True level -> jump rate of the decided level.
        examples: Ids of pairs whose decided level jumped, the furthest first, at most 20.
    """

    allowed_rate: float
    num_pairs: int
    predicted: Jumps
    decided: Jumps
    neutral: Jumps
    scheduled: Jumps
    scheduled_max_levels: int
    by_language: dict[str, Rate]
    by_position: dict[str, Rate]
    by_level: dict[str, Rate]
    examples: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether scheduled levels jump at most as often as allowed.

        A predictor for which every plain text is at the top already cannot be evaluated and does not pass.
        """
        return self._holds(self.scheduled)

    @property
    def passed_unguarded(self) -> bool:
        """Whether the most likely and the decided level do so too, without abstention and limited promotion."""
        return self._holds(self.predicted) and self._holds(self.decided)

    def _holds(self, jumps: Jumps) -> bool:
        rate = jumps.jumped.value
        return rate is not None and rate <= self.allowed_rate

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        groups = {
            name: {key: rate.to_json() for key, rate in getattr(self, name).items()}
            for name in ("by_language", "by_position", "by_level")
        }
        return {
            "passed": self.passed,
            "passed_unguarded": self.passed_unguarded,
            "allowed_rate": self.allowed_rate,
            "num_pairs": self.num_pairs,
            "predicted": self.predicted.to_json(),
            "decided": self.decided.to_json(),
            "neutral": self.neutral.to_json(),
            "scheduled": self.scheduled.to_json(),
            "scheduled_max_levels": self.scheduled_max_levels,
            **groups,
            "examples": list(self.examples),
        }


def check_claims(
    predict: Predict,
    pairs: Sequence[ClaimPair],
    *,
    allowed_rate: float = ALLOWED_RATE,
    threshold: float | None = None,
    max_promotion: int = 1,
    under_triage_cost: float = UNDER_TRIAGE_COST,
) -> AdversarialReport:
    """Measures how often adding a claim makes the predicted level more urgent.

    Args:
        predict: N texts -> probabilities [N, K].
        pairs: Texts with and without a claim; at least one.
        allowed_rate: Largest share of pairs that may jump, from 0 to 1.
        threshold: Abstain threshold, for the scheduled level.
        max_promotion: For the scheduled level.
        under_triage_cost: For the decided and the scheduled level.

    Raises:
        InputError: No pairs, or a rate outside its range.
    """
    if not pairs:
        raise InputError("adversarial pairs", 0, "at least one")
    if not 0 <= allowed_rate <= 1:
        raise InputError("allowed_rate", allowed_rate, "a number from 0 to 1")
    plain = predict([pair.text for pair in pairs])
    claimed = predict([pair.claimed_text for pair in pairs])
    tiers = np.array([pair.level_number for pair in pairs])
    neutral = predict(neutral_texts(pairs))
    before, after, control = (
        expected_cost_levels(rows, under_triage_cost) for rows in (plain, claimed, neutral)
    )
    scheduled = [
        effective_level(rows, tiers, threshold, max_promotion, under_triage_cost=under_triage_cost)
        for rows in (plain, claimed)
    ]

    def by(keys: Sequence[str]) -> dict[str, Rate]:
        named = np.array(keys)
        return {
            key: Rate.of(after < before, (before > 0) & (named == key)) for key in dict.fromkeys(sorted(keys))
        }

    order = np.argsort(-(before - after), kind="stable")
    return AdversarialReport(
        allowed_rate=allowed_rate,
        num_pairs=len(pairs),
        predicted=Jumps.between(plain.argmax(axis=1), claimed.argmax(axis=1)),
        decided=Jumps.between(before, after),
        neutral=Jumps.between(before, control),
        scheduled=Jumps.between(scheduled[0], scheduled[1]),
        scheduled_max_levels=int(np.max(tiers - scheduled[1])),
        by_language=by([pair.language for pair in pairs]),
        by_position=by([pair.position for pair in pairs]),
        by_level=by([LEVELS[tier] for tier in tiers]),
        examples=tuple(pairs[at].id for at in order[:20].tolist() if after[at] < before[at]),
    )
