"""The highest load that meets targets, by bisection with confidence intervals over seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from scheduler_core.errors import InputError
from scheduler_core.simulator.config import SimulationConfig, check_seeds
from scheduler_core.simulator.statistics import Interval, interval
from scheduler_core.simulator.sweep.cells import Cell
from scheduler_core.simulator.sweep.tables import metric

#: Simulates cells and gives their results in order; see `execute.run_cells`.
Simulate = Callable[[Sequence[Cell]], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on a metric.

    Attributes:
        metric: Dotted name, `ttft_s.p50` for instance.
        bound: The bound.
        kind: "at_most" or "at_least".
    """

    metric: str
    bound: float
    kind: Literal["at_most", "at_least"] = "at_most"

    def verdict(self, spread: Interval) -> bool | None:
        """Met, not met, or (None) not to be told from these seeds."""
        low, high = spread.low, spread.high
        if self.kind == "at_most":
            return True if high <= self.bound else False if low > self.bound else None
        return True if low >= self.bound else False if high < self.bound else None

    def met_by(self, value: float) -> bool:
        """Whether one number meets it."""
        return value <= self.bound if self.kind == "at_most" else value >= self.bound


@dataclass(frozen=True, slots=True)
class Probe:
    """One load that was tried.

    Attributes:
        level: The rate or load.
        meets: Whether the targets were met.
        clear: Whether the confidence intervals said so; else the means did.
        spreads: By metric: over seeds.
    """

    level: float
    meets: bool
    clear: bool
    spreads: dict[str, Interval]


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest load that meets the targets.

    Attributes:
        level: The highest level that was found to meet them.
        failing: The lowest that was found not to.
        probes: All that were tried, in order.
    """

    level: float
    failing: float
    probes: list[Probe]


@dataclass(frozen=True, kw_only=True)
class CapacitySearch:
    """How the search goes.

    Raises:
        InputError: A value is outside its range.
    """

    low: float
    high: float
    unit: Literal["load", "rate"] = "load"
    tolerance: float = 0.02
    min_seeds: int = 2
    max_seeds: int = 8
    confidence: float = 0.95

    def __post_init__(self) -> None:
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
        if not 0 < self.confidence < 1:
            raise InputError("confidence", self.confidence, "numbers between 0 and 1")

    def find(self, base: SimulationConfig, targets: Sequence[Target], simulate: Simulate) -> Capacity:
        """Bisects between `low`, which must meet the targets, and `high`, which must not.

        At every level seeds are added, two at a time, until the confidence interval of each metric is on one side of
        its bound, or `max_seeds` are done; then the mean decides, and the probe says so. The seeds are the same at all
        levels, so that levels differ in load and nothing else.

        Raises:
            InputError: `low` does not meet the targets, or `high` does.
        """
        if not targets:
            raise InputError("targets", targets, "at least one")
        low, high = self._probe(base, self.low, targets, simulate), None
        probes = [low]
        if not low.meets:
            raise InputError("low", self.low, f"a {self.unit} that meets the targets: {_told(low)}")
        high = self._probe(base, self.high, targets, simulate)
        probes.append(high)
        if high.meets:
            raise InputError(
                "high", self.high, f"a {self.unit} that does not meet the targets: {_told(high)}"
            )
        good, bad = self.low, self.high
        while bad / good > 1 + self.tolerance:
            probe = self._probe(base, (good * bad) ** 0.5, targets, simulate)
            probes.append(probe)
            if probe.meets:
                good = probe.level
            else:
                bad = probe.level
        return Capacity(good, bad, probes)

    def _probe(
        self, base: SimulationConfig, level: float, targets: Sequence[Target], simulate: Simulate
    ) -> Probe:
        seeds = list(range(base.seed, base.seed + self.min_seeds))
        while True:
            cells = [self._cell(base, level, seed) for seed in seeds]
            results = simulate(cells)
            spreads = {
                one.metric: interval(
                    [metric(found["metrics"], one.metric) for found in results], self.confidence
                )
                for one in targets
            }
            verdicts = [one.verdict(spreads[one.metric]) for one in targets]
            if any(verdict is False for verdict in verdicts):
                return Probe(level, False, True, spreads)
            if all(verdicts):
                return Probe(level, True, True, spreads)
            if len(seeds) >= self.max_seeds:
                meets = all(one.met_by(spreads[one.metric].mean) for one in targets)
                return Probe(level, meets, False, spreads)
            more = min(2, self.max_seeds - len(seeds))
            seeds += range(seeds[-1] + 1, seeds[-1] + 1 + more)

    def _cell(self, base: SimulationConfig, level: float, seed: int) -> Cell:
        load, rate = (level, None) if self.unit == "load" else (None, level)
        return Cell(replace(base, load=load, rate=rate, seed=seed), {self.unit: level, "seed": seed})


def _told(probe: Probe) -> str:
    return ", ".join(f"{name} = {spread.mean:.4g}" for name, spread in probe.spreads.items())
