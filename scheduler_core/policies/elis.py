"""ELIS: iterative shortest remaining time first (Choi et al. 2025, "ELIS: Efficient LLM Iterative Scheduling System with
Response Length Predictor", arXiv:2505.09142)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from scheduler_core.errors import InputError
from scheduler_core.indices.length_table import LengthTable
from scheduler_core.indices.stepwise import StepwiseIndex
from scheduler_core.policies.base import KeyChanges, Policy
from scheduler_core.request import RequestState


@dataclass(kw_only=True, slots=True)
class Elis(Policy):
    """Predict again every n tokens and serve the shortest rest; only at those points may a request be displaced.

    key = E[X~ - g_n | X~ > g_n], g_n = n floor(g / n)

    | symbol | meaning | unit |
    | --- | --- | --- |
    | X~ = min(X, M) | predicted output length, log-t; max_tokens, also the length without a prediction | tokens |
    | g, n | tokens generated; window_tokens, 50 | tokens |

    Differs from the paper: the prediction of the next window is the first one given that the answer goes on, which costs no
    call of a model; a new prediction that comes through `update` is used at once.

    Raises:
        InputError: A parameter is outside its range.
    """

    key_changes: ClassVar[KeyChanges] = "never"
    preemptive: ClassVar[bool] = True
    sees_every_step: ClassVar[bool] = True
    inputs: ClassVar[frozenset[str]] = frozenset({"length"})

    window_tokens: float = 50
    _index: StepwiseIndex = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.window_tokens < math.inf:
            raise InputError("window_tokens", self.window_tokens, "numbers >= 1")
        self._index = StepwiseIndex(self.window_tokens, LengthTable.expected_remaining)

    def on_prediction(self, state: RequestState) -> None:
        self._index.predicted(state)

    def on_finish(self, state: RequestState) -> None:
        self._index.finished(state)

    def key(self, state: RequestState, now: float) -> float:
        return self._index.value(state)

    def eviction_key(self, state: RequestState, now: float) -> float:
        within = state.num_output_tokens % self.window_tokens != 0
        return -math.inf if within else self.key(state, now)
