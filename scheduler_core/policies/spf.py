"""SPF: shortest prefill first (SLAI's order of new prefills, "Optimal Scheduling Algorithms for LLM Inference", section
5; also an option of vLLM and SGLang)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from scheduler_core.policies.base import KeyChanges, Policy
from scheduler_core.request import RequestState


@dataclass(kw_only=True, slots=True)
class Spf(Policy):
    """The request with the fewest prompt tokens to process goes first: short prompts see their first token soon.

    key = n - h

    | symbol | meaning | unit |
    | --- | --- | --- |
    | n | length of the prompt | tokens |
    | h | of these, already in the prefix cache | tokens |

    Differs from the paper: the cached prefix does not count.
    """

    key_changes: ClassVar[KeyChanges] = "never"
    running_keys: ClassVar[Literal["on_event", "on_tokens"]] = "on_event"

    def key(self, state: RequestState, now: float) -> float:
        return float(state.request.prompt_tokens - state.request.cached_prefix_tokens)
