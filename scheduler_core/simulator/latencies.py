"""Latencies of a run as a table and as a plot of their distribution functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scheduler_core.report.plotting import color, dash, mark_decades, new_figure
from scheduler_core.simulator.records import LATENCIES, RequestRecord, request_columns
from scheduler_core.simulator.watch import GAP_CLASS, TokenGaps
from scheduler_core.statistics import FloatArray

#: Distribution function: values, and the fraction of values up to each.
Curve = tuple[FloatArray, FloatArray]
#: Levels of the quantiles in the plot of a distribution function.
_LEVELS = np.linspace(0.0, 1.0, 400)
_STATISTICS = {"mean": "mean", "p50": "P50", "p90": "P90", "p95": "P95", "p99": "P99", "p999": "P99.9", "max": "max",
               "tail_ratio": "P99 / P50"}  # fmt: skip
#: Latencies of a table, with the ratio slowdown.
NAMES = (*LATENCIES, "tbt_s", "slowdown")


def latency_table(metrics: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows of the latencies in the metrics of a run."""
    rows = [[name, *map(metrics[name].get, _STATISTICS)] for name in NAMES if metrics[name]]
    return ["", *_STATISTICS.values()], rows


def group_field(metrics: Mapping[str, Any]) -> str | None:
    """The first field (tier, tenant, category) with several values; None if there is none."""
    return next((name for name in ("tier", "tenant", "category") if metrics["groups"][name]), None)


def latency_curves(
    records: Sequence[RequestRecord], gaps: TokenGaps, field: str | None
) -> dict[str, dict[str, Curve]]:
    """Distribution functions by latency (TTFT, TBT, TTLT) and by value of the field."""
    columns = request_columns(records)
    values = [None] if field is None else sorted(set(columns[field].tolist()))
    curves: dict[str, dict[str, Curve]] = {"TTFT": {}, "TBT": {}, "TTLT": {}}
    for value in values:
        rows = slice(None) if field is None else np.asarray(columns[field] == value)
        name = "all requests" if field is None else f"{field} {value}".strip()
        for title, latency in (("TTFT", "ttft_s"), ("TTLT", "ttlt_s")):
            curves[title][name] = (np.quantile(columns[latency][rows], _LEVELS), _LEVELS)
        if field in (None, *GAP_CLASS) and (merged := gaps.merged(field, value)).counts.any():
            curves["TBT"][name] = merged.curve()
    return {title: groups for title, groups in curves.items() if groups}


def distribution_figure(panels: Mapping[str, Mapping[str, Curve]]) -> tuple[Any, list[Any]]:
    """A figure with one panel per latency and one curve per group, and its axes; the time axis is logarithmic."""
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
    return figure, axes
