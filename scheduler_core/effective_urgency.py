"""The level a live request is scheduled at: its declared tier, corrected by its predicted urgency within limits."""

from __future__ import annotations

from scheduler_core.request import RequestState
from scheduler_core.urgency import UNDER_TRIAGE_COST, effective_level


def effective_urgency(
    state: RequestState,
    *,
    threshold: float | None = 0.5,
    max_promotion: int = 1,
    max_demotion: int = 0,
    under_triage_cost: float = UNDER_TRIAGE_COST,
) -> int:
    """`urgency.effective_level` of a request; the declared tier while nothing is predicted, and where it is none of the
    predictor's levels: with K tiers and fewer levels a text says nothing about the tiers beyond.

    The one place where a policy or router gets a request's urgency from, so that a text can never raise itself by more
    than `max_promotion` levels, whatever the order it is served in. Costs tens of microseconds with a prediction:
    policies keep it from `on_prediction` on.

    Args:
        state: The request.
        threshold: Least highest probability that counts; below it the predictor abstains and the declared tier holds.
            0.5: more likely right than not; an artifact says in its manifest which threshold it was certified at.
            None: always the declared tier.
        max_promotion: Most levels the prediction may raise the request.
        max_demotion: Most levels it may lower it.
        under_triage_cost: See `urgency.expected_cost_levels`.

    Returns:
        The level, 0 the most urgent.

    Raises:
        InputError: An argument is outside of its range.
    """
    if state.urgency is None or state.request.tier >= len(state.urgency.probabilities):
        return state.request.tier
    return int(
        effective_level(
            state.urgency.probabilities,
            state.request.tier,
            threshold,
            max_promotion,
            max_demotion=max_demotion,
            under_triage_cost=under_triage_cost,
        )
    )
