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
    calibrated,
    interval,
    mean_step_s,
    measured_capacity,
    run_metrics,
    simulated,
    slowness,
    window_throughput,
)
from scheduler_core.predictions import LengthPrediction
from training.markdown_section import markdown_table

SHOWN = {
    "per_token_mean": ("per token, s", 3), "per_token_p90": ("P90", 3), "ttft_mean": ("TTFT, s", 2),
    "ttlt_mean": ("TTLT, s", 2), "ttlt_p90": ("P90", 2), "window_tokens_per_s": ("tokens/s while requests come", 1),
    "tokens_per_s": ("tokens/s to the end", 1), "step_ms": ("decode step, ms", 1),
}  # fmt: skip

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
    fit = calibrated(base)
    real: Found = {}
    model: Found = {}
    same: list[bool] = []
    late = 0.0
    probes: list[float] = []
    for cell, run in _runs(setting):
        key, load = (cell.side, cell.load or 0.0), cell.load
        metrics = run_metrics(run["requests"]) | {
            "window_tokens_per_s": window_throughput(run), "step_ms": 1e3 * mean_step_s(run["steps"])
        }  # fmt: skip
        real.setdefault(key, {})[cell.repetition] = metrics
        slower = slowness(run["probe"], fit)
        probes.append(slower)
        told = simulated(
            cell.side, run, setting.predictions, calibrated(base, slower).step_time, setting.max_num_seqs,
            setting.max_tokens,
        )  # fmt: skip
        model.setdefault(key, {})[cell.repetition] = told
        late = max(late, *(row["sent_s"] - row["arrival_s"] for row in run["requests"]))
        pair = Cell("fcfs", cell.repetition, load)
        if cell.side != "fcfs" and pair.file(setting.folder).exists():
            lengths = {
                row["request_id"]: row["output_tokens"] for row in _read(pair, setting.folder)["requests"]
            }
            same += [lengths[row["request_id"]] == row["output_tokens"] for row in run["requests"]]
    header = ["load", "side", "runs", *(words for words, _ in SHOWN.values())]
    header += ["per token to fcfs", "tokens/s while requests come, to fcfs"]
    header += ["simulated: per token, s", "to fcfs", "TTLT, s", "its error"]
    rows = [_row(load, side, real, model) for load in setting.loads for side in SIDES if (side, load) in real]
    tokens = [row["output_tokens"] for row in base["requests"]]
    parameters = ", ".join(f"{name} {1e3 * value:.3g} ms" for name, value in fit.parameters.items())
    notes = [
        f"{setting.num_prompts} prompts, cap {setting.max_tokens} tokens (mean answer {sum(tokens) / len(tokens):.0f}), "
        f"max_num_seqs {setting.max_num_seqs}, capacity {measured_capacity(base['requests'], setting.max_num_seqs):.3f} "
        "requests/s. Mean and 95 % interval over repetitions (Student's t; none for one repetition); changes are paired "
        "within repetitions. Decode steps of different length on different sides mean that the machine was not quiet.",
        f"The simulator's step times are fitted to the capacity run alone ({parameters}; median error of a step "
        f"{100 * fit.median_error:.1f} %), and follow the machine's speed as the arrivals do: all rows are loads and orders "
        "that the fit has not seen."
        + (
            f" Decode steps before a run took {min(probes):.2f} to {max(probes):.2f} times what the fit says."
            if probes
            else ""
        ),
        f"The client was late by {1e3 * late:.0f} ms at most."
        + (f" Answers as long as in fcfs's run: {100 * sum(same) / len(same):.1f} %." if same else ""),
    ]
    return (markdown_table(header, rows) if rows else "No run yet.") + "\n\n" + "\n".join(notes)


def _runs(setting: Setting) -> list[tuple[Cell, dict[str, Any]]]:
    found = []
    for load in setting.loads:
        for side in SIDES:
            for path in sorted(setting.folder.glob(f"{side}-*-{load}.json")):
                cell = Cell(side, int(path.name.split("-")[1]), load)
                found.append((cell, _read(cell, setting.folder)))
    return found


def _read(cell: Cell, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(cell.file(folder).read_text(encoding="utf-8"))
    return found


def _row(load: float, side: str, real: Found, model: Found) -> list[str]:
    runs, told = real[side, load], model[side, load]
    cells = [f"{load}x", side, str(len(runs))]
    for name, (_, digits) in SHOWN.items():
        cells.append(_cell(*interval([metrics[name] for metrics in runs.values()]), digits=digits))
    cells += [_change(side, load, real, name) for name in ("per_token_mean", "window_tokens_per_s")]
    cells.append(_cell(*interval([metrics["per_token_mean"] for metrics in told.values()]), digits=3))
    cells.append(_change(side, load, model, "per_token_mean"))
    cells.append(_cell(*interval([metrics["ttlt_mean"] for metrics in told.values()]), digits=2))
    errors = [100 * (told[number]["ttlt_mean"] / runs[number]["ttlt_mean"] - 1) for number in runs]
    return [*cells, _cell(*interval(errors), digits=1) + " %"]


def _change(side: str, load: float, found: Found, name: str) -> str:
    """Against fcfs, in percent, paired within repetitions."""
    base, mine = found.get(("fcfs", load), {}), found[side, load]
    pairs = [100 * (mine[number][name] / base[number][name] - 1) for number in mine if number in base]
    return "-" if side == "fcfs" or not pairs else _cell(*interval(pairs), digits=1) + " %"


def _cell(mean: float, half: float, digits: int) -> str:
    return f"{mean:.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")
