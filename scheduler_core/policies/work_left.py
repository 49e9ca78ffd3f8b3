"""Work that is left for a request in seconds of the engine, and orders that are recomputed at every event."""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from scheduler_core.policies.base import Costs, EngineView, Policy, Progress, RunningKeys
from scheduler_core.request import RequestState

#: Least engine time of a request, because measured costs may be 0.
_SHORTEST_S = 1e-9


class TokenTimes(NamedTuple):
    """Seconds of the engine per token: of a prompt, of output, copied from host memory. By default those of the simulator's
    default step time with 32 decodes in a step."""

    prefill_s: float = 5.5e-5
    decode_s: float = 6e-4
    reload_s: float = 5.2e-6

    @classmethod
    def of(cls, costs: Costs) -> "TokenTimes":
        """As measured, > 0."""
        times = (costs.prefill_s(1.0), costs.decode_s(1.0), costs.reload_s(1.0))
        return cls(*[max(time_s, _SHORTEST_S) for time_s in times])


def work_left_s(state: RequestState, times: TokenTimes, output_tokens: float = 0.0) -> float:
    """Engine time of a waiting request in seconds, > 0: for its tokens that are not in the prefix cache, for the copy of those
    that are in host memory, and for `output_tokens` tokens of output less those that it already has."""
    prompt_s = times.prefill_s * max(state.uncached_tokens, 1) + times.reload_s * state.host_cached_tokens
    return prompt_s + times.decode_s * max(output_tokens - state.num_output_tokens, 0.0)


@dataclass(kw_only=True, slots=True)
class EventOrder(Policy):
    """Order of the waiting requests that is recomputed after every event (arrival, prediction, admission, end of prefill, preemption, end, end of a session),
    with the prefix cache, the costs and the time (`_key_s`) as they are then, but not with time alone.

    Simulated steps without an event can thus be completed at once. It does not read tokens of running requests.
    """

    key_changes = "on_event"
    running_keys: ClassVar[RunningKeys] = "on_event"
    progress: ClassVar[Progress] = "unused"

    _costs: Costs | None = field(default=None, init=False, repr=False)
    #: For the keys, until they are recomputed: seconds per token, and the time of the event before.
    _times: TokenTimes = field(default=TokenTimes(), init=False, repr=False)
    _key_s: float = field(default=0.0, init=False, repr=False)
    #: Time of the latest event, and whether keys have to be recomputed after it.
    _event_s: float = field(default=0.0, init=False, repr=False)
    _is_due: bool = field(default=False, init=False, repr=False)

    def bind(self, engine: EngineView) -> None:
        self._costs = engine.costs

    def on_pressure(self, num_waiting: int, max_num_seqs: int) -> bool:
        is_due, self._is_due = self._is_due, False
        if is_due:
            self._key_s = self._event_s
            if self._costs is not None and self.reads("costs"):
                self._times = TokenTimes.of(self._costs)
        return is_due

    @property
    def reorders_next(self) -> bool:
        return self._is_due

    def on_arrival(self, state: RequestState, now: float) -> None:
        self._event_s, self._is_due = now, True

    def on_prediction(self, state: RequestState) -> None:
        self._is_due = True

    def on_admit(self, state: RequestState, now: float) -> None:
        self._event_s, self._is_due = now, True

    def on_prefill_end(self, state: RequestState, now: float) -> None:
        self._event_s, self._is_due = now, True

    def on_preempt(self, state: RequestState, now: float) -> None:
        self._event_s, self._is_due = now, True

    def on_finish(self, state: RequestState) -> None:
        self._event_s, self._is_due = max(self._event_s, state.last_token_s or self._event_s), True

    def on_session_end(self, session: str, now: float) -> None:
        self._event_s, self._is_due = now, True


@dataclass(kw_only=True, slots=True)
class WorkLeft(EventOrder):
    """Order by predicted output length, with an option for the whole work of a request.

    Attributes:
        work_left: Count the uncached prompt as well, and all in seconds of the engine as measured (`work_left_s`): for
            prompts of very different lengths, or that share prefixes.
    """

    work_left: bool = False

    def reads(self, name: str) -> bool:
        return name in self.inputs or (self.work_left and name in ("cached", "costs"))

    def on_pressure(self, num_waiting: int, max_num_seqs: int) -> bool:
        return EventOrder.on_pressure(self, num_waiting, max_num_seqs) and self.work_left

    @property
    def reorders_next(self) -> bool:
        return self._is_due and self.work_left

    def work(self, state: RequestState, output_tokens: float) -> float:
        """Seconds with `work_left`, else the tokens of output."""
        return work_left_s(state, self._times, output_tokens) if self.work_left else output_tokens
