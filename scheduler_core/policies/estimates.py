"""Lengths in tokens derived from predictions, shared by policies."""

import math
from functools import lru_cache

from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.request import RequestState


@lru_cache(maxsize=65_536)
def _risk(length: LengthPrediction, max_tokens: int) -> tuple[float, float]:
    return length.expected_and_cvar(max_tokens)


def risk_tokens(state: RequestState) -> tuple[float, float]:
    """(E[X~], CVaR_0.9(X~)) of X~ = min(X, max_tokens) in tokens; max_tokens without a predicted length."""
    longest = state.request.max_tokens
    return (longest, longest) if state.prediction is None else _risk(state.prediction, longest)


def median_tokens(state: RequestState) -> float:
    """min(exp(mu), max_tokens) in tokens; max_tokens without a predicted length."""
    longest = state.request.max_tokens
    if state.prediction is None or state.prediction.mu >= math.log(longest):
        return longest
    return math.exp(state.prediction.mu)
