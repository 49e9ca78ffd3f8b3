"""Changes of a log before its simulation: resampling by sessions, other rates and lengths, parts for one replica."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.request import Segment
from scheduler_core.simulator.trace import MAX_REQUESTS, MAX_TOKENS, Trace, TraceRequest

Rows = list[TraceRequest]
#: Distance from which a block is drawn at most, as a fraction of the log.
_REACH = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The requests of a simulation, made from a log in this order.

    Attributes:
        seed: 0: the log itself. Others: a resampled log, see `resampled`.
        load: Multiple of the log's rate, at which sessions start.
        outputs: Multiple of the output lengths; prompts are unchanged.
        fraction: Part of the sessions that one of several replicas gets.
        num_requests: Number of requests at which the log is cut, around its busiest time, or up to which parts for other
            replicas follow; None: all.
        num_repeats: Number of times that the requests are simulated in a row.
    """

    seed: int = 0
    load: float = 1.0
    outputs: float = 1.0
    fraction: float = 1.0
    num_requests: int | None = None
    num_repeats: int = 1

    def apply(self, log: Trace) -> Trace:
        """The changed trace."""
        units = units_of(log.requests)
        shared = _shared_keys(units)
        end_s = _end_s(units)
        if self.seed:
            units = resampled(units, np.random.default_rng([self.seed, 5]), shared)
        if self.fraction < 1:
            num = 1
            if self.num_requests is not None:
                num = math.ceil(self.num_requests / max(1.0, self.fraction * len(log)))
            units, end_s = _parts(units, end_s, self.fraction, num, self.seed, shared)
        rows = _at_load(units, self.load)
        if self.num_requests is not None and len(rows) > self.num_requests:
            rows = busiest(rows, self.num_requests)
        if self.num_repeats > 1:
            rows = _repeated(rows, self.num_repeats, end_s / self.load, shared)
        if self.outputs != 1:
            rows = [_longer(row, self.outputs) for row in rows]
        return replace(log, requests=tuple(rows))


def units_of(rows: Sequence[TraceRequest]) -> list[Rows]:
    """What arrives independently: single requests, and sessions with those that wait for each other, by their first
    arrival."""
    parents: dict[str, str] = {}

    def root(name: str) -> str:
        while parents.setdefault(name, name) != name:
            parents[name] = parents[parents[name]]
            name = parents[name]
        return name

    for row in rows:
        if row.session_id is not None:
            parents[root(f"r{row.request_id}")] = root(f"s{row.session_id}")
        for other in row.after:
            parents[root(f"r{row.request_id}")] = root(f"r{other}")
    units: dict[str, Rows] = {}
    for row in rows:
        units.setdefault(root(f"r{row.request_id}"), []).append(row)
    return sorted(units.values(), key=lambda unit: unit[0].arrival_s)


def _shared_keys(units: Sequence[Rows]) -> frozenset[str]:
    """Texts that several units share, such as a system prompt; they stay shared in copies."""
    counts = Counter(key for unit in units for key in {key for row in unit for key, _ in row.content})
    return frozenset(key for key, count in counts.items() if count > 1)


def _end_s(units: Sequence[Rows]) -> float:
    """Start of a repetition: one mean gap after the last start of a unit."""
    starts = [unit[0].arrival_s for unit in units]
    return starts[-1] + (starts[-1] - starts[0]) / max(1, len(units) - 1)


def _copy(unit: Rows, shift_s: float, suffix: str, shared: frozenset[str]) -> Rows:
    """A unit at another time with new ids of requests, sessions and texts."""
    return [
        replace(
            row,
            request_id=row.request_id + suffix,
            arrival_s=max(0.0, row.arrival_s + shift_s),
            session_id=None if row.session_id is None else row.session_id + suffix,
            content=tuple(
                [Segment(key if key in shared else key + suffix, length) for key, length in row.content]
            ),
            after=tuple([name + suffix for name in row.after]),
        )
        for row in unit
    ]


def resampled(units: Sequence[Rows], rng: np.random.Generator, shared: frozenset[str]) -> list[Rows]:
    """Units drawn in blocks of time, each from near its place in the log, so that bursts and the course of the day stay.

    Source: local block bootstrap, Paparoditis and Politis 2002. n units have n^(2/3) blocks.
    """
    starts = np.array([unit[0].arrival_s for unit in units])
    first_s, end_s = float(starts[0]), _end_s(units)
    num = max(1, round(len(units) ** (2 / 3)))
    block_s, reach_s = (end_s - first_s) / num, _REACH * (end_s - first_s)
    drawn: list[Rows] = []
    for number in range(num):
        at_s = first_s + number * block_s
        low_s, high_s = max(first_s, at_s - reach_s), min(end_s - block_s, at_s + reach_s)
        from_s = float(rng.uniform(low_s, max(low_s, high_s)))
        begin, end = np.searchsorted(starts, (from_s, from_s + block_s)).tolist()
        for unit in units[begin:end]:
            drawn.append(_copy(unit, at_s - from_s, f"~{len(drawn)}", shared))
    return drawn or list(units)


