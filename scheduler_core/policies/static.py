"""Policies by properties known at the arrival: FCFS, priority, shortest prefill first."""

from dataclasses import dataclass

from scheduler_core.policies.base import Policy
from scheduler_core.request import RequestState


@dataclass(kw_only=True, slots=True)
class Fcfs(Policy):
    """First come, first served: the default of vLLM and the usual baseline. Needs no prediction.

    key = arrival time (s)
    """

    key_changes = "never"
    running_keys = "on_event"
    progress = "unused"

    def key(self, state: RequestState, now: float) -> float:
        return state.request.arrival_s


@dataclass(kw_only=True, slots=True)
class Priority(Policy):
    """Smallest declared priority value first, ties by arrival (vLLM, `--scheduling-policy priority`).

    key = priority (no unit, declared by the client)

    When memory runs out, the running request of the largest value is preempted, the latest arrival of several. A waiting
    request never displaces a running one for its slot.
    Requests of a larger value starve while smaller ones saturate the engine, as declared.
    """

    key_changes = "never"
    evicts_by_key = True
    running_keys = "on_event"
    progress = "unused"
    inputs = frozenset({"priority"})

    def key(self, state: RequestState, now: float) -> float:
        return float(state.request.priority)


@dataclass(kw_only=True, slots=True)
class Spf(Policy):
    """Shortest prefill first: the fewest prompt tokens to process (SLAI's order of new prefills, "Optimal Scheduling
    Algorithms for LLM Inference", section 5; also an option of vLLM and SGLang).

    key = n - h

    | symbol | meaning | unit |
    | --- | --- | --- |
    | n | length of the prompt | tokens |
    | h | prompt tokens in the prefix cache | tokens |

    Differs from the paper: the cached prefix is subtracted.
    """

    key_changes = "never"
    running_keys = "on_event"
    progress = "unused"

    def key(self, state: RequestState, now: float) -> float:
        return float(state.request.prompt_tokens - state.cached_tokens)
