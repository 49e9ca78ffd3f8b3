"""Figures of an evaluation: predicted against fitted parameters, reliability, PIT, bars by data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.report.plotting import COLORS, GRAY, INK, color, new_figure
from training.evaluating.evaluation import ScoredPredictor

FloatArray = NDArray[np.float64]
#: More points are drawn as their density.
_MAX_POINTS = 2000


def number_at(metrics: Mapping[str, Any], path: Sequence[str]) -> float | None:
    """A number inside metrics; None where it is missing or unknown."""
    value: Any = metrics
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return None if value is None else float(value)


def parameters(scored: ScoredPredictor) -> Any:
    """Predicted against fitted mu and sigma."""
    figure, axes = new_figure(9, 4.2, columns=2)
    _scatters(scored, axes)
    return figure


def reliability(content: Mapping[str, Any]) -> Any:
    """Coverage over its level, and the shift of P50, P90 and P99 from nominal for each served model."""
    figure, (left, right) = new_figure(11, 4.6, columns=2, width_ratios=(1, 1.35))
    parts = content.get("by_model") or {}
    for metrics in parts.values():
        left.plot(*_calibration_curve(metrics), color=COLORS[0], linewidth=0.8, alpha=0.45)
    left.plot(*_calibration_curve(content["model"]), color=INK, linewidth=2, label="all")
    if parts:
        left.plot([], [], color=COLORS[0], linewidth=0.8, label="each served model")
    _diagonal(left)
    left.legend(fontsize=8)
    _shifts(right, parts or {"all": content["model"]})
    return figure


def pit(content: Mapping[str, Any], labels: Mapping[str, str]) -> Any:
    """Histogram of F(x) of all outputs, and that of one distribution for all prompts."""
    figure, [axis] = new_figure(7, 3.6)
    fractions = np.array(content["model"]["pit"])
    edges = np.linspace(0, 1, len(fractions) + 1)
    heights = fractions * len(fractions)
    axis.bar(edges[:-1], heights, width=1 / len(fractions), align="edge", color=COLORS[0], alpha=0.8)
    marginal = content["baselines"].get("marginal")
    if marginal is not None:
        heights = np.array(marginal["pit"]) * len(fractions)
        axis.stairs(heights, edges, color=COLORS[1], linewidth=1.2, label=labels["marginal"])
        axis.legend(fontsize=8)
    axis.axhline(1, color=INK, linewidth=1, linestyle=":")
    axis.set(xlabel="F(x): predicted probability of an output at most as long", ylabel="density", xlim=(0, 1))
    return figure


def datasets(content: Mapping[str, Any], labels: Mapping[str, str]) -> Any:
    """R2 of mu, Kendall's tau and CRPS of log tokens by data set, for the predictor and others."""
    names = list(content["by_dataset"])
    by_dataset = content["others_by_dataset"]
    others = [*content["compared"]]
    others += ["per_model" if "per_model" in by_dataset else "marginal", "prompt_length"]
    entries: list[tuple[str, Mapping[str, Any]]] = [("predictor", content["by_dataset"])]
    entries += [(labels.get(name, name), by_dataset[name]) for name in others if name in by_dataset]
    metrics = (
        ("R2 of mu (not below -1)", ("mu", "r2")),
        ("Kendall's tau", ("kendall_tau", "median_vs_fitted_mu")),
        ("CRPS, log tokens", ("crps_log_tokens",)),
    )
    figure, axes = new_figure(10, 8.4, rows=3, sharex=True)
    for axis, (title, path) in zip(axes, metrics, strict=True):
        _bars(
            axis, names, [(label, [number_at(part[name], path) for name in names]) for label, part in entries]
        )
        axis.set_ylabel(title)
    axes[0].legend(fontsize=8, ncols=min(len(entries), 4))
    axes[0].set_ylim(bottom=max(axes[0].get_ylim()[0], -1.0))
    return figure


def _scatters(scored: ScoredPredictor, axes: Sequence[Any]) -> None:
    rows, prediction = scored.rows, scored.prediction
    sigma = prediction.sigma if prediction.sigma_within is None else prediction.sigma_within
    for axis, name, fitted, predicted in (
        (axes[0], "mu", rows.fits.mu, prediction.mu),
        (axes[1], "sigma", rows.fits.sigma, sigma),
    ):
        axis.set_xlabel(f"{name} fitted to the outputs")
        axis.set_ylabel(f"{name} predicted from the prompt")
        if predicted is None or len(rows.compared) == 0:
            axis.text(0.5, 0.5, "not predicted", ha="center", transform=axis.transAxes, color=GRAY)
            continue
        _cloud(axis, fitted[rows.compared], predicted[rows.compared], "log" if name == "sigma" else "linear")


def _cloud(axis: Any, fitted: FloatArray, predicted: FloatArray, scale: str) -> None:
    """Points, or their density where there are many, about the line of equality."""
    if len(fitted) > _MAX_POINTS:
        options = {"gridsize": 60, "bins": "log", "mincnt": 1, "cmap": "viridis", "linewidths": 0}
        axis.hexbin(fitted, predicted, xscale=scale, yscale=scale, **options)
    else:
        axis.scatter(fitted, predicted, s=8, alpha=0.4, color=COLORS[0], linewidths=0)
        axis.set_xscale(scale)
        axis.set_yscale(scale)
    ends = [float(min(fitted.min(), predicted.min())), float(max(fitted.max(), predicted.max()))]
    axis.plot(ends, ends, color=COLORS[1], linewidth=1)
    if scale == "log":
        for ticks in (axis.xaxis, axis.yaxis):
            ticks.set_minor_formatter("")
            ticks.set_major_formatter("{x:g}")


def _shifts(axis: Any, parts: Mapping[str, Mapping[str, Any]]) -> None:
    """A row for each part: estimate minus nominal at each level, in percentage points."""
    for number, level in enumerate(("p50", "p90", "p99")):
        entries = [part["coverage"].get(level) for part in parts.values()]
        points = [
            (100 * (entry["estimate"] - entry["level"]), row)
            for row, entry in enumerate(entries)
            if entry is not None and entry["estimate"] is not None
        ]
        if points:
            x, y = zip(*points, strict=True)
            axis.scatter(x, y, s=34, color=color(number), label=level.upper(), zorder=3)
    axis.axvspan(-2, 2, color="#e3e8ee", zorder=0)
    axis.axvline(0, color=INK, linewidth=1, linestyle=":")
    axis.set_yticks(range(len(parts)), [name.rsplit("/", 1)[-1] for name in parts], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("coverage minus nominal, percentage points (band: 2)")
    axis.legend(fontsize=8)


def _bars(axis: Any, names: Sequence[str], entries: Sequence[tuple[str, Sequence[float | None]]]) -> None:
    width = 0.8 / len(entries)
    for number, (label, values) in enumerate(entries):
        x = np.arange(len(names)) - 0.4 + (number + 0.5) * width
        heights = [np.nan if value is None else value for value in values]
        axis.bar(x, heights, width=width, color=color(number), label=label)
    axis.axhline(0, color=INK, linewidth=0.8)
    axis.set_xticks(range(len(names)), names, fontsize=9)


def _calibration_curve(metrics: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    points = [entry for entry in metrics["calibration"] if entry["estimate"] is not None]
    return [point["level"] for point in points], [point["estimate"] for point in points]


def _diagonal(axis: Any) -> None:
    axis.plot([0, 1], [0, 1], color=GRAY, linewidth=1, linestyle=":")
    axis.set_xlabel("nominal probability")
    axis.set_ylabel("fraction of outputs below the quantile")
