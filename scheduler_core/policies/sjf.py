"""SSJF: speculative shortest job first (Qiu et al. 2024, "Efficient Interactive LLM Serving with Proxy Model-based
Sequence Length Prediction", arXiv:2404.08509)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from scheduler_core.policies.base import KeyChanges, Policy
from scheduler_core.request import RequestState


@dataclass(kw_only=True, slots=True)
class Ssjf(Policy):
    """The request with the shortest predicted length goes first.

    key = ln min(exp(mu), M)

    | symbol | meaning | unit |
    | --- | --- | --- |
    | exp(mu) | median of the predicted length | tokens |
    | M | the request's own max_tokens; also the length assumed without a prediction | tokens |

    With an oracle predictor this is SJF on the true lengths, the usual bound.

    Differs from the paper: the point prediction is the median of the predicted distribution, not the output of a
    regression trained for SSJF alone; the order is updated when a prediction comes, requests do not wait for it.
    """

    key_changes: ClassVar[KeyChanges] = "never"
    running_keys: ClassVar[Literal["on_event", "on_tokens"]] = "on_event"
    inputs: ClassVar[frozenset[str]] = frozenset({"length"})

    def key(self, state: RequestState, now: float) -> float:
        longest = math.log(state.request.max_tokens)
        return longest if state.prediction is None else min(state.prediction.mu, longest)
