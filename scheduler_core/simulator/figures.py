"""Figures of runs and sweeps, as SVG text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.report.plotting import MAX_NAMED_CURVES, color, dash, mark_decades, new_figure, svg

FloatArray = NDArray[np.float64]
#: A distribution function: values, and the fraction of values up to each.
Curve = tuple[FloatArray, FloatArray]
#: Points of a drawn distribution function.
NUM_POINTS = 400


def empirical(values: FloatArray) -> Curve:
    """The empirical distribution function at up to `NUM_POINTS` quantiles."""
    levels = np.linspace(0.0, 1.0, min(NUM_POINTS, max(2, len(values))))
    return np.quantile(values, levels), levels


def distribution_functions(panels: Mapping[str, Mapping[str, Curve]]) -> str:
    """One panel per name, in each one curve per group; the time axis is logarithmic."""
    figure, axes = new_figure(3.6 * len(panels), 3.2, columns=len(panels))
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        for index, (name, (x, y)) in enumerate(curves.items()):
            style = {"color": color(index), "linestyle": dash(index), "linewidth": 1.4}
            axis.step(np.maximum(x, 1e-6), y, where="post", label=name, **style)
        axis.set_xscale("log")
        mark_decades(axis.xaxis, axis.get_xlim())
        axis.set_ylim(0, 1.01)
        axis.set_xlabel(f"{title}, s")
        axis.set_ylabel("fraction of gaps" if title == "TBT" else "fraction of requests")
    return _with_legend(figure, axes[0])


def load_latency(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float, float, float]]]], x_label: str
) -> str:
    """One panel per latency, in each one curve per system of points (load, mean, low, high); the bar is the interval."""
    figure, axes = new_figure(3.2 * len(panels), 3.2, columns=len(panels))
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        means: list[float] = []
        for index, (name, points) in enumerate(curves.items()):
            x, mean, low, high = np.array(sorted(points)).T
            style = {"color": color(index), "markersize": 3.5, "linewidth": 1.3}
            axis.plot(x, mean, f"o{dash(index)}", label=name, **style)
            finite = np.isfinite(low) & np.isfinite(high)
            axis.vlines(x[finite], np.maximum(low, 1e-9)[finite], high[finite], color=color(index), alpha=0.4)
            means.extend(mean[np.isfinite(mean) & (mean > 0)])
        if means:  # an interval that reaches below 0 must not stretch the axis
            axis.set_ylim(min(means) / 2, max(means) * 2)
        axis.set_yscale("log")
        mark_decades(axis.yaxis, axis.get_ylim())
        axis.set_xlabel(x_label)
        axis.set_ylabel(f"{title}, s")
    return _with_legend(figure, axes[0])


def _with_legend(figure: Any, axis: Any) -> str:
    """The figure with a legend outside the panels, where there are several curves and not too many to be told apart."""
    handles, labels = axis.get_legend_handles_labels()
    if 1 < len(labels) <= MAX_NAMED_CURVES:
        figure.legend(handles, labels, frameon=False, fontsize=8, loc="outside right upper")
    return svg(figure)
