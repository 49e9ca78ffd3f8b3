"""Replica selection by predicted lengths, against counting requests, in simulated clusters with little KV cache.

    python -m benchmarks.scheduling.routing DATA [--replicas 4 16] [--loads 0.7 0.9 1.1] [--seeds 5] [--slots 64]
        [--kv_blocks 1024] [--prefix_tokens 0] [--markdown benchmarks/results/routing.md]

DATA is the folder of the public data sets; the requests are a stream of many applications that no predictor was trained on
(`benchmarks.lengths.streams`), the last `--requests` of it. Engines run in virtual time, FCFS, with the simulator's default
step times, `--slots` slots and `--kv_blocks` blocks of 16 tokens: by default so few that requests wait for memory and are
preempted; with `--slots 8 --kv_blocks 8192` they wait for slots.
`--load` is relative to the estimated saturation. `--prefix_tokens`: all requests of an application share so many tokens of
system prompt, and engines cache prefixes in their blocks.

Routers that see only what they sent, as those inside LiteLLM and Ray Serve, and the requests that ended:
    least busy: the number of requests; two at random: the same, of two replicas; predicted work: the sum of prompts and
    expected outputs (`PredictedWork`), from the mean length of all requests, `tailcast-minilm` as shipped, with the memory of
    past requests (learned as the stream goes, requests in flight excluded), or true lengths; prefix affinity.
Routers that see the engines: least KV: blocks in use.

Each request counts after the first sixth. Ratios are to "least busy" of the same seed, with 95 % intervals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.lengths.features import Features, held_out_streams, remembered
from benchmarks.lengths.streams import Stream
from benchmarks.shared.command import Parser
from benchmarks.shared.pages import mean_cell, put_section
from scheduler_core.engine.plan import Counters
from scheduler_core.policies import make_policy
from scheduler_core.report.page import markdown_table
from scheduler_core.request import Segment
from scheduler_core.routing import make_router
from scheduler_core.routing.base import Router, RoutingRequest
from scheduler_core.routing.predicted_work import PredictedWork
from scheduler_core.routing.snapshot import ReplicaSnapshot
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.loop import Simulation
from scheduler_core.simulator.step_time import saturation_rate_rps
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import Trace, TraceRequest
from scheduler_core.simulator.trace_predictions import Predictions

FloatArray = NDArray[np.float64]
MAX_TOKENS = 4096
#: Requests in flight on one replica, whose lengths the memory does not know yet.
IN_FLIGHT = 24
FIRST = "least busy"
HEADER = (
    "", "TTFT mean", "P90", "P99", "s/token mean", "P90", "P99", "end-to-end mean", "tokens/s", "preemptions",
    "TTFT mean / least busy", "TTFT P99 / least busy", "s/token mean / least busy", "end-to-end mean / least busy",
)  # fmt: skip
RATIOS = (0, 2, 3, 6)


@dataclass(kw_only=True, slots=True)
class SentWork(Router):
    """The replica with the least work sent and not ended; `work_s` is that of each request. `PredictedWork` for a router that
    sees no tokens, in constant time."""

    work_s: Mapping[str, float]
    _sums: dict[str, float] = field(default_factory=dict)

    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        return min(
            replicas, key=lambda one: (self._sums.get(one.replica_id, 0.0), one.num_requests)
        ).replica_id

    def on_dispatched(self, item: RoutingRequest, replica_id: str, now: float) -> None:
        self._sums[replica_id] = self._sums.get(replica_id, 0.0) + self.work_s[item.request.request_id]

    def on_finished(self, request_id: str, replica_id: str, now: float) -> None:
        self._sums[replica_id] -= self.work_s[request_id]


def expected_tokens(stream: Stream, features: Features, num_in_flight: int) -> dict[str, FloatArray]:
    """Expected lengths [N] of requests as they arrive, by kind of prediction."""
    shipped, corrected = (
        np.array([length.expected_and_cvar(MAX_TOKENS)[0] for length in predictions])
        for predictions in remembered(stream, features, num_in_flight)
    )
    true = np.array([tokens for _, tokens in stream], float)
    mean = np.full(len(stream), true.mean())
    return {"mean length": mean, "as shipped": shipped, "memory": corrected, "true lengths": true}


def trace_of(stream: Stream, features: Features, prefix_tokens: int) -> Trace:
    """The stream as a trace, in which the prompts of an application start with the same `prefix_tokens` tokens."""
    return Trace(
        tuple(
            TraceRequest(
                request_id=str(number),
                arrival_s=float(number),
                prompt_tokens=prefix_tokens + max(1, features.num_tokens(request.prompt)),
                output_tokens=tokens,
                max_tokens=MAX_TOKENS,
                content=(Segment(request.application, prefix_tokens),) if prefix_tokens else (),
            )
            for number, (request, tokens) in enumerate(stream)
        )
    )


def summary(trace: Trace, router: Router, num_replicas: int, limits: SchedulerConfig) -> FloatArray:
    """[9] of one run: mean, P90 and P99 of TTFT and of the latency per token, mean latency, tokens/s, preemptions."""
    width = len(str(num_replicas))
    schedulers = {f"{one:0{width}d}": Scheduler(limits, make_policy("fcfs")) for one in range(num_replicas)}
    outcome = Simulation(trace, schedulers, LinearStepTime(), Predictions(), router).run()
    records = [one for one in outcome.records if int(one.request_id) >= len(trace) / 6]
    latencies = np.array([(one.ttft_s, one.normalized_latency_s, one.ttlt_s) for one in records]).T
    tails = [[values.mean(), *np.percentile(values, [90, 99])] for values in latencies]
    tokens = sum(one.output_tokens for one in outcome.records) / (outcome.end_s - outcome.start_s)
    counters: list[Counters] = [one.counters for one in schedulers.values()]
    preemptions = sum(one.num_preemptions for one in counters) / len(outcome.records)
    return np.array([*tails[0], *tails[1], tails[2][0], tokens, preemptions])


def table(runs: Mapping[str, Sequence[FloatArray]]) -> str:
    """A row for each side: the means of its runs, and ratios to "least busy"."""
    rows = []
    for side, results in runs.items():
        cells = [f"{value:.3g}" if value < 100 else f"{value:,.0f}" for value in np.mean(results, axis=0)]
        ratios = np.array(results) / np.array(runs[FIRST])
        cells += ["1" if side == FIRST else mean_cell(ratios[:, column].tolist()) for column in RATIOS]
        rows.append((side, *cells))
    return markdown_table(HEADER, rows)


def main() -> None:
    """Prints a table for each number of replicas and load."""
    parser = Parser(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.7, 0.9, 1.1])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--kv_blocks", type=int, default=1024)
    parser.add_argument("--prefix_tokens", type=int, default=0)
    parser.add_argument("--cache", type=Path, default=Path("out/lengths"), help="folder of slow features")
    parser.add_argument("--markdown", help="page whose section is replaced")
    options = parser.parse_args()
    mixed, features = held_out_streams(options.data, options.cache, options.seeds, MAX_TOKENS)
    limits = SchedulerConfig(
        max_num_seqs=options.slots, num_kv_blocks=options.kv_blocks, prefix_caching=options.prefix_tokens > 0
    )
    parts = []
    for num_replicas in options.replicas:
        expected = [expected_tokens(stream, features, IN_FLIGHT * num_replicas) for stream in mixed]
        for load in options.loads:
            runs: dict[str, list[FloatArray]] = {}
            for seed, stream in enumerate(mixed):
                trace = trace_of(stream[-options.requests :], features, options.prefix_tokens)
                rate = num_replicas * load * saturation_rate_rps(trace, limits, LinearStepTime())
                trace = trace.with_poisson_arrivals(rate, np.random.default_rng(seed))
                prompts = np.array([row.prompt_tokens for row in trace.requests])
                routers = {
                    FIRST: make_router("jsq"),
                    "two at random": make_router("power_of_two", rng=np.random.default_rng(seed)),
                }
                for name, tokens in expected[seed].items():
                    work = PredictedWork()
                    seconds = work.prefill_token_s * prompts + work.decode_token_s * tokens[-len(trace) :]
                    names = (row.request_id for row in trace.requests)
                    routers[f"predicted work, {name}"] = SentWork(
                        work_s=dict(zip(names, seconds.tolist(), strict=True))
                    )
                if options.prefix_tokens:
                    routers["prefix affinity"] = make_router("prefix_affine")
                routers["least KV"] = make_router("least_kv")
                for side, router in routers.items():
                    result = summary(trace, router, num_replicas, limits)
                    runs.setdefault(side, []).append(result)
            prefix = f"{options.prefix_tokens:,} shared tokens, " if options.prefix_tokens else ""
            parts.append(
                f"{num_replicas} engines with {options.slots} slots and {options.kv_blocks} blocks, load {load:g}, {prefix}"
                f"{options.requests:,} requests, {options.seeds} seeds, seconds:\n\n{table(runs)}"
            )
            print(parts[-1], flush=True)
    if options.markdown is not None:
        name = f"routing, {options.slots} slots, {options.kv_blocks} blocks, {options.prefix_tokens} shared tokens"
        put_section(options.markdown, name, "\n\n".join(parts))


if __name__ == "__main__":
    main()
