"""EDF: earliest deadline first (Liu & Layland 1973, "Scheduling algorithms for multiprogramming in a hard-real-time
environment", J. ACM 20, 46-61; for latency targets of requests: llm-d)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from scheduler_core.errors import InputError
from scheduler_core.policies.base import KeyChanges, Policy
from scheduler_core.request import RequestState


@dataclass(kw_only=True, slots=True)
class Edf(Policy):
    """The request whose next deadline is nearest goes first.

    key = a + D

    | symbol | meaning | unit |
    | --- | --- | --- |
    | a | arrival | s |
    | D | target for the first token until it is there, then for the last one; the other if there is but one | s |
    | default_slo_s | D of a request without targets | s |

    No starvation: a deadline is a fixed time, and only requests that arrive less than the largest D later can pass.

    Differs from the paper: two deadlines follow each other in one request.

    Raises:
        InputError: A parameter is outside its range.
    """

    key_changes: ClassVar[KeyChanges] = "on_event"
    running_keys: ClassVar[Literal["on_event", "on_tokens"]] = "on_event"
    inputs: ClassVar[frozenset[str]] = frozenset({"slo"})

    default_slo_s: float = 60.0
    _changed: list[RequestState] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.default_slo_s < float("inf"):
            raise InputError("default_slo_s", self.default_slo_s, "seconds > 0")

    def key(self, state: RequestState, now: float) -> float:
        request = state.request
        first, last = request.ttft_slo_s, request.ttlt_slo_s
        target = first if state.first_token_s is None else last
        if target is None:
            target = last if state.first_token_s is None else first
        return request.arrival_s + (self.default_slo_s if target is None else target)

    def on_tokens(self, state: RequestState, num_tokens: int, now: float) -> None:
        if state.first_token_s == now:
            self._changed.append(state)

    def take_changed(self, now: float) -> Collection[RequestState]:
        taken, self._changed = self._changed, []
        return taken
