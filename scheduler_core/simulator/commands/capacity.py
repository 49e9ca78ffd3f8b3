"""`simulate capacity`: highest load that meets targets, by bisection with confidence intervals over seeds."""

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from scheduler_core.errors import InputError
from scheduler_core.files import writable_target, write_json
from scheduler_core.ranges import check_choice, check_ranges
from scheduler_core.simulator.commands import progress_bar
from scheduler_core.simulator.commands.sweep import BaseConfig
from scheduler_core.simulator.config import MAX_SEEDS
from scheduler_core.simulator.metrics import metric
from scheduler_core.simulator.sweep import Cell, CellStore, run_cells
from scheduler_core.statistics import interval

logger = logging.getLogger(__name__)

#: Simulates cells and returns their results in order; see `sweep.run_cells`.
Simulate = Callable[[Sequence[Cell]], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class CapacityConfig(BaseConfig):
    """Find the highest load (or rate) that meets targets, by bisection.

    At every load, seeds are added until the confidence intervals show whether the targets are met.
    """

    OUTPUTS = ("json", "cells")

    json: str
    """Path of the result."""
    overwrite: bool = False
    """Replace existing output files."""
    at_most: dict[str, float] = field(default_factory=dict)
    """Targets: metrics by dotted name and their upper bounds, such as {ttft_s.p50: 0.5}."""
    at_least: dict[str, float] = field(default_factory=dict)
    """Targets: metrics and their lower bounds, such as {slo_attainment: 0.99}."""
    unit: Literal["load", "rate"] = "load"
    """load (fraction of the estimated capacity) or rate (requests per second)."""
    low: float = 0.1
    """A load that meets the targets."""
    high: float = 2.0
    """A load that does not meet the targets."""
    tolerance: float = 0.02
    """Stop when the relative difference of the two ends is less than this."""
    max_seeds: int = 8
    """Maximum number of seeds at every load, at least 2; if the intervals are inconclusive then, the means decide."""
    cells: str | None = None
    """Folder for results of simulations, to resume an interrupted search. Unset: a temporary folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.at_most and not self.at_least:
            raise InputError("at_most, at_least", {}, "at least one target, such as {ttft_s.p50: 0.5}")
        if not 1e-9 <= self.low < self.high <= 1e9:
            allowed = "numbers with 1e-09 <= low < high <= 1e+09"
            raise InputError("low, high", (self.low, self.high), allowed)
        check_choice("unit", self.unit, ("load", "rate"))
        check_ranges(self, tolerance=(1e-6, 0.999), max_seeds=(2, MAX_SEEDS))


def find_capacity(config: CapacityConfig, simulate: Simulate) -> dict[str, Any]:
    """Bisects between `low`, which must meet the targets, and `high`, which must not; otherwise `InputError`.

    The result has `level`, the highest level that meets the targets; `failing`, the lowest that does not; and
    `probes`, all tested levels in order. A probe has `level`; `meets` (the targets); `clear` (whether the confidence
    intervals were conclusive; otherwise the means decided); and `estimates`, the intervals over seeds by metric.
    """
    probes: list[dict[str, Any]] = []
    for name, level, should_meet in (("low", config.low, True), ("high", config.high, False)):
        probes.append(_probe(config, level, simulate))
        if probes[-1]["meets"] != should_meet:
            means = {key: estimate["mean"] for key, estimate in probes[-1]["estimates"].items()}
            values = ", ".join(f"{key} = {mean:.4g}" for key, mean in means.items())
            verb = "meets" if should_meet else "does not meet"
            raise InputError(name, level, f"a {config.unit} that {verb} the targets: {values}")
    good, bad = config.low, config.high
    while bad / good > 1 + config.tolerance:
        probes.append(_probe(config, (good * bad) ** 0.5, simulate))
        if probes[-1]["meets"]:
            good = probes[-1]["level"]
        else:
            bad = probes[-1]["level"]
    return {"level": good, "failing": bad, "probes": probes}


def _probe(config: CapacityConfig, level: float, simulate: Simulate) -> dict[str, Any]:
    """Adds seeds, two at a time, until the confidence interval of each metric is on one side of its bound.

    All levels use the same seeds, so that they only differ in load.
    """
    base = config.simulation()
    load, rate = (level, None) if config.unit == "load" else (None, level)
    targets = [(name, bound, 1) for name, bound in config.at_most.items()]
    targets = sorted([*targets, *((name, bound, -1) for name, bound in config.at_least.items())])
    num_seeds = 2
    while True:
        seeds = range(base.seed, base.seed + num_seeds)
        results = simulate([
            Cell(replace(base, load=load, rate=rate, seed=seed), {config.unit: level, "seed": seed}) for seed in seeds
        ])  # fmt: skip
        estimates = {
            name: interval([metric(result["metrics"], name) for result in results]) for name, _, _ in targets
        }
        met = {
            end: [sign * getattr(estimates[name], end) <= sign * bound for name, bound, sign in targets]
            for end in ("mean", "low", "high")
        }
        ends = list(zip(met["low"], met["high"], strict=True))
        fails, clear = (False, False) in ends, all(low == high for low, high in ends)
        if fails or clear or num_seeds >= config.max_seeds:
            meets = not fails and all(met["mean"])
            intervals = {name: asdict(estimate) for name, estimate in estimates.items()}
            return {"level": level, "meets": meets, "clear": fails or clear, "estimates": intervals}
        num_seeds = min(num_seeds + 2, config.max_seeds)


def run(config: CapacityConfig) -> None:
    """Runs `simulate capacity`."""
    target = writable_target(config.json, "json")
    bar = progress_bar(None, "simulating", "run")
    with tempfile.TemporaryDirectory() as scratch, bar, config.ready():
        store = CellStore(config.cells or scratch)

        def simulate(cells: Sequence[Cell]) -> Sequence[Mapping[str, Any]]:
            level = cells[0].settings[config.unit]
            bar.set_description_str(f"simulating {config.unit} {level:.4g}, {len(cells)} seeds")
            return run_cells(cells, store, config, bar.update)

        capacity = find_capacity(config, simulate)
    about = {"schema": "tailcast.capacity/2", "config": asdict(config), "unit": config.unit}
    write_json(target, about | capacity)
    text = "%s %.4g meets the targets, %.4g does not"
    logger.info(text, config.unit, capacity["level"], capacity["failing"])
