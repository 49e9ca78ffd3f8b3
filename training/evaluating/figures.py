"""Figures of an evaluation: predicted against fitted, reliability, PIT, bars by data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.files import atomic_file
from training.evaluating.report import LABELS, Report, number_at

FloatArray = NDArray[np.float64]
INK, PALE = "#1c2733", "#9aa5b1"
#: Of the main predictor, then of the others in their order.
COLOURS = ("#1f6f8b", "#d97b29", "#7a5195", "#5b8c3a", "#c8553d", "#9aa5b1", "#bfa046", "#4c6a92", "#8a8f98")
_DPI = 120


def draw_overview(report: Report, path: str | Path) -> None:
    """Predicted against fitted mu and sigma, and observed against nominal coverage beside the baselines."""
    plt = _pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
    _scatters(report, axes[:2])
    curves = [("predictor", report.content["model"])]
    curves += [(LABELS.get(name, name), found) for name, found in report.content["baselines"].items()]
    for number, (label, metrics) in enumerate(curves):
        levels, shares = _known(metrics["calibration"])
        axes[2].plot(levels, shares, color=_colour(number), linewidth=2 if number == 0 else 1, label=label)
    _nominal(axes[2])
    axes[2].legend(fontsize=8)
    _save(figure, path)


def draw_parameters(report: Report, path: str | Path) -> None:
    """Predicted against fitted mu and sigma."""
    figure, axes = _pyplot().subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    _scatters(report, axes)
    _save(figure, path)


def draw_reliability(report: Report, path: str | Path) -> None:
    """Coverage over its level, and how far P50, P90 and P99 are from nominal for each served model."""
    figure, (left, right) = _pyplot().subplots(
        1, 2, figsize=(11, 4.6), layout="constrained", width_ratios=(1, 1.35)
    )
    parts = report.content.get("by_model") or {}
    for metrics in parts.values():
        levels, shares = _known(metrics["calibration"])
        left.plot(levels, shares, color=COLOURS[0], linewidth=0.8, alpha=0.45)
    levels, shares = _known(report.content["model"]["calibration"])
    left.plot(levels, shares, color=INK, linewidth=2, label="all")
    if parts:
        left.plot([], [], color=COLOURS[0], linewidth=0.8, label="each served model")
    _nominal(left)
    left.legend(fontsize=8)
    _shifts(right, parts or {"all": report.content["model"]})
    _save(figure, path)


def draw_pit(report: Report, path: str | Path) -> None:
    """Histogram of F(x) of all answers, beside what no prompt-dependent prediction gives."""
    figure, axis = _pyplot().subplots(figsize=(7, 3.6), layout="constrained")
    shares = np.array(report.content["model"]["pit"])
    edges = np.linspace(0, 1, len(shares) + 1)
    axis.bar(
        edges[:-1], shares * len(shares), width=1 / len(shares), align="edge", color=COLOURS[0], alpha=0.8
    )
    other = report.content["baselines"].get("marginal")
    if other is not None:
        heights = np.array(other["pit"]) * len(shares)
        axis.stairs(heights, edges, color=COLOURS[1], linewidth=1.2, label=LABELS["marginal"])
        axis.legend(fontsize=8)
    axis.axhline(1, color=INK, linewidth=1, linestyle=":")
    axis.set(xlabel="F(x): predicted probability of an answer at most as long", ylabel="density", xlim=(0, 1))
    _save(figure, path)


def draw_datasets(report: Report, path: str | Path) -> None:
    """R2 of mu, Kendall tau and CRPS of log tokens by data set, the predictor beside the others."""
    names = list(report.content["by_dataset"])
    by_dataset = report.content["others_by_dataset"]
    shown = [*report.content["beside"]]
    shown += ["per_model" if "per_model" in by_dataset else "marginal", "prompt_length"]
    entries: list[tuple[str, Mapping[str, Any]]] = [("predictor", report.content["by_dataset"])]
    entries += [(LABELS.get(name, name), by_dataset[name]) for name in shown if name in by_dataset]
    panels = (
        ("R2 of mu (not below -1)", ("mu", "r2")),
        ("Kendall tau", ("kendall_tau", "median_vs_fitted_mu")),
        ("CRPS, log tokens", ("crps_log_tokens",)),
    )
    figure, axes = _pyplot().subplots(3, 1, figsize=(10, 8.4), layout="constrained", sharex=True)
    for axis, (title, where) in zip(axes, panels, strict=True):
        _bars(
            axis,
            names,
            [(label, [number_at(part[name], where) for name in names]) for label, part in entries],
        )
        axis.set_ylabel(title)
    axes[0].legend(fontsize=8, ncols=min(len(entries), 4))
    axes[0].set_ylim(bottom=max(axes[0].get_ylim()[0], -1.0))
    _save(figure, path)


def _scatters(report: Report, axes: Sequence[Any]) -> None:
    rows, prediction = report.judged.rows, report.judged.prediction
    at = rows.compared
    for axis, name, true, found in (
        (axes[0], "mu", rows.fits.mu, prediction.mu),
        (
            axes[1],
            "sigma",
            rows.fits.sigma,
            prediction.sigma if prediction.sigma_within is None else prediction.sigma_within,
        ),
    ):
        axis.set_xlabel(f"{name} fitted to the answers")
        axis.set_ylabel(f"{name} predicted from the prompt")
        if found is None or len(at) == 0:
            axis.text(0.5, 0.5, "not predicted", ha="center", transform=axis.transAxes, color=PALE)
            continue
        _cloud(axis, true[at], found[at], logs=name == "sigma")


def _cloud(axis: Any, true: FloatArray, found: FloatArray, *, logs: bool) -> None:
    """Points, or their density where there are many, about the line of equality."""
    scale = "log" if logs else "linear"
    if len(true) > 2000:
        axis.hexbin(
            true,
            found,
            gridsize=60,
            bins="log",
            mincnt=1,
            cmap="viridis",
            xscale=scale,
            yscale=scale,
            linewidths=0,
        )
    else:
        axis.scatter(true, found, s=8, alpha=0.4, color=COLOURS[0], linewidths=0)
        axis.set_xscale(scale)
        axis.set_yscale(scale)
    ends = [float(min(true.min(), found.min())), float(max(true.max(), found.max()))]
    axis.plot(ends, ends, color="#c8553d", linewidth=1)
    if logs:
        for ticks in (axis.xaxis, axis.yaxis):
            ticks.set_minor_formatter("")
            ticks.set_major_formatter("{x:g}")


def _shifts(axis: Any, parts: Mapping[str, Mapping[str, Any]]) -> None:
    """A row for each part: estimate minus nominal at each level, in percentage points."""
    names = list(parts)
    for number, level in enumerate(("p50", "p90", "p99")):
        points = [
            (100 * (found["estimate"] - found["level"]), row)
            for row, name in enumerate(names)
            if (found := parts[name]["coverage"].get(level)) is not None and found["estimate"] is not None
        ]
        if points:
            x, y = zip(*points, strict=True)
            axis.scatter(x, y, s=34, color=COLOURS[number], label=level.upper(), zorder=3)
    axis.axvspan(-2, 2, color="#e3e8ee", zorder=0)
    axis.axvline(0, color=INK, linewidth=1, linestyle=":")
    axis.set_yticks(range(len(names)), [name.rsplit("/", 1)[-1] for name in names], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("coverage minus nominal, percentage points (band: 2)")
    axis.legend(fontsize=8)


def _bars(axis: Any, names: Sequence[str], entries: Sequence[tuple[str, Sequence[float | None]]]) -> None:
    width = 0.8 / len(entries)
    for number, (label, values) in enumerate(entries):
        x = np.arange(len(names)) - 0.4 + (number + 0.5) * width
        heights = [np.nan if value is None else value for value in values]
        axis.bar(x, heights, width=width, color=_colour(number), label=label)
    axis.axhline(0, color=INK, linewidth=0.8)
    axis.set_xticks(range(len(names)), names, fontsize=9)


def _known(curve: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    found = [(row["level"], row["estimate"]) for row in curve if row["estimate"] is not None]
    return [level for level, _ in found], [share for _, share in found]


def _nominal(axis: Any) -> None:
    axis.plot([0, 1], [0, 1], color=PALE, linewidth=1, linestyle=":")
    axis.set_xlabel("nominal probability")
    axis.set_ylabel("share of answers below the quantile")


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, path: str | Path) -> None:
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=_DPI, format="png")
    _pyplot().close(figure)
