"""Speed and memory of the simulator, compared with a plain loop with the same results.

    python -m benchmarks.simulator.speed [--runs DIR] [--repeats 5] [--largest 1000000]

1. Requests per CPU second, both sides in turn in one process, median of the repeats:
   plain      `plain_loop.py`: about 100 lines, one pass of a loop per iteration, no scheduler.
   simulate   same times, but calls the Scheduler only when something can change; the iterations in between
              get their times from the same cost table.
   Inputs: DIR/c1... (of Vidur, see vidur.py), or without DIR requests of the same mean lengths and
   a cost table from a data sheet.
2. Peak memory and CPU time of new processes that simulate 10,000, 100,000, ... requests with step times that are linear in
   the context.

Vidur itself needs profiles that are not public. Reference values: 101 to 215 requests per CPU second and
970 MB for these inputs, on a machine on which an independent plain loop reached about 1,000.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.shared.command import Parser
from benchmarks.shared.timing import interleaved, memory_mb
from benchmarks.simulator import plain_loop
from benchmarks.simulator.vidur import SARATHI, Case, limits_of, read_case, table_of, trace_of
from scheduler_core.engine.plan import PrefillChunk
from scheduler_core.policies import make_policy
from scheduler_core.report.page import markdown_table
from scheduler_core.scheduler import Scheduler
from scheduler_core.simulator.loop import Simulation
from scheduler_core.simulator.step_time.base import LinearStepTime, StepTime, StepWork
from scheduler_core.simulator.step_time.operator_table import OperatorTable
from scheduler_core.simulator.step_time.roofline import GPUS, RooflineStepTime
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.trace_predictions import Predictions

CHUNK = 512
EMPTY = Case("", Trace(()), limits_of(SARATHI, 30_208), 1, "", 1, "", [], 0)
#: Requests per CPU second of Vidur (microsoft/vidur @ 7d47513) on these inputs: minimum and maximum.
VIDUR = {
    "c1_L3_sarathi512_conv_q4": (215, 101),
    "c2_L3_vllm_conv_q4": (143,),
    "c6_L70tp2_sarathi512_conv_q1": (164,),
    "c7_L70tp2_vllm_conv_q1": (203,),
}
#: Requests per CPU second of a plain loop on the machine of those measurements.
VIDUR_PLAIN = 1000


def synthetic_trace(num: int, rate_rps: float, seed: int = 0) -> Trace:
    """Requests with about the mean lengths of the conversations that Vidur ships: 1,167 and 218 tokens."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate_rps, num))
    prompts = np.clip(np.rint(rng.lognormal(6.6, 0.95, num)), 1, 3500).astype(int)
    outputs = np.clip(np.rint(rng.lognormal(5.0, 0.85, num)), 1, 590).astype(int)
    names = ("id", "arrived_at", "prompt_tokens", "output_tokens")
    columns = (range(num), arrivals.tolist(), prompts.tolist(), outputs.tolist())
    return trace_of(dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))


def synthetic_table() -> OperatorTable:
    """Llama-3-8B on an A100, from data sheets."""
    model, layers = RooflineStepTime(), 32
    tokens = [model.step_s(StepWork((PrefillChunk("", 0, size, False),))) / layers for size in range(1, 4097)]
    reading = model.size.kv_bytes_per_token / layers / (GPUS[model.gpu].bytes_per_s * 0.75)
    contexts = np.arange(65, dtype=np.float64) * 64
    return OperatorTable(
        num_layers=layers,
        tokens_s=np.array([0.0, *tokens]),
        decode_s=np.asarray(np.outer(np.arange(129), contexts) * reading, np.float64),
        prefill_s=np.asarray(np.outer(contexts, np.arange(4097)) * 1e-12, np.float64),
    )


def ours(case: Case, step_time: StepTime) -> None:
    """Runs the simulator."""
    core = Scheduler(case.limits, make_policy("fcfs"))
    assert len(Simulation(case.trace, core, step_time, Predictions()).run().records) == len(case.trace)


def plain(case: Case, table: OperatorTable) -> Callable[[], object]:
    """A function that runs the plain loop."""
    rows = [(row.arrival_s, row.prompt_tokens, row.output_tokens) for row in case.trace.requests]
    sarathi = case.limits.batching == "chunked_prefill"

    return lambda: plain_loop.simulate(
        rows,
        table,
        scheduler="sarathi" if sarathi else "vllm",
        budget=CHUNK if sarathi else case.limits.max_num_batched_tokens,
        num_blocks=case.limits.capacity_blocks,
    )


def speed(case: Case, table: OperatorTable, repeats: int) -> list[list[str]]:
    """Rows of the table: both sides of one input."""
    times = interleaved({"plain": plain(case, table), "simulate": lambda: ours(case, table)}, repeats)
    rows = []
    for name, values in times.items():
        took_s = median(values)
        requests, over_plain = len(case.trace) / took_s, median(times["plain"]) / took_s
        # Vidur's measurements, and the same on this machine if the two plain loops are equally fast.
        vidur = () if name == "plain" else VIDUR.get(case.name, ())
        scaled = " to ".join(f"{over_plain * VIDUR_PLAIN / one:,.1f}" for one in vidur)
        published = " to ".join(f"{requests / one:,.0f}" for one in vidur)
        rows.append([case.name, name, f"{requests:,.0f}", f"{over_plain:.2f}", scaled, published])
    return rows


def growth_run(num: int) -> tuple[float, float]:
    """Simulates `num` requests in this process: peak memory in MiB, and CPU seconds of the simulation."""
    case = replace(EMPTY, trace=synthetic_trace(num, 4.0))
    start_s = time.process_time()
    ours(case, LinearStepTime())
    return memory_mb(), time.process_time() - start_s


def growth(largest: int) -> list[tuple[str, ...]]:
    """A row for each number of requests, from 10,000."""
    rows: list[tuple[str, ...]] = []
    num, before, previous = 10_000, 0, 0.0
    while num <= largest:
        with get_context("spawn").Pool(1) as pool:
            peak, seconds = pool.apply(growth_run, (num,))
        each = f"{(peak - previous) * 2**20 / (num - before):,.0f}" if before else ""
        rows.append((f"{num:,}", f"{peak:,.0f}", each, f"{seconds / num * 1e6:.0f}"))
        num, before, previous = 10 * num, num, peak
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--runs", type=Path, help="folder of Vidur's runs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--largest", type=int, default=1_000_000)
    options = parser.parse_args(argv)
    pairs = [(replace(EMPTY, name="synthetic", trace=synthetic_trace(1024, 4.0)), synthetic_table())]
    if options.runs is not None:
        tables = options.runs / "cost_tables"
        cases = [read_case(path.parent) for path in sorted(options.runs.glob("*/summary.json"))]
        pairs = [(case, table_of(case, tables)) for case in cases if case.num_replicas == 1]
    header = "input|side|requests / CPU s|times plain|times Vidur, by plain|times Vidur's figure"
    rows = [row for case, table in pairs for row in speed(case, table, options.repeats)]
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}\n\n{markdown_table(header.split('|'), rows)}"
    )
    print()
    header = "requests|peak MiB|bytes per additional request|us per request"
    print(markdown_table(header.split("|"), growth(options.largest)))


if __name__ == "__main__":
    main()
