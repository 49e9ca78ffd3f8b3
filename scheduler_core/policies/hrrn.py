"""HRRN: highest response ratio next (Brinch Hansen 1971, "An analysis of response ratio scheduling", IFIP Congress; an
option of SGLang)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from scheduler_core.errors import InputError
from scheduler_core.lengths import expected_and_cvar
from scheduler_core.policies.base import KeyChanges, Policy
from scheduler_core.request import RequestState


@dataclass(kw_only=True, slots=True)
class Hrrn(Policy):
    """Short requests first, but waiting lifts everybody, the short ones faster.

    ratio = (wait + s) / s, largest first;   key = -ratio;   s = token_s E[min(X, M)]

    | symbol | meaning | unit |
    | --- | --- | --- |
    | wait | now - arrival | s |
    | s | expected service time | s |
    | token_s | time of one output token | s |
    | X, M | predicted output length, log-t; the request's max_tokens, also the length without a prediction | tokens |

    No starvation: while a request waits its ratio grows without bound, and only newcomers shorter than it can pass.

    Differs from the paper: the service time is expected, not known. The order changes with time, so the queue is sorted
    before every step.

    Raises:
        InputError: A parameter is outside its range.
    """

    key_changes: ClassVar[KeyChanges] = "with_time"
    running_keys: ClassVar[Literal["on_event", "on_tokens"]] = "on_tokens"
    inputs: ClassVar[frozenset[str]] = frozenset({"length"})

    token_s: float = 0.02
    _expected: dict[str, float] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.token_s < float("inf"):
            raise InputError("token_s", self.token_s, "seconds > 0")

    def on_prediction(self, state: RequestState) -> None:
        seen = state.prediction
        if seen is not None:
            mean, _ = expected_and_cvar(seen.mu, seen.sigma, seen.nu, state.request.max_tokens)
            self._expected[state.request_id] = max(mean, 1.0)

    def on_finish(self, state: RequestState) -> None:
        self._expected.pop(state.request_id, None)

    def key(self, state: RequestState, now: float) -> float:
        tokens = self._expected.get(state.request_id, float(state.request.max_tokens))
        return -1.0 - (now - state.request.arrival_s) / (self.token_s * tokens)
