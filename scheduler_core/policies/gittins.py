"""Gittins index on the predicted length: the least mean latency for known distributions and unknown lengths. Ours; the index
is Gittins 1979's, its optimality in the M/G/1 queue Sevcik 1974's and Klimov 1974's (see `indices.length_table`)."""

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
class Gittins(Policy):
    """Serve first what ends soonest for the work put in, where the plan may be to give up after a while.

    key = r(g) = inf over b > g of (W(b) - W(g)) / (S(g) - S(b));   displaced if r(j) + c n < r(i)

    | symbol | meaning | unit |
    | --- | --- | --- |
    | X~ = min(X, M) | predicted output length, log-t; max_tokens, also the length without a prediction | tokens |
    | S(x), W(x) | P(X~ > x), integral of S over [0, x] | -, tokens |
    | g | tokens generated, rounded down to whole `update_tokens` | tokens |
    | c, n | switch_cost, output tokens that one token computed again is worth; tokens that i would compute again | -, tokens |

    Argument: SEPT asks how long an answer is on average, SRPT how long it is. With a heavy tail the average is far from what
    an answer under way still needs: a log-t answer that has outlived its median has more left than at the start. r(g)
    takes that in: it falls while the end comes nearer, rises when the answer turns out to be one of the long ones, and
    never exceeds the expected rest. Among all policies that know the distributions and not the lengths none has a smaller
    mean response time in an M/G/1 queue.

    Starves long requests under load, as every policy for the mean; `tail_guard` is the cure. Without displacement of running
    requests (batch formers that have none) it is r(0): the shortest-first order of the best stopping point.

    Raises:
        InputError: A parameter is outside its range.
    """

    key_changes: ClassVar[KeyChanges] = "never"
    preemptive: ClassVar[bool] = True
    sees_every_step: ClassVar[bool] = True
    inputs: ClassVar[frozenset[str]] = frozenset({"length"})

    update_tokens: float = 16
    switch_cost: float = 0.1
    _index: StepwiseIndex = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.update_tokens < math.inf:
            raise InputError("update_tokens", self.update_tokens, "numbers >= 1")
        if not 0 <= self.switch_cost < math.inf:
            raise InputError("switch_cost", self.switch_cost, "numbers >= 0")
        self._index = StepwiseIndex(self.update_tokens, LengthTable.gittins_rank)

    def on_prediction(self, state: RequestState) -> None:
        self._index.predicted(state)

    def on_finish(self, state: RequestState) -> None:
        self._index.finished(state)

    def key(self, state: RequestState, now: float) -> float:
        return self._index.value(state)

    def may_preempt(self, running: RequestState, waiting: RequestState, now: float) -> bool:
        again = self.switch_cost * running.num_computed_tokens
        return self.key(waiting, now) + again < self.key(running, now)
