"""The decision between a declared tier and a predicted urgency."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from scheduler_core.predictions import UrgencyPrediction
from scheduler_core.request import Request, RequestState
from scheduler_core.urgency import LEVELS, effective_level, expected_cost_levels

K = len(LEVELS)
weights = st.lists(st.floats(0.0, 1.0), min_size=K, max_size=K).filter(lambda row: sum(row) > 1e-3)
rows = weights.map(lambda row: np.array(row) / sum(row))
costs = st.floats(0.1, 20.0)
tiers = st.integers(0, K - 1)


def expected_costs(row: NDArray[np.float64], cost: float) -> list[float]:
    return [
        sum(p * (cost * max(d - e, 0) + max(e - d, 0)) for e, p in enumerate(row.tolist())) for d in range(K)
    ]


@given(row=rows, cost=costs)
def test_the_decided_level_has_the_least_expected_cost(row: NDArray[np.float64], cost: float) -> None:
    decided = int(expected_cost_levels(row, cost))
    found = expected_costs(row, cost)
    assert found[decided] <= min(found) + 1e-6


@given(row=rows, tier=tiers, promotion=st.integers(0, 5), threshold=st.floats(0, 1))
def test_no_text_leaves_its_declared_tier_by_more_than_the_limit(
    row: NDArray[np.float64], tier: int, promotion: int, threshold: float
) -> None:
    level = int(effective_level(row, tier, threshold, promotion))
    assert max(0, tier - promotion) <= level <= tier


@given(row=rows, tier=tiers, cost=costs, level=st.integers(1, K - 1), share=st.floats(0.0, 1.0))
def test_probability_moved_to_a_more_urgent_level_never_lowers_the_urgency(
    row: NDArray[np.float64], tier: int, cost: float, level: int, share: float
) -> None:
    more = row.copy()
    moved = more[level] * share
    more[level] -= moved
    more[level - 1] += moved
    before = effective_level(row, tier, 0.0, K, under_triage_cost=cost)
    after = effective_level(more, tier, 0.0, K, under_triage_cost=cost)
    assert int(after) <= int(before)


SURE = (1.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("tier", "probabilities", "threshold", "max_promotion", "expected"),
    [
        (3, None, None, 1, 3),
        (3, (0.4, 0.3, 0.1, 0.1, 0.1), 0.5, 1, 3),  # abstains
        (3, (0.4, 0.3, 0.1, 0.1, 0.1), 0.4, 1, 2),
        (3, (0.4, 0.3, 0.1, 0.1, 0.1), None, 1, 2),  # never abstains
        (3, SURE, 1.0, 1, 3),  # always abstains
        (3, SURE, None, 2, 1),
        (1, SURE[::-1], None, 1, 1),  # no text lowers its own request
        (3, SURE, 1.0, 5, 0),  # unlimited trust: neither the threshold ...
        (1, SURE[::-1], None, math.inf, 4),  # ... nor the declared tier limits it
        *(
            (tier, SURE, None, 1, level) for tier, level in enumerate((0, 0, 1, 2, 3, 5, 6))
        ),  # 5, 6: not predicted
    ],
)
def test_the_level_to_schedule_at(
    tier: int,
    probabilities: tuple[float, ...] | None,
    threshold: float | None,
    max_promotion: float,
    expected: int,
) -> None:
    request = Request(request_id="r", arrival_s=0.0, prompt_tokens=1, max_tokens=1, tier=tier)
    urgency = None if probabilities is None else UrgencyPrediction(probabilities, threshold)
    assert RequestState(request, order=0, urgency=urgency).effective_level(max_promotion) == expected


def test_the_level_is_the_one_of_least_expected_cost() -> None:
    """Under-triage costs three times as much: the smallest level with P(level <= d) >= 1/4."""
    assert UrgencyPrediction((0.2, 0.04, 0.76)).level == 2
    assert UrgencyPrediction((0.26, 0.0, 0.74)).level == 0
