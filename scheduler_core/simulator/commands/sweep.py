"""`simulate sweep`: policies x batch formers x routers x loads x seeds, as tables and a page."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from scheduler_core.errors import InputError
from scheduler_core.files import check_shared_folder, shared_folder, write_json
from scheduler_core.report.page import Page
from scheduler_core.simulator import figures
from scheduler_core.simulator.commands import progress_bar
from scheduler_core.simulator.config import SimulationConfig, check_seeds
from scheduler_core.simulator.metrics import flat
from scheduler_core.simulator.regret import with_regret
from scheduler_core.simulator.sweep import Cell, CellStore, Point, SweepWorkers, grid, point_of, run_cells
from scheduler_core.simulator.tables import write_rows
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
    "ttft_s.mean",
    "ttft_s.p50",
    "ttft_s.p99",
    "tbt_s.p99",
    "ttlt_s.mean",
    "ttlt_s.p99",
    "throughput_rps",
    "slo_attainment",
    "regret.normalized_latency_s.regret_s",
    "regret.normalized_latency_s.fraction",
)
_AXES = {"load": "load, fraction of the estimated capacity", "rate": "requests per second"}


@dataclass(frozen=True, kw_only=True)
class BaseConfig(SimulationConfig):
    """Settings that all simulations of a sweep have in common, and the processes that carry them out."""

    policy: str = "fcfs"
    """As for simulate run; not used where policies are varied."""
    workers: int = 1
    """Processes on this machine."""
    ray: bool = False
    """Use a Ray cluster instead (extra: ray). Every node needs this version of tailcast, and the input files under the same
    path."""
    ray_address: str | None = None
    """Address of the Ray cluster (HOST:PORT, ray://HOST:PORT or auto). Unset: that of the environment variable
    RAY_ADDRESS, or a new one on this machine."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.process_workers()

    def process_workers(self) -> SweepWorkers:
        """The processes that simulate."""
        return SweepWorkers(self.workers, self.ray, self.ray_address)

    def simulation(self) -> SimulationConfig:
        """The fields of `SimulationConfig`."""
        return SimulationConfig(**{item.name: getattr(self, item.name) for item in fields(SimulationConfig)})


@dataclass(frozen=True, kw_only=True)
class SweepConfig(BaseConfig):
    """Simulate all combinations of policies, batch formers, routers, loads, other settings and seeds.

    Every simulation is a file in OUT/cells, named by a hash of everything it depends on and written atomically: a sweep
    that was killed continues where it was, and one whose configuration was changed runs what is new. OUT/cells.parquet has
    a row per simulation, OUT/points.parquet a row per combination and metric with 95 % confidence intervals over seeds,
    OUT/report.html the curves of latency over load. With fcfs and sjf among the policies, every one has its regret.
    """

    OUTPUTS = tuple(f"{{out}}/{name}" for name in _RESULTS)

    out: str
    """Folder of the results; other files in it stay."""
    policies: list[str] = field(default_factory=list)
    """Policies. Empty: the one of `policy`."""
    batchings: list[str] = field(default_factory=list)
    """Batch formers. Empty: the one of `scheduler.batching`."""
    routers: list[str] = field(default_factory=list)
    """Routers, with several replicas. Empty: the one of `cluster.router`."""
    loads: list[float] = field(default_factory=list)
    """Loads. Empty: the one of `load`."""
    rates: list[float] = field(default_factory=list)
    """Rates in requests per second, instead of loads."""
    vary: dict[str, list[Any]] = field(default_factory=dict)
    """More settings by dotted name, such as {scheduler.max_num_batched_tokens: [256, 512]}; num_tiers is that of workload
    and cluster together."""
    num_seeds: int = 3
    """Seeds seed, seed + 1, ... of each combination."""
    skip_impossible: bool = False
    """Leave out combinations of policy and batch former that make no sense, instead of refusing the sweep."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seeds("num_seeds", self.num_seeds)
        if self.loads and self.rates:
            raise InputError("loads, rates", (self.loads, self.rates), "one of them")

    def cells(self) -> list[Cell]:
        """All simulations."""
        lists: dict[str, Sequence[Any]] = {
            "policy": self.policies,
            "batching": self.batchings,
            "router": self.routers,
            "load": self.loads,
            "rate": self.rates,
        }
        vary = {name: values for name, values in lists.items() if values} | self.vary
        seeds = range(self.seed, self.seed + self.num_seeds)
        return grid(self.simulation(), vary, seeds, skip_impossible=self.skip_impossible)


def run(config: SweepConfig) -> None:
    """Carries out `simulate sweep`."""
    cells = config.cells()
    folder = check_shared_folder(config.out, "sweep", _RESULTS)
    store = CellStore(folder / "cells")
    with progress_bar(len(cells), "simulating", "cell") as bar:
        results = with_regret(run_cells(cells, store, config.process_workers(), bar.update))
    shared_folder(folder, "sweep", _RESULTS)
    write_rows([cell_row(one) for one in results], folder / "cells.parquet")
    write_rows(point_rows(results), folder / "points.parquet")
    write_json(folder / "config.json", asdict(config))
    write_sweep_page(results, folder / "report.html")
    logger.info("%d simulations in %s", len(results), folder)


def cell_row(result: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a cell: its settings, its arrival rate, and every number of its metrics."""
    rate = result["trace"]["arrival_rate_rps"]
    return {**result["settings"], "arrival_rate_rps": rate, **dict(flat(result["metrics"]))}


def _by_point(results: Results) -> dict[Point, list[dict[str, float]]]:
    """Numbers of each cell by dotted name, by point in order of appearance."""
    points: dict[Point, list[dict[str, float]]] = {}
    for one in results:
        points.setdefault(point_of(one["settings"]), []).append(dict(flat(one["metrics"])))
    return points


def point_rows(results: Results) -> list[dict[str, Any]]:
    """One row per point and metric: settings, metric, mean, low, high, num_seeds."""
    rows = []
    for point, cells in _by_point(results).items():
        for name in dict.fromkeys(name for cell in cells for name in cell):
            one = _over_seeds(cells, name)
            rows.append({
                **dict(point), "metric": name, "mean": one.mean, "low": one.low, "high": one.high, "num_seeds": one.num
            })  # fmt: skip
    return rows


def _over_seeds(cells: Sequence[Mapping[str, float]], name: str) -> Interval:
    """Over the cells that have the metric; NaN if none has."""
    return interval([cell[name] for cell in cells if name in cell] or [math.nan])


def write_sweep_page(results: Results, path: str | Path) -> None:
    """Writes the HTML report of a sweep: latency over load, and a table of all points.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    points = _by_point(results)
    page = Page(f"Sweep: {len(results)} simulations, {len(points)} points")
    axis = next((name for name in _AXES if all(name in dict(point) for point in points)), None)
    if axis is not None:
        panels: dict[str, dict[str, list[tuple[float, float, float, float]]]] = {name: {} for name in _PANELS}
        for point, cells in points.items():
            level, system = float(dict(point)[axis]), _system_name(point, axis)
            for title, name in _PANELS.items():
                one = _over_seeds(cells, name)
                panels[title].setdefault(system, []).append((level, one.mean, one.low, one.high))
        page.heading("Latency over load")
        caption = "Means over seeds; bars: 95 % confidence of the mean."
        page.figure(figures.load_latency(panels, _AXES[axis]), caption)
    page.heading("All points")
    page.note(
        "Mean over seeds, and half the width of its 95 % confidence interval where there are several; seconds where a name ends in _s."
    )
    present = {name for cells in points.values() for cell in cells for name in cell}
    metrics = [name for name in _TABLE if name in present]
    settings = list(dict.fromkeys(name for point in points for name, _ in point))
    rows = []
    for point, cells in points.items():
        values = [str(dict(point).get(name, "")) for name in settings]
        rows.append([*values, *(_text(_over_seeds(cells, name)) for name in metrics)])
    page.table([*settings, *metrics], rows)
    if any(name.startswith("regret.") for name in metrics):
        page.note(
            "Regret: mean normalized latency less that of sjf, the shortest true length first, in seconds; fraction: over "
            "the cost of fcfs compared with sjf."
        )
    page.write(path)


def _system_name(point: Point, axis: str) -> str:
    parts = [
        str(value) if name == "policy" else f"{name.split('.')[-1]}={value}"
        for name, value in point
        if name != axis
    ]
    return ", ".join(parts) or "all"


def _text(one: Interval) -> str:
    if math.isnan(one.mean):
        return "-"
    half = "" if math.isinf(one.high) else f" ± {(one.high - one.low) / 2:.2g}"
    return f"{one.mean:.4g}{half}"
