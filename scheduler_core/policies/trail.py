"""TRAIL: shortest remaining predicted time with limited preemption (Shahout et al. 2024, "Don't Stop Me Now: Embedding
Based Scheduling for LLMs", arXiv:2410.01035, section 3.3)."""

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
class Trail(Policy):
    """The request with the fewest expected tokens left goes first, but who is far enough is left in peace.

    key = E[X~ - g | X~ > g], X~ = min(X, M);   not displaced once g >= C r

    | symbol | meaning | unit |
    | --- | --- | --- |
    | X, M | predicted output length, log-t; max_tokens, also the length without a prediction | tokens |
    | g | tokens generated, rounded down to whole `update_tokens` | tokens |
    | r | E[X~], the length predicted at first | tokens |
    | C | limit, 0.8; 1 and more: always displaced, 0: never | - |

    Differs from the paper: what remains comes from the prompt's distribution given that the answer goes on, not from a
    probe on the served model's hidden states; it is updated every `update_tokens`, not with every token.

    Raises:
        InputError: A parameter is outside its range.
    """

    key_changes: ClassVar[KeyChanges] = "never"
    preemptive: ClassVar[bool] = True
    sees_every_step: ClassVar[bool] = True
    inputs: ClassVar[frozenset[str]] = frozenset({"length"})

    limit: float = 0.8
    update_tokens: float = 16
    _index: StepwiseIndex = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.limit < math.inf:
            raise InputError("limit", self.limit, "numbers >= 0")
        if not 1 <= self.update_tokens < math.inf:
            raise InputError("update_tokens", self.update_tokens, "numbers >= 1")
        self._index = StepwiseIndex(self.update_tokens, LengthTable.expected_remaining)

    def on_prediction(self, state: RequestState) -> None:
        self._index.predicted(state)

    def on_finish(self, state: RequestState) -> None:
        self._index.finished(state)

    def key(self, state: RequestState, now: float) -> float:
        return self._index.value(state)

    def eviction_key(self, state: RequestState, now: float) -> float:
        table = self._index.table(state)
        first = float(state.request.max_tokens) if table is None else table.expected_remaining()
        return -math.inf if state.num_output_tokens >= self.limit * first else self.key(state, now)
