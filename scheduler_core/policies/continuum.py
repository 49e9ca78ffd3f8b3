"""Continuum: programs first come, first served, and a time to live for their contexts in the KV cache."""

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from scheduler_core.policies.base import EngineView
from scheduler_core.policies.work_left import EventOrder
from scheduler_core.ranges import FINITE, POSITIVE, check_ranges
from scheduler_core.request import RequestState

#: Head start in seconds of a turn whose context is kept, larger than all times.
_FIRST = 1e9
#: Pauses in a distribution, fewest of them, and weight of the latest wait in the mean.
_NUM_PAUSES, _LEAST_PAUSES, _WAIT_WEIGHT = 1000, 10, 0.05
#: Sessions that are remembered; of more, those that have been idle longest are forgotten.
_MAX_SESSIONS = 10_000


def time_to_live_s(
    pauses_s: Collection[float], benefit_s: float, cost: float, default_pause_s: float
) -> float:
    """tau of the largest P(pause <= tau) benefit_s - cost tau, from the pauses so far; of an exponential distribution with
    mean `default_pause_s` if they are fewer than 10. `cost` is in seconds per second."""
    if cost <= 0.0:
        return math.inf
    if len(pauses_s) < _LEAST_PAUSES:
        return default_pause_s * math.log(max(benefit_s / (cost * default_pause_s), 1.0))
    pauses = np.sort(np.fromiter(pauses_s, float))
    gains = np.arange(1, len(pauses) + 1) / len(pauses) * benefit_s - cost * pauses
    best = int(gains.argmax())
    return float(pauses[best]) if gains[best] > 0.0 else 0.0


@dataclass(slots=True)
class _Session:
    """A session, or a request without one; times in seconds.

    Attributes:
        first_s: Arrival of its first turn.
        tokens: Length of its context.
        live: Number of its requests that wait or run.
        running: Ids of those that run.
        ended_s, ended_by: End of its latest turn, and how it ended.
        expires_s: End of the time to live of its context.
        is_in_time: Its turn has come before that.
        is_held: Its context takes memory: its requests run, or it is kept.
    """

    first_s: float
    tokens: int = 0
    live: int = 0
    running: set[str] = field(default_factory=set)
    ended_s: float | None = None
    ended_by: str = ""
    expires_s: float = -math.inf
    is_in_time: bool = False
    is_held: bool = False


