"""Predicted output lengths of coding agents' requests, from features of their sessions alone.

    python -m benchmarks.correcting.agent_sessions DATA [--sessions held_out] [--seeds 3] [--hours 24]
        [--markdown benchmarks/results/agent_sessions.md]

DATA is a table (Parquet) of recorded sessions, one row a request, without texts: session, agent, depth, time_s (from the
session's start), model, input_tokens, cached_tokens, output_tokens, input_types, api_time_s (may be empty),
tool_tokens, system_tokens. The features and constants of `scheduler_core.prediction.session` were chosen on two
thirds of the sessions (`is_development`); by default the others are measured, with `--sessions all` every session of DATA.

The sessions start at random times within `--hours`, and their requests interleave. Each request is predicted at its
arrival, and learned at its end (at the rate of `TOKEN_S` where its duration is not recorded). Compared, on the same requests:

    previous output    ln of the session's last output
    mean of session    ln of the geometric mean of its outputs, the newest with a weight of 0.2
    ridge              `SessionPredictor`
    memory             a constant prediction, corrected with the memory on `SessionFeatures.embedding`
    ridge + memory     the predictions of ridge, corrected with the memory

"calibrated" is the correction without the memory; memory includes it. Application: the lengths of tool definitions and
system prompt stand for the key of the system prompt. The scores are means over seeds of the starting times.

Pauses are not used, because the recorded pause before a request contains a part of its own duration, hence of the length to
predict. A gateway's own pauses do not.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.shared.command import Parser
from benchmarks.shared.pages import put_section
from scheduler_core.prediction.correction import Correction, RequestContext
from scheduler_core.prediction.outcome import Outcome
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.prediction.score_window import COVERAGE_LEVELS, ScoreWindow
from scheduler_core.prediction.session import SessionFeatures, SessionPredictor, SessionStates
from scheduler_core.report.page import markdown_table
from scheduler_core.statistics import kendall_tau

#: Numbers of requests at which a window of the stream begins.
WINDOWS = (0, 200, 1000, 3000, 10_000)
#: Duration of requests without a recorded one: seconds before the first token, and for each token.
FIRST_TOKEN_S, TOKEN_S = 2.0, 0.025
#: The prediction without a predictor; also its scale in ln tokens.
CONSTANT = LengthPrediction(SessionPredictor.PRIOR_MEAN, SessionPredictor.SIGMA, SessionPredictor.NU)
COLUMNS = (
    "session", "agent", "depth", "time_s", "model", "input_tokens", "cached_tokens", "output_tokens",
    "input_types", "api_time_s", "tool_tokens", "system_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """One recorded request; `start_s` and `end_s` are seconds from the start of its session."""

    session: str
    agent: str
    start_s: float
    end_s: float
    model: str
    application: int
    depth: int
    input_tokens: int
    new_input_tokens: int
    is_tool_result: bool
    output_tokens: int


def is_development(session: str) -> bool:
    """Whether the features were chosen on this session: two thirds, by a hash of the name."""
    return int(hashlib.sha256(session.encode()).hexdigest()[:8], 16) % 3 != 0


def read_requests(file: str, *, held_out: bool) -> list[AgentRequest]:
    """The requests with an output, in the order of the table; only those of held-out sessions if `held_out`."""
    rows = pq.read_table(file, columns=list(COLUMNS)).to_pylist()
    return [
        _request(row)
        for row in rows
        if row["output_tokens"] > 0 and not (held_out and is_development(row["session"]))
    ]


def _request(row: Mapping[str, Any]) -> AgentRequest:
    duration_s = row["api_time_s"]
    if duration_s is None or math.isnan(duration_s):
        duration_s = FIRST_TOKEN_S + TOKEN_S * row["output_tokens"]
    return AgentRequest(
        session=row["session"],
        agent=f"{row['session']} {row['agent']}",
        start_s=row["time_s"],
        end_s=row["time_s"] + duration_s,
        model=row["model"],
        application=1_000_000 * row["tool_tokens"] + row["system_tokens"],
        depth=row["depth"],
        input_tokens=row["input_tokens"],
        new_input_tokens=row["input_tokens"] - row["cached_tokens"],
        is_tool_result="tool_result" in row["input_types"],
        output_tokens=row["output_tokens"],
    )


def session_starts(sessions: Collection[str], hours: float, seed: int) -> dict[str, float]:
    """Random times within some hours at which sessions start, in seconds."""
    rng = np.random.default_rng(seed)
    return {name: 3600.0 * hours * rng.random() for name in sorted(sessions)}


def events(requests: Sequence[AgentRequest], hours: float, seed: int) -> list[tuple[float, bool, int]]:
    """(time, whether it is an arrival, number of the request) of arrivals and ends, in order of time."""
    starts = session_starts({request.session for request in requests}, hours, seed)
    rows = []
    for number, request in enumerate(requests):
        start = starts[request.session]
        rows += [(start + request.start_s, True, number), (start + request.end_s, False, number)]
    return sorted(rows)


@dataclass(frozen=True, slots=True)
class Pending:
    """What is kept of a request from its arrival to its end: features, context for the memory, base predictions."""

    features: SessionFeatures
    context: RequestContext
    ridge: LengthPrediction


class Methods:
    """All methods on one stream, each with its own state."""

    NAMES = (
        "previous output",
        "mean of session",
        "ridge",
        "previous output, calibrated",
        "ridge, calibrated",
        "memory",
        "ridge + memory",
    )

    def __init__(self) -> None:
        self._sessions, self._predictor = SessionStates(), SessionPredictor()
        self._corrections = {name: Correction() for name in self.NAMES[3:]}
        #: Seconds (of this process) of all predictions, and of all updates, of "ridge + memory", with features.
        self.predict_s = self.observe_s = 0.0

    def predict(self, request: AgentRequest) -> tuple[Pending, list[LengthPrediction]]:
        """What to keep for `observe`, and the predictions in the order of `NAMES`."""
        start = time.process_time()
        features = self._sessions.features(
            request.agent,
            input_tokens=request.input_tokens,
            new_input_tokens=request.new_input_tokens,
            is_tool_result=request.is_tool_result,
            depth=request.depth,
        )
        context = RequestContext(
            served_model=request.model,
            prompt_tokens=request.input_tokens,
            system_prompt=request.application,
            embedding=features.embedding(),
        )
        pending = Pending(features, context, self._predictor.predict(features))
        best = self._corrections["ridge + memory"].correct(context, pending.ridge)
        self.predict_s += time.process_time() - start
        predictions = [
            _around(features.last_output_tokens),
            _around(features.mean_output_tokens),
            pending.ridge,
        ]
        for name, base, its_context in self._corrected(pending)[:-1]:
            predictions.append(self._corrections[name].correct(its_context, base))
        return pending, [*predictions, best]

    def observe(self, request: AgentRequest, pending: Pending) -> None:
        """Learns the length of an ended request."""
        for name, base, context in self._corrected(pending):
            start = time.process_time()
            self._corrections[name].observe(context, _outcome(request, base))
        self._predictor.observe(pending.features, request.output_tokens)
        self._sessions.observe(
            request.agent, output_tokens=request.output_tokens, input_tokens=request.input_tokens
        )
        self.observe_s += time.process_time() - start

    def _corrected(self, pending: Pending) -> list[tuple[str, LengthPrediction, RequestContext]]:
        """Name, base prediction and context of the methods with a correction, in the order of `NAMES`."""
        without = replace(pending.context, embedding=None)
        previous = _around(pending.features.last_output_tokens)
        bases = (
            (previous, without),
            (pending.ridge, without),
            (CONSTANT, pending.context),
            (pending.ridge, pending.context),
        )
        return [(name, *base) for name, base in zip(self.NAMES[3:], bases, strict=True)]


def _around(tokens: float | None) -> LengthPrediction:
    """The constant prediction, moved to a number of tokens if it is known."""
    return CONSTANT if tokens is None else CONSTANT.moved(math.log(tokens), CONSTANT.sigma)


def _outcome(request: AgentRequest, prediction: LengthPrediction) -> Outcome:
    return Outcome(
        output_tokens=request.output_tokens,
        finished=True,
        prediction=prediction,
        prompt_tokens=request.input_tokens,
    )


def windows(num: int) -> Iterator[tuple[int, int]]:
    """First and last + 1 request of the windows of a stream that have at least 100 requests."""
    for start, end in zip(WINDOWS, (*WINDOWS[1:], num), strict=True):
        if min(end, num) - start >= 100:
            yield start, min(end, num)


def gains_of_tau(
    rows: Sequence[tuple[AgentRequest, list[LengthPrediction]]], resamples: int = 200
) -> dict[str, tuple[float, float, float]]:
    """Method -> tau of the last method minus its own from request `WINDOWS[1]` on, with the bounds of its 95 % interval
    by resampling sessions."""
    rows = rows[WINDOWS[1] :]
    lengths = np.array([request.output_tokens for request, _ in rows])
    mu = np.array([[prediction.mu for prediction in versions] for _, versions in rows])
    sessions = np.unique([request.session for request, _ in rows], return_inverse=True)[1]
    members = [np.flatnonzero(sessions == number) for number in range(sessions.max() + 1)]

    def gains(chosen: NDArray[np.intp]) -> list[float]:
        taus = [kendall_tau(column, lengths[chosen]) or 0.0 for column in mu[chosen].T]
        return [taus[-1] - tau for tau in taus[:-1]]

    rng, draws = np.random.default_rng(0), []
    for _ in range(resamples):
        numbers = rng.integers(len(members), size=len(members))
        draws.append(gains(np.concatenate([members[number] for number in numbers])))
    low, high = np.quantile(draws, (0.025, 0.975), axis=0)
    estimates = gains(np.arange(len(rows)))
    return {
        name: (estimate, float(low[number]), float(high[number]))
        for number, (name, estimate) in enumerate(zip(Methods.NAMES, estimates, strict=False))
    }


@dataclass(frozen=True, slots=True)
class StreamResult:
    """Results of one stream: (tau, CRPS, coverages) of each window and method, seconds per prediction and per update, and
    `gains_of_tau`."""

    scores: list[list[tuple[float, ...]]]
    predict_s: float
    observe_s: float
    gains: dict[str, tuple[float, float, float]]


def run(requests: Sequence[AgentRequest], *, hours: float, seed: int) -> StreamResult:
    """Predicts and learns the requests in the order of their arrivals and ends."""
    methods = Methods()
    pending: dict[int, Pending] = {}
    predictions: list[tuple[AgentRequest, list[LengthPrediction]]] = []
    for _, is_arrival, number in events(requests, hours, seed):
        request = requests[number]
        if is_arrival:
            pending[number], versions = methods.predict(request)
            predictions.append((request, versions))
        else:
            methods.observe(request, pending.pop(number))
    results = []
    for start, end in windows(len(predictions)):
        window = ScoreWindow(end - start, len(Methods.NAMES))
        for request, versions in predictions[start:end]:
            window.add(versions, _outcome(request, versions[0]))
        results.append([_scores(window, version) for version in range(len(Methods.NAMES))])
    num = len(requests)
    return StreamResult(results, methods.predict_s / num, methods.observe_s / num, gains_of_tau(predictions))


def _scores(window: ScoreWindow, version: int) -> tuple[float, ...]:
    scores = window.scores(version)
    coverage = (scores["coverage"][name] for name in COVERAGE_LEVELS)
    return (scores["tau"] or 0.0, scores["crps"], *coverage)


def tables(results: Sequence[StreamResult], num: int) -> str:
    """Markdown tables: tau and CRPS, and coverage, of methods by windows; gains of tau of the first stream."""
    values = np.array([result.scores for result in results], float).mean(axis=0)
    header = ["from request", *(f"{start:,}" for start, _ in windows(num))]
    scores, coverages = [], []
    for version, name in enumerate(Methods.NAMES):
        scores.append([name, *(f"{tau:.3f} / {crps:.3f}" for tau, crps, *_ in values[:, version])])
        coverages.append(
            [name, *(" / ".join(f"{100 * level:.0f}" for level in row[2:]) for row in values[:, version])]
        )
    gains = [
        [name, f"{gain:.3f} ({low:.3f} to {high:.3f})"]
        for name, (gain, low, high) in results[0].gains.items()
    ]
    title = f"{Methods.NAMES[-1]} compared with"
    return (
        f"Kendall tau / CRPS of ln length\n\n{markdown_table(header, scores)}\n\n"
        f"P50 / P90 / P99 coverage, %\n\n{markdown_table(header, coverages)}\n\n"
        f"{markdown_table((title, f'gain of tau from request {WINDOWS[1]} on (95 % interval over sessions)'), gains)}"
    )


def main(args: Sequence[str] | None = None) -> None:
    """Prints the tables and the time of a prediction."""
    parser = Parser(__doc__)
    parser.add_argument("data")
    parser.add_argument("--sessions", choices=("held_out", "all"), default="held_out")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--markdown", help="page whose tables are replaced")
    options = parser.parse_args(args)
    requests = read_requests(options.data, held_out=options.sessions == "held_out")
    results = [run(requests, hours=options.hours, seed=seed) for seed in range(options.seeds)]
    num_sessions = len({request.session for request in requests})
    times = [(result.predict_s, result.observe_s) for result in results]
    predict_us, observe_us = (1e6 * np.mean(times, axis=0)).tolist()
    text = (
        f"{len(requests):,} requests of {num_sessions} sessions\n\n"
        f"{tables(results, len(requests))}\n\n"
        f"ridge + memory: {predict_us:.0f} µs per prediction, {observe_us:.0f} µs per update"
    )
    print(text)
    if options.markdown:
        put_section(options.markdown, "agent sessions", text)


if __name__ == "__main__":
    main()
