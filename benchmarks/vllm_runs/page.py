"""The table of a benchmark from the runs that are there, complete or not."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.vllm_runs.plan import CAPACITY, SIDES, Cell
from benchmarks.vllm_runs.results import (
    CLOCK,
    calibrated,
    interval,
    measured_capacity,
    run_metrics,
    scheduling_s,
    simulated,
    slowness,
    window_throughput,
)
from scheduler_core.predictions import LengthPrediction
from scheduler_core.report.page import markdown_table

SHOWN = {
    "per_token_mean": ("per token, s", 3), "per_token_p90": ("P90", 3), "ttft_mean": ("TTFT, s", 2),
    "ttlt_mean": ("TTLT, s", 2), "ttlt_p90": ("P90", 2), "window_tokens_per_s": ("tokens/s while requests come", 1),
    "slowness": ("steps, times the fit", 2), "scheduling_ms": ("scheduling, ms a step", 2),
    "clock_per_token_mean": ("engine's clock: per token, s", 3), "clock_ttft_mean": ("TTFT, s", 2),
    "clock_ttlt_mean": ("TTLT, s", 2), "clock_window_tokens_per_s": ("tokens/s while requests come", 1),
}  # fmt: skip

COMPARED = {"per_token_mean": "per token", "window_tokens_per_s": "tokens/s while requests come"}

Found = dict[tuple[str, float], dict[int, dict[str, float]]]


@dataclass(frozen=True, slots=True)
class Setting:
    """What the table has to know.

    Attributes:
        folder: Of the runs.
        num_prompts: Requests of a run.
        max_tokens: Cap of answers.
        max_num_seqs: Places of the engine.
        loads: In the order of the table.
        predictions: By request, for the simulator.
    """

    folder: Path
    num_prompts: int
    max_tokens: int
    max_num_seqs: int
    loads: Sequence[float]
    predictions: Mapping[str, LengthPrediction]


def report(setting: Setting) -> str:
    """Markdown: a row for each load and side with at least one run, and notes. Empty without the capacity run."""
    if not CAPACITY.file(setting.folder).exists():
        return ""
    base = _read(CAPACITY, setting.folder)
    fit = calibrated(base["steps"])
    real: Found = {}
    model: Found = {}
    same: list[bool] = []
    late = 0.0
    for cell, run in _runs(setting):
        key, load = (cell.side, cell.load or 0.0), cell.load
        clock = run_metrics(run["requests"], CLOCK) | {"window_tokens_per_s": window_throughput(run, CLOCK)}
        metrics = run_metrics(run["requests"]) | {
            "window_tokens_per_s": window_throughput(run), "slowness": slowness(run["steps"], fit),
            "scheduling_ms": 1e3 * scheduling_s(run["steps"]), **{f"clock_{name}": clock[name] for name in clock},
        }  # fmt: skip
        real.setdefault(key, {})[cell.repetition] = metrics
        simulated_metrics = simulated(
            cell.side, run, setting.predictions, fit.step_time, setting.max_num_seqs, setting.max_tokens
        )
        model.setdefault(key, {})[cell.repetition] = simulated_metrics
        late = max(late, *(row["sent_s"] - row["arrival_s"] for row in run["requests"]))
        pair = Cell("fcfs", cell.repetition, load)
        if cell.side != "fcfs" and pair.file(setting.folder).exists():
            lengths = {
                row["request_id"]: row["output_tokens"] for row in _read(pair, setting.folder)["requests"]
            }
            same += [lengths[row["request_id"]] == row["output_tokens"] for row in run["requests"]]
    header = ["load", "side", "runs", *(words for words, _ in SHOWN.values())]
    header += [
        f"{clock}{words}, to fcfs" for clock in ("", "engine's clock: ") for words in COMPARED.values()
    ]
    header += [
        "simulated: per token, s",
        "to fcfs",
        "TTLT, s",
        "its error",
        "its error by the engine's clock",
    ]
    rows = [_row(load, side, real, model) for load in setting.loads for side in SIDES if (side, load) in real]
    tokens = [row["output_tokens"] for row in base["requests"]]
    parameters = ", ".join(f"{name} {1e3 * value:.3g} ms" for name, value in fit.parameters.items())
    notes = [
        f"{setting.num_prompts} prompts, cap {setting.max_tokens} tokens (mean answer {sum(tokens) / len(tokens):.0f}), "
        f"max_num_seqs {setting.max_num_seqs}, capacity {measured_capacity(base['requests'], setting.max_num_seqs):.3f} "
        "requests/s. Mean and 95 % interval over repetitions (Student's t; none for one repetition); changes are paired "
        "within repetitions. How many times as long steps took as the fit says is the machine's doing, or a side's.",
        f"The simulator's step times are fitted to the capacity run alone ({parameters}; median error of a step "
        f"{100 * fit.median_error:.1f} %), and its arrivals are those by the engine's clock: all rows are loads and orders that "
        "the fit has not seen. Against the wall's clock its error has the machine's changes of speed in it.",
        f"The client was late by {1e3 * late:.0f} ms at most."
        + (f" Answers as long as in fcfs's run: {100 * sum(same) / len(same):.1f} %." if same else ""),
    ]
    return (markdown_table(header, rows) if rows else "No run yet.") + "\n\n" + "\n".join(notes)


def _runs(setting: Setting) -> list[tuple[Cell, dict[str, Any]]]:
    content = []
    for load in setting.loads:
        for side in SIDES:
            for path in sorted(setting.folder.glob(f"{side}-*-{load}.json")):
                cell = Cell(side, int(path.name.split("-")[1]), load)
                content.append((cell, _read(cell, setting.folder)))
    return content


def _read(cell: Cell, folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(cell.file(folder).read_text(encoding="utf-8"))
    return content


def _row(load: float, side: str, real: Found, model: Found) -> list[str]:
    runs, simulated_metrics = real[side, load], model[side, load]
    cells = [f"{load}x", side, str(len(runs))]
    for name, (_, digits) in SHOWN.items():
        cells.append(_cell(*interval([metrics[name] for metrics in runs.values()]), digits=digits))
    cells += [_change(side, load, real, f"{clock}{name}") for clock in ("", "clock_") for name in COMPARED]
    cells.append(
        _cell(*interval([metrics["per_token_mean"] for metrics in simulated_metrics.values()]), digits=3)
    )
    cells.append(_change(side, load, model, "per_token_mean"))
    cells.append(_cell(*interval([metrics["ttlt_mean"] for metrics in simulated_metrics.values()]), digits=2))
    for measured in ("ttlt_mean", "clock_ttlt_mean"):
        errors = [
            100 * (simulated_metrics[number]["ttlt_mean"] / runs[number][measured] - 1) for number in runs
        ]
        cells.append(_cell(*interval(errors), digits=1) + " %")
    return cells


def _change(side: str, load: float, content: Found, name: str) -> str:
    """Against fcfs, in percent, paired within repetitions."""
    base, mine = content.get(("fcfs", load), {}), content[side, load]
    pairs = [100 * (mine[number][name] / base[number][name] - 1) for number in mine if number in base]
    return "-" if side == "fcfs" or not pairs else _cell(*interval(pairs), digits=1) + " %"


def _cell(mean: float, half: float, digits: int) -> str:
    return f"{mean:.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")
