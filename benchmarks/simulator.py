"""Speed, start-up and memory of the simulator, beside a plain loop that does the same.

    python benchmarks/simulator.py [--runs DIR] [--repeats 5] [--largest 1000000]

1. Requests per CPU second, every side in turn in one process, median of the repeats:
   plain      `plain_vidur_loop.py`: about 100 lines, a round of a loop per iteration, no scheduler.
   exact      the Scheduler is asked before every single iteration.
   stretches  the same times: the Scheduler is asked when something can change; each iteration in between has its own
              time from the same cost table. What `simulate` does.
   linear     stretches in closed form: step times linear in the context, no iteration is looked at.
   Inputs: DIR/c1... (Vidur's, with the reference runs, see vidur_validation.py), or without DIR requests of the same mean
   lengths and a cost table made from a data sheet; and long answers, 60 times as much time between requests.
2. CPU seconds of start-up: a new process that imports the simulator and reads the cost tables.
3. Peak memory and CPU time of new processes that simulate 10,000, 100,000, ... requests.

Vidur itself needs profiles that are not public; its figures are in the reference: 101 to 215 requests per CPU second and
970 MB for these inputs, on a machine on which the plain loop, written independently, made about 1,000.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks import plain_vidur_loop
from benchmarks.vidur_validation import SARATHI, Case, limits_of, read_case, table_of
from scheduler_core.plan import PrefillChunk
from scheduler_core.policies import make_policy
from scheduler_core.scheduler import Scheduler
from scheduler_core.simulator.fetch import no_predictions
from scheduler_core.simulator.loop import Simulation
from scheduler_core.simulator.operator_table import OperatorTable
from scheduler_core.simulator.roofline_time import RooflineStepTime
from scheduler_core.simulator.step_time import LinearStepTime, StepTime, StepWork
from scheduler_core.simulator.trace import Trace, TraceRequest

CHUNK = 512


def synthetic_trace(num: int, rate_rps: float, seed: int = 0) -> Trace:
    """Requests with about the mean lengths of the conversations that Vidur ships: 1,167 and 218 tokens."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate_rps, num))
    prompts = np.clip(np.rint(rng.lognormal(6.6, 0.95, num)), 1, 3500).astype(int)
    outputs = np.clip(np.rint(rng.lognormal(5.0, 0.85, num)), 1, 590).astype(int)
    return Trace(
        tuple(
            TraceRequest(
                request_id=str(index),
                arrival_s=float(arrivals[index]),
                prompt_tokens=int(prompts[index]),
                output_tokens=int(outputs[index]),
                max_tokens=int(outputs[index]),
            )
            for index in range(num)
        )
    )


def synthetic_table() -> OperatorTable:
    """Llama-3-8B on an A100 by its data sheet."""
    model, layers = RooflineStepTime(), 32
    tokens = [model.step_s(StepWork((PrefillChunk("", 0, size, False),))) / layers for size in range(1, 4097)]
    reading = model.size.kv_bytes_per_token / layers / (model.device.bytes_per_s * 0.75)
    contexts = np.arange(65, dtype=np.float64) * 64
    return OperatorTable(
        num_layers=layers,
        tokens_s=np.array([0.0, *tokens]),
        decode_s=np.asarray(np.outer(np.arange(129), contexts) * reading, np.float64),
        prefill_s=np.asarray(np.outer(contexts, np.arange(4097)) * 1e-12, np.float64),
    )


def stretched(trace: Trace, factor: float) -> Trace:
    """The same requests, so much further apart, each with the longest answer that the profile allows."""
    rows = [
        replace(row, arrival_s=row.arrival_s * factor, output_tokens=most, max_tokens=most)
        for row in trace.requests
        for most in [max(row.output_tokens, 4000 - row.prompt_tokens)]
    ]
    return replace(trace, requests=tuple(rows))


def ours(case: Case, step_time: StepTime, *, exact_steps: bool = False) -> Callable[[], int]:
    """A run that returns the number of iterations."""

    def run() -> int:
        core = Scheduler(case.limits, make_policy("fcfs"))
        out = Simulation(case.trace, core, step_time, no_predictions(), exact_steps=exact_steps).run()
        assert len(out.records) == len(case.trace)
        return out.num_steps

    return run