@dataclass(kw_only=True, slots=True)
class Continuum(EventOrder):
    """Continuum's time to live of contexts, CacheTTL (Li et al. 2025, "Continuum: Efficient and Robust Multi-Turn LLM Agent
    Scheduling with KV Cache Time-to-Live", arXiv:2511.02230, section 4).

    tau = argmax P(pause <= tau) (R + T) - m tau, after a turn that calls a tool;   key = arrival of the session's first turn

    | symbol | meaning | unit |
    | --- | --- | --- |
    | tau | time for which the context is kept after the turn | s |
    | P | empirical distribution of the last 1,000 pauses after turns with the same end; before 10 of them exponential | - |
    | R | engine time to compute the context again, as measured | s |
    | T | mean wait of requests whose contexts were not kept, exponentially averaged | s |
    | m | part of the KV cache that the context takes | - |

    A turn that comes in time is served before those of other sessions. The others are only admitted into memory that neither
    running requests nor kept contexts take, unless nothing runs. If memory runs out nevertheless, contexts after their time
    are evicted first, least recently used first, then those that expire next.

    Sessions whose contexts are not kept starve while enough others go on.

    Differs from the paper: the cost of keeping a context is the part of the memory that it takes; tools are distinguished only
    by how the turn ended (`RequestState.ended_by`), and "end_turn" ends the program; before 10 pauses are known they are
    exponential with mean `default_pause_s`; a time to live ends with the first event after it.
    """

    inputs = frozenset({"costs", "session"})
    orders_retention = True

    default_pause_s: float = 2.0
    _capacity_tokens: float = field(default=math.inf, init=False, repr=False)
    _sessions: dict[str, _Session] = field(default_factory=dict, init=False, repr=False)
    _pauses_s: dict[str, deque[float]] = field(default_factory=dict, init=False, repr=False)
    _mean_wait_s: float = field(default=0.0, init=False, repr=False)
    #: Tokens of the contexts that take memory.
    _held_tokens: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, default_pause_s=(POSITIVE, FINITE))

    def bind(self, engine: EngineView) -> None:
        EventOrder.bind(self, engine)
        self._capacity_tokens = engine.capacity_tokens

    def on_arrival(self, state: RequestState, now: float) -> None:
        EventOrder.on_arrival(self, state, now)
        session = self._sessions.setdefault(_name(state), _Session(now))
        if session.ended_s is not None and not session.live:
            pauses_s = self._pauses_s.setdefault(session.ended_by, deque(maxlen=_NUM_PAUSES))
            pauses_s.append(now - session.ended_s)
            session.is_in_time = now <= session.expires_s
        session.live += 1
        session.tokens = state.known_tokens

    def on_admit(self, state: RequestState, now: float) -> None:
        EventOrder.on_admit(self, state, now)
        session = self._sessions[_name(state)]
        if not session.is_held:
            session.is_held = True
            self._held_tokens += session.tokens
        if not session.is_in_time:
            self._mean_wait_s += _WAIT_WEIGHT * (now - state.request.arrival_s - self._mean_wait_s)
        session.running.add(state.request_id)

    def on_preempt(self, state: RequestState, now: float) -> None:
        EventOrder.on_preempt(self, state, now)
        self._sessions[_name(state)].running.discard(state.request_id)

    def on_finish(self, state: RequestState) -> None:
        EventOrder.on_finish(self, state)
        session = self._sessions[_name(state)]
        session.live -= 1
        session.running.discard(state.request_id)
        if session.live:
            return
        if not state.request.session or state.ended_by == "end_turn":
            del self._sessions[_name(state)]
            return
        if len(self._sessions) > _MAX_SESSIONS:
            self._forget()
        if state.last_token_s is None:
            return
        session.tokens, session.is_in_time = state.known_tokens, False
        session.ended_s, session.ended_by = self._event_s, state.ended_by
        benefit_s = self._times.prefill_s * session.tokens + self._mean_wait_s
        cost = session.tokens / self._capacity_tokens
        pauses_s = self._pauses_s.get(state.ended_by, ())
        session.expires_s = self._event_s + time_to_live_s(pauses_s, benefit_s, cost, self.default_pause_s)

    def on_session_end(self, session: str, now: float) -> None:
        EventOrder.on_session_end(self, session, now)
        self._sessions.pop(session, None)

    def on_pressure(self, num_waiting: int, max_num_seqs: int) -> bool:
        is_due = EventOrder.on_pressure(self, num_waiting, max_num_seqs)
        if is_due:
            for session in self._sessions.values():
                is_kept = not session.live and session.expires_s > self._event_s
                session.is_held = bool(session.running) or session.is_in_time or is_kept
            self._held_tokens = sum([item.tokens for item in self._sessions.values() if item.is_held])
        return is_due

    def may_admit(self, state: RequestState, now: float) -> bool:
        session = self._sessions[_name(state)]
        return session.is_held or self._held_tokens + session.tokens <= self._capacity_tokens

    def key(self, state: RequestState, now: float) -> float:
        session = self._sessions[_name(state)]
        return session.first_s - (_FIRST if session.is_in_time else 0.0)

    def retention_key(self, session: str) -> float:
        entry = self._sessions.get(session)
        return _FIRST + max(entry.expires_s, self._key_s) if entry is not None and entry.is_held else 0.0

    def _forget(self) -> None:
        """Drops the tenth of the sessions that have been idle longest."""
        idle = [name for name, item in self._sessions.items() if not item.live]
        idle.sort(key=lambda name: self._sessions[name].ended_s or -math.inf)
        for name in idle[: _MAX_SESSIONS // 10]:
            del self._sessions[name]


def _name(state: RequestState) -> str:
    """Name of the session of a request."""
    return state.request.session or f"\0{state.request_id}"
