"""Declared priority (vLLM, `--scheduling-policy priority`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from scheduler_core.policies.base import KeyChanges, Policy
from scheduler_core.request import RequestState


@dataclass(kw_only=True, slots=True)
class Priority(Policy):
    """The request with the smallest declared priority goes first, arrival order among equals.

    key = priority (no unit, declared by the client)

    Where memory runs out the running request of the largest priority, the youngest of several, goes. Requests of a larger
    priority starve while smaller ones keep the engine busy: that is what was declared.
    """

    key_changes: ClassVar[KeyChanges] = "never"
    running_keys: ClassVar[Literal["on_event", "on_tokens"]] = "on_event"
    inputs: ClassVar[frozenset[str]] = frozenset({"priority"})

    def key(self, state: RequestState, now: float) -> float:
        return float(state.request.priority)
