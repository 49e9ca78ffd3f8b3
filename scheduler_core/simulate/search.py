"""`simulate search`: the best settings of a deployment."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from scheduler_core.errors import InputError
from scheduler_core.files import check_shared_folder, shared_folder, write_json
from scheduler_core.simulate.capacity import targets_of
from scheduler_core.simulate.progress import progress_bar
from scheduler_core.simulate.sweep import BaseConfig
from scheduler_core.simulator.config import SimulationConfig, check_seeds
from scheduler_core.simulator.sweep.cells import Cell, grid
from scheduler_core.simulator.sweep.execute import run_cells
from scheduler_core.simulator.sweep.halving import Scored, Settings, rungs, successive_halving
from scheduler_core.simulator.sweep.store import CellStore
from scheduler_core.simulator.sweep.tables import write_rows

logger = logging.getLogger(__name__)

#: Files in OUT.
_RESULTS = ("search.json", "ranking.parquet")


@dataclass(frozen=True, kw_only=True)
class SearchConfig(BaseConfig):
    """Find the settings that make a metric best while targets are met: all combinations, or successive halving.

    Settings to vary are, for instance, cluster.headroom_share, num_tiers (K, of the workload and the cluster together),
    scheduler.max_num_batched_tokens (the budget of a step, and so the largest chunk), scheduler.batching_parameters.NAME,
    cluster.num_replicas. Simulations are kept as by simulate sweep.
    """

    OUTPUTS = tuple(f"{{out}}/{name}" for name in _RESULTS)

    out: str
    """Folder of the results; OUT/search.json and OUT/ranking.parquet have the ranking."""
    vary: dict[str, list[Any]] = field(default_factory=dict)
    """Settings by dotted name and their values."""
    objective: str = "ttlt_s.mean"
    """Metric by dotted name."""
    maximise: bool = False
    """The objective shall be large, as goodput_rps."""
    at_most: dict[str, float] = field(default_factory=dict)
    """Targets: metrics and what they may be at most."""
    at_least: dict[str, float] = field(default_factory=dict)
    """Targets: metrics and what they must be at least."""
    method: Literal["grid", "halving"] = "halving"
    """grid: every candidate in full; halving: all with few requests, the best 1/eta of them with eta times as many, and
    so on."""
    eta: int = 3
    """Halving: how much fewer candidates and more requests from one round to the next."""
    min_requests: int = 200
    """Halving: requests of the first round, at least."""
    num_seeds: int = 2
    """Seeds of every candidate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workload is None:
            raise InputError("workload", None, "a workload: a search changes the number of requests")
        if not self.vary:
            raise InputError("vary", self.vary, "at least one setting with its values")
        check_seeds("num_seeds", self.num_seeds)


def _resized(config: SimulationConfig, num_requests: int) -> SimulationConfig:
    assert config.workload is not None
    return replace(config, workload=replace(config.workload, num_requests=num_requests))


def _rows(ranking: Sequence[Scored]) -> list[dict[str, Any]]:
    """One row per candidate, the best first."""
    return [
        {
            "rank": place,
            **one.settings,
            "num_requests": one.num_requests,
            "objective": one.objective,
            "excess": one.excess,
        }
        for place, one in enumerate(ranking, 1)
    ]


def run(config: SearchConfig) -> None:
    """Carries out `simulate search`."""
    base = config.simulation()
    assert base.workload is not None
    full = base.workload.num_requests
    seeds = range(config.seed, config.seed + config.num_seeds)
    by_point: dict[tuple[tuple[str, Any], ...], list[Cell]] = {}
    for cell in grid(base, config.vary, seeds):
        by_point.setdefault(cell.point, []).append(cell)
    schedule = [(len(by_point), full)]
    if config.method == "halving":
        schedule = rungs(len(by_point), full, config.eta, config.min_requests)
    folder = check_shared_folder(config.out, "search", _RESULTS)
    store = CellStore(folder / "cells")
    total = sum(count for count, _ in schedule) * config.num_seeds
    who = config.who()
    with progress_bar(total, "simulating", "run") as bar, who.ready():

        def evaluate(candidates: Sequence[Settings], num: int) -> Sequence[Sequence[Mapping[str, Any]]]:
            groups = [by_point[tuple(one.items())] for one in candidates]
            cells = [replace(cell, config=_resized(cell.config, num)) for group in groups for cell in group]
            results = run_cells(cells, store, who, bar.update)
            size = config.num_seeds
            return [results[place : place + size] for place in range(0, len(results), size)]

        ranking = successive_halving(
            [dict(point) for point in by_point],
            schedule,
            evaluate,
            config.objective,
            targets_of(config.at_most, config.at_least),
            config.maximise,
        )
    content = {
        "schema": "tailcast.search/1",
        "config": asdict(config),
        "rounds": [{"candidates": count, "num_requests": num} for count, num in schedule],
        "ranking": [asdict(one) for one in ranking],
    }
    shared_folder(folder, "search", _RESULTS)
    write_json(folder / "search.json", content)
    write_rows(_rows(ranking), folder / "ranking.parquet")
    best = ranking[0]
    met = "all targets met" if best.excess == 0 else "no candidate meets the targets"
    logger.info("best: %s, %s = %.4g, %s", dict(best.settings), config.objective, best.objective, met)
