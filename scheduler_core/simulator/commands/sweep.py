"""`simulate sweep`: simulates policies x loads x other settings x seeds; writes tables and a page."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_core.ranges import check_ranges
from scheduler_core.report.page import Page
from scheduler_core.report.plotting import color, dash, mark_decades, new_figure, svg
from scheduler_core.shell.files import check_shared_folder, shared_folder, write_json
from scheduler_core.shell.progress import progress_bar
from scheduler_core.simulator.commands.last_lines import end_with_warnings, few_seeds, merged_warnings
from scheduler_core.simulator.config import MAX_SEEDS, SimulationConfig
from scheduler_core.simulator.metrics import flat, over_seeds
from scheduler_core.simulator.sweep import MAX_PROCESSES, Cell, CellStore, Point, grid, point_of, run_cells
from scheduler_core.simulator.tables import columns_of, write_table
from scheduler_core.statistics import Interval

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
class BaseConfig(SimulationConfig):
    """Settings of all simulations of a sweep, and its worker processes."""

    workers: int = 1
    """Processes that simulate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, workers=(1, MAX_PROCESSES))


@dataclass(frozen=True, kw_only=True)
class SweepConfig(BaseConfig):
    """Simulate all combinations of policies, loads, other settings and seeds.

    Every simulation is a file in OUT/cells, named by a hash of all its inputs and written atomically. An
    interrupted sweep can be resumed, and after a change of the configuration only new simulations run.
    OUT/cells.parquet has one row per simulation, OUT/points.parquet one row per combination and metric with
    95 % confidence intervals over seeds, and OUT/report.html the curves of latency over load.
    """

    OUTPUTS = ("{out}/cells", *(f"{{out}}/{name}" for name in _RESULTS))

    out: str
    """Folder of the results; other files in it are kept."""
    policies: list[str] = field(default_factory=list)
    """Policies. Empty: only `policy`."""
    loads: list[float] = field(default_factory=list)
    """Loads. Empty: only `load`."""
    vary: dict[str, list[Any]] = field(default_factory=dict)
    """More settings by dotted name, such as {scheduler.batching: [chunked_prefill, vllm], cluster.router:
    [jsq]}; num_tiers sets workload.tiers and cluster."""
    num_seeds: int = 3
    """Number of seeds of each combination: seed, seed + 1, ..."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, num_seeds=(1, MAX_SEEDS))

    def cells(self) -> list[Cell]:
        """All simulations."""
        lists: dict[str, Sequence[Any]] = {"policy": self.policies, "load": self.loads}
        vary = {name: values for name, values in lists.items() if values} | self.vary
        seeds = range(self.seed, self.seed + self.num_seeds)
        return grid(self.simulation(), vary, seeds)


def run(config: SweepConfig) -> int:
    """Runs `simulate sweep`."""
    cells = config.cells()
    folder = check_shared_folder(config.out, "sweep", _RESULTS)
    store = CellStore(folder / "cells")
    with progress_bar(len(cells), "cell", enabled=None, desc="simulating") as bar:
        results = run_cells(cells, store, config.workers, bar.update)
    shared_folder(folder, "sweep", _RESULTS)
    for name, rows in (("cells", [*map(cell_row, results)]), ("points", point_rows(results))):
        write_table(columns_of(rows), folder / f"{name}.parquet", f"tailcast.sweep_{name}/2", "out")
    write_json(folder / "config.json", asdict(config))
    write_sweep_page(results, folder / "report.html")
    logger.info("%d simulations in %s", len(results), folder)
    warnings = merged_warnings([result["warnings"] for result in results]) | few_seeds(config.num_seeds)
    return end_with_warnings(warnings, [result["metrics"] for result in results])


def cell_row(result: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a cell: settings, arrival rate, and all numbers of its metrics."""
    rate = result["trace"]["arrival_rate_rps"]
    return {**result["settings"], "arrival_rate_rps": rate, **dict(flat(result["metrics"]))}


def point_rows(results: Results) -> list[dict[str, Any]]:
    """One row per point and metric: settings, metric, mean, low, high (None for one seed), number of seeds."""
    return [
        {**dict(point), "metric": name, **one.to_json()}
        for point, metrics in over_points(results).items()
        for name, one in metrics.items()
    ]  # fmt: skip


def over_points(results: Results) -> dict[Point, dict[str, Interval]]:
    """Intervals of all metrics over seeds, by dotted name, for each point in order of appearance."""
    points: dict[Point, list[Mapping[str, Any]]] = {}
    for result in results:
        points.setdefault(point_of(result["settings"]), []).append(result["metrics"])
    return {point: over_seeds(metrics) for point, metrics in points.items()}


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
                estimate = metrics[name]
                position = (float(dict(point)[axis]), estimate.mean, estimate.low, estimate.high)
                panels[title].setdefault(", ".join(words) or "all", []).append(position)
        page.heading("Latency over load")
        caption = "Means over seeds; bars: 95 % confidence of the mean."
        page.figure(_load_latency(panels, _AXES[axis]), caption)
    page.heading("All points")
    page.note("Mean over seeds, with several seeds its 95 % confidence interval. Names in _s: seconds.")
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
    """Plots one panel per latency with one curve per system, from points (load, mean, low, high)."""
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
        if means:  # do not stretch the axis for intervals that extend below 0
            axis.set_ylim(min(means) / 2, max(means) * 2)
        axis.set_yscale("log")
        mark_decades(axis.yaxis, axis.get_ylim())
        axis.set_xlabel(x_label)
        axis.set_ylabel(f"{title}, s")
    return svg(figure, axes[0])


def _text(one: Interval | None) -> str:
    if one is None:
        return "-"
    ends = "" if math.isinf(one.high) else f" ({one.low:.3g} to {one.high:.3g})"
    return f"{one.mean:.4g}{ends}"
