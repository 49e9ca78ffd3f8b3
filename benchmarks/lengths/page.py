"""The tables and the figure of docs/length-benchmark.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.lengths.hazards import Row
from benchmarks.shared.pages import number_cell, put_section, write_svg
from scheduler_core.report.page import markdown_table
from scheduler_core.report.plotting import color, dash, new_figure

#: Entrants in the table, and those in the figure.
SHOWN = (
    "pretrained, memory",
    "pretrained, calibration",
    "pretrained, raw",
    "tiny, memory",
    "memory alone",
    "llm-d sketch, fine bins",
    "llm-d outlen-bucket",
    "AIBrix histogram",
    "prompt length",
    "Clairvoyant's recipe",
    "S3 buckets",
    "LTR (linear ranker)",
)
PLOTTED = (*SHOWN[:6], "AIBrix histogram", "Clairvoyant's recipe", "S3 buckets")
#: The windows of the table.
WINDOW = {"M": "1000", "L": "3000"}


def write_page(page: Path, tables: Mapping[str, Sequence[Row]]) -> None:
    """Replaces the tables of the page that have been measured."""
    if tables["scores"]:
        put_section(page, "scores", _scores(tables["scores"]))
    if tables["hazards"]:
        header = ("stream", "calibration", "memory", "ratio")
        put_section(page, "hazards", markdown_table(header, _hazards(tables["hazards"])))


def _hazards(rows: Sequence[Row]) -> list[list[str]]:
    single = [row for row in rows if row["study"] == "alone"]
    lines = []
    if single:
        mean = [
            number_cell(float(np.mean([float(row[key]) for row in single])))
            for key in ("calibration", "memory")
        ]
        ratios = np.array([row["ratio"] for row in single], float)
        label = f"{len(single)} applications, each alone"
        lines.append([label, *mean, f"{ratios.mean():.3f} (worst {ratios.max():.3f})"])
    for row in rows:
        if row["study"] != "alone" and row["case"] != "none, tenants unknown":
            numbers = [number_cell(row[key]) for key in ("calibration", "memory", "ratio")]
            lines.append([f"{row['study']}: {row['case']}", *numbers])
    return lines


def _scores(rows: Sequence[Row]) -> str:
    by_key = {(row["stream"], row["entrant"], row["after"]): row for row in rows}
    header = ("entrant", "tau", "pairs", "CRPS", "pinball .9", "P50 / P90 / P99", "tau, L", "CRPS, L", "µs")
    lines = []
    for name in SHOWN:
        row = by_key.get(("M", name, WINDOW["M"]))
        if row is None:
            continue
        large = by_key.get(("L", name, WINDOW["L"]), {})
        coverage = " / ".join(
            number_cell(100 * row[f"coverage_{level}"], "{:.1f}") for level in (0.5, 0.9, 0.99)
        )
        numbers = [number_cell(row[key]) for key in ("tau", "pairs", "crps", "pinball_0.9")]
        more = [number_cell(large.get(key, "")) for key in ("tau", "crps")]
        lines.append([name, *numbers, coverage, *more, f"{row['predict_us']:,.0f}"])
    return markdown_table(header, lines)


def plot(file: Path, rows: Sequence[Row]) -> None:
    """Kendall's tau over the windows of M and L, as SVG."""
    figure, axes = new_figure(9.0, 3.4, columns=2, sharey=True)
    for axis, stream in zip(axes, WINDOW, strict=True):
        windows = list(dict.fromkeys(row["after"] for row in rows if row["stream"] == stream))
        for number, name in enumerate(PLOTTED):
            values = [
                row["tau"] or np.nan for row in rows if (row["stream"], row["entrant"]) == (stream, name)
            ]
            if values:
                style = {"color": color(number), "linestyle": dash(number), "marker": "o", "markersize": 3}
                axis.plot(range(len(values)), np.array(values, float), label=name, **style)
        axis.set_xticks(range(len(windows)), [f"{int(window):,}" for window in windows])
        axis.set(title=f"stream {stream}", xlabel="after so many requests")
    axes[0].set_ylabel("Kendall's tau")
    write_svg(file, figure, axes[0])
