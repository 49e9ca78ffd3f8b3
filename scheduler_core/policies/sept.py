"""SEPT: shortest expected processing time (Weber 1983, "Scheduling jobs with stochastic processing requirements on
parallel machines", J. Appl. Probab. 20, 841-847); TIE's ablation with beta = 0 (TIE, table 4)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from scheduler_core.lengths import expected_and_cvar
from scheduler_core.policies.base import KeyChanges, Policy
from scheduler_core.request import RequestState


@dataclass(kw_only=True, slots=True)
class Sept(Policy):
    """The request with the smallest expected output length goes first.

    key = E[min(X, M)]

    | symbol | meaning | unit |
    | --- | --- | --- |
    | X | predicted output length, log-t | tokens |
    | M | the request's own max_tokens; also the length assumed without a prediction | tokens |

    Differs from the paper: the expectation is of the censored length, as in TIE (Eq. 9), because the mean of a
    log-t is infinite; and as there, only the length of the output counts, not the prompt.
    """

    key_changes: ClassVar[KeyChanges] = "never"
    running_keys: ClassVar[Literal["on_event", "on_tokens"]] = "on_event"
    inputs: ClassVar[frozenset[str]] = frozenset({"length"})
    _expected: dict[str, float] = field(default_factory=dict, init=False, repr=False)

    def on_prediction(self, state: RequestState) -> None:
        seen = state.prediction
        if seen is not None:
            mean, _ = expected_and_cvar(seen.mu, seen.sigma, seen.nu, state.request.max_tokens)
            self._expected[state.request_id] = mean

    def on_finish(self, state: RequestState) -> None:
        self._expected.pop(state.request_id, None)

    def key(self, state: RequestState, now: float) -> float:
        return self._expected.get(state.request_id, float(state.request.max_tokens))
