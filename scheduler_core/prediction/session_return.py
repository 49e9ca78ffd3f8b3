"""Return of sessions: the pause after an ended turn, the turns that remain, and the tokens of the next input that are new.

Pause. Seconds from the end of a turn to the arrival of the session's next request. Time is divided into bins of equal width
in ln seconds. h_k is the cumulative hazard in bin k, and the pause is longer than t with probability

    S(t) = exp(-sum of h_j over the bins before t, and the part of h_k that is before t),

which has a mass at infinity: sessions that never return. A group of pauses (rows of the table below, each a part of the one
above) has n_k returns in bin k and e_k pauses that lasted until it, and with h'_k of the group above

    h_k = (n_k + s h'_k) / (e_k + s),

the mean of the gamma posterior of a piecewise exponential model whose prior counts as s pauses. h' of the first group is that
of a log-t distribution (`PRIOR_PAUSES`). A return is spread over the bins near it by a normal kernel.

    group                                         s     weight of the pause before
    how the turn ended                            10    1 - 1 / MEMORY
    and the tool                                  20    1 - 1 / MEMORY
    and the tenant                                20    1 - 1 / MEMORY
    and the time of day (4 hours)                 40    1 - 1 / MEMORY
    session, and how the turn ended               2     0.93

Censoring. A pause that has not ended is in e_k of the bins it has outlasted, which are counted at `CHECKPOINTS`, so neither
sessions that never return nor those that are dropped bias h.

Turns. The probability that a session ends with a turn (does not return for `ENDED_S` seconds) is exp(b.x), x = (1, ln input
tokens - 11), by recursive Poisson regression, times a factor of the tenant, (ends + 5) / (expected ends + 5). The number of
turns that remain is geometric.

New tokens. The next input is longer than input and output of this turn by N tokens; ln N is log-t around a recursive ridge
regression on the last and the mean ln N of the session, whose observations have the weights of Student's t. An input that is
shorter than the last one (compaction) is not learned.

`python -m benchmarks.agents.returns` compares it with simpler predictions on recorded sessions of coding agents.
"""

import math
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.lengths import LogT
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.prediction.score_window import COVERAGE_LEVELS
from scheduler_core.prediction.session import NEWEST, RecursiveRegression
from scheduler_core.ranges import check_ranges

FloatArray = NDArray[np.float64]

#: Start of the first bin in seconds, width in ln seconds, and number of bins; the last one ends after 27 hours.
MIN_PAUSE_S, BIN_WIDTH, NUM_BINS = 0.03, 0.25, 60
#: Standard deviation of the kernel, in bins.
KERNEL_BINS = 0.7
#: Bins at whose starts pauses that have not ended are counted: after 9, 42, 189, 850 seconds, 1, 5 and 27 hours.
CHECKPOINTS = (23, 29, 35, 41, 47, 53, 60)
#: Bin at whose start a session counts as ended, and that time in seconds.
ENDED_BIN = 47
ENDED_S = MIN_PAUSE_S * math.exp(ENDED_BIN * BIN_WIDTH)
#: How a turn ended -> location and scale in ln seconds of the log-t distribution of its pause before any is observed.
PRIOR_PAUSES = {"tool_use": (2.2, 1.0), "end_turn": (5.3, 1.8)}
OTHER_PRIOR_PAUSE, PRIOR_NU = (3.5, 1.8), 3.0
#: s of the groups, in the order of the table, and weight of the pauses before in those of a session and in the others.
KIND, TOOL, TENANT, HOURS, SESSION = 10.0, 20.0, 20.0, 40.0, 2.0
SESSION_DECAY, MEMORY = 0.93, 5000
#: Groups that are kept, except for those of sessions, and kinds of ends that are kept of a session.
MAX_GROUPS, MAX_KINDS = 4096, 8
#: Number of latest pauses for `ReturnPredictor.coverage`.
WINDOW = 1000
#: Seconds of a part of the day, and number of parts.
DAY_PART_S, NUM_DAY_PARTS = 14_400.0, 6
#: First b, precision of its prior, weight of the factor's prior in ends, and turns after which a turn is forgotten.
FIRST_END_RATES, END_PRECISION, TENANT_ENDS, TURN_MEMORY = (-4.0, 0.0), (1.0, 5.0), 5.0, 20_000
#: Of N: smallest number that is told from a smaller one, center of ln N, scale and degrees of freedom of its distribution.
MIN_NEW_TOKENS, NEW_TOKENS_CENTER, NEW_TOKENS_SIGMA, NEW_TOKENS_NU = 30, 5.8, 1.4, 3.5
STATE_FORMAT = "tailcast-session-returns/1"

