"""Lengths in tokens derived from predictions, shared by policies."""

import math

from scheduler_core.request import RequestState


def risk_tokens(state: RequestState) -> tuple[float, float]:
    """(E[X~], CVaR_0.9(X~)) of X~ = min(X, max_tokens) in tokens; max_tokens without a predicted length."""
    longest = state.request.max_tokens
    return state.expected_and_cvar() or (longest, longest)


def median_tokens(state: RequestState) -> float:
    """min(exp(mu), max_tokens) in tokens; max_tokens without a predicted length."""
    longest = state.request.max_tokens
    if state.prediction is None or state.prediction.mu >= math.log(longest):
        return longest
    return math.exp(state.prediction.mu)
