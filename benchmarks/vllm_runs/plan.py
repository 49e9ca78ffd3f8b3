"""The runs of a benchmark in their order: whenever it stops, what is there can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.vllm_runs.client import Ask

SIDES = ("fcfs", "tie", "priority", "ssjf", "oracle", "fcfs_again")
#: Parts of a run in which the same number of requests arrives.
PARTS = 10
#: The engine a side runs in.
ENGINES = {"fcfs_again": "fcfs"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run.

    Attributes:
        side: One of `SIDES`.
        repetition: Which order and arrivals.
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

    In every other repetition sides go backwards, so that none is always the first.
    """
    cells = [CAPACITY]
    for load in loads:
        mine = list(sides if load == loads[0] else low_sides)
        for repetition in range(repetitions):
            cells += [Cell(side, repetition, load) for side in mine[:: 1 if repetition % 2 == 0 else -1]]
    return cells + [Cell("fcfs_again", repetition, loads[0]) for repetition in range(controls)]


def asks(
    prompts: Sequence[str],
    repetition: int,
    rate: float | None,
    max_tokens: int,
    seed: int,
    lengths: Sequence[int] | None = None,
) -> list[Ask]:
    """The requests of a run: always the same, each with its own sampling seed; order and times are the repetition's.

    Without a rate all are there at once. Else arrivals are those of a Poisson process of which it is known that each of
    `PARTS` equal parts of the len(prompts) / rate seconds gets its share of the requests, and with lengths (of the answers,
    by prompt) its share of short and long ones: any request may come in any part, but every repetition has the load that
    is asked for, from begin to end, and only its bursts are chance.
    """
    draws = np.random.default_rng([seed, repetition])
    count = len(prompts)
    # Neighbours by length go to different parts.
    rank = draws.permutation(count)
    if lengths is not None:
        rank = rank[np.argsort(np.asarray(lengths)[rank], kind="stable")]
    part = np.empty(count, int)
    for begin in range(0, count, PARTS):
        part[rank[begin : begin + PARTS]] = draws.permutation(PARTS)[: count - begin]
    order = np.lexsort((draws.uniform(size=count), part))
    shares = np.sort((part + draws.uniform(size=count)) / PARTS)
    at = np.zeros(count) if rate is None else shares * count / rate
    return [
        Ask(f"q{number}", prompts[number], float(when), int(number), max_tokens)
        for number, when in zip(order.tolist(), at.tolist(), strict=True)
    ]
