"""Tables of a benchmark from the existing runs, complete or not."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.vllm.plan import CAPACITY, SIDES, Cell
from benchmarks.vllm.results import (
    CLOCK,
    LEVELS,
    calibrated,
    interval,
    measured_capacity,
    run_metrics,
    scheduling_s,
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

#: (load, bursts, side) -> repetition -> metric -> value.
Metrics = dict[tuple[float, bool, str], dict[int, dict[str, float]]]


@dataclass(frozen=True, slots=True)
class Setting:
    """Inputs of the tables.

    Attributes:
        folder: Folder of the runs.
        num_prompts: Requests of a run.
        max_tokens: Limit of output tokens.
        max_num_seqs: Slots of the engine.
        loads: (load, bursts) in the order of the tables.
        predictions: Predictions by request, for the simulator.
    """

    folder: Path
    num_prompts: int
    max_tokens: int
    max_num_seqs: int
    loads: Sequence[tuple[float, bool]]
    predictions: Mapping[str, LengthPrediction]


def report(setting: Setting) -> str:
    """Markdown: two tables with a row for each load and side that has a run, and notes.

    Empty without a capacity run.
    """
    if not CAPACITY.file(setting.folder).exists():
        return ""
    base = _read(CAPACITY, setting.folder)
    fit = calibrated(base["steps"])
    runs: Metrics = {}
    same: list[bool] = []
    late_s = 0.0
    for cell, run in _runs(setting):
        assert cell.load is not None
        metrics = run_metrics(run["requests"], CLOCK)
        metrics |= {f"wall_{name}": value for name, value in run_metrics(run["requests"]).items()}
        metrics |= {
            "tokens_per_s": window_throughput(run, CLOCK), "slowness": slowness(run["steps"], fit),
            "scheduling_ms": 1e3 * scheduling_s(run["steps"]),
        }  # fmt: skip
        simulated_metrics = simulated(
            cell.side, run, setting.predictions, fit.step_time, setting.max_num_seqs, setting.max_tokens
        )
        metrics |= {f"simulated_{name}": value for name, value in simulated_metrics.items()}
        runs.setdefault((cell.load, cell.bursts, cell.side), {})[cell.repetition] = metrics
        late_s = max(late_s, *(row["sent_s"] - row["arrival_s"] for row in run["requests"]))
        pair = Cell("fcfs", cell.repetition, cell.load, cell.bursts).file(setting.folder)
        if cell.side != "fcfs" and pair.exists():
            lengths = {
                row["request_id"]: row["output_tokens"] for row in json.loads(pair.read_text())["requests"]
            }
            same += [lengths[row["request_id"]] == row["output_tokens"] for row in run["requests"]]
    if not runs:
        return "No run yet."
    tokens = [row["output_tokens"] for row in base["requests"]]
    parameters = ", ".join(f"{name} {1e3 * value:.3g} ms" for name, value in fit.parameters.items())
    notes = [
        f"{setting.num_prompts} prompts, max_tokens {setting.max_tokens} "
        f"(mean output {sum(tokens) / len(tokens):.0f}), "
        f"max_num_seqs {setting.max_num_seqs}, capacity {measured_capacity(base['requests'], setting.max_num_seqs):.3f} "
        "requests/s. Mean and 95 % interval over repetitions (Student's t; none for one repetition); ratios are paired "
        "within repetitions.",
        f"The simulator's step times are fitted to the capacity run only ({parameters}; median error of a "
        f"step {100 * fit.median_error:.1f} %).",
        f"Maximum delay of the client: {1e3 * late_s:.0f} ms."
        + (f" Outputs as long as in the run of fcfs: {100 * sum(same) / len(same):.1f} %." if same else ""),
    ]
    return "\n\n".join((_latencies(runs, setting), _checks(runs, setting), "\n".join(notes)))


def _latencies(runs: Metrics, setting: Setting) -> str:
    """Latencies in engine time: seconds for fcfs, ratios to fcfs for the others."""
    rows = []
    for key, head in _heads(runs, setting):
        ratios = key[2] != "fcfs"
        values = (_ratios(runs, key, name) if ratios else _values(runs, key, name) for name in LATENCIES)
        rows.append([*head, *(_cell(*interval(one)) if one else "-" for one in values)])
    return markdown_table(["load", "side", "runs", *LATENCIES.values()], rows)


def _checks(runs: Metrics, setting: Setting) -> str:
    """Wall-clock time, the machine, the scheduler's cost and the simulator."""
    header = [
        "load",
        "side",
        "wall clock: TTFT mean",
        "TTLT mean",
        "per token",
        "tokens/s while requests come",
    ]
    header += ["steps, times the fit", "scheduling, ms a step", "simulated per token, to fcfs", "simulated TTLT mean, error"]  # fmt: skip
    rows = []
    for key, (load, side, _) in _heads(runs, setting):
        ratios = key[2] != "fcfs"
        names = [f"wall_{name}" for name in ("ttft_mean", "ttlt_mean", "per_token_mean")] + ["tokens_per_s"]
        cells = [_ratios(runs, key, name) if ratios else _values(runs, key, name) for name in names]
        cells += [_values(runs, key, "slowness"), _values(runs, key, "scheduling_ms")]
        cells.append(_ratios(runs, key, "simulated_per_token_mean") if ratios else [])
        errors = [100 * (one["simulated_ttlt_mean"] / one["ttlt_mean"] - 1) for one in runs[key].values()]
        rows.append(
            [
                load,
                side,
                *(_cell(*interval(one)) if one else "-" for one in cells),
                f"{_cell(*interval(errors))} %",
            ]
        )
    return markdown_table(header, rows)


def _heads(runs: Metrics, setting: Setting) -> Iterator[tuple[tuple[float, bool, str], list[str]]]:
    for load, bursts in setting.loads:
        for side in SIDES:
            if (key := (load, bursts, side)) in runs:
                yield key, [f"{load}{', bursts' if bursts else ''}", side, str(len(runs[key]))]


def _values(runs: Metrics, key: tuple[float, bool, str], name: str) -> list[float]:
    return [metrics[name] for metrics in runs[key].values()]


def _ratios(runs: Metrics, key: tuple[float, bool, str], name: str) -> list[float]:
    """Ratios to fcfs, paired within repetitions."""
    base = runs.get((*key[:2], "fcfs"), {})
    return [metrics[name] / base[at][name] for at, metrics in runs[key].items() if at in base]


def _runs(setting: Setting) -> Iterator[tuple[Cell, dict[str, Any]]]:
    for load, bursts in setting.loads:
        for side in SIDES:
            pattern = Cell(side, 0, load, bursts).file(Path()).name.replace(f"{side}-0-", f"{side}-*-")
            for path in sorted(setting.folder.glob(pattern)):
                cell = Cell(side, int(path.name.split("-")[1]), load, bursts)
                yield cell, _read(cell, setting.folder)


def _read(cell: Cell, folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(cell.file(folder).read_text(encoding="utf-8"))
    return content


def _cell(mean: float, half: float) -> str:
    return f"{mean:.2f}" + ("" if math.isnan(half) else f" ± {half:.2f}")