def _parts(
    units: Sequence[Rows], end_s: float, fraction: float, num: int, seed: int, shared: frozenset[str]
) -> tuple[list[Rows], float]:
    """The units of `num` replicas that each get a random fraction of them, one replica after the other."""
    draws = np.random.default_rng([seed, 6]).random(len(units))
    start_s, parts = units[0][0].arrival_s, []
    for number in range(num):
        low = number * fraction % 1.0
        chosen = [unit for unit, draw in zip(units, draws, strict=True) if (draw - low) % 1.0 < fraction]
        shift_s = number * (end_s - start_s)
        parts += [_copy(unit, shift_s, f"%{number}", shared) if number else unit for unit in chosen]
    if not parts:
        parts = [units[0]]
    return parts, start_s + num * (end_s - start_s)


def _at_load(units: Sequence[Rows], load: float) -> Rows:
    """The rows with units that start `load` times as fast; what follows in a unit keeps its distance to its start."""
    first_s = units[0][0].arrival_s
    rows = []
    for unit in units:
        start_s = unit[0].arrival_s
        shift_s = 0.0 if load == 1 else first_s + (start_s - first_s) / load - start_s
        rows += (
            [replace(row, arrival_s=max(0.0, row.arrival_s + shift_s)) for row in unit] if shift_s else unit
        )
    return sorted(rows, key=lambda row: row.arrival_s)


def busiest(rows: Rows, num: int) -> Rows:
    """The `num` consecutive rows that arrive in the shortest time; they wait for no request before them."""
    times = np.array([row.arrival_s for row in rows])
    first = int(np.argmin(times[num - 1 :] - times[: len(rows) - num + 1]))
    part = rows[first : first + num]
    names = {row.request_id for row in part}
    return [
        replace(row, after=tuple(name for name in row.after if name in names)) if row.after else row
        for row in part
    ]


def _repeated(rows: Rows, num: int, end_s: float, shared: frozenset[str]) -> Rows:
    if num * len(rows) > MAX_REQUESTS:
        raise InputError("repeats", num, f"at most {MAX_REQUESTS} requests in all")
    period_s = max(end_s - rows[0].arrival_s, 0.0)
    copies = list(rows)
    for number in range(1, num):
        copies += _copy(rows, number * period_s, f"#{number}", shared)
    return sorted(copies, key=lambda row: row.arrival_s)


def _longer(row: TraceRequest, factor: float) -> TraceRequest:
    """A row with an output of `factor` times the length, and a prediction of it."""
    length = min(MAX_TOKENS, max(1, round(row.output_tokens * factor)))
    limit = min(MAX_TOKENS, max(length, round(row.max_tokens * factor)))
    prediction = row.prediction
    if prediction is not None:
        prediction = LengthPrediction(prediction.mu + math.log(factor), prediction.sigma, prediction.nu)
    return replace(row, output_tokens=length, max_tokens=limit, prediction=prediction)


def at_drawn_times(log: Trace, rate_rps: float, rng: np.random.Generator) -> Trace:
    """The requests with sessions that start at random times, at `rate_rps` requests per second. What is beyond the end of the
    log continues at its start, so that at any time as many sessions are under way: its steady state."""
    units = units_of(log.requests)
    shared, span_s = _shared_keys(units), len(log) / rate_rps
    rows: Rows = []
    for unit, time_s in zip(units, np.sort(rng.uniform(0.0, span_s, len(units))).tolist(), strict=True):
        start_s = unit[0].arrival_s
        laps: dict[int, Rows] = {}
        for row in unit:
            lap, at_s = divmod(time_s + row.arrival_s - start_s, span_s)
            laps.setdefault(int(lap), []).append(replace(row, arrival_s=at_s))
        for number, part in laps.items():
            names = {row.request_id for row in part}
            part = [replace(row, after=tuple(n for n in row.after if n in names)) for row in part]
            rows += _copy(part, 0.0, f"+{number}", shared) if number else part
    return replace(log, requests=tuple(sorted(rows, key=lambda row: row.arrival_s)))


def drift(log: Trace) -> str | None:
    """How the second half of a log differs from the first in its load, as a sentence: by more than a tenth, and more than
    three times what random blocks differ by; None if it does not."""
    units = units_of(log.requests)
    starts = np.array([unit[0].arrival_s for unit in units])
    middle_s = (starts[0] + starts[-1]) / 2
    names = ("requests", "prompt tokens", "output tokens")
    values = np.array(
        [
            [len(unit), sum(row.prompt_tokens for row in unit), sum(row.output_tokens for row in unit)]
            for unit in units
        ],
        float,
    )
    halves = [values[starts <= middle_s], values[starts > middle_s]]
    if min(map(len, halves)) < 2:
        return None
    changes = []
    for column, name in enumerate(names):
        sums = [float(half[:, column].sum()) for half in halves]
        error = math.sqrt(sum(float((half[:, column] ** 2).sum()) for half in halves))
        if abs(sums[1] - sums[0]) > max(3 * error, 0.1 * max(sums)):
            changes.append(f"{sums[1] / max(sums[0], 1.0):.2g} times the {name}")
    if not changes:
        return None
    return f"the second half of the log has {', '.join(changes)} of the first, so its load drifts"


def rate_profile(log: Trace, num_bins: int) -> tuple[list[float], list[float]]:
    """Edges [num_bins + 1] in seconds from the start, and arrivals per second between them [num_bins]."""
    times = np.array([row.arrival_s for row in log.requests])
    counts, edges = np.histogram(times - times[0], bins=num_bins)
    return edges.tolist(), [
        float(count / (b - a)) for count, (a, b) in zip(counts, pairwise(edges), strict=True)
    ]
