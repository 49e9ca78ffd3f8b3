"""`simulate capacity`: the highest load that meets targets, by bisection with confidence intervals over seeds."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from scheduler_core.errors import InputError
from scheduler_core.files import writable_target, write_json
from scheduler_core.simulator.commands import progress_bar
from scheduler_core.simulator.commands.sweep import BaseConfig
from scheduler_core.simulator.config import check_seeds
from scheduler_core.simulator.metrics import metric
from scheduler_core.simulator.sweep import Cell, CellStore, run_cells
from scheduler_core.statistics import Interval, interval

logger = logging.getLogger(__name__)

#: Simulates cells and returns their results in order; see `sweep.run_cells`.
Simulate = Callable[[Sequence[Cell]], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on a metric, `ttft_s.p50` for instance."""

    metric: str
    bound: float
    kind: Literal["at_most", "at_least"] = "at_most"

    def is_met(self, estimate: Interval) -> bool | None:
        """Whether the interval is on the right side of the bound; None if the bound is inside."""
        if self.met_by(estimate.low) and self.met_by(estimate.high):
            return True
        return None if self.met_by(estimate.low) or self.met_by(estimate.high) else False

    def met_by(self, value: float) -> bool:
        """Whether one number meets it."""
        return value <= self.bound if self.kind == "at_most" else value >= self.bound


@dataclass(frozen=True, slots=True)
class Probe:
    """One load that was tried.

    Attributes:
        level: The rate or load.
        meets: Whether the targets were met.
        clear: Whether the confidence intervals decided; else the means did.
        estimates: By metric: over seeds.
    """

    level: float
    meets: bool
    clear: bool
    estimates: dict[str, Interval]

    def text(self) -> str:
        return ", ".join(f"{name} = {one.mean:.4g}" for name, one in self.estimates.items())


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest level that meets the targets, the lowest that does not, and all probes in order."""

    level: float
    failing: float
    probes: list[Probe]


@dataclass(frozen=True, kw_only=True)
class CapacityConfig(BaseConfig):
    """Find the highest load (or rate) that meets targets, by bisection.

    At every load seeds are added until the confidence intervals tell whether the targets are met.
    """

    OUTPUTS = ("json", "cells")

    json: str
    """Where to write the result."""
    at_most: dict[str, float] = field(default_factory=dict)
    """Targets: metrics by dotted name and their upper bounds, such as {ttft_s.p50: 0.5}."""
    at_least: dict[str, float] = field(default_factory=dict)
    """Targets: metrics and their lower bounds, such as {slo_attainment: 0.99}."""
    unit: Literal["load", "rate"] = "load"
    """load (fraction of the estimated capacity) or rate (requests per second)."""
    low: float = 0.1
    """A load that meets the targets."""
    high: float = 2.0
    """A load that does not."""
    tolerance: float = 0.02
    """Stop when the two ends differ by less than this, relatively."""
    min_seeds: int = 2
    """Minimum number of seeds at every load."""
    max_seeds: int = 8
    """Maximum number of seeds at every load; if that leaves it open, the mean decides."""
    cells: str | None = None
    """Folder where simulations are kept, so that an interrupted search can continue. Unset: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.targets:
            raise InputError("at_most, at_least", {}, "at least one target, such as {ttft_s.p50: 0.5}")
        if not 1e-9 <= self.low < self.high <= 1e9:
            allowed = "numbers with 1e-09 <= low < high <= 1e+09"
            raise InputError("low, high", (self.low, self.high), allowed)
        if self.unit not in ("load", "rate"):
            raise InputError("unit", self.unit, "load, rate")
        if not 1e-6 <= self.tolerance < 1:
            raise InputError("tolerance", self.tolerance, "numbers from 1e-06 to below 1")
        if not 2 <= self.min_seeds <= self.max_seeds:
            raise InputError("min_seeds", self.min_seeds, "integers from 2 to max_seeds")
        check_seeds("max_seeds", self.max_seeds)

    @property
    def targets(self) -> list[Target]:
        """Both kinds of targets."""
        return [
            *(Target(name, bound, "at_most") for name, bound in self.at_most.items()),
            *(Target(name, bound, "at_least") for name, bound in self.at_least.items()),
        ]


def find_capacity(config: CapacityConfig, simulate: Simulate) -> Capacity:
    """Bisects between `low`, which must meet the targets, and `high`, which must not.

    Raises:
        InputError: `low` does not meet the targets, or `high` does.
    """
    good, bad = config.low, config.high
    probes = [_probe(config, good, simulate)]
    if not probes[0].meets:
        raise InputError("low", good, f"a {config.unit} that meets the targets: {probes[0].text()}")
    probes.append(_probe(config, bad, simulate))
    if probes[1].meets:
        raise InputError("high", bad, f"a {config.unit} that does not meet the targets: {probes[1].text()}")
    while bad / good > 1 + config.tolerance:
        probes.append(_probe(config, (good * bad) ** 0.5, simulate))
        if probes[-1].meets:
            good = probes[-1].level
        else:
            bad = probes[-1].level
    return Capacity(good, bad, probes)


def _probe(config: CapacityConfig, level: float, simulate: Simulate) -> Probe:
    """Adds seeds, two at a time, until the confidence interval of each metric is on one side of its bound.

    The seeds are the same at all levels, so that levels differ in load and nothing else.
    """
    base = config.simulation()
    load, rate = (level, None) if config.unit == "load" else (None, level)
    num_seeds = config.min_seeds
    while True:
        cells = [
            Cell(replace(base, load=load, rate=rate, seed=seed), {config.unit: level, "seed": seed})
            for seed in range(base.seed, base.seed + num_seeds)
        ]
        results = simulate(cells)
        estimates = {
            one.metric: interval([metric(result["metrics"], one.metric) for result in results])
            for one in config.targets
        }
        met = [one.is_met(estimates[one.metric]) for one in config.targets]
        if False in met or None not in met:
            return Probe(level, False not in met, True, estimates)
        if num_seeds >= config.max_seeds:
            meets = all(one.met_by(estimates[one.metric].mean) for one in config.targets)
            return Probe(level, meets, False, estimates)
        num_seeds = min(num_seeds + 2, config.max_seeds)


def run(config: CapacityConfig) -> None:
    """Carries out `simulate capacity`."""
    target, workers = writable_target(config.json, "json"), config.process_workers()
    with (
        tempfile.TemporaryDirectory() as scratch,
        progress_bar(None, "simulating", "run") as bar,
        workers.ready(),
    ):
        store = CellStore(config.cells or scratch)

        def simulate(cells: Sequence[Cell]) -> Sequence[Mapping[str, Any]]:
            level = cells[0].settings[config.unit]
            bar.set_description_str(f"simulating {config.unit} {level:.4g}, {len(cells)} seeds")
            return run_cells(cells, store, workers, bar.update)

        capacity = find_capacity(config, simulate)
    about = {"schema": "tailcast.capacity/2", "config": asdict(config), "unit": config.unit}
    write_json(target, {**about, **asdict(capacity)})
    logger.info("%s %.4g meets the targets, %.4g does not", config.unit, capacity.level, capacity.failing)
