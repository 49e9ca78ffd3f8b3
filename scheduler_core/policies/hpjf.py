"""HPJF: highest priority job first, by urgency alone (a baseline of "Semantic Scheduling for LLM Inference", section 4)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from scheduler_core.policies.base import KeyChanges, Policy
from scheduler_core.request import RequestState


@dataclass(kw_only=True, slots=True)
class Hpjf(Policy):
    """The most urgent request goes first, arrival order within a level.

    key = f_e

    | symbol | meaning | unit |
    | --- | --- | --- |
    | f_e | predicted urgency level, 0 = most urgent .. 4; the declared tier, 0 to K - 1, without a prediction | - |

    A text that claims urgency raises its own request as far as the predictor believes it, as in the paper; where that must not
    be, order by `effective_urgency`, as `slo_tie` does.

    Differs from the paper: the level is the one of least expected cost, not the most probable one (see
    `UrgencyPrediction.level`).
    """

    key_changes: ClassVar[KeyChanges] = "never"
    running_keys: ClassVar[Literal["on_event", "on_tokens"]] = "on_event"
    inputs: ClassVar[frozenset[str]] = frozenset({"urgency", "tier"})

    _levels: dict[str, float] = field(default_factory=dict, init=False, repr=False)

    def on_prediction(self, state: RequestState) -> None:
        if state.urgency is not None:
            self._levels[state.request_id] = float(state.urgency.level)

    def on_finish(self, state: RequestState) -> None:
        self._levels.pop(state.request_id, None)

    def key(self, state: RequestState, now: float) -> float:
        return self._levels.get(state.request_id, float(state.request.tier))
