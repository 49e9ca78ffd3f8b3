"""The urgency a policy sees: never further from the declared tier than the limits allow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler_core.effective_urgency import effective_urgency
from scheduler_core.predictions import UrgencyPrediction
from scheduler_core.request import Request, RequestState
from scheduler_core.urgency import effective_level

rows = st.lists(st.floats(0.01, 1.0), min_size=5, max_size=5).map(
    lambda row: tuple(value / sum(row) for value in row)
)


def state(tier: int, probabilities: tuple[float, ...] | None) -> RequestState:
    asked = Request(request_id="r", arrival_s=0.0, prompt_tokens=1, max_tokens=1, tier=tier)
    urgency = None if probabilities is None else UrgencyPrediction(probabilities)
    return RequestState(asked, order=0, urgency=urgency)


def test_without_a_prediction_or_a_sure_one_the_declared_tier_holds() -> None:
    assert effective_urgency(state(3, None)) == 3
    assert effective_urgency(state(3, (0.4, 0.3, 0.1, 0.1, 0.1))) == 3, "abstains below one half"
    assert effective_urgency(state(3, (0.98, 0.02, 0.0, 0.0, 0.0)), threshold=None) == 3


def test_a_sure_text_rises_by_one_level_and_never_falls_by_itself() -> None:
    assert effective_urgency(state(3, (0.98, 0.02, 0.0, 0.0, 0.0))) == 2
    assert effective_urgency(state(3, (0.98, 0.02, 0.0, 0.0, 0.0)), max_promotion=4) == 0
    assert effective_urgency(state(1, (0.0, 0.0, 0.0, 0.0, 1.0))) == 1
    assert effective_urgency(state(1, (0.0, 0.0, 0.0, 0.0, 1.0)), max_demotion=2) == 3


@given(row=rows, tier=st.integers(0, 4), threshold=st.none() | st.floats(0, 1), promotion=st.integers(0, 4))
def test_it_is_the_decision_of_the_urgency_module(
    row: tuple[float, ...], tier: int, threshold: float | None, promotion: int
) -> None:
    found = effective_urgency(state(tier, row), threshold=threshold, max_promotion=promotion)
    assert found == int(effective_level(row, tier, threshold, promotion))
    assert max(0, tier - promotion) <= found <= tier


def test_a_tier_beyond_the_predicted_levels_holds() -> None:
    """Ten tiers, five levels: a text moves those of tiers 0 to 4, at most one up, and says nothing about the others."""
    sure = (1.0, 0.0, 0.0, 0.0, 0.0)
    found = [effective_urgency(state(tier, sure)) for tier in range(10)]
    assert found == [0, 0, 1, 2, 3, 5, 6, 7, 8, 9]