_LOG_MIN = math.log(MIN_PAUSE_S)
_LOG_EDGES = np.linspace(_LOG_MIN, _LOG_MIN + BIN_WIDTH * NUM_BINS, NUM_BINS + 1)
_EDGES_S = np.exp(_LOG_EDGES)
MAX_PAUSE_S = float(_EDGES_S[-1])


def _kernels() -> FloatArray:
    """Returns and exposures [NUM_BINS, 2, NUM_BINS] of a pause that ends in each bin."""
    bins = np.arange(NUM_BINS)
    returns = np.exp(-0.5 * ((bins[:, None] - bins) / KERNEL_BINS) ** 2)
    returns /= returns.sum(axis=1, keepdims=True)
    # A pause that ends in a bin was half of it in this bin.
    exposures = returns[:, ::-1].cumsum(axis=1)[:, ::-1] - 0.5 * returns
    return np.stack([returns, exposures], axis=1)


_KERNELS = _kernels()


class SessionReturn:
    """What is predicted at the end of a turn of a session. Times are in seconds since the end of the turn.

    Attributes:
        ended_s: Time of the end of the turn.
        end_probability: Probability that the session ends with a turn like this one.
        new_tokens: Distribution of N, the tokens of the next input that are neither in the input nor in the output of this
            turn.
    """

    __slots__ = ("_hazards", "_rates", "end_probability", "ended_s", "new_tokens")

    def __init__(
        self, hazards: FloatArray, *, ended_s: float, end_probability: float, new_tokens: LengthPrediction
    ) -> None:
        """`hazards` are those of the bins [NUM_BINS], >= 0."""
        #: Cumulative hazard at the edges of the bins.
        self._hazards: list[float] = [0.0, *np.cumsum(hazards).tolist()]
        self._rates: list[float] | None = None
        self.ended_s, self.end_probability, self.new_tokens = ended_s, end_probability, new_tokens

    def survival(self, idle_s: float) -> float:
        """P(pause > idle_s)."""
        return math.exp(-self._hazard(idle_s))

    def probability_of_return(self, idle_s: float, horizon_s: float) -> float:
        """P(pause <= idle_s + horizon_s | pause > idle_s)."""
        return -math.expm1(self._hazard(idle_s) - self._hazard(idle_s + horizon_s))

    def expected_pause_s(self, idle_s: float, horizon_s: float) -> float:
        """E[min(pause - idle_s, horizon_s) | pause > idle_s]: seconds for which a context of the session would lie idle if it
        were kept for at most `horizon_s`."""
        start_s, end_s = max(idle_s, MIN_PAUSE_S), idle_s + horizon_s
        if end_s <= start_s:
            return horizon_s
        inner = _EDGES_S[(start_s < _EDGES_S) & (end_s > _EDGES_S)]
        log_times = np.log(np.concatenate([[start_s], inner, [end_s]]))
        # t S is a power of t in each bin, so its mean over ln t is the logarithmic mean of its values at both ends.
        log_products = log_times - np.interp(log_times, _LOG_EDGES, self._hazards) + self._hazard(idle_s)
        return start_s - idle_s + float(_segments(log_times, log_products).sum())

    def return_rate(self, idle_s: float) -> float:
        """Returns per second for which the context of the session is kept, with the best time h for which it is kept: the
        maximum over h of P(pause <= idle_s + h | pause > idle_s) / E[min(pause - idle_s, h) | pause > idle_s].

        This is the Gittins index of keeping it (1979): contexts of the largest rates give the most hits for their memory. From
        the edges of the bins, between which it is linear in ln idle_s; a session of more than `MAX_PAUSE_S` has 0.
        """
        if self._rates is None:
            self._rates = _return_rates(np.array(self._hazards))
        if idle_s <= MIN_PAUSE_S:
            return self._rates[0]
        position = (math.log(idle_s) - _LOG_MIN) / BIN_WIDTH
        if position >= NUM_BINS:
            return 0.0
        number = int(position)
        rate = self._rates[number]
        return rate + (self._rates[number + 1] - rate) * (position - number)

    def quantile(self, level: float, idle_s: float = 0.0) -> float:
        """The pause in seconds that is not exceeded with probability `level` in [0, 1), if it is longer than `idle_s`;
        infinite beyond the last bin."""
        hazards = self._hazards
        target = self._hazard(idle_s) - math.log1p(-level)
        number = bisect_left(hazards, target)
        if number == 0:
            return idle_s
        if number > NUM_BINS:
            return math.inf
        part = (target - hazards[number - 1]) / (hazards[number] - hazards[number - 1])
        return max(MIN_PAUSE_S * math.exp(BIN_WIDTH * (number - 1 + part)), idle_s)

    @property
    def remaining_turns(self) -> float:
        """Expected number of turns after this one until the session ends."""
        return 1.0 / self.end_probability - 1.0

    def turns_quantile(self, level: float) -> float:
        """The number of turns that remain, by its level in [0, 1)."""
        return math.log1p(-level) / math.log1p(-self.end_probability)

    def _hazard(self, time_s: float) -> float:
        """-ln S."""
        if time_s <= MIN_PAUSE_S:
            return 0.0
        position = (math.log(time_s) - _LOG_MIN) / BIN_WIDTH
        hazards = self._hazards
        if position >= NUM_BINS:
            return hazards[NUM_BINS]
        number = int(position)
        hazard = hazards[number]
        return hazard + (hazards[number + 1] - hazard) * (position - number)


