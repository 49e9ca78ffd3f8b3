"""A workload: a description of requests, and the trace drawn from it by a seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.predictions import LengthPrediction
from scheduler_core.simulator.trace import Trace, TraceRequest
from scheduler_core.simulator.workloads.arrivals import Arrivals, FloatArray, at_rate, check_rate
from scheduler_core.simulator.workloads.classes import RequestClass, Tiers, tier_weights
from scheduler_core.simulator.workloads.length_file import LengthRows, read_lengths
from scheduler_core.simulator.workloads.lengths import IntArray, Law, Lengths, log_t_tokens, shortened
from scheduler_core.simulator.workloads.sessions import Sessions

#: A request takes about half a kilobyte.
MAX_REQUESTS = 100_000_000
#: Longest answer drawn from a fitted distribution when the workload sets no cap.
MAX_DRAWN_TOKENS = 32_768


def _default_lengths() -> Lengths:
    return Lengths(
        prompt=Law(law="log_t", mu=5.5, sigma=0.8, high=4096),
        output=Law(law="log_t", mu=5.0, sigma=0.7, high=2048),
    )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What arrives at the engine: how many requests, when, how long, and whose.

    Arrivals, lengths, classes and conversations draw from streams of their own, so that another rate leaves the
    lengths as they are.

    Raises:
        InputError: A value is outside its range.
    """

    num_requests: int = 1000
    """Number of requests."""
    arrivals: Arrivals = field(default_factory=Arrivals)
    """When they come."""
    lengths: Lengths = field(default_factory=_default_lengths)
    """How long prompts and answers are."""
    classes: tuple[RequestClass, ...] = ()
    """Classes of requests with shares, targets and lengths of their own, such as paying and free, or reasoning and chat."""
    tiers: Tiers | None = None
    """Tiers drawn by a mix, for every request whose class has none. Unset: tier 2."""
    sessions: Sessions | None = None
    """Conversations of several turns; rate_rps then counts conversations. Unset: every request stands alone."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_requests <= MAX_REQUESTS:
            raise InputError("num_requests", self.num_requests, f"integers from 1 to {MAX_REQUESTS}")
        if self.arrivals.rate_rps is not None:
            check_rate("rate_rps", self.arrivals.rate_rps, self.num_requests)
        if self.arrivals.process == "trace" and self.lengths.file is None:
            raise InputError("arrivals.process", "trace", "trace only with lengths.file")
        if self.arrivals.process == "trace" and not self.lengths.in_order:
            raise InputError("lengths.in_order", False, "true with arrivals.process = trace")

    def trace(self, seed: int) -> Trace:
        """The requests in order of arrival, the same for the same seed.

        Raises:
            InputError: A file cannot be used.
        """
        seeds = np.random.SeedSequence(seed).spawn(4)
        when, long, who, talk = [np.random.default_rng(one) for one in seeds]
        drawn = self._class_indices(who)
        rows = self._rows(drawn, self._tiers(who), long)
        times = self._times(when)
        timed = [_with_arrival(values, float(time)) for values, time in zip(rows, times, strict=True)]
        if self.sessions is not None:
            timed = self.sessions.conversations(timed, talk)
        timed.sort(key=lambda row: row.arrival_s)
        return Trace(tuple(timed), source=f"workload, seed {seed}")

    def _class_indices(self, rng: np.random.Generator) -> IntArray:
        if not self.classes:
            return np.zeros(self.num_requests, np.int64)
        shares = np.array([one.share for one in self.classes])
        return np.asarray(rng.choice(len(shares), self.num_requests, p=shares / shares.sum()))

    def _tiers(self, rng: np.random.Generator) -> IntArray:
        if self.tiers is None:
            return np.full(self.num_requests, 2)
        weights = tier_weights(self.tiers.mix, self.tiers.num_tiers)
        return np.asarray(rng.choice(len(weights), self.num_requests, p=weights))

    def _times(self, rng: np.random.Generator) -> FloatArray:
        if self.arrivals.process != "trace":
            return self.arrivals.times(self.num_requests, rng)
        assert self.lengths.file is not None
        times = read_lengths(self.lengths.file).arrivals()
        if self.num_requests > len(times):
            raise InputError("num_requests", self.num_requests, f"at most {len(times)}, the rows of the file")
        times = times[: self.num_requests]
        return times if self.arrivals.rate_rps is None else at_rate(times, self.arrivals.rate_rps)

    def _rows(self, drawn: IntArray, tiers: IntArray, rng: np.random.Generator) -> list[dict[str, object]]:
        """Fields of every request but its arrival."""
        rows: list[dict[str, object]] = [{} for _ in range(self.num_requests)]
        kinds: Sequence[RequestClass | None] = self.classes or (None,)
        for index, kind in enumerate(kinds):
            members = np.flatnonzero(drawn == index)
            lengths = self.lengths if kind is None or kind.lengths is None else kind.lengths
            if not len(members):
                continue
            prompt, output, cap, seen = _draw(lengths, len(members), rng)
            for place, member in enumerate(members):
                tier = int(tiers[member]) if kind is None or kind.tier is None else kind.tier
                rows[member] = dict(
                    request_id=f"r{member}",
                    prompt_tokens=int(prompt[place]),
                    output_tokens=int(output[place]),
                    max_tokens=cap,
                    prediction=seen[place] if seen else None,
                    tier=tier,
                    **_of_class(kind),
                )
        return rows


def _with_arrival(values: dict[str, object], arrival_s: float) -> TraceRequest:
    return TraceRequest(arrival_s=arrival_s, **values)  # type: ignore[arg-type]


def _of_class(kind: RequestClass | None) -> dict[str, object]:
    if kind is None:
        return {}
    names = ("tenant", "category", "priority", "ttft_slo_s", "tbt_slo_s", "ttlt_slo_s")
    return {name: getattr(kind, name) for name in names}


def _draw(
    lengths: Lengths, num: int, rng: np.random.Generator
) -> tuple[IntArray, IntArray, int, list[LengthPrediction]]:
    """Prompts, answers, their cap, and the distributions that the answers were drawn from, if there are."""
    seen: list[LengthPrediction] = []
    if lengths.file is None:
        prompt, output = lengths.draw_laws(num, rng)
    else:
        rows = read_lengths(lengths.file)
        chosen = np.arange(num) % len(rows) if lengths.in_order else rng.integers(0, len(rows), num)
        prompt, output, seen = _from_rows(lengths, rows, chosen, rng)
    if lengths.max_total_tokens is not None:
        prompt, output = shortened(prompt, output, lengths.max_total_tokens)
    cap = int(output.max()) if lengths.max_tokens is None else lengths.max_tokens
    return prompt, np.minimum(output, cap), cap, seen


def _from_rows(
    lengths: Lengths, rows: LengthRows, chosen: IntArray, rng: np.random.Generator
) -> tuple[IntArray, IntArray, list[LengthPrediction]]:
    if lengths.prompt is not None:
        prompt = lengths.prompt.draw(len(chosen), rng)
    elif rows.prompt_tokens is not None:
        prompt = rows.prompt_tokens[chosen]
    else:
        raise InputError(
            "lengths.file", rows.source, "a file with a column prompt_tokens, or a law lengths.prompt"
        )
    if rows.output_tokens is not None:
        return prompt, rows.output_tokens[chosen], []
    assert rows.laws is not None
    mu, sigma, nu = rows.laws[:, chosen]
    cap = lengths.max_tokens or MAX_DRAWN_TOKENS
    output = log_t_tokens(mu, sigma, nu, 1, cap, rng)
    return (
        prompt,
        output,
        [LengthPrediction(float(m), float(s), float(n)) for m, s, n in zip(mu, sigma, nu, strict=True)],
    )


def mean_rate_rps(trace: Trace) -> float | None:
    """Arrivals per second from the first to the last; None if they all come at once."""
    span = trace.requests[-1].arrival_s - trace.requests[0].arrival_s
    return (len(trace) - 1) / span if span > 0 and math.isfinite(span) else None
