"""`simulate capacity`: the highest load that meets targets."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from scheduler_core.errors import InputError
from scheduler_core.files import writable_target, write_json
from scheduler_core.simulate.progress import progress_bar
from scheduler_core.simulate.sweep import BaseConfig
from scheduler_core.simulator.sweep.capacity import CapacitySearch, Target
from scheduler_core.simulator.sweep.cells import Cell
from scheduler_core.simulator.sweep.execute import run_cells
from scheduler_core.simulator.sweep.store import CellStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CapacityConfig(BaseConfig):
    """Find the highest load (or rate) that meets targets, by bisection.

    At every load seeds are added until the confidence intervals tell whether the targets are met.
    """

    OUTPUTS = ("json", "cells")

    json: str
    """Where to write the result."""
    at_most: dict[str, float] = field(default_factory=dict)
    """Targets: metrics by dotted name and what they may be at most, such as {ttft_s.p50: 0.5}."""
    at_least: dict[str, float] = field(default_factory=dict)
    """Targets: metrics and what they must be at least, such as {slo_attainment: 0.99}."""
    unit: Literal["load", "rate"] = "load"
    """load (share of the estimated capacity) or rate (requests per second)."""
    low: float = 0.1
    """A load that meets the targets."""
    high: float = 2.0
    """A load that does not."""
    tolerance: float = 0.02
    """Stop when the two ends are as near as this, relatively."""
    min_seeds: int = 2
    """Seeds at every load, at least."""
    max_seeds: int = 8
    """Seeds at every load, at most; if that leaves it open, the mean decides."""
    cells: str | None = None
    """Folder where simulations are kept, so that an interrupted search goes on. Unset: nowhere."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.at_most and not self.at_least:
            raise InputError("at_most, at_least", {}, "at least one target, such as {ttft_s.p50: 0.5}")
        self.search()

    def search(self) -> CapacitySearch:
        """How the search goes."""
        return CapacitySearch(
            low=self.low,
            high=self.high,
            unit=self.unit,
            tolerance=self.tolerance,
            min_seeds=self.min_seeds,
            max_seeds=self.max_seeds,
        )


def targets_of(at_most: Mapping[str, float], at_least: Mapping[str, float]) -> list[Target]:
    """Both kinds of targets."""
    return [
        *(Target(name, bound, "at_most") for name, bound in at_most.items()),
        *(Target(name, bound, "at_least") for name, bound in at_least.items()),
    ]


def run(config: CapacityConfig) -> None:
    """Carries out `simulate capacity`."""
    target, search = writable_target(config.json, "json"), config.search()
    who = config.who()
    with (
        tempfile.TemporaryDirectory() as scratch,
        progress_bar(None, "simulating", "run") as bar,
        who.ready(),
    ):
        store = CellStore(config.cells or scratch)

        def simulate(cells: Sequence[Cell]) -> Sequence[Mapping[str, Any]]:
            level = cells[0].settings[config.unit]
            bar.set_description_str(f"simulating {config.unit} {level:.4g}, {len(cells)} seeds")
            return run_cells(cells, store, who, bar.update)

        found = search.find(config.simulation(), targets_of(config.at_most, config.at_least), simulate)
    content = {
        "schema": "tailcast.capacity/1",
        "config": asdict(config),
        **asdict(found),
        "unit": config.unit,
    }
    write_json(target, content)
    logger.info("%s %.4g meets the targets, %.4g does not", config.unit, found.level, found.failing)
