"""`simulate capacity`: highest load that meets targets, by bisection with confidence intervals over seeds."""

import logging
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from scheduler_core.errors import InputError
from scheduler_core.ranges import check_choice, check_ranges
from scheduler_core.shell.files import writable_target, write_json
from scheduler_core.shell.progress import progress_bar
from scheduler_core.simulator.commands.last_lines import end_with_warnings, seed_warnings
from scheduler_core.simulator.commands.sweep import BaseConfig
from scheduler_core.simulator.config import MAX_SEEDS
from scheduler_core.simulator.planning.search import (
    Probe,
    Results,
    Search,
    Simulate,
    drive,
    highest_level,
    means_of,
    probe_level,
)
from scheduler_core.simulator.planning.targets import MAX_GIVEN_UP
from scheduler_core.simulator.sweep import Cell, CellStore, run_cells
from scheduler_core.statistics import Interval, interval

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SearchConfig(BaseConfig):
    """Targets, and the simulations that show whether a level (of load, rate or replicas) meets them."""

    OUTPUTS = ("json", "cells")

    json: str
    """Path of the result."""
    overwrite: bool = False
    """Replace existing output files."""
    at_most: dict[str, float] = field(default_factory=dict)
    """Targets: metrics by dotted name and their upper bounds, such as {ttft_s.p99: 2}."""
    at_least: dict[str, float] = field(default_factory=dict)
    """Targets: metrics and their lower bounds, such as {slo_attainment: 0.99}."""
    max_seeds: int = 8
    """Maximum number of seeds at every level, at least 2; if the intervals are inconclusive then, the means decide."""
    cells: str | None = None
    """Folder for results of simulations, to resume an interrupted search. Unset: a temporary folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.at_most and not self.at_least:
            raise InputError("at_most, at_least", {}, "at least one target, such as {ttft_s.p50: 0.5}")
        check_ranges(self, max_seeds=(2, MAX_SEEDS))

    @abstractmethod
    def cell(self, level: float, seed: int) -> Cell:
        """The simulation of a level with a seed."""

    def warnings(self, results: Results) -> dict[str, str]:
        return seed_warnings(self, results)

    def estimate(self, values: Sequence[float], bounds: tuple[float, float]) -> Interval:
        return interval(values, bounds)

    def problem(self, results: Results) -> str | None:
        """Clients that give up, of which latencies know nothing; `slo_attainment` counts them."""
        for result in results if self.at_most else ():
            metrics = result["metrics"]
            num = metrics["clients"]["num_given_up"] if "clients" in metrics else 0
            fraction = num / max(1, num + metrics["num_finished"]) if num else 0.0
            if fraction > MAX_GIVEN_UP:
                return f"{fraction:.1%} of the clients give up"
        return None


@dataclass(frozen=True, kw_only=True)
class CapacityConfig(SearchConfig):
    """Find the highest load (or rate) that meets targets, by bisection.

    At every load, seeds are added until the confidence intervals show whether the targets are met.
    """

    unit: Literal["load", "rate"] = "load"
    """load (fraction of the estimated capacity) or rate (requests per second)."""
    low: float = 0.1
    """A load that meets the targets."""
    high: float = 2.0
    """A load that does not meet the targets."""
    tolerance: float = 0.02
    """Stop when the relative difference of the two ends is less than this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1e-9 <= self.low < self.high <= 1e9:
            allowed = "numbers with 1e-09 <= low < high <= 1e+09"
            raise InputError("low, high", (self.low, self.high), allowed)
        check_choice("unit", self.unit, ("load", "rate"))
        check_ranges(self, tolerance=(1e-6, 0.999))

    def cell(self, level: float, seed: int) -> Cell:
        load, rate = (level, None) if self.unit == "load" else (None, level)
        config = replace(self.simulation(), load=load, rate=rate, seed=seed)
        return Cell(config, {self.unit: level, "seed": seed})


def find_capacity(config: CapacityConfig, simulate: Simulate) -> dict[str, Any]:
    """Bisects between `low`, which must meet the targets, and `high`, which must not; otherwise `InputError`.

    The result has `level`, the highest level that meets the targets; `failing`, the lowest that does not; and
    `probes`, all tested levels in order, see `search.probe_level`.
    """
    return drive(_search_capacity(config), simulate)


def _search_capacity(config: CapacityConfig) -> Search[dict[str, Any]]:
    probes: list[Probe] = []
    for name, level, should_meet in (("low", config.low, True), ("high", config.high, False)):
        probes.append((yield from probe_level(config, level)))
        if probes[-1]["meets"] != should_meet:
            verb = "meets" if should_meet else "does not meet"
            allowed = f"a {config.unit} that {verb} the targets: {means_of(probes[-1])}"
            raise InputError(name, level, allowed + advice_of(probes[-1]))
    good, bad, between = yield from highest_level(
        lambda level: probe_level(config, level), config.low, config.high, config.tolerance
    )
    return {"level": good, "failing": bad, "probes": probes + between}


def advice_of(probe: Mapping[str, Any]) -> str:
    """Why a probe may mislead, as the end of a message."""
    return f"; {probe['warnings']['steady_state']}" if "steady_state" in probe["warnings"] else ""


def run_search(
    config: SearchConfig, schema: str, find: Callable[[Simulate], dict[str, Any]], level_key: str, text: str
) -> int:
    """Runs a search and writes its result, with schema, config and warnings, those of the probe of the level at the key
    `level_key`. Logs `text`, formatted with the result, and the warnings; returns the exit code."""
    target = writable_target(config.json, "json")
    bar = progress_bar(None, "run", enabled=None, desc="simulating")
    simulated: dict[float, Sequence[Mapping[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch, bar:
        store = CellStore(config.cells or scratch)

        def simulate(cells: Sequence[Cell]) -> Sequence[Mapping[str, Any]]:
            unit, level = next(iter(cells[0].settings.items()))
            bar.set_description_str(f"simulating {unit} {level:.4g}, {len(cells)} seeds")
            simulated[level] = run_cells(cells, store, config.workers, bar.update)
            return simulated[level]

        result = find(simulate)
    level = result[level_key]
    probe = next(probe for probe in result["probes"] if probe["level"] == level)
    warnings = dict(probe["warnings"])
    if not probe["clear"]:
        num = max(estimate["num"] for estimate in probe["estimates"].values())
        unclear = (
            f"the intervals over {num} seeds contain a target, so the means decided; use a higher --max_seeds"
        )
        warnings = {"not_clear": unclear} | warnings
    if config.workload is None and config.rate is None and level_key == "num_replicas":
        same = "all seeds have the arrivals of the trace, so the intervals do not include other traffic; see --rate"
        warnings = {"same_arrivals": same} | warnings
    write_json(target, {"schema": schema, "config": asdict(config), **result, "warnings": warnings})
    logger.info(text.format(means=means_of(probe), **result))
    return end_with_warnings(warnings, [one["metrics"] for one in simulated[level]])


def run(config: CapacityConfig) -> int:
    """Runs `simulate capacity`."""

    def find(simulate: Simulate) -> dict[str, Any]:
        return {"unit": config.unit} | find_capacity(config, simulate)

    text = "{unit} {level:.4g} meets the targets ({means}), {failing:.4g} does not"
    return run_search(config, "tailcast.capacity/3", find, "level", text)