def _segments(log_times: FloatArray, log_products: FloatArray) -> FloatArray:
    """Integrals of S over the times [N-1] between N; `log_products` is ln(t S), linear in ln t between them."""
    steps = np.diff(log_products)
    growths = np.where(steps == 0.0, 1.0, np.expm1(steps) / np.where(steps == 0.0, 1.0, steps))
    return np.asarray(np.exp(log_products[:-1]) * growths * np.diff(log_times))


def _return_rates(hazards: FloatArray) -> list[float]:
    """`SessionReturn.return_rate` at the edges of the bins, from the cumulative hazards there [NUM_BINS + 1]."""
    bins_s = _segments(_LOG_EDGES, np.asarray(_LOG_EDGES - hazards)).tolist()
    bins_returns = (-np.diff(np.exp(-hazards))).tolist()
    rates = [0.0]
    # From the right, with runs of bins of decreasing rates: a bin takes in the runs after it that have larger rates.
    runs: list[tuple[float, float, float]] = []
    for returns, time_s in zip(reversed(bins_returns), reversed(bins_s), strict=True):
        rate = returns / time_s
        while runs and runs[-1][0] > rate:
            _, more_returns, more_s = runs.pop()
            returns, time_s = returns + more_returns, time_s + more_s
            rate = returns / time_s
        runs.append((rate, returns, time_s))
        rates.append(rate)
    return rates[::-1]


@dataclass(slots=True, eq=False)
class _Pause:
    """The time since the last turn of a session, until its next one."""

    forecast: SessionReturn
    #: Groups of the table, without that of the session, and the counts of that.
    groups: list[tuple[str, ...]]
    session_counts: FloatArray
    tenant: str
    #: Tokens of input and output; None: unknown.
    sizes: tuple[int, int] | None
    token_features: FloatArray
    turn_features: FloatArray
    #: Bins that are counted.
    num_counted: int = 0
    #: False once the session has returned, or is dropped.
    is_open: bool = True


@dataclass(slots=True)
class _Session:
    """What is kept of a session: returns and exposures [2, NUM_BINS] by how its turns ended, and its ln N."""

    counts: dict[str, FloatArray] = field(default_factory=dict)
    last_log: float = NEW_TOKENS_CENTER
    mean_log: float = NEW_TOKENS_CENTER
    num_logs: int = 0
    pause: _Pause | None = None

    def close(self) -> _Pause | None:
        """Ends the pause, if there is one, and returns it."""
        pause, self.pause = self.pause, None
        if pause is not None:
            pause.is_open = False
        return pause

    def counts_of(self, ended_by: str) -> FloatArray:
        """Counts of the turns that ended in this way; of the first one, if there are too many."""
        if ended_by not in self.counts and len(self.counts) == MAX_KINDS:
            ended_by = next(iter(self.counts))
        return self.counts.setdefault(ended_by, np.zeros((2, NUM_BINS)))

    def add_new_tokens(self, log_tokens: float) -> None:
        """Adds ln N of a turn."""
        self.num_logs += 1
        self.last_log = log_tokens
        self.mean_log += max(NEWEST, 1.0 / self.num_logs) * (log_tokens - self.mean_log)


