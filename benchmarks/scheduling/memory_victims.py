"""Which running request to preempt when the KV cache is full: vLLM's rule, ours, and others, on the same requests.

    python -m benchmarks.scheduling.memory_victims DATA [--requests 1200] [--seeds 4] [--first_seed 200] [--quick]

Chunked prefill, recompute, 64 sequences, and so few blocks that vLLM's rule preempts 1 to 40 % of the requests (`REGIMES`).
DATA is the folder of the public data sets. CASTILLO's report split has the predictions of the shipped predictor, which was not
trained on these prompts; other lengths have none, and their predictions are the true lengths with an error of 0.7 in ln tokens.
Arrivals are a gamma process with a coefficient of variation of 2.

vLLM preempts the request admitted last. `cheapest` is `scheduler_core/engine/memory_victim.py`: the fewest tokens to recompute,
with a bound for the preemptions of one request. The others use the remaining output: as predicted and given those generated
so far, or as it is. Prefix cache `own`: a preempted request finds what others have not overwritten (vLLM's default),
`shared`: 8 system prompts of 1,024 tokens are shared as well, `off`: it finds nothing.

A token is recomputed if it was in the KV cache before a preemption and not after the next admission; in percent of all prompt
and output tokens. Pause: the longest time between two tokens of a request. Values are ratios to vLLM's rule with 95 %
intervals over seeds, or over seeds and regimes. The last line counts preemptions of recorded sessions of agents (`benchmarks.agents`).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd

from benchmarks.agents import simulated as agents
from benchmarks.scheduling.default_order import Population, read_population
from benchmarks.shared.command import Parser
from benchmarks.shared.pages import mean_cell
from scheduler_core.engine import memory_victim
from scheduler_core.lengths.table import LengthTable
from scheduler_core.policies import make_policy
from scheduler_core.prediction.predictions import LengthPrediction, Prediction
from scheduler_core.report.page import markdown_table
from scheduler_core.request import RequestState, Segment
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.loop import Simulation
from scheduler_core.simulator.step_time import saturation_rate_rps
from scheduler_core.simulator.step_time.base import LinearStepTime, StepTime
from scheduler_core.simulator.trace import Trace, TraceRequest
from scheduler_core.simulator.trace_predictions import Predictions, oracle_predictions
from scheduler_core.simulator.watch import RunWatch
from scheduler_core.simulator.workloads.agents import Agents
from scheduler_core.simulator.workloads.arrivals import Arrivals
from scheduler_core.simulator.workloads.workload import Workload

#: Lengths -> file of the public data sets, and max_tokens; CASTILLO is read with its prompts.
FILES = {
    "azure": "traces/azure2023_conv.parquet",
    "burstgpt": "traces/burstgpt_8k_sample.parquet",
    "sharegpt": "traces/slai_sharegpt4_8k.parquet",
}
MAX_TOKENS = {"castillo": 8000, "azure": 2000, "burstgpt": 4000, "sharegpt": 2000}
#: Scale of the error of predictions that are made from true lengths, in ln tokens.
NOISE = 0.7
SYSTEM_TOKENS, NUM_SYSTEMS = 1024, 8
VLLM, OURS = "vLLM: admitted last", "cheapest"


def _by_root(state: RequestState, remaining: float, rounds: int) -> Any:
    return rounds, state.num_computed_tokens / remaining**0.5


#: Other rules: the smallest value of (running request, remaining output, rounds of preemptions) goes first; those with "true" in
#: their names get the true remaining output.
OTHERS: dict[str, Callable[[RequestState, float, int], Any]] = {
    "cheapest, unbounded": lambda state, remaining, rounds: state.num_computed_tokens,
    "cheapest by root of remaining output": _by_root,
    "cheapest by root of true remaining output": _by_root,
    "longest remaining output": lambda state, remaining, rounds: -remaining,
}
RULES = (VLLM, OURS, *OTHERS)
STEP_TIME = LinearStepTime()
#: Values of a run that are compared, in the order of the columns.
COLUMNS = {
    "recomputed": "recomputed tokens", "mean": "latency mean", "p99": "P99", "ttft": "TTFT mean", "ttft_p99": "P99",
    "pause": "pause mean", "pause_p99": "P99", "preemptions": "preemptions",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Regime:
    """Lengths, policy, KV memory in blocks of 16 tokens, load as a fraction of the capacity with it, prefix cache."""

    lengths: str
    policy: str
    num_kv_blocks: int
    load: float
    prefixes: str

    @property
    def cells(self) -> tuple[str, ...]:
        """The first cells of its row."""
        return self.lengths, self.policy, f"{16 * self.num_kv_blocks:,}", f"{self.load:g}", self.prefixes


REGIMES = tuple(
    Regime(*case)
    for case in (
        ("castillo", "fcfs", 1500, 0.7, "own"),
        ("castillo", "fcfs", 2000, 0.9, "own"),
        ("castillo", "ssjf", 1500, 0.8, "own"),
        ("castillo", "tie", 1500, 1.0, "own"),
        ("castillo", "bounded_shortest", 2000, 1.0, "own"),
        ("azure", "fcfs", 1500, 1.1, "own"),
        ("sharegpt", "ssjf", 2000, 0.9, "own"),
        ("castillo", "fcfs", 1100, 0.9, "shared"),
        ("sharegpt", "tie", 2000, 0.9, "shared"),
        ("castillo", "fcfs", 2000, 0.9, "off"),
        ("castillo", "ssjf", 1500, 0.8, "off"),
        ("castillo", "tie", 1500, 1.0, "off"),
        ("azure", "fcfs", 1500, 1.1, "off"),
        ("burstgpt", "fcfs", 800, 1.0, "off"),
        ("sharegpt", "fcfs", 1500, 1.0, "off"),
    )
)


def draw(
    regime: Regime, data: Path, population: Population | None, num: int, seed: int
) -> tuple[Trace, Predictions]:
    """Requests of a regime with their predictions; without a population all lengths are true ones with an error."""
    rng = np.random.default_rng([seed, *map(ord, "".join(regime.cells))])
    longest = MAX_TOKENS[regime.lengths]
    system = SYSTEM_TOKENS if regime.prefixes == "shared" else 0
    predictions = None
    if regime.lengths == "castillo" and population is not None:
        rows = population.rows.iloc[rng.integers(0, len(population.rows), num)]
        outputs = [int(rng.choice(each)) for each in rows.output_tokens]
        parameters = rows[["mu", "sigma", "nu"]].to_numpy(float).tolist()
        heads = [Prediction(length=LengthPrediction(*one)) for one in parameters]
        predictions = Predictions("tailcast-minilm", {f"r{row}": one for row, one in enumerate(heads)})
    else:
        rows = pd.read_parquet(data / FILES[regime.lengths])
        rows = rows.iloc[rng.integers(0, len(rows), num)]
        outputs = rows.output_tokens.astype(int).tolist()
    most = 16 * regime.num_kv_blocks - longest - 16
    requests = []
    for row, (prompt, output) in enumerate(zip(rows.prompt_tokens, outputs, strict=True)):
        prompt_tokens = system + min(max(int(prompt), 1), min(most, 8000) - system)
        own = Segment(f"r{row}", prompt_tokens - system)
        shared = (Segment(f"system{row % NUM_SYSTEMS}", system),) if system else ()
        requests.append(
            TraceRequest(
                request_id=f"r{row}", arrival_s=0.0, prompt_tokens=prompt_tokens, max_tokens=longest,
                output_tokens=min(max(output, 1), longest), content=(*shared, own),
            )
        )  # fmt: skip
    trace = Trace(tuple(requests), "benchmark")
    rate_rps = regime.load * saturation_rate_rps(trace, limits(regime, VLLM), STEP_TIME)
    times_s = Arrivals(process="gamma", cv=2.0, rate_rps=rate_rps).times(num, rng).tolist()
    arrived = (replace(request, arrival_s=time_s) for request, time_s in zip(requests, times_s, strict=True))
    trace = replace(trace, requests=tuple(arrived))
    return trace, predictions or oracle_predictions(trace, NOISE, rng)


def limits(regime: Regime, rule: str) -> SchedulerConfig:
    """The engine of a regime."""
    return SchedulerConfig(
        max_num_seqs=64,
        num_kv_blocks=regime.num_kv_blocks,
        prefix_caching=regime.prefixes != "off",
        memory_victims="last_admitted" if rule == VLLM else "cheapest",
    )


def run(regime: Regime, rule: str, trace: Trace, predictions: Predictions) -> dict[str, float]:
    """Latencies and pauses in seconds, recomputed tokens and preempted requests in percent, and numbers of preemptions."""
    scheduler = Scheduler(limits(regime, rule), make_policy(regime.policy, {}))
    cost = (
        nullcontext() if rule in (VLLM, OURS) else patch.object(memory_victim, "_cost", _order(rule, trace))
    )
    with cost:
        return measured(scheduler, trace, predictions, STEP_TIME)


def measured(
    scheduler: Scheduler,
    trace: Trace,
    predictions: Predictions,
    step_time: StepTime,
    horizon_s: float | None = None,
) -> dict[str, float]:
    """See `run`."""
    recomputed = _count_recomputed(scheduler)
    watch = RunWatch()
    records = (
        Simulation(trace, scheduler, step_time, predictions, watch=watch, horizon_s=horizon_s).run().records
    )
    latency_s, ttft_s = ([getattr(record, name) for record in records] for name in ("ttlt_s", "ttft_s"))
    pauses_s = [watch.gaps.longest_s.get(record.request_id, 0.0) for record in records]
    counts = [record.num_preemptions for record in records]
    tokens = sum(record.prompt_tokens + record.output_tokens for record in records)
    return {
        "recomputed": 100 * sum(recomputed) / tokens,
        "mean": float(np.mean(latency_s)), "p99": float(np.percentile(latency_s, 99)),
        "ttft": float(np.mean(ttft_s)), "ttft_p99": float(np.percentile(ttft_s, 99)),
        "pause": float(np.mean(pauses_s)), "pause_p99": float(np.percentile(pauses_s, 99)),
        "preemptions": float(sum(counts)), "most": float(max(counts)),
        "preempted": 100 * float(np.mean(np.array(counts) > 0)), "requests": float(len(records)),
    }  # fmt: skip


def _count_recomputed(scheduler: Scheduler) -> list[int]:
    """A list to which each admission after a preemption adds its recomputed tokens."""
    pool, recomputed = scheduler.pool, list[int]()
    computed: dict[str, int] = {}
    preempt, admit = pool.preempt, pool.admit

    def counted_preempt(state: RequestState, *arguments: Any) -> int:
        computed[state.request_id] = state.num_computed_tokens
        return preempt(state, *arguments)

    def counted_admit(state: RequestState, *arguments: Any) -> bool:
        is_admitted = admit(state, *arguments)
        if is_admitted and state.request_id in computed:
            recomputed.append(max(computed.pop(state.request_id) - state.num_computed_tokens, 0))
        return is_admitted

    pool.preempt = counted_preempt  # type: ignore[method-assign, assignment]
    pool.admit = counted_admit  # type: ignore[method-assign, assignment]
    return recomputed


def _order(rule: str, trace: Trace) -> Callable[[RequestState], Any]:
    """Cost of a running request under one of the other rules."""
    lengths = {row.request_id: row.output_tokens for row in trace.requests}
    tables: dict[str, LengthTable] = {}
    order, num = OTHERS[rule], memory_victim.PREEMPTIONS_PER_ROUND

    def cost(state: RequestState) -> Any:
        name, length = state.request_id, state.prediction
        remaining = float(lengths[name] - state.num_output_tokens)
        if "true" not in rule:
            assert length is not None, "all requests have predictions"
            if name not in tables:
                tables[name] = length.table(state.request.max_tokens)
            remaining = tables[name].expected_remaining(state.num_output_tokens)
        return order(state, max(remaining, 1.0), state.num_preemptions // num)

    return cost


def agent_counts(file: Path, minutes: float) -> Iterator[tuple[int, int]]:
    """(requests, preemptions) of recorded sessions under vLLM's rule, for several loads of the KV cache."""
    for num_sessions, kv_tokens in ((16, 1_000_000), (60, 1_000_000), (100, 3_000_000)):
        turns = round(num_sessions * (80 + 5 * minutes))
        sessions = Agents(num_sessions=num_sessions, file=str(file), max_pause_s=agents.MAX_PAUSE_S)
        trace = Workload(num_requests=turns, agents=sessions).trace(0)
        config = SchedulerConfig(
            num_kv_blocks=kv_tokens // agents.BLOCK, kv_block_tokens=agents.BLOCK, kv_watermark=0.0,
            max_num_batched_tokens=agents.CHUNK + 64, batching_parameters={"chunk_tokens": agents.CHUNK},
        )  # fmt: skip
        scheduler = Scheduler(config, make_policy("fcfs", {}))
        values = measured(scheduler, trace, Predictions(), agents.STEP, 60.0 * minutes)
        yield round(values["requests"]), round(values["preemptions"])


