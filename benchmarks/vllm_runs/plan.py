"""The runs of a benchmark in their order: whenever it stops, what is there can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.vllm_runs.client import Ask

SIDES = ("fcfs", "tie", "priority", "ssjf", "oracle", "fcfs_again")
#: The engine a side runs in.
ENGINES = {"fcfs_again": "fcfs"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run.

    Attributes:
        side: One of `SIDES`.
        repetition: Which arrivals, order and sampling seeds.
        load: Share of the capacity; None: all requests at once, to measure it.
    """

    side: str
    repetition: int
    load: float | None

    def file(self, folder: Path) -> Path:
        """Where its result is, or will be."""
        return folder / f"{self.side}-{self.repetition}-{'capacity' if self.load is None else self.load}.json"


CAPACITY = Cell("fcfs", 0, None)


def cells(
    loads: Sequence[float], repetitions: int, sides: Sequence[str], low_sides: Sequence[str], controls: int
) -> list[Cell]:
    """The capacity first; then load by load, the first one with all sides; repetition by repetition; controls last.

    In every other repetition sides go backwards, so that none is always the first; the oracle stays last, because it is
    told the lengths of another run of its repetition.
    """
    found = [CAPACITY]
    for load in loads:
        mine = [side for side in (sides if load == loads[0] else low_sides) if side != "oracle"]
        for repetition in range(repetitions):
            order = mine if repetition % 2 == 0 else mine[::-1]
            found += [Cell(side, repetition, load) for side in order]
            if "oracle" in (sides if load == loads[0] else low_sides):
                found.append(Cell("oracle", repetition, load))
    return found + [Cell("fcfs_again", repetition, loads[0]) for repetition in range(controls)]


def asks(
    prompts: Sequence[str], repetition: int, rate: float | None, max_tokens: int, seed: int
) -> list[Ask]:
    """The requests of a run, in an order, at times and with sampling seeds that depend on the repetition alone.

    Arrivals are those of a Poisson process of which it is known that all come within len(prompts) / rate seconds: every
    repetition has just the load that is asked for, and only its bursts are chance.
    """
    draws = np.random.default_rng([seed, repetition])
    order = draws.permutation(len(prompts))
    shares = np.sort(draws.uniform(size=len(prompts)))
    at = np.zeros(len(prompts)) if rate is None else shares * len(prompts) / rate
    return [
        Ask(f"q{number}", prompts[number], float(when), 1000 * repetition + int(number), max_tokens)
        for number, when in zip(order.tolist(), at.tolist(), strict=True)
    ]
