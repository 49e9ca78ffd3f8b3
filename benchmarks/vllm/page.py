"""Tables of a benchmark from the existing runs, complete or not."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.pages import mean_cell
from benchmarks.vllm.plan import CAPACITY, SIDES, Cell
from benchmarks.vllm.results import (
    CLOCK,
    LEVELS,
    calibrated,
    measured_capacity,
    run_metrics,
    simulated,
    slowness,
    window_throughput,
)
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.report.page import markdown_table

#: Metric -> heading of the first table, in engine time: seconds for fcfs, ratios to fcfs for the others.
LATENCIES = {
    f"{name}_{level}": f"{name.upper()} {level.replace('p', 'P')}"
    for name in ("ttft", "ttlt")
    for level in ("mean", *LEVELS)
} | {"per_token_mean": "per token", "per_token_p90": "per token P90", "per_token_p99": "per token P99"}
#: The same for the second table, which is about wall-clock time, the machine, the scheduler's cost and the simulator.
CHECKS = {
    "wall_ttft_mean": "wall clock: TTFT mean",
    "wall_ttlt_mean": "TTLT mean",
    "wall_per_token_mean": "per token",
    "tokens_per_s": "tokens/s while requests come",
    "simulated_per_token_mean": "simulated per token",
}
#: Values of every side.
ABSOLUTE = {
    "slowness": "steps, times the fit",
    "scheduling_ms": "scheduling, ms a step",
    "simulator_error": "simulated TTLT mean, error in %",
}
#: (load, bursts, side) -> repetition -> metric -> value.
Metrics = dict[tuple[float, bool, str], dict[int, dict[str, float]]]
Loads = Sequence[tuple[float, bool]]


def report(options: argparse.Namespace, loads: Loads, predictions: Mapping[str, LengthPrediction]) -> str:
    """Markdown: two tables with a row for each load and side that has a run, and notes.

    Args:
        options: Options of `serving`: out, num_prompts, max_tokens, max_num_seqs.
        loads: (load, bursts) in the order of the tables.
        predictions: Predictions by request, for the simulator.
    """
    slots = options.max_num_seqs
    base = _read(CAPACITY, options.out)
    fit = calibrated(base["steps"])
    runs: Metrics = {}
    same: list[bool] = []
    late_s = 0.0
    for cell, run in _runs(options.out, loads):
        assert cell.load is not None
        metrics = run_metrics(run["requests"], CLOCK)
        metrics |= {f"wall_{name}": value for name, value in run_metrics(run["requests"]).items()}
        simulation = simulated(cell.side, run, predictions, fit.step_time, slots, options.max_tokens)
        metrics |= {
            "tokens_per_s": window_throughput(run, CLOCK),
            "slowness": slowness(run["steps"], fit),
            "scheduling_ms": 1e3 * float(np.mean([step[6] for step in run["steps"]])),
            "simulated_per_token_mean": simulation["per_token_mean"],
            "simulator_error": 100 * (simulation["ttlt_mean"] / metrics["ttlt_mean"] - 1),
        }
        runs.setdefault((cell.load, cell.bursts, cell.side), {})[cell.repetition] = metrics
        late_s = max(late_s, *(row["sent_s"] - row["arrival_s"] for row in run["requests"]))
        pair = Cell("fcfs", cell.repetition, cell.load, cell.bursts)
        if cell.side != "fcfs" and pair.file(options.out).exists():
            rows = _read(pair, options.out)["requests"]
            lengths = {row["request_id"]: row["output_tokens"] for row in rows}
            same += [lengths[row["request_id"]] == row["output_tokens"] for row in run["requests"]]
    if not runs:
        return "No run yet."
    tokens = [row["output_tokens"] for row in base["requests"]]
    parameters = ", ".join(f"{name} {1e3 * value:.3g} ms" for name, value in fit.parameters.items())
    notes = [
        f"{options.num_prompts} prompts, max_tokens {options.max_tokens} "
        f"(mean output {sum(tokens) / len(tokens):.0f}), "
        f"max_num_seqs {slots}, capacity {measured_capacity(base['requests'], slots):.3f} "
        "requests/s. Mean and 95 % interval over repetitions (Student's t; none for one repetition); ratios are paired "
        "within repetitions.",
        f"The simulator's step times are fitted to the capacity run only ({parameters}; median error of a "
        f"step {100 * fit.median_error:.1f} %).",
        f"Maximum delay of the client: {1e3 * late_s:.0f} ms."
        + (f" Outputs as long as in the run of fcfs: {100 * sum(same) / len(same):.1f} %." if same else ""),
    ]
    tables = (_table(runs, loads, LATENCIES, {}), _table(runs, loads, CHECKS, ABSOLUTE))
    return "\n\n".join((*tables, "\n".join(notes)))


def _table(runs: Metrics, loads: Loads, relative: Mapping[str, str], absolute: Mapping[str, str]) -> str:
    """A row for each load and side: relative metrics as seconds or rates for fcfs and ratios to it for the others."""
    rows = []
    for load, bursts in loads:
        base = runs.get((load, bursts, "fcfs"), {})
        for side in SIDES:
            if (own := runs.get((load, bursts, side))) is not None:
                cells = []
                for name in (*relative, *absolute):
                    ratios = [row[name] / base[at][name] for at, row in own.items() if at in base]
                    values = [row[name] for row in own.values()]
                    cells.append(mean_cell(values if side == "fcfs" or name in absolute else ratios))
                rows.append([f"{load}{', bursts' if bursts else ''}", side, str(len(own)), *cells])
    return markdown_table(["load", "side", "runs", *relative.values(), *absolute.values()], rows)


def _runs(folder: Path, loads: Loads) -> Iterator[tuple[Cell, dict[str, Any]]]:
    for load, bursts in loads:
        for side in SIDES:
            pattern = Cell(side, 0, load, bursts).file(Path()).name.replace(f"{side}-0-", f"{side}-*-")
            for path in sorted(folder.glob(pattern)):
                cell = Cell(side, int(path.name.split("-")[1]), load, bursts)
                yield cell, _read(cell, folder)


def _read(cell: Cell, folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(cell.file(folder).read_text(encoding="utf-8"))
    return content
