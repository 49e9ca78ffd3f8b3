"""Speed, start-up time and memory of the simulator, compared with a plain loop with the same results.

    python -m benchmarks.simulator.speed [--runs DIR] [--repeats 5] [--largest 1000000] [--markdown FILE]

1. Requests per CPU second, all variants in turn in one process, median of the repeats:
   plain      `plain_loop.py`: about 100 lines, one pass of a loop per iteration, no scheduler.
   exact      calls the Scheduler before every iteration.
   stretches  same times, but calls the Scheduler only when something can change; the iterations in between
              get their times from the same cost table. This is what `simulate` does.
   linear     step times linear in the context: stretches are computed in closed form.
   Inputs: DIR/c1... (of Vidur, see vidur.py), or without DIR requests of the same mean lengths and
   a cost table from a data sheet; and long outputs with 60 times the time between requests.
2. CPU seconds of start-up: a new process imports the simulator and reads the cost tables.
3. Peak memory of new processes that read the cost tables and simulate an input of Vidur.
4. Peak memory and CPU time of new processes that simulate 10,000, 100,000, ... requests (linear).

Vidur itself needs profiles that are not public. Reference values: 101 to 215 requests per CPU second and
970 MB for these inputs, on a machine on which an independent plain loop reached about 1,000.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.simulator import plain_loop
from benchmarks.simulator.vidur import SARATHI, Case, limits_of, read_case, table_of, trace_of
from scheduler_core.engine.plan import PrefillChunk
from scheduler_core.policies import make_policy
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.loop import Simulation
from scheduler_core.simulator.predictions import Predictions
from scheduler_core.simulator.step_time.base import LinearStepTime, StepTime, StepWork
from scheduler_core.simulator.step_time.operator_table import OperatorTable
from scheduler_core.simulator.step_time.roofline import GPUS, RooflineStepTime
from scheduler_core.simulator.trace import Trace, TraceRequest

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
VIDUR_PEAK_MB = 970


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


def stretched(trace: Trace, factor: float) -> Trace:
    """The same requests with `factor` times the intervals, each with the longest output in the profile."""
    rows = [
        replace(row, arrival_s=row.arrival_s * factor, output_tokens=most, max_tokens=most)
        for row in trace.requests
        for most in [max(row.output_tokens, 4000 - row.prompt_tokens)]
    ]
    return replace(trace, requests=tuple(rows))


def ours(case: Case, step_time: StepTime, *, exact_steps: bool = False) -> Callable[[], int]:
    """A function that runs the simulator and returns the number of iterations."""

    def run() -> int:
        core = Scheduler(case.limits, make_policy("fcfs"))
        out = Simulation(case.trace, core, step_time, Predictions(), exact_steps=exact_steps).run()
        assert len(out.records) == len(case.trace)
        return out.num_steps

    return run


def plain(case: Case, table: OperatorTable) -> Callable[[], int]:
    """A function that runs the plain loop and returns the number of iterations."""
    rows = [(row.arrival_s, row.prompt_tokens, row.output_tokens) for row in case.trace.requests]
    sarathi = case.limits.batching == "chunked_prefill"

    def run() -> int:
        times = plain_loop.simulate(
            rows,
            table,
            scheduler="sarathi" if sarathi else "vllm",
            budget=CHUNK if sarathi else case.limits.max_num_batched_tokens,
            num_blocks=case.limits.num_kv_blocks,
        )
        return len(times)

    return run


@dataclass(frozen=True, slots=True)
class Speed:
    """Median speed of one side on one input.

    Attributes:
        case: Name of the input.
        side: Name of the variant.
        requests: Requests per CPU second.
        iterations: Iterations per CPU second.
        over_plain: Ratio of `requests` to that of the plain loop.
    """

    case: str
    side: str
    requests: float
    iterations: float
    over_plain: float

    def row(self) -> str:
        """A row of the table."""
        published_s = VIDUR.get(self.case)
        here = there = ""
        if published_s is not None and self.side != "plain":
            here = " to ".join(f"{self.requests / one:,.0f}" for one in published_s)
            there = " to ".join(f"{self.over_plain * VIDUR_PLAIN / one:,.1f}" for one in published_s)
        return (
            f"| {self.case} | {self.side} | {self.requests:,.0f} | {self.iterations:,.0f} "
            f"| {self.over_plain:.2f} | {there} | {here} |"
        )


def speed(case: Case, table: OperatorTable, repeats: int) -> list[Speed]:
    """Measures every variant."""
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
    took = {name: median(values) for name, values in seconds.items()}
    return [
        Speed(
            case.name,
            name,
            len(case.trace) / took[name],
            iterations[name] / took[name],
            took["plain"] / took[name],
        )
        for name in sides
    ]


START_UP = """
import time
start = time.process_time()
import scheduler_core.simulator.loop
from scheduler_core.simulator.step_time.operator_table import read_operator_table
imported = time.process_time()
if {folder!r}:
    read_operator_table({folder!r}, num_layers=32)
