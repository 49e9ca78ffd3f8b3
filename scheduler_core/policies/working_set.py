"""Working set of sessions, by tailcast: as many agent sessions at a time as the KV cache has memory for, in turn."""

import math
from dataclasses import dataclass, field
from itertools import islice

from scheduler_core.policies.base import EngineView
from scheduler_core.policies.estimates import median_tokens
from scheduler_core.policies.fcfs_estimate import RecentValues
from scheduler_core.policies.work_left import EventOrder, work_left_s
from scheduler_core.prediction.session_return import ReturnPredictor
from scheduler_core.ranges import FINITE, POSITIVE, check_ranges
from scheduler_core.request import RequestState

#: Keys of turns that are due, and of those of active sessions, are below those of others by these.
_DUE, _ACTIVE = 1e12, 1e9
#: Waiting turns that are considered at a time, in order of arrival, and sessions that are remembered.
_MAX_TURNS, _MAX_SESSIONS = 512, 10_000
#: Weight of the newest pause in the mean of a session, prior of it in seconds, and longest pause that counts in it.
_NEWEST_PAUSE, _FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 15.0, 600.0
#: Weight of the newest pause in the mean of all, and pauses before which idle sessions only leave for turns that are due.
_NEWEST_OF_ALL, _FIRST_PAUSES = 0.002, 20
#: Mean output before any turn has ended, and weight of the newest one.
_FIRST_OUTPUT_TOKENS, _NEWEST_OUTPUT = 256.0, 0.02
#: W is computed again after this fraction of it.
_REFRESH = 0.01


@dataclass(slots=True, eq=False)
class Session:
    """A session as the policy knows it.

    Attributes:
        context_tokens: Tokens of its last input and output, or of the input that waits.
        is_active: Whether it is in the working set.
        entered_s: Time at which it was last added to it.
        waiting: Turns that wait, by request id; usually one.
        num_running: Turns that run.
        idle_since_s: End of its last turn; None while a turn waits or runs.
        mean_pause_s: Mean seconds from the end of a turn to the next one.
        last_s: End of its last turn, also while others wait or run.
        num_turns: Turns that ended.
        value: v, while it is idle and active.
    """

    name: str
    context_tokens: int = 0
    is_active: bool = False
    entered_s: float = 0.0
    waiting: dict[str, RequestState] = field(default_factory=dict)
    num_running: int = 0
    idle_since_s: float | None = None
    mean_pause_s: float = _FIRST_PAUSE_S
    last_s: float = 0.0
    num_turns: int = 0
    value: float = 0.0

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.num_running


