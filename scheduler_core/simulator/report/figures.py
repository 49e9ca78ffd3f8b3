"""Figures of runs, as SVG text: distribution functions, violins, memory over time, load and latency, Gantt charts."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import MissingExtraError
from scheduler_core.simulator.watch import LoadTimeline, Segment

FloatArray = NDArray[np.float64]
#: Points of a drawn distribution function.
NUM_POINTS = 400
#: Okabe and Ito's colours, told apart by everybody.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
_KINDS = {"prefill": "#D55E00", "decode": "#0072B2", "waiting": "#dddddd"}


def _figure(columns: int, width: float, height: float) -> tuple[Any, list[Any]]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "sim") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, columns))
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.6)
    return figure, list(axes)


def _svg(figure: Any) -> str:
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tailcast"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = re.sub("<metadata>.*?</metadata>", "", out.getvalue(), flags=re.DOTALL)
    return text[text.index("<svg") :]


def _mark_decades(axis: Any, limits: tuple[float, float]) -> None:
    """Plain numbers at 1, 2, 5 of each decade of a logarithmic axis, at 1 alone where that would be many."""
    low, high = limits
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if len(decades) <= 3 else (1,)
    ticks = [digit * 10.0**power for power in decades for digit in digits]
    axis.set_ticks([tick for tick in ticks if low <= tick <= high])
    axis.set_ticks([], minor=True)
    axis.set_major_formatter(lambda value, _: f"{value:g}")


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def empirical(values: Sequence[float]) -> tuple[FloatArray, FloatArray]:
    """(values, share of values up to there): the empirical distribution function at up to `NUM_POINTS` quantiles."""
    shares = np.linspace(0.0, 1.0, min(NUM_POINTS, max(2, len(values))))
    return np.quantile(np.asarray(values, float), shares), shares


Curve = tuple[FloatArray, FloatArray]


def distribution_functions(panels: Mapping[str, Mapping[str, Curve]]) -> str:
    """One panel per name, in each one curve per group; the time axis is logarithmic."""
    figure, axes = _figure(len(panels), 3.6 * len(panels), 3.2)
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        for index, (name, (x, y)) in enumerate(curves.items()):
            axis.step(np.maximum(x, 1e-6), y, where="post", color=_colour(index), label=name, linewidth=1.4)
        axis.set_xscale("log")
        _mark_decades(axis.xaxis, axis.get_xlim())
        axis.set_ylim(0, 1.01)
        axis.set_xlabel(f"{title}, s")
    axes[0].set_ylabel("share of requests (TBT: of gaps)")
    if len(panels[next(iter(panels))]) > 1:
        axes[-1].legend(frameon=False, fontsize=8, loc="lower right")
    return _svg(figure)


def violins(groups: Mapping[str, Sequence[float]], label: str) -> str:
    """One violin per group with its median and P99 marked; the axis is logarithmic."""
    figure, (axis,) = _figure(1, max(4.0, 1.1 * len(groups)), 3.4)
    places = np.arange(len(groups))
    logs = [np.log10(np.maximum(np.asarray(values, float), 1e-6)) for values in groups.values()]
    drawable = [place for place, values in zip(places, logs, strict=True) if np.ptp(values) > 0]
    if drawable:
        parts = axis.violinplot([logs[place] for place in drawable], drawable, showextrema=False, widths=0.8)
        for body in parts["bodies"]:
            body.set_facecolor(_COLOURS[0])
            body.set_alpha(0.45)
    for place, values in zip(places, logs, strict=True):
        for share, marker in ((0.5, "o"), (0.99, "_")):
            axis.plot(
                place, np.quantile(values, share), marker, color="black", markersize=5 if share == 0.5 else 12
            )
    axis.set_xticks(places, [f"{name}\nn = {len(values)}" for name, values in groups.items()])
    low, high = axis.get_ylim()
    decades = range(math.floor(low), math.ceil(high) + 1)
    ticks = [math.log10(digit) + power for power in decades for digit in (1, 2, 5)]
    axis.set_yticks([tick for tick in ticks if low <= tick <= high])
    axis.yaxis.set_major_formatter(lambda value, _: f"{10**value:.3g}")
    axis.set_ylabel(f"{label}, s")
    return _svg(figure)


def load_over_time(loads: Mapping[str, LoadTimeline]) -> str:
    """Share of KV blocks in use, and running and waiting requests; one line per replica."""
    figure, axes = _figure(3, 10.8, 2.8)
    titles = ("KV blocks in use, %", "running requests", "waiting requests")
    for index, (name, line) in enumerate(loads.items()):
        time = [point.time_s for point in line.points]
        values = (
            [100 * point.kv_share for point in line.points],
            [point.num_running for point in line.points],
            [point.num_waiting for point in line.points],
        )
        for axis, series in zip(axes, values, strict=True):
            axis.step(time, series, where="pre", color=_colour(index), linewidth=1.0, label=f"replica {name}")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_xlabel("time, s")
        axis.set_ylabel(title)
        axis.set_ylim(bottom=0)
    if len(loads) > 1:
        axes[-1].legend(frameon=False, fontsize=8)
    return _svg(figure)


def load_latency(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float, float, float]]]], x_label: str
) -> str:
    """One panel per latency, in each one curve per system of points (load, mean, low, high); the bar is the interval."""
    figure, axes = _figure(len(panels), 4.0 * len(panels), 3.3)
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        means: list[float] = []
        for index, (name, points) in enumerate(curves.items()):
            x, mean, low, high = np.array(sorted(points)).T
            axis.plot(x, mean, "o-", color=_colour(index), label=name, markersize=3.5, linewidth=1.3)
            known = np.isfinite(low) & np.isfinite(high)
            axis.vlines(x[known], np.maximum(low, 1e-9)[known], high[known], color=_colour(index), alpha=0.4)
            means.extend(mean[np.isfinite(mean) & (mean > 0)])
        if means:  # an interval that reaches below 0 must not stretch the axis
            axis.set_ylim(min(means) / 2, max(means) * 2)
        axis.set_yscale("log")
        _mark_decades(axis.yaxis, axis.get_ylim())
        axis.set_xlabel(x_label)
        axis.set_ylabel(f"{title}, s")
    axes[0].legend(frameon=False, fontsize=8)
    return _svg(figure)


def gantt(segments: Sequence[Segment], arrivals: Mapping[str, float], max_requests: int = 60) -> str:
    """What the first requests did when: waiting from arrival, then prefill and decode; one row each."""
    names = sorted(arrivals, key=lambda name: (arrivals[name], name))[:max_requests]
    rows = {name: place for place, name in enumerate(names)}
    figure, (axis,) = _figure(1, 10.8, max(2.0, 0.16 * len(names) + 0.8))
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    last: dict[str, float] = {}
    for one in segments:
        if one.request_id in rows:
            bars.setdefault((rows[one.request_id], one.kind), []).append(
                (one.start_s, one.end_s - one.start_s)
            )
            last[one.request_id] = max(last.get(one.request_id, 0.0), one.end_s)
    for name, end_s in last.items():
        axis.broken_barh(
            [(arrivals[name], end_s - arrivals[name])], (rows[name] - 0.4, 0.8), color=_KINDS["waiting"]
        )
    for (row, kind), spans in bars.items():
        axis.broken_barh(spans, (row - 0.4, 0.8), color=_KINDS[kind])
    axis.set_yticks(range(len(names)), names, fontsize=6)
    axis.invert_yaxis()
    axis.set_xlabel("time, s")
    for index, (kind, colour) in enumerate(_KINDS.items()):
        axis.text(
            0.78 + 0.075 * index,
            1.01,
            kind,
            color=colour if index < 2 else "#888888",
            transform=axis.transAxes,
            fontsize=8,
        )
    return _svg(figure)
