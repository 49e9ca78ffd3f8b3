"""Searches over a level (load, rate, number of replicas): which one still meets the targets, by simulations with several seeds.

A search is a generator of cells to simulate, to which their results are sent, so that many of them run side by side.
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol, TypeVar

from scheduler_core.simulator.metrics import metric, metric_bounds
from scheduler_core.simulator.sweep import Cell
from scheduler_core.statistics import Interval

T = TypeVar("T")

Results = Sequence[Mapping[str, Any]]
#: Simulates cells and returns their results in order; see `sweep.run_cells`.
Simulate = Callable[[Sequence[Cell]], Results]
Search = Generator[Sequence[Cell], Results, T]
#: A tested level, see `probe_level`.
Probe = dict[str, Any]


class Levels(Protocol):
    """The targets of a search, and the simulations of a level. All levels use the same seeds, so that they only differ in it."""

    @property
    def at_most(self) -> Mapping[str, float]: ...
    @property
    def at_least(self) -> Mapping[str, float]: ...
    @property
    def seed(self) -> int: ...
    @property
    def max_seeds(self) -> int: ...
    def cell(self, level: float, seed: int) -> Cell:
        """The simulation of a level with a seed."""

    def warnings(self, results: Results) -> dict[str, str]:
        """What may mislead in the results of a level, by kind."""

    def estimate(self, values: Sequence[float], bounds: tuple[float, float]) -> Interval:
        """What the values of a metric with the seeds say about it."""

    def problem(self, results: Results) -> str | None:
        """Why a level does not meet the targets whatever its metrics are, as a sentence; None: nothing."""


def drive(search: Search[T], simulate: Simulate) -> T:
    """The result of a search, whose cells `simulate` simulates."""
    try:
        cells = next(search)
        while True:
            cells = search.send(simulate(cells))
    except StopIteration as end:
        result: T = end.value
        return result


def probe_level(levels: Levels, level: float, num_seeds: int = 2) -> Search[Probe]:
    """Adds seeds, two at a time from `num_seeds` on, until the confidence interval of each metric is on one side of its bound.

    The result has `level`; `meets` (the targets); `clear` (whether the confidence intervals were conclusive; otherwise the
    means decided); `estimates`, the intervals over seeds by metric; and `warnings` by kind, of which `problem` is
    `Levels.problem`.
    """
    targets = [(name, bound, 1) for name, bound in levels.at_most.items()]
    targets = sorted([*targets, *((name, bound, -1) for name, bound in levels.at_least.items())])
    while True:
        results = yield [levels.cell(level, seed) for seed in range(levels.seed, levels.seed + num_seeds)]
        estimates = {
            name: levels.estimate(
                [metric(result["metrics"], name) for result in results], metric_bounds(name)
            )
            for name, _, _ in targets
        }
        met = {
            end: [sign * getattr(estimates[name], end) <= sign * bound for name, bound, sign in targets]
            for end in ("mean", "low", "high")
        }
        ends = list(zip(met["low"], met["high"], strict=True))
        problem = levels.problem(results)
        fails, clear = problem is not None or (False, False) in ends, all(low == high for low, high in ends)
        if fails or clear or num_seeds >= levels.max_seeds:
            break
        num_seeds = min(num_seeds + 2, levels.max_seeds)
    return {
        "level": level,
        "meets": not fails and all(met["mean"]),
        "clear": fails or clear,
        "estimates": {name: asdict(estimate) for name, estimate in estimates.items()},
        "warnings": levels.warnings(results) | ({"problem": problem} if problem else {}),
    }


def means_of(probe: Probe) -> str:
    """The means of the metrics of a probe, for a message."""
    return ", ".join(f"{name} = {estimate['mean']:.4g}" for name, estimate in probe["estimates"].items())


def highest_level(
    probe: Callable[[float], Search[Probe]], good: float, bad: float, tolerance: float
) -> Search[tuple[float, float, list[Probe]]]:
    """Bisects between a level that meets the targets and a higher one that does not, until their relative difference is at
    most `tolerance`. The highest level that meets them, the lowest that does not, and the tested ones in order."""
    probes = []
    while bad / good > 1 + tolerance:
        probes.append((yield from probe((good * bad) ** 0.5)))
        if probes[-1]["meets"]:
            good = probes[-1]["level"]
        else:
            bad = probes[-1]["level"]
    return good, bad, probes


def smallest_level(
    probe: Callable[[int], Search[Probe]], largest: int, first: int = 1, step: float = 2.0
) -> Search[tuple[Probe | None, list[Probe]]]:
    """Multiplies an integer level by `step` from `first` on until the targets are met (or divides it while they are), then
    bisects; assumes that more is never worse. A step below 2, for a good guess, grows to 2.

    The probe of the smallest level that meets the targets, None if `largest` does not, and all probes in order."""
    probes: list[Probe] = []
    best: Probe | None = None
    bad, good = 0, min(first, largest)
    while best is None:
        probes.append((yield from probe(good)))
        if probes[-1]["meets"]:
            best = probes[-1]
        elif good == largest:
            return None, probes
        else:
            bad, good = good, min(max(good + 1, math.ceil(good * step)), largest)
            step = min(step**2, 2.0)
    while good - bad > 1:
        level = (good + bad) // 2 if bad else max(min(good - 1, int(good / step)), 1)
        step = min(step**2, 2.0)
        probes.append((yield from probe(level)))
        if probes[-1]["meets"]:
            best, good = probes[-1], level
        else:
            bad = level
    return best, probes
