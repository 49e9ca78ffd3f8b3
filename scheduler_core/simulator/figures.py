"""Figures of runs, as SVG text: distribution functions, violins, memory over time, load and latency, Gantt charts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.report.plotting import (
    COLORS,
    MAX_NAMED_CURVES,
    color,
    dash,
    mark_decades,
    new_figure,
    svg,
)
from scheduler_core.simulator.watch import LoadTimeline, Segment

FloatArray = NDArray[np.float64]
#: A distribution function: values, and the fraction of values up to each.
Curve = tuple[FloatArray, FloatArray]
#: Points of a drawn distribution function.
NUM_POINTS = 400
_KIND_COLORS = {"prefill": "#D55E00", "decode": "#0072B2", "waiting": "#dddddd"}


def empirical(values: Sequence[float] | FloatArray) -> Curve:
    """The empirical distribution function at up to `NUM_POINTS` quantiles."""
    levels = np.linspace(0.0, 1.0, min(NUM_POINTS, max(2, len(values))))
    return np.quantile(np.asarray(values, float), levels), levels


def distribution_functions(panels: Mapping[str, Mapping[str, Curve]]) -> str:
    """One panel per name, in each one curve per group; the time axis is logarithmic."""
    figure, axes = new_figure(3.6 * len(panels), 3.2, columns=len(panels))
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        _draw_curves(axis, curves)
        axis.set_xlabel(f"{title}, s")
        axis.set_ylabel("fraction of gaps" if title == "TBT" else "fraction of requests")
    _legend(figure, axes[0], len(panels[next(iter(panels))]))
    return svg(figure)


def ratio_functions(panels: Mapping[str, Mapping[str, Curve]]) -> str:
    """One panel per latency: the distribution function of a ratio, with a line at 1; the axis is logarithmic."""
    figure, axes = new_figure(3.6 * len(panels), 3.0, columns=len(panels))
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        _draw_curves(axis, curves)
        axis.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
        axis.set_xlabel(f"{title}, b / a")
        axis.set_ylabel("fraction of requests")
    return svg(figure)


def _draw_curves(axis: Any, curves: Mapping[str, Curve]) -> None:
    for index, (name, (x, y)) in enumerate(curves.items()):
        style = {"color": color(index), "linestyle": dash(index), "linewidth": 1.4}
        axis.step(np.maximum(x, 1e-6), y, where="post", label=name, **style)
    axis.set_xscale("log")
    mark_decades(axis.xaxis, axis.get_xlim())
    axis.set_ylim(0, 1.01)


def _legend(figure: Any, axis: Any, num_curves: int) -> None:
    """A legend outside the panels, where there are several curves and not too many to be told apart."""
    if 1 < num_curves <= MAX_NAMED_CURVES:
        figure.legend(*axis.get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside right upper")


def violins(panels: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """One panel per latency, in each one violin per group with its median and P99 marked; the axis is logarithmic."""
    num_groups = max(len(groups) for groups in panels.values())
    width = min(11.0, len(panels) * max(3.6, 0.9 * num_groups))
    figure, axes = new_figure(width, 3.4, columns=len(panels))
    for axis, (label, groups) in zip(axes, panels.items(), strict=True):
        _draw_violins(axis, groups)
        axis.set_ylabel(f"{label}, s")
    return svg(figure)


def _draw_violins(axis: Any, groups: Mapping[str, Sequence[float]]) -> None:
    logs = [np.log10(np.maximum(np.asarray(values, float), 1e-6)) for values in groups.values()]
    drawable = [index for index, values in enumerate(logs) if np.ptp(values) > 0]
    if drawable:
        parts = axis.violinplot([logs[index] for index in drawable], drawable, showextrema=False, widths=0.8)
        for body in parts["bodies"]:
            body.set_facecolor(COLORS[0])
            body.set_alpha(0.45)
    for index, values in enumerate(logs):
        axis.plot(index, np.quantile(values, 0.5), "o", color="black", markersize=5)
        axis.plot(index, np.quantile(values, 0.99), "_", color="black", markersize=12)
    font = {"fontsize": 7, "rotation": 45} if len(groups) > 6 else {"fontsize": 8}
    labels = [f"{name}\nn = {len(values)}" for name, values in groups.items()]
    axis.set_xticks(np.arange(len(groups)), labels, **font)
    low, high = axis.get_ylim()
    decades = range(math.floor(low), math.ceil(high) + 1)
    digits = (1, 2, 5) if high - low <= 3 else (1,)
    ticks = [math.log10(digit) + power for power in decades for digit in digits]
    axis.set_yticks([tick for tick in ticks if low <= tick <= high])
    axis.yaxis.set_major_formatter(lambda value, _: f"{10**value:.3g}")


def load_over_time(loads: Mapping[str, LoadTimeline]) -> str:
    """Fraction of KV blocks in use, and running and waiting requests; one line per replica."""
    figure, axes = new_figure(11.4, 2.8, columns=3)
    for index, (name, line) in enumerate(loads.items()):
        times = [point.time_s for point in line.points]
        series = (
            [100 * point.kv_usage for point in line.points],
            [point.num_running for point in line.points],
            [point.num_waiting for point in line.points],
        )
        style = {"color": color(index), "linestyle": dash(index), "linewidth": 0.9, "alpha": 0.8}
        for axis, values in zip(axes, series, strict=True):
            axis.step(times, values, where="post", label=f"replica {name}", **style)
    titles = ("KV blocks in use, %", "running requests", "waiting requests")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_xlabel("time, s")
        axis.set_ylabel(title)
        axis.set_ylim(0, max(axis.get_ylim()[1], 1.0))
    _legend(figure, axes[0], len(loads))
    return svg(figure)


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
    _legend(figure, axes[0], len(panels[next(iter(panels))]))
    return svg(figure)


def gantt(segments: Sequence[Segment], arrivals: Mapping[str, float], max_requests: int = 60) -> str:
    """The first requests over time: waiting from arrival, then prefill and decode; one row each. A black mark: the
    request moved to another replica."""
    names = sorted(arrivals, key=lambda name: (arrivals[name], name))[:max_requests]
    rows = {name: row for row, name in enumerate(names)}
    figure, (axis,) = new_figure(11.0, max(2.0, 0.16 * len(names) + 0.9))
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    last: dict[str, Segment] = {}
    moves: list[tuple[float, int]] = []
    for one in sorted(segments, key=lambda one: one.start_s):
        if one.request_id not in rows:
            continue
        row, before = rows[one.request_id], last.get(one.request_id)
        bars.setdefault((row, one.kind), []).append((one.start_s, one.end_s - one.start_s))
        if before is not None and before.replica_id != one.replica_id:
            moves.append((one.start_s, row))
        if before is None or one.end_s >= before.end_s:
            last[one.request_id] = one
    for name, segment in last.items():
        span = (arrivals[name], segment.end_s - arrivals[name])
        axis.broken_barh([span], (rows[name] - 0.4, 0.8), color=_KIND_COLORS["waiting"])
    for (row, kind), spans in bars.items():
        axis.broken_barh(spans, (row - 0.4, 0.8), color=_KIND_COLORS[kind])
    if moves:
        axis.plot(*zip(*moves, strict=True), "|", color="black", markersize=5, label="moved")
    axis.set_yticks(range(len(names)), names, fontsize=6)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.set_xlabel("time, s")
    for kind, kind_color in _KIND_COLORS.items():
        axis.broken_barh([], (0, 0), color=kind_color, label=kind)
    figure.legend(frameon=False, fontsize=8, loc="outside upper right", ncols=4)
    return svg(figure)