def plain(case: Case, table: OperatorTable) -> Callable[[], int]:
    """The loop written straight down."""
    rows = [(row.arrival_s, row.prompt_tokens, row.output_tokens) for row in case.trace.requests]
    sarathi = case.limits.batching == "chunked_prefill"

    def run() -> int:
        times = plain_vidur_loop.simulate(
            rows,
            table,
            scheduler="sarathi" if sarathi else "vllm",
            budget=CHUNK if sarathi else case.limits.max_num_batched_tokens,
            num_blocks=case.limits.num_kv_blocks,
        )
        return len(times)

    return run


def speed(case: Case, table: OperatorTable, repeats: int) -> None:
    """Prints one row per side."""
    sides = {
        "plain": plain(case, table),
        "exact": ours(case, table, exact_steps=True),
        "stretches": ours(case, table),
        "linear": ours(case, LinearStepTime()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    iterations = dict.fromkeys(sides, 0)
    for _ in range(repeats):
        for name, run in sides.items():
            start = time.process_time()
            iterations[name] = run()
            seconds[name].append(time.process_time() - start)
    iterations["plain"] = iterations["exact"]
    base = median(seconds["plain"])
    for name in sides:
        took = median(seconds[name])
        print(
            f"| {case.name} | {name} | {len(case.trace) / took:,.0f} | {iterations[name] / took:,.0f} "
            f"| {base / took:.1f} |"
        )


START_UP = """
import time
start = time.process_time()
import scheduler_core.simulator
from scheduler_core.simulator.operator_profile import read_operator_table
imported = time.process_time()
if {folder!r}:
    read_operator_table({folder!r}, num_layers=32)
print(imported, time.process_time() - imported)
"""

GROWTH = """
import json, resource, time
from benchmarks.simulator import growth_run
print(json.dumps(growth_run({num})))
"""


def growth_run(num: int) -> dict[str, float]:
    """Simulates so many requests in this process: peak memory in bytes per request, CPU seconds per request."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    case = Case("", synthetic_trace(num, 4.0), limits_of(SARATHI, 30_208), 1, "", 1, "", [], 0)
    made = time.process_time()
    ours(case, LinearStepTime())()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "peak_mb": peak / 1024,
        "bytes_per_request": (peak - before) * 1024 / num,
        "run_s": time.process_time() - made,
        "make_s": made - start,
    }


def child(code: str) -> str:
    """What a new interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=Path, default=None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--largest", type=int, default=1_000_000)
    options = parser.parse_args(argv)
    print(f"Python {platform.python_version()}, {platform.processor() or platform.machine()}")
    print(
        "\n| input | side | requests / CPU s | iterations / CPU s | times the plain loop |\n|---|---|---|---|---|"
    )
    folder = ""
    if options.runs is None:
        limits = limits_of(SARATHI, 30_208)
        case = Case("synthetic", synthetic_trace(1024, 4.0), limits, 1, "", 1, "", [], 0)
        pairs = [(case, synthetic_table())]
    else:
        tables = options.runs / "cost_tables"
        cases = [read_case(path.parent) for path in sorted(options.runs.glob("*/summary.json"))]
        pairs = [(case, table_of(case, tables)) for case in cases if case.num_replicas == 1]
        folder = str(tables / cases[0].profile)
    for case, table in pairs:
        speed(case, table, options.repeats)
    case, table = pairs[0]
    long = replace(case, name="long answers", trace=stretched(case.trace, 60.0))
    speed(long, table, max(1, options.repeats // 2))
    imported, read = (float(one) for one in child(START_UP.format(folder=folder)).split())
    print(f"\nstart-up: import {imported:.2f} CPU s, cost tables {read:.2f} CPU s")
    print("\n| requests | peak MB | bytes per request | us per request |\n|---|---|---|---|")
    num = 10_000
    while num <= options.largest:
        found = json.loads(child(GROWTH.format(num=num)))
        print(
            f"| {num:,} | {found['peak_mb']:.0f} | {found['bytes_per_request']:.0f} "
            f"| {found['run_s'] / num * 1e6:.0f} |"
        )
        num *= 10


if __name__ == "__main__":
    main()
