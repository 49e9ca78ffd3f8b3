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
_DASHES = ("-", "--", ":")
#: More curves than this are not named: no colours and dashes are left.
MAX_NAMED = len(_COLOURS) * len(_DASHES)
#: An axis with fewer marks than this says nothing about its scale.
MIN_MARKS = 3
_KINDS = {"prefill": "#D55E00", "decode": "#0072B2", "waiting": "#dddddd"}


def _figure(columns: int, width: float, height: float) -> tuple[Any, list[Any]]:
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise MissingExtraError("matplotlib", "sim") from error
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(wspace=0.06))
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
    """Plain numbers at 1, 2, 5 of each decade of a logarithmic axis: at 1 alone where that would be many, and at evenly
    spaced numbers where it would be too few."""
    from matplotlib.ticker import MaxNLocator

    low, high = limits
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if math.log10(high / low) <= 2.2 else (1,)
    ticks = [
        digit * 10.0**power for power in decades for digit in digits if low <= digit * 10.0**power <= high
    ]
    if len(ticks) < MIN_MARKS:
        ticks = [tick for tick in MaxNLocator(4).tick_values(low, high) if low <= tick <= high]
    axis.set_ticks(ticks)
    axis.set_ticks([], minor=True)
    axis.set_major_formatter(lambda value, _: f"{value:g}")


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _dash(index: int) -> str:
    return _DASHES[index // len(_COLOURS) % len(_DASHES)]


def empirical(values: Sequence[float] | FloatArray) -> tuple[FloatArray, FloatArray]:
    """(values, share of values up to there): the empirical distribution function at up to `NUM_POINTS` quantiles."""
    shares = np.linspace(0.0, 1.0, min(NUM_POINTS, max(2, len(values))))
    return np.quantile(np.asarray(values, float), shares), shares


Curve = tuple[FloatArray, FloatArray]


def distribution_functions(panels: Mapping[str, Mapping[str, Curve]]) -> str:
    """One panel per name, in each one curve per group; the time axis is logarithmic."""
    figure, axes = _figure(len(panels), 3.6 * len(panels), 3.2)
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        _draw_curves(axis, curves)
        axis.set_xlabel(f"{title}, s")
        axis.set_ylabel("share of gaps" if title == "TBT" else "share of requests")
    _legend(figure, axes[0], len(panels[next(iter(panels))]))
    return _svg(figure)


def ratio_functions(panels: Mapping[str, Mapping[str, Curve]]) -> str:
    """One panel per latency: the distribution function of a ratio, with a line at 1; the axis is logarithmic."""
    figure, axes = _figure(len(panels), 3.6 * len(panels), 3.0)
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        _draw_curves(axis, curves)
        axis.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
        axis.set_xlabel(f"{title}, b / a")
        axis.set_ylabel("share of requests")
    return _svg(figure)


def _draw_curves(axis: Any, curves: Mapping[str, Curve]) -> None:
    for index, (name, (x, y)) in enumerate(curves.items()):
        axis.step(
            np.maximum(x, 1e-6),
            y,
            where="post",
            color=_colour(index),
            linestyle=_dash(index),
            label=name,
            linewidth=1.4,
        )
    axis.set_xscale("log")
    _mark_decades(axis.xaxis, axis.get_xlim())
    axis.set_ylim(0, 1.01)


def _legend(figure: Any, axis: Any, num_curves: int) -> None:
    """What the curves are, beside the panels, where there are several and not too many to be told apart."""
    if 1 < num_curves <= MAX_NAMED:
        figure.legend(*axis.get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside right upper")


def violins(panels: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """One panel per latency, in each one violin per group with its median and P99 marked; the axis is logarithmic."""
    most = max(len(groups) for groups in panels.values())
    figure, axes = _figure(len(panels), min(11.0, len(panels) * max(3.6, 0.9 * most)), 3.4)
    for axis, (label, groups) in zip(axes, panels.items(), strict=True):
        _draw_violins(axis, groups)
        axis.set_ylabel(f"{label}, s")
    return _svg(figure)


def _draw_violins(axis: Any, groups: Mapping[str, Sequence[float]]) -> None:
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
    small = {"fontsize": 7, "rotation": 45} if len(groups) > 6 else {"fontsize": 8}
    axis.set_xticks(places, [f"{name}\nn = {len(values)}" for name, values in groups.items()], **small)
    low, high = axis.get_ylim()
    decades = range(math.floor(low), math.ceil(high) + 1)
    digits = (1, 2, 5) if high - low <= 3 else (1,)
    ticks = [math.log10(digit) + power for power in decades for digit in digits]
    axis.set_yticks([tick for tick in ticks if low <= tick <= high])
    axis.yaxis.set_major_formatter(lambda value, _: f"{10**value:.3g}")


def load_over_time(loads: Mapping[str, LoadTimeline]) -> str:
    """Share of KV blocks in use, and running and waiting requests; one line per replica."""
    figure, axes = _figure(3, 11.4, 2.8)
    titles = ("KV blocks in use, %", "running requests", "waiting requests")
    for index, (name, line) in enumerate(loads.items()):
        time = [point.time_s for point in line.points]
        values = (
            [100 * point.kv_share for point in line.points],
            [point.num_running for point in line.points],
            [point.num_waiting for point in line.points],
        )
        for axis, series in zip(axes, values, strict=True):
            axis.step(
                time,
                series,
                where="post",
                color=_colour(index),
                linestyle=_dash(index),
                linewidth=0.9,
                alpha=0.8,
                label=f"replica {name}",
            )
    for axis, title in zip(axes, titles, strict=True):
        axis.set_xlabel("time, s")
        axis.set_ylabel(title)
        axis.set_ylim(0, max(axis.get_ylim()[1], 1.0))
    _legend(figure, axes[0], len(loads))
    return _svg(figure)


def load_latency(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float, float, float]]]], x_label: str
) -> str:
    """One panel per latency, in each one curve per system of points (load, mean, low, high); the bar is the interval."""
    figure, axes = _figure(len(panels), 3.2 * len(panels), 3.2)
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        means: list[float] = []
        for index, (name, points) in enumerate(curves.items()):
            x, mean, low, high = np.array(sorted(points)).T
            axis.plot(
                x,
                mean,
                f"o{_dash(index)}",
                color=_colour(index),
                label=name,
                markersize=3.5,
                linewidth=1.3,
            )
            known = np.isfinite(low) & np.isfinite(high)
            axis.vlines(x[known], np.maximum(low, 1e-9)[known], high[known], color=_colour(index), alpha=0.4)
            means.extend(mean[np.isfinite(mean) & (mean > 0)])
        if means:  # an interval that reaches below 0 must not stretch the axis
            axis.set_ylim(min(means) / 2, max(means) * 2)
        axis.set_yscale("log")
        _mark_decades(axis.yaxis, axis.get_ylim())
        axis.set_xlabel(x_label)
        axis.set_ylabel(f"{title}, s")
    _legend(figure, axes[0], len(panels[next(iter(panels))]))
    return _svg(figure)