print(imported - start, time.process_time() - imported)
"""

PEAK = """
import json, sys
from pathlib import Path
from benchmarks.simulator.speed import peak_run
print(peak_run(Path({folder!r}), json.loads(sys.stdin.read())))
"""

GROWTH = """
import json
from benchmarks.simulator.speed import growth_run
print(json.dumps(growth_run({num})))
"""


def peak_mb() -> float:
    """Peak memory of this process, without that of its parent (which getrusage may include)."""
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def peak_run(tables: Path, arguments: dict[str, Any]) -> float:
    """Simulates a case with its cost tables and returns the peak memory of this process in MB."""
    limits = SchedulerConfig(**arguments["limits"])
    case = replace(EMPTY, trace=trace_of(arguments["rows"]), limits=limits)
    case = replace(
        case, profile=arguments["profile"], model=arguments["model"], tensor_parallel=arguments["tp"]
    )
    ours(case, table_of(case, tables))()
    return peak_mb()


def growth_run(num: int) -> dict[str, float]:
    """Simulates `num` requests in this process: peak memory in MB, CPU seconds of creation and simulation."""
    start = time.process_time()
    case = replace(EMPTY, trace=synthetic_trace(num, 4.0))
    start_run_s = time.process_time()
    ours(case, LinearStepTime())()
    return {"peak_mb": peak_mb(), "run_s": time.process_time() - start_run_s, "make_s": start_run_s - start}


def child(code: str, arguments: str = "") -> str:
    """Runs code in a new interpreter and returns its output."""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True, input=arguments
    )
    return done.stdout


def peaks(cases: Sequence[Case], tables: Path) -> list[str]:
    """A row per case: peak memory of a new process that reads the tables and simulates the case."""
    rows = []
    for case in cases:
        requests = [
            {
                "id": row.request_id,
                "arrived_at": row.arrival_s,
                "prompt_tokens": row.prompt_tokens,
                "output_tokens": row.output_tokens,
            }
            for row in case.trace.requests
        ]
        arguments = {
            "rows": requests,
            "limits": asdict(case.limits),
            "profile": case.profile,
            "model": case.model,
            "tp": case.tensor_parallel,
        }
        mb = float(child(PEAK.format(folder=str(tables)), json.dumps(arguments)))
        rows.append(f"| {case.name} | {mb:.0f} | {mb / VIDUR_PEAK_MB:.1%} |")
    return rows


def growth(largest: int) -> list[str]:
    """A row for each number of requests, from 10,000."""
    rows = []
    before: tuple[int, float] | None = None
    num = 10_000
    while num <= largest:
        growth_values = json.loads(child(GROWTH.format(num=num)))
        each = (
            ""
            if before is None
            else f"{(growth_values['peak_mb'] - before[1]) * 2**20 / (num - before[0]):,.0f}"
        )
        rows.append(
            f"| {num:,} | {growth_values['peak_mb']:,.0f} | {each} | {growth_values['run_s'] / num * 1e6:.0f} |"
        )
        before = (num, growth_values["peak_mb"])
        num *= 10
    return rows


def sides(runs: Path | None) -> tuple[list[tuple[Case, OperatorTable]], Path | None]:
    """The inputs with their cost tables, and the folder of these tables."""
    if runs is None:
        return [(replace(EMPTY, name="synthetic", trace=synthetic_trace(1024, 4.0)), synthetic_table())], None
    tables = runs / "cost_tables"
    cases = [read_case(path.parent) for path in sorted(runs.glob("*/summary.json"))]
    return [(case, table_of(case, tables)) for case in cases if case.num_replicas == 1], tables


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=Path, default=None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--largest", type=int, default=1_000_000)
    parser.add_argument("--markdown", type=Path, default=None, help="also write the tables to this file")
    options = parser.parse_args(argv)
    page: list[str] = []

    def say(*lines: str) -> None:
        for line in lines:
            print(line, flush=True)
        page.extend(lines)

    pairs, tables = sides(options.runs)
    say(HEAD)
    for case, table in pairs:
        say(*[one.row() for one in speed(case, table, options.repeats)])
    case, table = pairs[0]
    long = replace(case, name="long answers", trace=stretched(case.trace, 60.0))
    say(*[one.row() for one in speed(long, table, max(1, options.repeats // 2))])
    folder = "" if tables is None else str(tables / case.profile)
    starts = [[float(one) for one in child(START_UP.format(folder=folder)).split()] for _ in range(3)]
    imported, read = min(starts, key=sum)
    say(f"\nStart-up, minimum of 3: import {imported:.2f} CPU s, cost tables {read:.2f} CPU s.")
    if tables is not None:
        say(f"\n| input | peak MB | of Vidur's {VIDUR_PEAK_MB} MB |\n|---|---|---|")
        say(*peaks([case for case, _ in pairs], tables))
    say("\n| requests | peak MB | bytes per additional request | us per request |\n|---|---|---|---|")
    say(*growth(options.largest))
    if options.markdown is not None:
        options.markdown.write_text(_page(options, page), encoding="utf-8")


def _page(options: argparse.Namespace, lines: list[str]) -> str:
    arguments = f"--repeats {options.repeats} --largest {options.largest}"
    runs = "" if options.runs is None else "--runs DIR "
    today = time.strftime("%Y-%m-%d", time.gmtime())
    return (
        f"""# benchmarks/simulator/speed.py on a CPU

