"""DistBoost: boosts for the prefill queue, decode by entry ("Beyond Prediction: Tail-Aware Scheduling for LLM Inference",
section 3.1, Eqs. 2-6)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from scheduler_core.errors import InputError
from scheduler_core.indices.boost import boost_s
from scheduler_core.indices.work_rate import WorkRate
from scheduler_core.policies.base import KeyChanges, Policy
from scheduler_core.request import Phase, RequestState


@dataclass(kw_only=True, slots=True)
class DistBoost(Policy):
    """Short prompts are moved ahead of their arrival, softly; who decodes goes on in the order it began to.

    prefill: key = a - b(s_pre);   decode: key = a_dec;   b(w) = (1/gamma) ln(1/(1 - exp(-gamma w)))

    | symbol | meaning | unit |
    | --- | --- | --- |
    | a, a_dec | arrival, begin of decode | s |
    | s_pre | engine time of the tokens to prefill, those of the prompt that are not in the prefix cache | s |
    | gamma | gamma_per_s; large: FCFS, small: shortest prompt first | 1/s |

    No starvation: the boost of a prompt is finite and fixed, so who waited longer than b(shortest) is ahead of newcomers.

    Differs from the paper: gamma is per second but the paper puts tokens beside it; tokens become seconds by the measured
    time per prompt token. Keys are computed anew when that has moved by a tenth.

    Raises:
        InputError: A parameter is outside its range.
    """

    key_changes: ClassVar[KeyChanges] = "on_event"
    sees_every_step: ClassVar[bool] = True

    gamma_per_s: float = 0.1
    prefill_token_s: float = 5e-5
    _rate: WorkRate = field(init=False, repr=False)
    _token_s: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.gamma_per_s < float("inf"):
            raise InputError("gamma_per_s", self.gamma_per_s, "numbers > 0")
        self._rate = WorkRate(self.prefill_token_s)
        self._token_s = self.prefill_token_s

    def on_tokens(self, state: RequestState, num_tokens: int, now: float) -> None:
        self._rate.saw(state, num_tokens)

    def on_step(self, now: float, step_s: float) -> None:
        self._rate.step_ended(step_s)

    def on_pressure(self, num_waiting: int, max_num_seqs: int) -> bool:
        if abs(self._rate.prefill_token_s - self._token_s) <= 0.1 * self._token_s:
            return False
        self._token_s = self._rate.prefill_token_s
        return True

    def key(self, state: RequestState, now: float) -> float:
        decoding = state.prefill_target_tokens > 0 and state.phase is Phase.DECODE
        if decoding and state.decode_entered_s is not None:
            return state.decode_entered_s
        tokens = state.known_tokens - state.request.cached_prefix_tokens
        return state.request.arrival_s - boost_s(tokens * self._token_s, self.gamma_per_s)
