"""`simulate sweep`: policies x batch formers x routers x loads x seeds."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from scheduler_core.errors import InputError
from scheduler_core.files import check_shared_folder, shared_folder, write_json
from scheduler_core.simulate.progress import progress_bar
from scheduler_core.simulator.config import SimulationConfig, check_seeds
from scheduler_core.simulator.regret import with_regret
from scheduler_core.simulator.sweep.cells import Cell, grid
from scheduler_core.simulator.sweep.execute import Workers, run_cells
from scheduler_core.simulator.sweep.store import CellStore
from scheduler_core.simulator.sweep.tables import cell_rows, point_rows, write_rows

logger = logging.getLogger(__name__)

#: Files in OUT.
_RESULTS = ("cells.parquet", "points.parquet", "config.json", "report.html")


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Who carries out simulations, and where their results are kept."""

    workers: int = 1
    """Processes on this machine."""
    ray: bool = False
    """Use a Ray cluster instead (extra: ray). Every node needs this version of tailcast, and the files that are read under
    the same path."""
    ray_address: str | None = None
    """Address of the Ray cluster (HOST:PORT, ray://HOST:PORT or auto). Unset: that of the environment variable
    RAY_ADDRESS, or a new one on this machine."""

    def __post_init__(self) -> None:
        self.who()

    def who(self) -> Workers:
        """The same as the sweep knows it."""
        return Workers(self.workers, self.ray, self.ray_address)


@dataclass(frozen=True, kw_only=True)
class BaseConfig(SimulationConfig, WorkerConfig):
    """What all simulations of a sweep or search have in common."""

    policy: str = "fcfs"
    """As for simulate run; where policies are varied, this one is not used."""

    def __post_init__(self) -> None:
        SimulationConfig.__post_init__(self)
        WorkerConfig.__post_init__(self)

    def simulation(self) -> SimulationConfig:
        """The simulation alone."""
        return SimulationConfig(**{item.name: getattr(self, item.name) for item in fields(SimulationConfig)})


@dataclass(frozen=True, kw_only=True)
class SweepConfig(BaseConfig):
    """Simulate all combinations of policies, batch formers, routers, loads, other settings and seeds.

    Every simulation is a file in OUT/cells, named by a hash of all it depends on and written when it is whole: a sweep
    that was killed goes on where it was, and one whose configuration was changed does what is new. OUT/cells.parquet has
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
    """More settings by dotted name, such as {scheduler.max_num_batched_tokens: [256, 512]}."""
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
        vary: dict[str, Sequence[Any]] = {
            "policy": self.policies,
            "batching": self.batchings,
            "router": self.routers,
            "load": self.loads,
            "rate": self.rates,
        }
        given = {name: values for name, values in vary.items() if values} | self.vary
        seeds = range(self.seed, self.seed + self.num_seeds)
        return grid(self.simulation(), given, seeds, skip_impossible=self.skip_impossible)


def run(config: SweepConfig) -> None:
    """Carries out `simulate sweep`."""
    cells = config.cells()
    folder = check_shared_folder(config.out, "sweep", _RESULTS)
    store = CellStore(folder / "cells")
    with progress_bar(len(cells), "simulating", "cell") as bar:
        results = with_regret(run_cells(cells, store, config.who(), bar.update))
    shared_folder(folder, "sweep", _RESULTS)
    write_rows(cell_rows(results), folder / "cells.parquet")
    write_rows(point_rows(results), folder / "points.parquet")
    write_json(folder / "config.json", asdict(config))
    from scheduler_core.simulator.report.sweep_page import write_sweep_page

    write_sweep_page(results, folder / "report.html")
    logger.info("%d simulations in %s", len(results), folder)