class ReturnPredictor:
    """Predicts returns from the turns before; keeps the `max_sessions` sessions that were used last.

    A session is any string. Times are in seconds, of one clock that does not go back. Not for several threads at once.
    """

    def __init__(self, max_sessions: int = 10_000) -> None:
        self.max_sessions = max_sessions
        check_ranges(self, max_sessions=(1, 100_000_000))
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._groups: OrderedDict[tuple[str, ...], FloatArray] = OrderedDict()
        self._turns = _TurnRates()
        self._new_tokens = RecursiveRegression((2.0, 20.0, 20.0), NEW_TOKENS_CENTER, MEMORY)
        #: Pauses that wait for each of the checkpoints, in the order of their times.
        self._waiting: tuple[deque[_Pause], ...] = tuple(deque() for _ in CHECKPOINTS)
        #: Of the latest pauses: probability of a shorter one, infinite after `ENDED_S`, and of one that is shorter than that.
        self._levels: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def __len__(self) -> int:
        return len(self._sessions)

    def forecast(self, session: str) -> SessionReturn | None:
        """The prediction of the last turn that ended; None if the session has returned since, or is unknown."""
        state = self._sessions.get(session)
        return None if state is None or state.pause is None else state.pause.forecast

    def ended(
        self,
        session: str,
        now: float,
        *,
        ended_by: str = "",
        tool: str = "",
        tenant: str = "",
        input_tokens: int | None = None,
        output_tokens: int | None = None,
        day_s: float | None = None,
    ) -> SessionReturn:
        """Adds the end of a turn and predicts the return.

        Args:
            session: Identity of the session.
            now: Time of the end.
            ended_by: How the output ended, such as tool_use or end_turn; empty: unknown.
            tool: The tool that the output calls; empty: none or unknown.
            tenant: Empty: unknown.
            input_tokens: Tokens of the input of the turn; None: unknown.
            output_tokens: Tokens of its output; None: unknown.
            day_s: Seconds since midnight, of any time zone; None: the time of day is not used.
        """
        self._count_until(now)
        state = self._sessions.pop(session, None) or _Session()
        self._sessions[session] = state
        if len(self._sessions) > self.max_sessions:
            self._sessions.popitem(last=False)[1].close()
        state.close()
        groups = _groups_of(ended_by, tool, tenant, day_s)
        counts = state.counts_of(ended_by)
        turn_features = np.array([1.0, 0.0 if input_tokens is None else _log(input_tokens) - 11.0])
        sizes = None if input_tokens is None or output_tokens is None else (input_tokens, output_tokens)
        token_features = np.array(
            [1.0, state.last_log - NEW_TOKENS_CENTER, state.mean_log - NEW_TOKENS_CENTER]
        )
        mu = min(max(self._new_tokens.predict(token_features), 0.0), 20.0)
        forecast = SessionReturn(
            self._hazards(groups, counts),
            ended_s=now,
            end_probability=self._turns.probability(turn_features, tenant),
            new_tokens=LengthPrediction(mu, NEW_TOKENS_SIGMA, NEW_TOKENS_NU),
        )
        state.pause = _Pause(forecast, groups, counts, tenant, sizes, token_features, turn_features)
        self._waiting[0].append(state.pause)
        return forecast

    def returned(self, session: str, now: float, *, input_tokens: int | None = None) -> None:
        """Learns that the next request of a session has arrived; without effect if it has no ended turn."""
        self._count_until(now)
        state = self._sessions.get(session)
        pause = None if state is None else state.close()
        if state is None or pause is None:
            return
        self._sessions.move_to_end(session)
        pause_s = max(now - pause.forecast.ended_s, MIN_PAUSE_S)
        if pause_s < MAX_PAUSE_S:
            # At a checkpoint, rounding may place a pause before the bins that are counted.
            number = int((math.log(pause_s) - _LOG_MIN) / BIN_WIDTH)
            self._count(pause, min(max(number, pause.num_counted), NUM_BINS - 1), is_return=True)
        if pause.num_counted < ENDED_BIN:
            self._learn_end(pause, pause_s, is_end=False)
        if input_tokens is not None and pause.sizes is not None and input_tokens >= pause.sizes[0]:
            self._learn_new_tokens(state, pause, input_tokens - sum(pause.sizes))

    def left(self, session: str, now: float) -> None:
        """The session will not return, because it ended or moved; nothing is learned from its pause after this time."""
        self._count_until(now)
        state = self._sessions.get(session)
        if state is not None:
            state.close()

    def _learn_end(self, pause: _Pause, pause_s: float, *, is_end: bool) -> None:
        """Learns whether the session has ended with a turn, once per turn."""
        self._turns.observe(pause.turn_features, pause.tenant, is_end=is_end)
        level = math.inf if is_end else 1.0 - pause.forecast.survival(pause_s)
        self._levels.append((level, 1.0 - pause.forecast.survival(ENDED_S)))

    def _learn_new_tokens(self, state: _Session, pause: _Pause, num_tokens: int) -> None:
        """Learns N, which may be negative where an engine drops a part of the output, such as reasoning."""
        log_tokens = math.log(max(num_tokens, MIN_NEW_TOKENS))
        z = (log_tokens - pause.forecast.new_tokens.mu) / NEW_TOKENS_SIGMA
        weight = (NEW_TOKENS_NU + 1.0) / (NEW_TOKENS_NU + z * z)
        self._new_tokens.observe(pause.token_features, log_tokens, weight)
        state.add_new_tokens(log_tokens)

    def _hazards(self, groups: list[tuple[str, ...]], session_counts: FloatArray) -> FloatArray:
        """h of the bins [NUM_BINS]."""
        hazards = _PRIOR_HAZARDS.get(groups[0][0], _OTHER_PRIOR_HAZARDS)
        for key in groups:
            counts = self._groups.get(key)
            if counts is not None:
                weight = _WEIGHTS[len(key) - 1]
                hazards = (counts[0] + weight * hazards) / (counts[1] + weight)
        return np.asarray((session_counts[0] + SESSION * hazards) / (session_counts[1] + SESSION))

    def _count_until(self, now: float) -> None:
        """Counts the bins that pauses have outlasted."""
        for number, (waiting, end) in enumerate(zip(self._waiting, CHECKPOINTS, strict=True)):
            latest_s = now - _EDGES_S[end]
            while waiting and waiting[0].forecast.ended_s <= latest_s:
                pause = waiting.popleft()
                if not pause.is_open:
                    continue
                self._count(pause, end, is_return=False)
                if end == ENDED_BIN:
                    self._learn_end(pause, math.inf, is_end=True)
                if end < NUM_BINS:
                    self._waiting[number + 1].append(pause)

    def _count(self, pause: _Pause, end: int, *, is_return: bool) -> None:
        """Counts the bins of a pause that were not counted yet: all before `end`, or its return in that bin."""
        first, is_last = pause.num_counted, is_return or end == NUM_BINS
        pause.num_counted = end
        arrays = [(pause.session_counts, SESSION_DECAY)]
        for key in pause.groups:
            counts = self._groups.get(key)
            if counts is None:
                counts = self._groups[key] = np.zeros((2, NUM_BINS))
                if len(self._groups) > MAX_GROUPS:
                    self._groups.popitem(last=False)
            self._groups.move_to_end(key)
            arrays.append((counts, 1.0 - 1.0 / MEMORY))
        for counts, decay in arrays:
            if is_last:
                counts *= decay
            if is_return:
                counts[0] += _KERNELS[end, 0]
                counts[1, first:] += _KERNELS[end, 1, first:]
            else:
                counts[1, first:end] += 1.0

    def coverage(self) -> dict[str, float | None]:
        """Calibration: level -> fraction of the latest `WINDOW` pauses that were not longer than their quantile, among those
        whose quantile is below `ENDED_S`; None if there are none. Sessions that do not return count after that time."""
        levels, ends = np.array(self._levels).reshape(-1, 2).T
        coverage: dict[str, float | None] = {}
        for name, level in COVERAGE_LEVELS.items():
            is_observed = ends > level
            coverage[name] = float((levels <= level)[is_observed].mean()) if is_observed.any() else None
        return coverage

    def state(self) -> dict[str, Any]:
        """What is learned, without the sessions: JSON content, except for the array of the counts."""
        return {
            "format": STATE_FORMAT,
            "groups": [list(key) for key in self._groups],
            "counts": np.array([*self._groups.values()], np.float32).reshape(-1, 2, NUM_BINS),
            "new_tokens": self._new_tokens.state(),
            "turns": self._turns.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a `state`; sessions are unknown. `InputError`, without any change, if it is invalid."""
        restored = ReturnPredictor(self.max_sessions)
        try:
            if state["format"] != STATE_FORMAT:
                raise ValueError("format")
            counts = np.asarray(state["counts"], np.float64)
            keys = [tuple(map(str, key)) for key in state["groups"]]
            if counts.shape != (len(keys), 2, NUM_BINS) or not (np.isfinite(counts) & (counts >= 0)).all():
                raise ValueError("counts")
            if not all(1 <= len(key) <= len(_WEIGHTS) for key in keys):
                raise ValueError("groups")
            restored._groups.update(zip(keys[-MAX_GROUPS:], counts[-MAX_GROUPS:].copy(), strict=True))
            restored._new_tokens.restore(state["new_tokens"])
            restored._turns.restore(state["turns"])
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise InputError(f"state cannot be used: {error!r}") from error
        self.__dict__.update(restored.__dict__)


class _TurnRates:
    """Probability that a session ends with a turn: Poisson regression on x [2], with a factor for each tenant."""

    def __init__(self) -> None:
        self._gram = np.diag(END_PRECISION)
        self._response = self._gram @ FIRST_END_RATES
        self._coefficients = np.array(FIRST_END_RATES)
        #: Tenant, and "" for all of them -> ends, and expected ends.
        self._tenants: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def probability(self, x: FloatArray, tenant: str) -> float:
        """The probability that the session ends with a turn."""
        rate = self._rate(x)
        if tenant in self._tenants:
            ends, expected = self._tenants[tenant]
            ratio = (self._tenants[""][0] + 1.0) / (self._tenants[""][1] + 1.0)
            rate *= (ends / ratio + TENANT_ENDS) / (expected + TENANT_ENDS)
        return min(max(rate, 1e-6), 0.999)

    def _rate(self, x: FloatArray) -> float:
        """exp(b.x), at most 1."""
        return math.exp(min(max(float(self._coefficients @ x), -12.0), 0.0))

    def observe(self, x: FloatArray, tenant: str, *, is_end: bool) -> None:
        """Adds a turn."""
        rate, decay = self._rate(x), 1.0 - 1.0 / TURN_MEMORY
        information = rate * x[:, None] * x
        self._gram = decay * self._gram + information
        self._response = decay * self._response + information @ self._coefficients + (is_end - rate) * x
        self._coefficients = np.linalg.solve(self._gram, self._response)
        for name in {"": None, tenant: None}:
            ends, expected = self._tenants.pop(name, (0.0, 0.0))
            self._tenants[name] = (decay * ends + is_end, decay * expected + rate)
        if len(self._tenants) > MAX_GROUPS:
            self._tenants.popitem(last=False)

    def state(self) -> dict[str, Any]:
        return {
            "gram": self._gram.tolist(),
            "response": self._response.tolist(),
            "tenants": [[name, *counts] for name, counts in self._tenants.items()],
        }

    def restore(self, content: Mapping[str, Any]) -> None:
        """Restores a `state`; raises an error if the content is invalid."""
        gram, response = np.array(content["gram"], float), np.array(content["response"], float)
        if gram.shape != (2, 2) or response.shape != (2,) or not np.isfinite(response).all():
            raise ValueError("gram, response")
        if not np.allclose(gram, gram.T) or np.linalg.eigvalsh(gram).min() <= 0:
            raise ValueError("gram")
        tenants = [(str(name), (float(ends), float(expected))) for name, ends, expected in content["tenants"]]
        if (tenants and "" not in dict(tenants)) or not all(
            0 <= value < math.inf for _, counts in tenants for value in counts
        ):
            raise ValueError("tenants")
        self._gram, self._response, self._tenants = gram, response, OrderedDict(tenants[-MAX_GROUPS:])
        self._coefficients = np.linalg.solve(gram, response)


def _groups_of(ended_by: str, tool: str, tenant: str, day_s: float | None) -> list[tuple[str, ...]]:
    """Keys of the groups of a pause, the largest first; a key has as many parts as is the number of its row in the table."""
    day_part = "" if day_s is None else str(int(day_s // DAY_PART_S) % NUM_DAY_PARTS)
    key = (ended_by, tool, tenant, day_part)
    return [key[:num] for num in range(1, 5) if num == 1 or key[num - 1]]


def _log(tokens: int) -> float:
    return math.log(max(tokens, 1))


def _prior_hazards(mu: float, sigma: float) -> FloatArray:
    """h of a log-t distribution."""
    return np.asarray(-np.diff(LogT(mu, sigma, PRIOR_NU).logsf(_EDGES_S)))


_PRIOR_HAZARDS = {ended_by: _prior_hazards(*prior) for ended_by, prior in PRIOR_PAUSES.items()}
_OTHER_PRIOR_HAZARDS = _prior_hazards(*OTHER_PRIOR_PAUSE)
_WEIGHTS = (KIND, TOOL, TENANT, HOURS)
