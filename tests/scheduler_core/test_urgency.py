"""The decision between a declared tier and a predicted urgency."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from scheduler_core.errors import InputError
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


@given(
    row=rows, tier=tiers, promotion=st.integers(0, 5), demotion=st.integers(0, 5), threshold=st.floats(0, 1)
)
def test_no_text_leaves_its_declared_tier_by_more_than_the_limits(
    row: NDArray[np.float64], tier: int, promotion: int, demotion: int, threshold: float
) -> None:
    level = int(effective_level(row, tier, threshold, promotion, max_demotion=demotion))
    assert max(0, tier - promotion) <= level <= min(K - 1, tier + demotion)


@given(row=rows, tier=tiers)
def test_without_confidence_the_declared_tier_holds(row: NDArray[np.float64], tier: int) -> None:
    assert int(effective_level(row, tier, None, K, max_demotion=K)) == tier
    if row.max() < 1:
        assert int(effective_level(row, tier, float(np.nextafter(row.max(), 2)), K, max_demotion=K)) == tier


@given(row=rows, tier=tiers, cost=costs, level=st.integers(1, K - 1), share=st.floats(0.0, 1.0))
def test_probability_moved_to_a_more_urgent_level_never_lowers_the_urgency(
    row: NDArray[np.float64], tier: int, cost: float, level: int, share: float
) -> None:
    more = row.copy()
    moved = more[level] * share
    more[level] -= moved
    more[level - 1] += moved
    before = effective_level(row, tier, 0.0, K, max_demotion=K, under_triage_cost=cost)
    after = effective_level(more, tier, 0.0, K, max_demotion=K, under_triage_cost=cost)
    assert int(after) <= int(before)


@given(row=rows, low=costs, high=costs)
def test_a_higher_cost_of_under_triage_never_decides_less_urgent(
    row: NDArray[np.float64], low: float, high: float
) -> None:
    low, high = min(low, high), max(low, high)
    assert int(expected_cost_levels(row, high)) <= int(expected_cost_levels(row, low))


def test_many_rows_are_the_rows_one_by_one() -> None:
    random = np.random.default_rng(4)
    many = random.dirichlet(np.ones(K), size=200)
    declared = random.integers(0, K, size=200)
    together = effective_level(many, declared, 0.45, 2, max_demotion=1)
    alone = [
        int(effective_level(row, tier, 0.45, 2, max_demotion=1))
        for row, tier in zip(many, declared, strict=True)
    ]
    assert together.tolist() == alone


def test_a_sure_prediction_promotes_by_the_limit_alone() -> None:
    sure = np.eye(K)[0]
    for tier, promotion in itertools.product(range(K), range(K)):
        assert int(effective_level(sure, tier, 0.9, promotion)) == max(0, tier - promotion)
    assert int(effective_level(np.eye(K)[4], 1, 0.9)) == 1


@pytest.mark.parametrize(
    ("row", "tier", "threshold", "promotion", "field"),
    [
        ([0.5, 0.2], 0, 0.5, 1, "probabilities, row 0"),
        ([1.2, -0.2], 0, 0.5, 1, "probabilities, row 0"),
        ([float("nan"), 1.0], 0, 0.5, 1, "probabilities, row 0"),
        ([1.0], 0, 0.5, 1, "probabilities, shape"),
        ([0.5, 0.5], 2, 0.5, 1, "declared_tier"),
        ([0.5, 0.5], -1, 0.5, 1, "declared_tier"),
        ([0.5, 0.5], 0, 1.5, 1, "threshold"),
        ([0.5, 0.5], 0, float("nan"), 1, "threshold"),
        ([0.5, 0.5], 0, 0.5, -1, "max_promotion"),
    ],
)
def test_bad_arguments_are_named(
    row: list[float], tier: int, threshold: float, promotion: int, field: str
) -> None:
    with pytest.raises(InputError) as caught:
        effective_level(row, tier, threshold, promotion)
    assert caught.value.field == field


@pytest.mark.parametrize("cost", [0.0, -1.0, float("inf"), float("nan")])
def test_a_cost_is_finite_and_positive(cost: float) -> None:
    with pytest.raises(InputError, match="under_triage_cost"):
        expected_cost_levels([0.5, 0.5], cost)


def state(tier: int, probabilities: tuple[float, ...] | None) -> RequestState:
    asked = Request(request_id="r", arrival_s=0.0, prompt_tokens=1, max_tokens=1, tier=tier)
    urgency = None if probabilities is None else UrgencyPrediction(probabilities)
    return RequestState(asked, order=0, urgency=urgency)


def test_without_a_prediction_or_a_sure_one_the_declared_tier_holds() -> None:
    assert state(3, None).effective_level() == 3
    assert state(3, (0.4, 0.3, 0.1, 0.1, 0.1)).effective_level() == 3, "abstains below one half"


def test_a_sure_text_rises_by_one_level_and_never_falls_by_itself() -> None:
    assert state(3, (0.98, 0.02, 0.0, 0.0, 0.0)).effective_level() == 2
    assert state(1, (0.0, 0.0, 0.0, 0.0, 1.0)).effective_level() == 1


def test_a_tier_beyond_the_predicted_levels_holds() -> None:
    """Ten tiers, five levels: a text moves those of tiers 0 to 4, at most one up, and says nothing about the others."""
    sure = (1.0, 0.0, 0.0, 0.0, 0.0)
    found = [state(tier, sure).effective_level() for tier in range(10)]
    assert found == [0, 0, 1, 2, 3, 5, 6, 7, 8, 9]