def gantt(segments: Sequence[Segment], arrivals: Mapping[str, float], max_requests: int = 60) -> str:
    """What the first requests did when: waiting from arrival, then prefill and decode; one row each. A black mark: the
    request went to another replica."""
    names = sorted(arrivals, key=lambda name: (arrivals[name], name))[:max_requests]
    rows = {name: place for place, name in enumerate(names)}
    figure, (axis,) = _figure(1, 11.0, max(2.0, 0.16 * len(names) + 0.9))
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    last: dict[str, Segment] = {}
    moves: list[tuple[float, int]] = []
    for one in sorted(segments, key=lambda one: one.start_s):
        if one.request_id in rows:
            row, before = rows[one.request_id], last.get(one.request_id)
            bars.setdefault((row, one.kind), []).append((one.start_s, one.end_s - one.start_s))
            if before is not None and before.replica_id != one.replica_id:
                moves.append((one.start_s, row))
            if before is None or one.end_s >= before.end_s:
                last[one.request_id] = one
    for name, segment in last.items():
        axis.broken_barh(
            [(arrivals[name], segment.end_s - arrivals[name])],
            (rows[name] - 0.4, 0.8),
            color=_KINDS["waiting"],
        )
    for (row, kind), spans in bars.items():
        axis.broken_barh(spans, (row - 0.4, 0.8), color=_KINDS[kind])
    if moves:
        times, places = zip(*moves, strict=True)
        axis.plot(times, places, "|", color="black", markersize=5, label="moved")
    axis.set_yticks(range(len(names)), names, fontsize=6)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.set_xlabel("time, s")
    for kind, colour in _KINDS.items():
        axis.broken_barh([], (0, 0), color=colour, label=kind)
    figure.legend(frameon=False, fontsize=8, loc="outside upper right", ncols=4)
    return _svg(figure)
