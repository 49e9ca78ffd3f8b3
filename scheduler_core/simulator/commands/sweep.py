"""`simulate sweep`: policies x loads x other settings x seeds, as tables and a page."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.files import check_shared_folder, shared_folder, write_json
from scheduler_core.ranges import check_ranges
from scheduler_core.report.page import Page
from scheduler_core.report.plotting import color, dash, mark_decades, new_figure, svg
from scheduler_core.simulator.commands import progress_bar
from scheduler_core.simulator.config import MAX_SEEDS, SimulationConfig
from scheduler_core.simulator.metrics import flat
from scheduler_core.simulator.sweep import Cell, CellStore, Point, SweepWorkers, grid, point_of, run_cells
from scheduler_core.simulator.tables import columns_of, write_table
from scheduler_core.statistics import Interval, interval

logger = logging.getLogger(__name__)

Results = Sequence[Mapping[str, Any]]

#: Files in OUT.
_RESULTS = ("cells.parquet", "points.parquet", "config.json", "report.html")
_PANELS = {
    "TTFT, mean": "ttft_s.mean",
    "TTFT, P99": "ttft_s.p99",
    "TTLT, mean": "ttlt_s.mean",
    "TTLT, P99": "ttlt_s.p99",
}
_TABLE = (
    "ttft_s.mean", "ttft_s.p50", "ttft_s.p99", "tbt_s.p99", "ttlt_s.mean", "ttlt_s.p99", "throughput_rps", "slo_attainment",
)  # fmt: skip
_AXES = {"load": "load, fraction of the estimated capacity", "rate": "requests per second"}


@dataclass(frozen=True, kw_only=True)
class BaseConfig(SimulationConfig, SweepWorkers):
    """Settings that all simulations of a sweep have in common, and the processes that carry them out."""

    policy: str = "fcfs"
    """As for simulate run; not used where policies are varied."""

    def __post_init__(self) -> None:
        SimulationConfig.__post_init__(self)
        SweepWorkers.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class SweepConfig(BaseConfig):
    """Simulate all combinations of policies, loads, other settings and seeds.

    Every simulation is a file in OUT/cells, named by a hash of everything it depends on and written atomically: a sweep
    that was killed continues where it was, and one whose configuration was changed runs what is new. OUT/cells.parquet has
    a row per simulation, OUT/points.parquet a row per combination and metric with 95 % confidence intervals over seeds,
    OUT/report.html the curves of latency over load.
    """

    OUTPUTS = tuple(f"{{out}}/{name}" for name in _RESULTS)

    out: str
    """Folder of the results; other files in it stay."""
    policies: list[str] = field(default_factory=list)
    """Policies. Empty: the one of `policy`."""
    loads: list[float] = field(default_factory=list)
    """Loads. Empty: the one of `load`."""
    rates: list[float] = field(default_factory=list)
    """Rates in requests per second, instead of loads."""
    vary: dict[str, list[Any]] = field(default_factory=dict)
    """More settings by dotted name, such as {scheduler.batching: [chunked_prefill, vllm], cluster.router: [jsq]}; num_tiers is that of workload
    and cluster together."""
    num_seeds: int = 3
    """Seeds seed, seed + 1, ... of each combination."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, num_seeds=(1, MAX_SEEDS))
        if self.loads and self.rates:
            raise InputError("loads, rates", (self.loads, self.rates), "one of them")

    def cells(self) -> list[Cell]:
        """All simulations."""
        lists: dict[str, Sequence[Any]] = {"policy": self.policies, "load": self.loads, "rate": self.rates}
        vary = {name: values for name, values in lists.items() if values} | self.vary
        seeds = range(self.seed, self.seed + self.num_seeds)
        return grid(self.simulation(), vary, seeds)


def run(config: SweepConfig) -> None:
    """Carries out `simulate sweep`."""
    cells = config.cells()
    folder = check_shared_folder(config.out, "sweep", _RESULTS)
    store = CellStore(folder / "cells")
    with progress_bar(len(cells), "simulating", "cell") as bar:
        results = run_cells(cells, store, config, bar.update)
    shared_folder(folder, "sweep", _RESULTS)
    for name, rows in (("cells", [*map(cell_row, results)]), ("points", point_rows(results))):
        write_table(columns_of(rows), folder / f"{name}.parquet", f"tailcast.sweep_{name}/1", "out")
    write_json(folder / "config.json", asdict(config))
    write_sweep_page(results, folder / "report.html")
    logger.info("%d simulations in %s", len(results), folder)


def cell_row(result: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a cell: its settings, its arrival rate, and every number of its metrics."""
    rate = result["trace"]["arrival_rate_rps"]
    return {**result["settings"], "arrival_rate_rps": rate, **dict(flat(result["metrics"]))}


def point_rows(results: Results) -> list[dict[str, Any]]:
    """One row per point and metric: settings, metric, mean, low, high, num_seeds."""
    return [
        {**dict(point), "metric": name, "mean": one.mean, "low": one.low, "high": one.high, "num_seeds": one.num}
        for point, metrics in over_points(results).items()
        for name, one in metrics.items()
    ]  # fmt: skip


def over_points(results: Results) -> dict[Point, dict[str, Interval]]:
    """By point, in order of appearance: every metric by dotted name, over the seeds that have it."""
    points: dict[Point, dict[str, list[float]]] = {}
    for one in results:
        metrics = points.setdefault(point_of(one["settings"]), {})
        for name, value in flat(one["metrics"]):
            metrics.setdefault(name, []).append(value)
    return {point: {name: interval(values) for name, values in one.items()} for point, one in points.items()}


def write_sweep_page(results: Results, path: str | Path) -> None:
    """Writes the HTML report of a sweep: latency over load, and a table of all points."""
    points = over_points(results)
    page = Page(f"Sweep: {len(results)} simulations, {len(points)} points")
    axis = next((name for name in _AXES if all(name in dict(point) for point in points)), None)
    if axis is not None:
        panels: dict[str, dict[str, list[tuple[float, float, float, float]]]] = {name: {} for name in _PANELS}
        for point, metrics in points.items():
            others = [(name.split(".")[-1], value) for name, value in point if name != axis]
            words = [str(value) if name == "policy" else f"{name}={value}" for name, value in others]
            for title, name in _PANELS.items():
                one = metrics[name]
                position = (float(dict(point)[axis]), one.mean, one.low, one.high)
                panels[title].setdefault(", ".join(words) or "all", []).append(position)
        page.heading("Latency over load")
        caption = "Means over seeds; bars: 95 % confidence of the mean."
        page.figure(_load_latency(panels, _AXES[axis]), caption)
    page.heading("All points")
    page.note(
        "Mean over seeds, and half the width of its 95 % confidence interval where there are several; seconds where a name ends in _s."
    )
    settings = list(dict.fromkeys(name for point in points for name, _ in point))
    rows = []
    for point, metrics in points.items():
        values = [str(dict(point).get(name, "")) for name in settings]
        rows.append([*values, *(_text(metrics.get(name)) for name in _TABLE)])
    page.table([*settings, *_TABLE], rows)
    page.write(path)


def _load_latency(
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
    return svg(figure, axes[0])


def _text(one: Interval | None) -> str:
    if one is None:
        return "-"
    half = "" if math.isinf(one.high) else f" ± {(one.high - one.low) / 2:.2g}"
    return f"{one.mean:.4g}{half}"
