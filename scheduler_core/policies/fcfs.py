"""First come, first served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from scheduler_core.policies.base import KeyChanges, Policy
from scheduler_core.request import RequestState


@dataclass(kw_only=True, slots=True)
class Fcfs(Policy):
    """Arrival order; the default of vLLM, and the baseline of every paper. Needs no prediction.

    key = arrival time (s)
    """

    key_changes: ClassVar[KeyChanges] = "never"
    running_keys: ClassVar[Literal["on_event", "on_tokens"]] = "on_event"

    def key(self, state: RequestState, now: float) -> float:
        return state.request.arrival_s