{today}, version {metadata.version("tailcast")}, Python {platform.python_version()}, {processor()}, load {os.getloadavg()[0]:.0f}: medians of CPU time, all sides in turn in one process.

    python -m benchmarks.simulator.speed {runs}{arguments} --markdown FILE

{NOTES}

"""
        + "\n".join(lines).replace("\n\n\n", "\n\n")
        + "\n"
    )


def processor() -> str:
    """Name of the processor and number of cores available to this process."""
    name = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line
        ]
        name = names[0] if names else name
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


HEAD = (
    "| input | side | requests / CPU s | iterations / CPU s | times plain "
    "| times Vidur, by plain | times Vidur's figure |\n|---|---|---|---|---|---|---|"
)

NOTES = f"""plain is a loop of about 100 lines with one pass per iteration. exact calls the scheduler before
every iteration. stretches, as in `simulate` (which also records gaps and load), calls it only when something
can change; the iterations in between get their times from the same cost table. linear has step times that are
linear in the context and computes stretches in closed form. plain, exact and stretches have equal results.

"times Vidur's figure" is relative to measurements of Vidur (c1 with and without its metrics) on another
machine, where an independent plain loop reached about {VIDUR_PLAIN:,} requests per CPU second. "times Vidur,
by plain" assumes that the two plain loops are equally fast."""


if __name__ == "__main__":
    main()
