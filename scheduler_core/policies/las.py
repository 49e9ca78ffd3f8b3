"""LAS: least attained service (Kleinrock 1976, "Queueing Systems II", section 4.6; the baseline MLFQ+ of "Beyond
Prediction: Tail-Aware Scheduling for LLM Inference", section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from scheduler_core.errors import InputError
from scheduler_core.policies.base import KeyChanges, Policy
from scheduler_core.request import RequestState


@dataclass(kw_only=True, slots=True)
class Las(Policy):
    """Who has got the least goes first: without knowing any length, short answers are through before long ones.

    key = floor(w / q)

    | symbol | meaning | unit |
    | --- | --- | --- |
    | w | prompt tokens processed and output tokens generated so far | tokens |
    | q | quantum_tokens; 1 is LAS itself | tokens |

    Starves the longest requests when the load comes near 1: a newcomer is always in front.

    Differs from the paper: attained service counts in steps of a quantum. Two requests of equal service would otherwise
    displace each other at every token, and each displacement costs a recomputation or a swap. Work that was lost in a
    displacement does not count: else who was displaced once would be displaced again and again.

    Raises:
        InputError: A parameter is outside its range.
    """

    key_changes: ClassVar[KeyChanges] = "never"
    preemptive: ClassVar[bool] = True
    sees_every_step: ClassVar[bool] = True

    quantum_tokens: float = 256

    def __post_init__(self) -> None:
        if not 1 <= self.quantum_tokens < float("inf"):
            raise InputError("quantum_tokens", self.quantum_tokens, "numbers >= 1")

    def key(self, state: RequestState, now: float) -> float:
        started = state.first_token_s is not None
        prompt = state.request.prompt_tokens if started else state.num_computed_tokens
        return float((prompt + state.num_output_tokens) // self.quantum_tokens)
