"""The page about a sweep: latency over load, and a table of all points."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scheduler_core.simulator.report import figures
from scheduler_core.simulator.report.page import Page
from scheduler_core.simulator.statistics import Interval, interval
from scheduler_core.simulator.sweep.tables import by_point, flat

_PANELS = {
    "TTFT, mean": "ttft_s.mean",
    "TTFT, P99": "ttft_s.p99",
    "TTLT, mean": "ttlt_s.mean",
    "TTLT, P99": "ttlt_s.p99",
}
_TABLE = (
    "ttft_s.mean",
    "ttft_s.p50",
    "ttft_s.p99",
    "tbt_s.p99",
    "ttlt_s.mean",
    "ttlt_s.p99",
    "throughput_rps",
    "slo_attainment",
    "regret.per_token_latency_s.regret_s",
    "regret.per_token_latency_s.share",
)
_AXES = {"load": "load, share of the estimated capacity", "rate": "requests per second"}


def write_sweep_page(results: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Writes the HTML report of a sweep.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    points = by_point(results)
    page = Page(f"Sweep: {len(results)} simulations, {len(points)} points")
    axis = next((name for name in _AXES if all(name in dict(point) for point in points)), None)
    if axis is not None:
        panels: dict[str, dict[str, list[tuple[float, float, float, float]]]] = {name: {} for name in _PANELS}
        for point, members in points.items():
            level = float(dict(point)[axis])
            system = _name(point, axis)
            for title, name in _PANELS.items():
                spread = _spread(members, name)
                panels[title].setdefault(system, []).append((level, spread.mean, spread.low, spread.high))
        page.heading("Latency over load")
        page.figure(
            figures.load_latency(panels, _AXES[axis]), "Means over seeds; bars: 95 % confidence of the mean."
        )
    page.heading("All points")
    known = {name for one in results for name, _ in flat(one["metrics"])}
    shown = [name for name in _TABLE if name in known]
    page.note(
        "Mean over seeds, and half the width of its 95 % confidence interval where there are several; seconds where a name ends in _s."
    )
    names = list(dict.fromkeys(name for point in points for name, _ in point))
    rows = []
    for point, members in points.items():
        values = [str(dict(point).get(name, "")) for name in names]
        rows.append([*values, *(_shown(_spread(members, name)) for name in shown)])
    page.table([*names, *shown], rows)
    if any(name.startswith("regret.") for name in shown):
        page.note(
            "Regret: mean latency per token less that of sjf, the shortest true length first, in seconds; share: over what "
            "fcfs costs against sjf."
        )
    page.write(path)


def _spread(members: Sequence[Mapping[str, Any]], name: str) -> Interval:
    """Over the seeds that have the metric; NaN if none has."""
    values = [value for one in members if (value := dict(flat(one["metrics"])).get(name)) is not None]
    return interval(values or [math.nan])


def _name(point: Sequence[tuple[str, Any]], axis: str) -> str:
    parts = [
        str(value) if name == "policy" else f"{name.split('.')[-1]}={value}"
        for name, value in point
        if name != axis
    ]
    return ", ".join(parts) or "all"


def _shown(spread: Interval) -> str:
    if math.isnan(spread.mean):
        return "-"
    half = "" if math.isinf(spread.high) else f" ± {(spread.high - spread.low) / 2:.2g}"
    return f"{spread.mean:.4g}{half}"
