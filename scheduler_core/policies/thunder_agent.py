"""ThunderAgent: pause the sessions of agents whose contexts do not fit into the KV cache together."""

import math
from dataclasses import dataclass, field

from scheduler_core.policies.base import EngineView
from scheduler_core.policies.work_left import EventOrder
from scheduler_core.ranges import FINITE, POSITIVE, check_ranges
from scheduler_core.request import RequestState

#: Keys of held requests are after all arrival times; distance of their groups, larger than all numbers of tokens.
_HELD, _GROUP = 1e12, 1e10


@dataclass(slots=True)
class _Program:
    """A session, or a request without one.

    Attributes:
        tokens: Length of its context: that of its latest prompt, or with the output after its end.
        live: Number of its waiting and running requests; 0: it is acting (runs a tool), else reasoning.
        num_running: Number of the running ones.
        num_turns: Requests so far.
        changed_s: Time of its latest arrival or end.
        is_paused: It holds no memory of the engine, and its requests are held.
        is_marked: It will be paused when its running requests end.
    """

    tokens: int = 0
    live: int = 0
    num_running: int = 0
    num_turns: int = 0
    changed_s: float = 0.0
    is_paused: bool = True
    is_marked: bool = False


@dataclass(kw_only=True, slots=True)
class ThunderAgent(EventOrder):
    """ThunderAgent's rule for one replica (Kang et al. 2026, "ThunderAgent: A Simple, Fast and Program-Aware Agentic Inference
    System", arXiv:2602.13692, section 4; ThunderAgent-org/ThunderAgent, `scheduler/router.py`).

    while sum of (c + buffer) of active programs > C: pause the smallest acting one, else mark the smallest reasoning one
    then resume while c + buffer <= C - sum: programs with a turn that waits, new ones, acting ones, each smallest first

    | symbol | meaning | unit |
    | --- | --- | --- |
    | c | length of the program's context | tokens |
    | C | size of the KV cache | tokens |
    | buffer | buffer_tokens, 100, for the output | tokens |
    | - | hold_s, 1800: a request that has waited so long is resumed regardless | s |

    key = arrival; requests of paused programs are held, after all others. A marked program is paused when its turn ends. If
    nothing runs, the first request is admitted anyway.

    Large new programs starve while smaller ones arrive, until `hold_s`.

    Differs from the paper: both rules are applied after events, not every 5 s; acting programs keep their whole weight (the
    code's default; in the paper it halves every second); a program ends with an output that ends the agent's turn
    (`RequestState.ended_by` "end_turn") or after `lease_s` without a request (as in ai-dynamo/dynamo #11447), if it is not released before.
    """

    inputs = frozenset({"session"})

    buffer_tokens: float = 100
    hold_s: float = 1800.0
    lease_s: float = 1800.0
    _capacity_tokens: float = field(default=math.inf, init=False, repr=False)
    _programs: dict[str, _Program] = field(default_factory=dict, init=False, repr=False)
    #: Waiting requests.
    _waiting: dict[str, RequestState] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, buffer_tokens=(0, FINITE), hold_s=(POSITIVE, FINITE), lease_s=(POSITIVE, FINITE))

    def bind(self, engine: EngineView) -> None:
        self._capacity_tokens = engine.capacity_tokens

    def on_arrival(self, state: RequestState, now: float) -> None:
        EventOrder.on_arrival(self, state, now)
        program = self._programs.setdefault(_name(state), _Program())
        program.live += 1
        program.num_turns += 1
        program.tokens = state.known_tokens
        program.changed_s = now
        self._waiting[state.request_id] = state

    def on_admit(self, state: RequestState, now: float) -> None:
        EventOrder.on_admit(self, state, now)
        self._programs[_name(state)].num_running += 1
        self._waiting.pop(state.request_id, None)

    def on_preempt(self, state: RequestState, now: float) -> None:
        EventOrder.on_preempt(self, state, now)
        self._programs[_name(state)].num_running -= 1
        self._waiting[state.request_id] = state

    def on_finish(self, state: RequestState) -> None:
        EventOrder.on_finish(self, state)
        name = _name(state)
        program = self._programs[name]
        program.live -= 1
        if self._waiting.pop(state.request_id, None) is None:
            program.num_running -= 1
            program.tokens = state.known_tokens
        program.changed_s = self._event_s
        if not program.live and (not state.request.session or state.ended_by == "end_turn"):
            del self._programs[name]

    def on_session_end(self, session: str, now: float) -> None:
        EventOrder.on_session_end(self, session, now)
        self._programs.pop(session, None)

    def on_pressure(self, num_waiting: int, max_num_seqs: int) -> bool:
        is_due = EventOrder.on_pressure(self, num_waiting, max_num_seqs)
        if is_due:
            self._expire()
            self._pause_until_safe()
            self._resume()
        return is_due

    def may_admit(self, state: RequestState, now: float) -> bool:
        return not self._programs[_name(state)].is_paused

    def key(self, state: RequestState, now: float) -> float:
        program = self._programs[_name(state)]
        if not program.is_paused:
            return state.request.arrival_s
        return _HELD + _GROUP * _group(program) + program.tokens

    def _free_tokens(self) -> float:
        """Tokens of the KV cache that no active program needs."""
        used = [item.tokens + self.buffer_tokens for item in self._programs.values() if not item.is_paused]
        return self._capacity_tokens - sum(used)

    def _expire(self) -> None:
        """Drops programs without requests for too long, and resumes those that wait for too long or run anyway."""
        late = [
            name
            for name, item in self._programs.items()
            if not item.live and self._event_s - item.changed_s > self.lease_s
        ]
        for name in late:
            del self._programs[name]
        for state in self._waiting.values():
            if self._event_s - state.request.arrival_s > self.hold_s:
                self._programs[_name(state)].is_paused = False
        for program in self._programs.values():
            if program.num_running:
                program.is_paused = False
            if program.is_marked and not program.live:
                program.is_marked, program.is_paused = False, True

    def _pause_until_safe(self) -> None:
        active = [item for item in self._programs.values() if not item.is_paused]
        free_tokens = self._free_tokens()
        free_tokens += sum([item.tokens + self.buffer_tokens for item in active if item.is_marked])
        active = [item for item in active if not item.is_marked]
        for program in sorted(active, key=lambda item: (item.live > 0, item.tokens)):
            if free_tokens >= 0:
                return
            free_tokens += program.tokens + self.buffer_tokens
            program.is_marked = program.live > 0
            program.is_paused = not program.is_marked

    def _resume(self) -> None:
        free_tokens = self._free_tokens()
        paused = [item for item in self._programs.values() if item.is_paused]
        for program in sorted(paused, key=lambda item: (_group(item), item.tokens)):
            needed = program.tokens + self.buffer_tokens
            if needed <= free_tokens:
                program.is_paused = False
                free_tokens -= needed


def _name(state: RequestState) -> str:
    """Name of the program of a request."""
    return state.request.session or f"\0{state.request_id}"


def _group(program: _Program) -> int:
    """Order in which paused programs are resumed: those with a turn that waits, new ones, acting ones."""
    if program.live:
        return 1 if program.num_turns == 1 else 0
    return 2
