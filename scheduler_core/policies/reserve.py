"""Admission by predicted memory: FCFS that reserves a quantile of the remaining length. Ours; S3 (2023) reserves by bucket."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from scheduler_core.errors import InputError
from scheduler_core.indices.length_table import LengthTable
from scheduler_core.policies.base import KeyChanges, Policy
from scheduler_core.request import RequestState


@dataclass(kw_only=True, slots=True)
class Reserve(Policy):
    """Arrival order; a request is admitted when the memory it will probably need is there.

    key = arrival (s);   tokens reserved = n + g + Q_q(min(X, M) - g | X > g)

    | symbol | meaning | unit |
    | --- | --- | --- |
    | X, M | predicted output length, log-t; max_tokens | tokens |
    | n, g | prompt, tokens generated so far | tokens |
    | q | quantile, 0.9; without a prediction only n + g is reserved | - |

    Argument: vLLM admits by the memory of the prompt, so when answers grow somebody is preempted, and all its tokens are
    computed again. With the q-quantile reserved a request outgrows its share with probability 1 - q, and preemptions
    all but vanish. The price is a smaller batch: what is reserved and not yet used serves nobody, and quantiles add up
    where lengths would average out. So it pays where a preemption is dear (long prompts, recompute, targets for the time
    between tokens) and costs throughput where it is cheap; q is the knob between the two.

    No starvation: FCFS, and the whole of prompt and max_tokens is never asked for if the cache cannot hold it.

    Raises:
        InputError: A parameter is outside its range.
    """

    key_changes: ClassVar[KeyChanges] = "never"
    running_keys: ClassVar[Literal["on_event", "on_tokens"]] = "on_event"
    inputs: ClassVar[frozenset[str]] = frozenset({"length"})

    quantile: float = 0.9
    _tables: dict[str, LengthTable] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.quantile < 1:
            raise InputError("quantile", self.quantile, "numbers in (0, 1)")

    def on_prediction(self, state: RequestState) -> None:
        if state.prediction is not None:
            self._tables[state.request_id] = LengthTable(state.prediction, state.request.max_tokens)

    def on_finish(self, state: RequestState) -> None:
        self._tables.pop(state.request_id, None)

    def key(self, state: RequestState, now: float) -> float:
        return state.request.arrival_s

    def admission_tokens(self, state: RequestState) -> int:
        table = self._tables.get(state.request_id)
        if table is None:
            return state.known_tokens
        rest = table.remaining_quantile(self.quantile, state.num_output_tokens)
        return state.known_tokens + round(rest)
