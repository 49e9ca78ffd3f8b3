"""When agents' sessions return: predicted pauses, turns that remain, and growth of contexts, on recorded sessions.

    python -m benchmarks.agents.returns DATA [--sessions held_out] [--hours 6] [--seed 0] [--markdown PAGE]

DATA is a table (Parquet) of recorded sessions, see `benchmarks.correcting.agent_sessions`. The constants of
`scheduler_core.prediction.session_return` were chosen on two thirds of the sessions (`is_development`); by default the
others are measured. The sessions start at random times within `--hours`, and their turns interleave. Each pause is
predicted at the end of its turn, and learned when the session returns, or has not returned for some time. All methods start
without any data. Compared:

    global              `ReturnPredictor` with one distribution of all pauses
    by end              ... with one for each way in which a turn ended (tool_use, end_turn, unknown), without sessions
    log-t regression    ln pause by the way in which the turn ended and the session's pauses, recursive, then `Correction`
    ours                `ReturnPredictor`: by the way in which the turn ended and session
    true returns        the recorded pauses: the bound of any prediction

Log score: -ln of the probability of the recorded second, in nats. CRPS: of ln seconds. A pause of more than an hour, and a
session that never returns, count as a pause of more than an hour. AUC: of P(return within 10, 60, 300 s) for pairs of one
session that does and one that does not; at the ends of turns, and among all sessions that have been idle for less than an
hour, once a minute. There, the idle time itself ranks sessions as LRU and a fixed time-to-live do.

Retention: hits of a cache of contexts, as a fraction of the tokens of the contexts to which sessions return. While it is too
large, the context of the idle session with the smallest `return_rate` is evicted, or the one that was used longest ago (LRU).

Recorded pauses contain a part of the duration of the request that follows; they are not used to predict outputs.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from benchmarks.correcting.agent_sessions import FIRST_TOKEN_S, TOKEN_S, is_development, session_starts
from benchmarks.shared.command import Parser
from benchmarks.shared.pages import number_cell, put_section
from scheduler_core.lengths.student_t import student_t_cdf, student_t_quantile
from scheduler_core.prediction.correction import Correction, RequestContext
from scheduler_core.prediction.outcome import Outcome
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.prediction.session import RecursiveRegression
from scheduler_core.prediction.session_return import ENDED_S, NUM_BINS, ReturnPredictor, SessionReturn
from scheduler_core.report.page import markdown_table
from scheduler_core.statistics import kendall_tau

#: Longest pause in seconds that is told from a longer one.
HOUR_S = 3600.0
#: Horizons of a return in seconds, and seconds between two times at which idle sessions are ranked.
HORIZONS_S, RANKING_S = (10.0, 60.0, 300.0), 60.0
#: Levels of the quantiles whose mean loss is half of the CRPS.
LEVELS = tuple((number + 0.5) / 32 for number in range(32))
#: Tokens of the cache of contexts.
CAPACITIES = (500_000, 1_000_000, 2_000_000, 3_000_000)
COLUMNS = (
    "session", "agent", "time_s", "input_tokens", "output_tokens", "stop", "think_time_s", "api_time_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Turn:
    """One ended turn; `pause_s` and `growth_tokens` are those to the session's next one, None if there is none.
    `remaining_turns`: before the next pause of at least `ENDED_S` seconds."""

    session: str
    ended_s: float
    ended_by: str
    input_tokens: int
    output_tokens: int
    pause_s: float | None
    growth_tokens: int | None
    remaining_turns: int


#: (time, 0 for the end of a turn or 1 for the return after it, turn).
Event = tuple[float, int, Turn]


class Pause(Protocol):
    """A predicted pause, see `SessionReturn`."""

    def survival(self, idle_s: float) -> float: ...

    def probability_of_return(self, idle_s: float, horizon_s: float) -> float: ...

    def quantile(self, level: float) -> float: ...


class Method(Protocol):
    """Predicts and learns pauses."""

    def ended(self, turn: Turn, now: float) -> Pause: ...

    def returned(self, turn: Turn, now: float) -> None:
        """The pause after this turn has ended."""


def read_turns(file: str, *, sessions: str) -> dict[str, list[Turn]]:
    """Agent -> its turns, of `held_out`, `development` or `all` sessions; times are from the start of the session."""
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in pq.read_table(file, columns=list(COLUMNS)).to_pylist():
        if sessions == "all" or is_development(row["session"]) == (sessions == "development"):
            runs[f"{row['session']} {row['agent']}"].append(row)
    return {agent: _turns(agent, rows) for agent, rows in runs.items()}


def _turns(agent: str, rows: Sequence[Mapping[str, Any]]) -> list[Turn]:
    turns: list[Turn] = []
    following: Mapping[str, Any] | None = None
    for row in reversed(rows):
        duration_s, pause_s, growth = row["api_time_s"], None, None
        is_recorded = duration_s is not None and not math.isnan(duration_s)
        if not is_recorded:
            duration_s = FIRST_TOKEN_S + TOKEN_S * row["output_tokens"]
        if following is not None:
            growth = following["input_tokens"] - row["input_tokens"]
            pause_s = following["think_time_s"]
            # Without a duration, the recorded pause is from the start of the request.
            if not is_recorded or pause_s is None or math.isnan(pause_s):
                pause_s = max(round(following["time_s"] - row["time_s"] - duration_s), 0.0)
        remaining = (
            turns[-1].remaining_turns + 1 if turns and pause_s is not None and pause_s < ENDED_S else 0
        )
        turns.append(
            Turn(
                agent,
                row["time_s"] + duration_s,
                row["stop"],
                row["input_tokens"],
                row["output_tokens"],
                pause_s,
                growth,
                remaining,
            )
        )
        following = row
    return turns[::-1]


def events(turns: Mapping[str, Sequence[Turn]], hours: float, seed: int) -> list[Event]:
    """The ends of all turns, and the returns after them, in order of time."""
    starts = session_starts({agent.split()[0] for agent in turns}, hours, seed)
    rows = []
    for agent in sorted(turns):
        for turn in turns[agent]:
            ended_s = starts[agent.split()[0]] + turn.ended_s
            rows.append((ended_s, 0, turn))
            if turn.pause_s is not None:
                rows.append((ended_s + turn.pause_s, 1, turn))
    return sorted(rows, key=lambda row: row[:2])


class TrueReturn(SessionReturn):
    """The true return of a session `pause_s` seconds after the end of a turn; None: never. The rest is predicted."""

    __slots__ = ("pause_s",)

    def __init__(self, pause_s: float | None, predicted: SessionReturn) -> None:
        super().__init__(
            np.zeros(NUM_BINS),
            ended_s=predicted.ended_s,
            end_probability=predicted.end_probability,
            new_tokens=predicted.new_tokens,
        )
        self.pause_s = math.inf if pause_s is None else pause_s

    def survival(self, idle_s: float) -> float:
        return float(idle_s < self.pause_s)

    def probability_of_return(self, idle_s: float, horizon_s: float) -> float:
        return float(self.pause_s <= idle_s + horizon_s)

    def expected_pause_s(self, idle_s: float, horizon_s: float) -> float:
        return min(max(self.pause_s - idle_s, 0.0), horizon_s)

    def return_rate(self, idle_s: float) -> float:
        return 1.0 / max(self.pause_s - idle_s, 1e-3)

    def quantile(self, level: float, idle_s: float = 0.0) -> float:
        return max(self.pause_s, idle_s)


class TrueReturns(ReturnPredictor):
    """Session -> the pauses after its turns, in seconds, in place of predictions: their bound."""

    def __init__(self, pauses_s: Mapping[str, Sequence[float | None]]) -> None:
        super().__init__()
        self._pauses_s = pauses_s
        self._num_turns: Counter[str] = Counter()
        self._true: dict[str, TrueReturn] = {}

    def ended(self, session: str, now: float, **turn: Any) -> TrueReturn:
        pauses_s, number = self._pauses_s.get(session, ()), self._num_turns[session]
        self._num_turns[session] += 1
        pause_s = pauses_s[number] if number < len(pauses_s) else None
        true = self._true[session] = TrueReturn(pause_s, super().ended(session, now, **turn))
        return true

    def forecast(self, session: str) -> TrueReturn | None:
        return None if super().forecast(session) is None else self._true[session]


class Returns:
    """`ReturnPredictor`, with what it may know of a turn."""

    def __init__(self, predictor: ReturnPredictor, *, ends: bool = True, sessions: bool = True) -> None:
        self.predictor = predictor
        self._ends, self._sessions = ends, sessions
        self._names: dict[str, str] = {}
        self._num = 0

    def ended(self, turn: Turn, now: float) -> SessionReturn:
        self._num += 1
        name = self._names[turn.session] = turn.session if self._sessions else str(self._num)
        return self.predictor.ended(
            name,
            now,
            ended_by=turn.ended_by if self._ends else "",
            input_tokens=turn.input_tokens,
            output_tokens=turn.output_tokens,
        )

    def returned(self, turn: Turn, now: float) -> None:
        input_tokens = None if turn.growth_tokens is None else turn.input_tokens + turn.growth_tokens
        self.predictor.returned(self._names[turn.session], now, input_tokens=input_tokens)


class LogTPause:
    """A log-t distributed pause, in tenths of a second."""

    def __init__(self, prediction: LengthPrediction) -> None:
        self._prediction = prediction

    def survival(self, idle_s: float) -> float:
        if idle_s <= 0.0:
            return 1.0
        z = (math.log(10.0 * idle_s) - self._prediction.mu) / self._prediction.sigma
        return student_t_cdf(-z, self._prediction.nu)

    def probability_of_return(self, idle_s: float, horizon_s: float) -> float:
        return 1.0 - self.survival(idle_s + horizon_s) / max(self.survival(idle_s), 1e-300)

    def quantile(self, level: float) -> float:
        z = student_t_quantile(level, self._prediction.nu)
        return math.exp(min(self._prediction.mu + self._prediction.sigma * z, 50.0)) / 10.0


class LogTRegression:
    """ln pause by recursive regression on how the turn ended and on the session's last and mean pauses, corrected for each
    way of ending. A session that has not returned for an hour is censored."""

    def __init__(self) -> None:
        self._regression = RecursiveRegression((2.0, *(20.0,) * 4), math.log(300.0), 5000)
        self._correction = Correction()
        #: Session and way of ending -> last and mean ln pause, and their number.
        self._means: dict[tuple[str, str], tuple[float, float, int]] = {}
        self._pending: dict[
            str, tuple[Turn, float, NDArray[np.float64], LengthPrediction, RequestContext]
        ] = {}

    def ended(self, turn: Turn, now: float) -> LogTPause:
        self._expire(now)
        last, mean, num = self._means.get((turn.session, turn.ended_by), (0.0, 0.0, 0))
        is_known = float(num > 0)
        own = [is_known * (last - 5.0), is_known * (mean - 5.0)]
        x = np.array([1.0, float(turn.ended_by == "end_turn"), float(turn.ended_by == ""), *own])
        base = LengthPrediction(min(max(self._regression.predict(x), 0.0), 20.0), 0.8, 3.0)
        context = RequestContext(served_model=turn.ended_by)
        self._pending[turn.session] = (turn, now, x, base, context)
        return LogTPause(self._correction.correct(context, base))

    def returned(self, turn: Turn, now: float) -> None:
        self._expire(now)
        self._learn(turn, now)

    def _expire(self, now: float) -> None:
        """Censors pauses of an hour; the dictionary is in the order of the ends of turns."""
        while self._pending:
            turn, ended_s, *_ = next(iter(self._pending.values()))
            if ended_s > now - HOUR_S:
                return
            self._learn(turn, ended_s + HOUR_S, finished=False)

    def _learn(self, turn: Turn, now: float, *, finished: bool = True) -> None:
        if turn.session not in self._pending:
            return
        _, ended_s, x, base, context = self._pending.pop(turn.session)
        tenths = max(round(10.0 * (now - ended_s)), 5)
        self._correction.observe(context, Outcome(output_tokens=tenths, finished=finished, prediction=base))
        log_pause = math.log(tenths)
        self._regression.observe(x, log_pause)
        key = (turn.session, turn.ended_by)
        _, mean, num = self._means.get(key, (0.0, 0.0, 0))
        self._means[key] = (log_pause, mean + max(0.2, 1.0 / (num + 1)) * (log_pause - mean), num + 1)


METHODS: dict[str, Callable[[Mapping[str, Sequence[Turn]]], Method]] = {
    "global": lambda turns: Returns(ReturnPredictor(), ends=False, sessions=False),
    "by end": lambda turns: Returns(ReturnPredictor(), sessions=False),
    "log-t regression": lambda turns: LogTRegression(),
    "ours": lambda turns: Returns(ReturnPredictor()),
    "true returns": lambda turns: Returns(
        TrueReturns(
            {
                session: [turn.pause_s for turn in sorted(rows, key=lambda turn: turn.ended_s)]
                for session, rows in turns.items()
            }
        )
    ),
}
REFERENCE, OURS, BOUND = "by end", "ours", "true returns"


def forecasts(method: Method, rows: Sequence[Event]) -> list[Pause]:
    """The pauses [N] that a method predicts on a stream of events, in the order of the ends of turns."""
    pauses = []
    for now, is_return, turn in rows:
        if is_return:
            method.returned(turn, now)
        else:
            pauses.append(method.ended(turn, now))
    return pauses


def idle_times(rows: Sequence[Event]) -> list[tuple[int, float]]:
    """(number of its last turn, seconds since its end) of each session that is idle, once a minute."""
    idle: dict[str, tuple[int, float]] = {}
    times: list[tuple[int, float]] = []
    next_s, num = rows[0][0], 0
    for now, is_return, turn in rows:
        while next_s < now:
            idle = {name: last for name, last in idle.items() if next_s - last[1] < HOUR_S}
            times += [(number, next_s - ended_s) for number, ended_s in idle.values()]
            next_s += RANKING_S
        idle.pop(turn.session, None)
        if not is_return:
            idle[turn.session] = (num, now)
            num += 1
    return times


def scores(pause: Pause, true_s: float) -> tuple[float, ...]:
    """Log score, CRPS, and whether P50 and P90 cover the true pause."""
    true_s = min(true_s, HOUR_S + 1.0)
    upper = 0.0 if true_s > HOUR_S else pause.survival(true_s + 0.5)
    probability = (1.0 if true_s < 0.5 else pause.survival(true_s - 0.5)) - upper
    quantiles = np.array([min(max(pause.quantile(level), 0.5), HOUR_S) for level in LEVELS])
    gaps = math.log(min(max(true_s, 0.5), HOUR_S)) - np.log(quantiles)
    crps = 2.0 * float((np.array(LEVELS) * gaps - np.minimum(gaps, 0.0)).mean())
    covered = (true_s <= pause.quantile(level) for level in (0.5, 0.9))
    return -math.log(max(probability, 1e-9)), crps, *covered


def auc_cell(values: NDArray[np.float64], return_s: NDArray[np.float64]) -> str:
    """AUC of the values [N, horizons] for a return within each horizon, from the true seconds to the return [N]."""
    columns = zip(HORIZONS_S, values.T, strict=True)
    return " / ".join(f"{roc_auc_score(return_s <= horizon_s, each):.3f}" for horizon_s, each in columns)


def gain(
    one: NDArray[np.float64], other: NDArray[np.float64], sessions: NDArray[np.intp], resamples: int = 500
) -> tuple[float, float, float]:
    """Mean of other - one, with the bounds of its 95 % interval by resampling sessions [N]."""
    sums = np.bincount(sessions, other - one)
    counts = np.bincount(sessions)
    draws = np.random.default_rng(0).integers(len(sums), size=(resamples, len(sums)))
    low, high = np.quantile(sums[draws].sum(axis=1) / counts[draws].sum(axis=1), (0.025, 0.975))
    return float(sums.sum() / counts.sum()), float(low), float(high)


def hits(pauses: Sequence[SessionReturn] | None, capacity: int, rows: Sequence[Event]) -> float:
    """Hits of a cache of contexts that evicts by the return rates of predicted pauses; by LRU without them."""
    cache: dict[str, tuple[float, int, SessionReturn | None]] = {}
    num_hits = num_returned = num_cached = num_ended = 0
    for now, is_return, turn in rows:
        _, size, _ = cache.pop(turn.session, (now, 0, None))
        num_cached -= size
        if is_return:
            num_hits += size
            num_returned += turn.input_tokens + turn.output_tokens
            continue
        size = turn.input_tokens + turn.output_tokens
        cache[turn.session] = (now, size, None if pauses is None else pauses[num_ended])
        num_cached += size
        num_ended += 1
        while num_cached > capacity:
            rates = (
                (ended_s if pause is None else pause.return_rate(now - ended_s), session)
                for session, (ended_s, _, pause) in cache.items()
            )
            num_cached -= cache.pop(min(rates)[1])[1]
    return num_hits / max(num_returned, 1)


def hit_table(predicted: Mapping[str, Sequence[Pause]], rows: Sequence[Event]) -> str:
    """Markdown table of the hits of caches of several sizes."""
    returns = {
        name: [each for each in pauses if isinstance(each, SessionReturn)]
        for name, pauses in predicted.items()
    }
    methods = {"LRU": None} | {name: pauses for name, pauses in returns.items() if pauses}
    cells = [
        [name, *(f"{hits(pauses, capacity, rows):.3f}" for capacity in CAPACITIES)]
        for name, pauses in methods.items()
    ]
    header = ["hits of a cache of", *(f"{capacity / 1e6:g} M tokens" for capacity in CAPACITIES)]
    return markdown_table(header, cells)


def pause_table(predicted: Mapping[str, Sequence[Pause]], rows: Sequence[Event]) -> str:
    """Markdown table of the scores of pauses."""
    turns = [turn for _, is_return, turn in rows if not is_return]
    sessions = np.unique([turn.session.split()[0] for turn in turns], return_inverse=True)[1]
    true_s = np.array([math.inf if turn.pause_s is None else turn.pause_s for turn in turns])
    last_turns, idle_s = np.array(idle_times(rows)).T
    last_turns = last_turns.astype(int)
    remaining_s = true_s[last_turns] - idle_s
    scored = {
        name: np.array([scores(pause, float(each)) for pause, each in zip(pauses, true_s, strict=True)]).T
        for name, pauses in predicted.items()
    }
    by_idle = auc_cell(np.tile(-idle_s[:, None], len(HORIZONS_S)), remaining_s)
    cells = [["idle time (LRU, fixed time-to-live)", *"----", "0.500 / 0.500 / 0.500", by_idle]]
    for name, pauses in predicted.items():
        log_scores, crps, *covered = scored[name]
        better, low, high = gain(log_scores, scored[REFERENCE][0], sessions)
        at_end = [[pause.probability_of_return(0.0, each) for each in HORIZONS_S] for pause in pauses]
        of_idle = [
            [pauses[number].probability_of_return(time_s, each) for each in HORIZONS_S]
            for number, time_s in zip(last_turns, idle_s, strict=True)
        ]
        row = [
            f"{log_scores.mean():.3f}",
            f"{better:.3f} ({low:.3f} to {high:.3f})",
            f"{crps.mean():.3f}",
            " / ".join(f"{100 * each.mean():.0f}" for each in covered),
        ]
        if name == BOUND:
            row = ["-", "-", row[2], "-"]
        cells.append(
            [name, *row, auc_cell(np.array(at_end), true_s), auc_cell(np.array(of_idle), remaining_s)]
        )
    header = [
        "prediction of the pause",
        "log score",
        f"better than {REFERENCE} by (95 % interval over sessions)",
        "CRPS",
        "P50 / P90 coverage, %",
        f"AUC of a return within {' / '.join(f'{each:.0f}' for each in HORIZONS_S)} s",
        "the same, of idle sessions once a minute",
    ]
    return markdown_table(header, cells)


def turn_table(pauses: Sequence[SessionReturn], rows: Sequence[Event]) -> str:
    """Markdown table of the number of turns that remain and of the growth of the input."""
    turns = (turn for _, is_return, turn in rows if not is_return)
    sizes = [(turn.remaining_turns, turn.growth_tokens or 0, turn.output_tokens) for turn in turns]
    remaining, growth, outputs = np.array(sizes, float).T
    medians, upper = np.array([[pause.turns_quantile(level) for level in (0.5, 0.9)] for pause in pauses]).T
    log_growth = np.log(np.maximum(growth, 1.0))
    is_growth = growth > 0.0
    quantiles = np.array([pause.new_tokens.distribution().ppf((0.5, 0.9)) for pause in pauses])
    predicted, high = np.log(outputs[:, None] + quantiles).T

    def of_turns(name: str, *quantiles: NDArray[np.float64]) -> list[str]:
        error = np.abs(np.log1p(quantiles[0]) - np.log1p(remaining)).mean()
        coverage = " / ".join(f"{100 * (remaining <= values).mean():.0f}" for values in quantiles)
        tau = number_cell(kendall_tau(quantiles[0], remaining))
        return [f"turns that remain: {name}", tau, f"{error:.3f}", coverage]

    def of_growth(name: str, values: NDArray[np.float64], coverage: str) -> list[str]:
        tau = kendall_tau(values[is_growth], log_growth[is_growth])
        error = np.abs(values - log_growth)[is_growth].mean()
        return [f"growth of the context: {name}", number_cell(tau), f"{error:.3f}", coverage]

    covered = [f"{100 * (log_growth <= limit)[is_growth].mean():.0f}" for limit in (predicted, high)]
    middle = np.full_like(log_growth, np.median(log_growth[is_growth]))
    cells = [
        of_turns("median of all (with hindsight)", np.full_like(remaining, np.median(remaining))),
        of_turns("ours", medians, upper),
        of_growth("median of all (with hindsight)", middle, "50"),
        of_growth("tokens of the output", np.log(np.maximum(outputs, 1.0)), "-"),
        of_growth("ours", predicted, " / ".join(covered)),
    ]
    return markdown_table(("", "Kendall tau", "MAE of ln (turns: ln(1 + n))", "P50 / P90 coverage, %"), cells)


def times_us(rows: Sequence[Event]) -> tuple[float, float]:
    """Microseconds of the events of a turn (its end and the return after it), and of a probability of return."""
    start = time.process_time()
    pauses = forecasts(Returns(ReturnPredictor()), rows)
    middle = time.process_time()
    for number, pause in enumerate(pauses):
        pause.probability_of_return(0.5 + number % 500, 60.0)
    each = 1e6 / len(pauses)
    return each * (middle - start), each * (time.process_time() - middle)


def main(args: Sequence[str] | None = None) -> int:
    """Prints the tables and the times."""
    parser = Parser(__doc__)
    parser.add_argument("data")
    parser.add_argument("--sessions", choices=("held_out", "development", "all"), default="held_out")
    parser.add_argument("--hours", type=float, default=6.0)
    parser.add_argument("--seed", type=int, default=0, help="of the starting times of sessions")
    parser.add_argument("--markdown", help="page whose tables are replaced")
    options = parser.parse_args(args)
    turns = read_turns(options.data, sessions=options.sessions)
    rows = events(turns, options.hours, options.seed)
    predicted = {name: forecasts(create(turns), rows) for name, create in METHODS.items()}
    ours = [pause for pause in predicted[OURS] if isinstance(pause, SessionReturn)]
    of_turn_us, of_query_us = times_us(rows)
    num_sessions = len({agent.split()[0] for agent in turns})
    text = (
        f"{sum(map(len, turns.values())):,} turns of {num_sessions} sessions\n\n"
        f"{pause_table(predicted, rows)}\n\n{hit_table(predicted, rows)}\n\n{turn_table(ours, rows)}\n\n"
        f"{of_turn_us:.0f} µs for the events of a turn, {of_query_us:.1f} µs per probability of return"
    )
    print(text)
    if options.markdown:
        put_section(options.markdown, "returns", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