def tables(results: dict[tuple[Regime, str], list[dict[str, float]]]) -> str:
    """Two tables: our rule by regime, and all rules over the regimes."""
    ratios: dict[tuple[Regime, str], dict[str, list[float]]] = {}
    for (regime, rule), runs in results.items():
        pairs = list(zip(runs, results[regime, VLLM], strict=True))
        ratios[regime, rule] = {
            name: [own[name] / other[name] for own, other in pairs if other[name]] for name in COLUMNS
        }
    regimes = list(dict.fromkeys(regime for regime, _ in results))
    rows = []
    for regime in regimes:
        own, other = results[regime, OURS], results[regime, VLLM]
        means = [f"{np.mean([one[name] for one in other]):.1f}" for name in ("preempted", "recomputed")]
        means.append(f"{np.mean([one['recomputed'] for one in own]):.1f}")
        names = ("recomputed", "mean", "p99", "ttft", "pause", "pause_p99")
        rows.append([*regime.cells, *means, *(mean_cell(ratios[regime, OURS][name]) for name in names)])
    header = (
        "lengths",
        "policy",
        "KV tokens",
        "load",
        "prefix cache",
        "preempted, %",
        "recomputed, %: vLLM",
        "ours",
    )
    by_regime = markdown_table(
        (*header, "ratio", "latency mean", "P99", "TTFT mean", "pause mean", "P99"), rows
    )
    lines = []
    for is_on in (True, False):
        chosen = [regime for regime in regimes if (regime.prefixes != "off") is is_on]
        for rule in RULES:
            values = {
                name: [one for regime in chosen for one in ratios[regime, rule][name]] for name in COLUMNS
            }
            most = max(one["most"] for regime in chosen for one in results[regime, rule])
            cells = [mean_cell(values[name]) for name in COLUMNS]
            lines.append(["on" if is_on else "off", rule, *cells, f"{most:.0f}"])
    by_rule = markdown_table(("prefix cache", "rule", *COLUMNS.values(), "most of one request"), lines)
    return f"{by_regime}\n\n{by_rule}"


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--first_seed", type=int, default=200)
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="simulated minutes of the sessions of agents"
    )
    parser.add_argument("--quick", action="store_true", help="few requests, without CASTILLO and sessions")
    options: argparse.Namespace = parser.parse_args()
    regimes, population = REGIMES, None
    if options.quick:
        options.requests, options.seeds = 300, 1
        regimes = tuple(regime for regime in REGIMES if regime.lengths in FILES)
    else:
        population = read_population(options.data)
    results = defaultdict[tuple[Regime, str], list[dict[str, float]]](list)
    for regime in regimes:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            trace, predictions = draw(regime, options.data, population, options.requests, seed)
            for rule in RULES:
                results[regime, rule].append(run(regime, rule, trace, predictions))
    print(tables(results))
    if not options.quick:
        counts = agent_counts(options.data / "traces/agent_sessions.parquet", options.minutes)
        print(
            "\nSessions of agents:",
            ", ".join(f"{more} preemptions of {num} requests" for num, more in counts),
        )


if __name__ == "__main__":
    main()