@dataclass(kw_only=True, slots=True)
class WorkingSet(EventOrder):
    """A working set of sessions (Denning 1968, "The Working Set Model for Program Behavior", CACM 11(5)): turns of active
    sessions run, least work first; others wait until there is memory for their contexts, or until their deadline.

    A session becomes active, the largest (now - a) / w first, as soon as   A + c <= f M   and less prefill than fills a step is
    pending. For it, idle sessions i leave the set, smallest value first, as long as   v_i C < 1,   v_i = m G_i
    If a turn would miss its deadline   d = a + r max(W, Q)   after the prefill of all turns before it, the first turn is due: it
    is the next one, and others leave for its session: idle ones by value, then those that wait, longest in the set first.

    | symbol | meaning | unit |
    | --- | --- | --- |
    | a, w | arrival of a turn; its work (`work_left_s`) | s |
    | M, A | memory of the KV cache; contexts of the active sessions | tokens |
    | c | context of a session with its expected output | tokens |
    | f | fill, 0.95: the rest is for growth | - |
    | m | time to prefill a token of a lost context, or to copy it if the engine has a host tier | s |
    | G | returns per second of idle context, at the best horizon (`SessionReturn.return_rate`) | 1/s |
    | C | contexts of the running turns and of those let in with it, all of which a prefill delays | tokens |
    | W | wait under first come, first served, if it loses each context between two turns, see below | s |
    | Q | P99 of W over the last `window` arrivals | s |
    | r | ratio, 1.1 | - |

    If the contexts have grown beyond M, sessions leave in the same order until they fit. Where the engine evicts the least
    recently used blocks whatever the policy wants, those whose last turn ended first leave first in each case: it is their
    contexts that will be lost.

    v C is what a kept context saves, in token seconds of delayed turns, per token second for which it lies idle. So the dearer a
    miss, the longer contexts are kept; with a cheap one the order is nearly that of the highest response ratio.

    Guarantee, up to errors of the estimates: every turn starts by its deadline, or as soon as a turn ends and leaves enough memory.
    So a session makes progress at least at 1 / r of its rate under first come, first served, which serves sessions in turn. If
    all contexts fit, all sessions are active. Turns have no deadline before the engine's speed is known. While nothing runs,
    the first waiting turn is admitted.

    W solves   W = sum over sessions of w_i W / (W + z_i),   w_i the engine's time for a turn with the miss of its context, z_i the
    time from its start to the next turn, output and mean pause: a session is in the queue for the fraction W / (W + z_i) of the
    time. An output token takes as long as a step with its share of the prompts. No context is lost as long as all fit. An idle
    session counts with the probability that it returns within W, so that those that have ended or moved soon do not.

    Attributes:
        predict_returns: Use the predicted return of each session; False: the mean pause of all, and the time since
            the end of the turn.
    """

    inputs = frozenset({"cached", "costs", "session", "length"})
    orders_retention = True
    protects_running = True

    ratio: float = 1.1
    fill: float = 0.95
    window: float = 2000
    predict_returns: bool = True
    #: The sessions that are known.
    sessions: dict[str, Session] = field(default_factory=dict, init=False, repr=False)
    returns: ReturnPredictor = field(default_factory=ReturnPredictor, init=False, repr=False)
    _engine: EngineView | None = field(default=None, init=False, repr=False)
    #: Waiting turns in order of arrival, those of them that are due, and running ones.
    _turns: dict[str, RequestState] = field(default_factory=dict, init=False, repr=False)
    _due: set[str] = field(default_factory=set, init=False, repr=False)
    #: Sessions outside of the set of which a turn was admitted because nothing ran; they enter before the next step, when
    #: all keys are recomputed.
    _admitted: list[Session] = field(default_factory=list, init=False, repr=False)
    _running: dict[str, RequestState] = field(default_factory=dict, init=False, repr=False)
    _deadlines: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _fcfs_wait_s: float = field(default=0.0, init=False, repr=False)
    _fcfs_wait_at_s: float = field(default=-math.inf, init=False, repr=False)
    _fcfs_waits: RecentValues = field(init=False, repr=False)
    #: Sums over ended turns, fading: number, seconds for what was new in their prompts; mean pause, and number of pauses.
    _num_turns: float = field(default=0.0, init=False, repr=False)
    _prompt_work_s: float = field(default=0.0, init=False, repr=False)
    _pause_s: float = field(default=_FIRST_PAUSE_S, init=False, repr=False)
    _max_num_seqs: int = field(default=1, init=False, repr=False)
    _num_pauses: int = field(default=0, init=False, repr=False)
    #: Mean output of ended turns, for turns without a prediction.
    _output_tokens: float = field(default=_FIRST_OUTPUT_TOKENS, init=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, ratio=(POSITIVE, FINITE), fill=(POSITIVE, 1.0), window=(1, 10**6))
        self._fcfs_waits = RecentValues(int(self.window))

    def bind(self, engine: EngineView) -> None:
        EventOrder.bind(self, engine)
        self._engine = engine

    # Events.

    def on_arrival(self, state: RequestState, now: float) -> None:
        EventOrder.on_arrival(self, state, now)
        session = self._session(state)
        session.context_tokens = state.request.prompt_tokens
        if session.idle_since_s is not None:
            pause_s = min(now - session.idle_since_s, _LONGEST_PAUSE_S)
            session.mean_pause_s += _NEWEST_PAUSE * (pause_s - session.mean_pause_s)
            self._num_pauses += 1
            self._pause_s += max(_NEWEST_OF_ALL, 1.0 / self._num_pauses) * (pause_s - self._pause_s)
            if self.predict_returns:
                self.returns.returned(session.name, now, input_tokens=state.request.prompt_tokens)
            session.idle_since_s = None
        self._wait(state, session)
        if self._fcfs_wait_s > 0.0:
            self._fcfs_waits.append(self._fcfs_wait_s)

    def on_admit(self, state: RequestState, now: float) -> None:
        EventOrder.on_admit(self, state, now)
        session = self._session(state)
        self._stop_waiting(state, session)
        if not session.is_active:
            self._admitted.append(session)
        session.num_running += 1
        self._running[state.request_id] = state

    def on_preempt(self, state: RequestState, now: float) -> None:
        EventOrder.on_preempt(self, state, now)
        session = self._session(state)
        self._stop_running(state, session)
        self._wait(state, session)
        self._due.add(state.request_id)

    def on_finish(self, state: RequestState) -> None:
        EventOrder.on_finish(self, state)
        session = self._session(state)
        if state.request_id in session.waiting:
            self._stop_waiting(state, session)
        else:
            self._stop_running(state, session)
            self._learn_turn(state)
        session.last_s = self._event_s
        if not state.request.session:
            del self.sessions[session.name]
            return
        session.context_tokens = max(state.known_tokens, session.context_tokens)
        session.num_turns += 1
        if session.is_idle:
            session.idle_since_s = self._event_s
            if self.predict_returns:
                self.returns.ended(
                    session.name,
                    self._event_s,
                    ended_by=state.ended_by,
                    tenant=state.request.tenant,
                    input_tokens=state.request.prompt_tokens,
                    output_tokens=state.num_output_tokens,
                )

    def on_session_end(self, session: str, now: float) -> None:
        EventOrder.on_session_end(self, session, now)
        if self.sessions.pop(session, None) is not None:
            self.returns.left(session, now)

    def _session(self, state: RequestState) -> Session:
        # A session may have the name of a request.
        name = state.request.session or f"\0{state.request_id}"
        session = self.sessions.get(name)
        if session is None:
            session = self.sessions[name] = Session(name, mean_pause_s=self._pause_s)
            if len(self.sessions) > _MAX_SESSIONS:
                idle = [item for item in self.sessions.values() if item.is_idle and item is not session]
                for item in sorted(idle, key=lambda item: item.last_s)[: _MAX_SESSIONS // 10]:
                    del self.sessions[item.name]
        return session

    def _wait(self, state: RequestState, session: Session) -> None:
        self._turns[state.request_id] = session.waiting[state.request_id] = state

    def _stop_waiting(self, state: RequestState, session: Session) -> None:
        del self._turns[state.request_id], session.waiting[state.request_id]
        self._deadlines.pop(state.request_id, None)
        self._due.discard(state.request_id)

    def _stop_running(self, state: RequestState, session: Session) -> None:
        del self._running[state.request_id]
        session.num_running -= 1

    def _learn_turn(self, state: RequestState) -> None:
        """Adds an ended turn to the mean time of the work that is new in each."""
        request = state.request
        self._output_tokens += _NEWEST_OUTPUT * (state.num_output_tokens - self._output_tokens)
        new_tokens = request.prompt_tokens - min(state.cached_tokens, request.prompt_tokens)
        if state.cached_tokens:  # else its context was lost as well
            self._num_turns = 0.998 * self._num_turns + 1.0
            self._prompt_work_s = 0.998 * self._prompt_work_s + self._times.prefill_s * new_tokens

    # Decisions.

    def on_pressure(self, num_waiting: int, max_num_seqs: int) -> bool:
        if not EventOrder.on_pressure(self, num_waiting, max_num_seqs):
            return False
        self._max_num_seqs = max_num_seqs
        for session in self._admitted:
            if not session.is_active:
                self._activate(session)
        self._admitted.clear()
        if self._turns:
            self._plan()
        return True

    def key(self, state: RequestState, now: float) -> float:
        if state.request_id in self._due:
            return state.order - _DUE
        session = self._session(state)
        return self._work_s(state) - _ACTIVE if session.is_active else state.request.arrival_s

    def eviction_key(self, state: RequestState, now: float) -> float:
        # Below all keys, so that no batch former evicts a running turn for one that waits.
        return state.request.arrival_s - 2.0 * _DUE

    def may_admit(self, state: RequestState, now: float) -> bool:
        return self._session(state).is_active

    def retention_key(self, session: str) -> float:
        item = self.sessions.get(session)
        if item is None:
            return -math.inf
        return _DUE + item.value if item.is_active else item.last_s

    def _work_s(self, state: RequestState) -> float:
        """w of a waiting turn in seconds."""
        return self._prompt_s(state) + self._output_s(state)

    def _output_s(self, state: RequestState) -> float:
        return self._times.decode_s * max(self._expected_output(state) - state.num_output_tokens, 0.0)

    def _expected_output(self, state: RequestState) -> float:
        """Predicted median of the output in tokens; the mean of ended turns without a prediction."""
        if state.prediction is not None:
            return median_tokens(state)
        return min(self._output_tokens, state.request.max_tokens)

    def _prompt_s(self, state: RequestState) -> float:
        return work_left_s(state, self._times)

    def _miss_s(self, num_tokens: float) -> float:
        """m: time until a context that was evicted is in the KV cache again."""
        assert self._engine is not None, "bind was not called"
        times = self._times
        return num_tokens * (times.reload_s if self._engine.has_host_tier else times.prefill_s)

    def _plan(self) -> None:
        """Finds out what is due, and adds sessions to the working set."""
        assert self._engine is not None, "bind was not called"
        now, turns = self._key_s, list(islice(self._turns.values(), _MAX_TURNS))
        prompts_s = {state.request_id: self._prompt_s(state) for state in turns}
        self._find_due(turns, prompts_s, now)
        active = [session for session in self.sessions.values() if session.is_active]
        self._shrink(active, now)
        outside = [state for state in turns if not self._session(state).is_active]
        if not outside:
            return
        due = next((state for state in outside if state.request_id in self._due), None)
        active = [session for session in active if session.is_active]
        pending = sum(state.uncached_tokens for state in turns if self._session(state).is_active)
        for state in self._running.values():
            pending += max(state.prefill_target_tokens - state.num_computed_tokens, 0)
        free = self.fill * self._engine.capacity_tokens - sum(session.context_tokens for session in active)
        idle = self._idle(active, now)
        running_tokens = sum(state.known_tokens for state in self._running.values())
        work_s = {s.request_id: prompts_s[s.request_id] + self._output_s(s) for s in outside}
        outside.sort(key=lambda state: (state.request.arrival_s - now) / work_s[state.request_id])
        if due is not None:
            outside = [due, *[state for state in outside if state is not due]]
        for state in outside:
            session = self._session(state)
            if session.is_active:
                continue
            if state is not due and pending >= self._engine.step_tokens:
                return
            need = session.context_tokens + self._expected_output(state)
            leaving: list[Session] = []
            freed = 0.0
            for other in idle:
                is_kept = self._num_pauses < _FIRST_PAUSES or other.value * running_tokens >= 1.0
                if free + freed >= need or (state is not due and is_kept):
                    break
                leaving.append(other)
                freed += other.context_tokens
            if state is due and free + freed < need:
                for other in self._held(active):
                    if free + freed >= need:
                        break
                    leaving.append(other)
                    freed += other.context_tokens
            if free + freed < need and active:
                if state is due:
                    # What is free now is not given to others, because this turn stays the first.
                    self._leave(leaving)
                return
            self._leave(leaving)
            active = [other for other in active if other.is_active]
            idle = [other for other in idle if other.is_active]
            free += freed - need
            self._activate(session)
            active.append(session)
            pending += state.uncached_tokens
            running_tokens += session.context_tokens

    def _shrink(self, active: list[Session], now: float) -> None:
        """Lets sessions leave if the contexts have grown beyond the memory, so that not all of them are lost in turn."""
        assert self._engine is not None, "bind was not called"
        excess = sum(session.context_tokens for session in active) - self._engine.capacity_tokens
        if excess <= 0:
            return
        for session in [*self._idle(active, now), *self._held(active)]:
            if excess <= 0:
                return
            session.is_active = False
            excess -= session.context_tokens

    def _idle(self, active: list[Session], now: float) -> list[Session]:
        """The idle ones, smallest value first."""
        assert self._engine is not None, "bind was not called"
        idle = [session for session in active if session.is_idle]
        for session in idle:
            session.value = self._miss_s(1.0) * self._return_rate(session, now)
        by_value = self._engine.evicts_by_policy
        return sorted(idle, key=lambda session: session.value if by_value else session.last_s)

    def _held(self, active: list[Session]) -> list[Session]:
        """Those with a turn that waits and none that runs, longest in the set first."""
        assert self._engine is not None, "bind was not called"
        waiting = [session for session in active if session.waiting and not session.num_running]
        by_entry = self._engine.evicts_by_policy
        return sorted(waiting, key=lambda session: session.entered_s if by_entry else session.last_s)

    def _find_due(self, turns: list[RequestState], prompts_s: dict[str, float], now: float) -> None:
        """Adds the first turn to those that are due, if a turn reaches its bound once those before it are served."""
        assert self._engine is not None, "bind was not called"
        if not self._engine.costs.is_measured:
            return  # on another engine than the typical one, all turns would be due at once
        self._estimate_fcfs_wait(now)
        longest_s = self.ratio * max(self._fcfs_wait_s, self._fcfs_waits.quantile(0.99))
        ahead_s = 0.0
        for state in turns:
            ahead_s += prompts_s[state.request_id]
            deadline_s = self._deadlines.setdefault(state.request_id, state.request.arrival_s + longest_s)
            if now + ahead_s >= deadline_s:
                self._due.add(turns[0].request_id)
                return

    def _estimate_fcfs_wait(self, now: float) -> None:
        """Updates W."""
        assert self._engine is not None, "bind was not called"
        if now < self._fcfs_wait_at_s + _REFRESH * self._fcfs_wait_s:
            return
        self._fcfs_wait_at_s = now
        engine = self._engine
        shares = {session: self._return_probability(session, now) for session in self.sessions.values()}
        num_sessions = max(sum(shares.values()), 1e-9)
        num_tokens = max(sum(share * session.context_tokens for session, share in shares.items()), 1.0)
        are_lost = num_tokens > engine.capacity_tokens
        work = {session: share * self._fcfs_prompt_s(session, are_lost) for session, share in shares.items()}
        # A turn takes part in as many steps as it has output tokens, which others share.
        num_running = max(min(engine.capacity_tokens * num_sessions / num_tokens, self._max_num_seqs), 1.0)
        chunks = (
            num_tokens / num_sessions / engine.step_tokens if are_lost and not engine.has_host_tier else 1.0
        )
        steps = max(self._output_tokens / num_running, chunks, 1.0)
        output_s = self._output_tokens * (sum(work.values()) / num_sessions / steps + engine.costs.step_s)
        turns = [
            (
                work[session] + share * steps * engine.costs.step_s,
                session.mean_pause_s + output_s if session.num_turns else 0.0,
            )
            for session, share in shares.items()
        ]
        wait_s = self._fcfs_wait_s or sum(work_s for work_s, _ in turns)
        for _ in range(3):
            if wait_s <= 0.0:
                break
            wait_s = sum(work_s * wait_s / (wait_s + away_s) for work_s, away_s in turns)
        self._fcfs_wait_s = wait_s

    def _return_probability(self, session: Session, now: float) -> float:
        """Probability that a turn of the session is in the queue, or comes while one of the others waits."""
        forecast = self.returns.forecast(session.name) if self.predict_returns else None
        if session.idle_since_s is None or forecast is None:
            return 1.0
        return forecast.probability_of_return(
            now - session.idle_since_s, max(self._fcfs_wait_s, _FIRST_PAUSE_S)
        )

    def _fcfs_prompt_s(self, session: Session, are_lost: bool) -> float:
        """Time to process the prompt of a turn of this session under first come, first served."""
        if session.waiting:
            work_s = sum(self._prompt_s(state) for state in session.waiting.values())
            cached = sum(state.cached_tokens - state.host_cached_tokens for state in session.waiting.values())
        else:
            work_s = self._prompt_work_s / self._num_turns if self._num_turns else 0.0
            cached = session.context_tokens
        return work_s + (self._miss_s(cached) if are_lost else 0.0)

    @staticmethod
    def _leave(sessions: list[Session]) -> None:
        for session in sessions:
            session.is_active = False

    def _activate(self, session: Session) -> None:
        session.is_active, session.entered_s, session.value = True, self._event_s, 0.0

    def _return_rate(self, session: Session, now: float) -> float:
        """G of an idle session; without a prediction 1 / (mean pause + idle time)."""
        forecast = self.returns.forecast(session.name) if self.predict_returns else None
        idle_s = 0.0 if session.idle_since_s is None else now - session.idle_since_s
        return 1.0 / (self._pause_s + idle_s) if forecast is None else forecast.return_rate(idle_s)
