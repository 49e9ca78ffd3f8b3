"""Time of `tailcast plan` for a log, and whether its number of replicas is that of trying them in turn.

    python -m benchmarks.simulator.plan [--num_requests 10000] [--rate 20] [--workers 2]

The log has the mean lengths of conversations (see `speed.py`), with Poisson arrivals. Choices: three kinds of GPUs with four
numbers of them, two settings each of slots and tokens of a step. Brute force simulates all of the log with 1, 2, 3, ...
replicas of the recommended choice, without stopping early, until the targets are met; it tries no other choice.

`tailcast plan` should take less than two minutes on two cores for 10,000 requests.
"""

import json
import os
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared.command import Parser
from benchmarks.simulator.speed import synthetic_trace
from scheduler_core.report.page import markdown_table
from scheduler_core.simulator.metrics import metric
from scheduler_core.simulator.planning.choices import Choice
from scheduler_core.simulator.planning.config import PlanConfig
from scheduler_core.simulator.run import run_simulation
from scheduler_core.simulator.trace import write_trace
from tailcast.commands.plan import main as plan

OPTIONS: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "gpus": "h100-80gb=2.5,a100-80gb=1.6,l40s-48gb=0.9",
    "target": "ttft_s.p99<2,tpot_s.p90<0.05",
}


def measured(function: Callable[[], int]) -> tuple[int, float, float]:
    """Result, wall-clock seconds, and CPU seconds with those of child processes."""
    before_s, cpu_s = time.perf_counter(), _cpu_s()
    result = function()
    return result, time.perf_counter() - before_s, _cpu_s() - cpu_s


def _cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def brute_force(log: Path, choice: Choice) -> int:
    """The first number of replicas that meets the targets."""
    config = PlanConfig(**OPTIONS)
    base = config.base(str(log), has_predictions=False)
    num = 0
    while True:
        num += 1
        metrics = run_simulation(choice.config(base, num)).metrics
        values = [metric(metrics, target.metric) for target in config.targets]
        if all(target.slack(value) <= 1 for target, value in zip(config.targets, values, strict=True)):
            return num


def main(args: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if the numbers of replicas differ."""
    parser = Parser(__doc__)
    parser.add_argument("--num_requests", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes of the plan")
    options = parser.parse_args(args)
    with tempfile.TemporaryDirectory() as folder:
        log, result, cells = (Path(folder) / name for name in ("log.parquet", "plan.json", "out"))
        write_trace(synthetic_trace(options.num_requests, options.rate), log)
        words = [str(log), *(part for name, value in OPTIONS.items() for part in (f"--{name}", value))]
        words += ["--json", str(result), "--cells", str(cells), "--workers", str(options.workers)]
        _, wall_s, cpu_s = measured(lambda: plan(words))
        recommended = json.loads(result.read_text(encoding="utf-8"))["answer"]
        num_simulations = len([*(cells / "cells").iterdir()])
        settings = dict(recommended["settings"])
        choice = Choice(gpu=recommended["gpu"], devices=settings.pop("tensor_parallel"), **settings)
        num, brute_wall_s, brute_cpu_s = measured(lambda: brute_force(log, choice))
    header = ["", "choices", "simulations", "replicas", "wall s", "CPU s"]
    rows = [
        ["tailcast plan", "all", str(num_simulations), str(recommended["num_replicas"])],
        ["brute force", "1", str(num), str(num)],
    ]
    for row, times in zip(rows, ((wall_s, cpu_s), (brute_wall_s, brute_cpu_s)), strict=True):
        row += [f"{seconds:.1f}" for seconds in times]
    print(f"{options.num_requests} requests, {options.workers} processes: {recommended['hardware']}")
    print(markdown_table(header, rows))
    return int(num != recommended["num_replicas"])


if __name__ == "__main__":
    raise SystemExit(main())
