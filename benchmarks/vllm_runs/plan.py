"""The runs of a benchmark in their order: whenever it stops, what is there can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.vllm_runs.client import Ask

SIDES = ("fcfs", "bounded_shortest", "tie", "ssjf", "oracle", "priority", "fcfs_again")
#: Parts of a run in which the same number of requests arrives.
PARTS = 10
#: Bursts of a run with bursts: in the first tenth of each of these parts arrives half of its requests.
BURSTS = 4
#: The engine a side runs in.
ENGINES = {"fcfs_again": "fcfs"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run.

    Attributes:
        side: One of `SIDES`.
        repetition: Which order and arrivals.
        load: Mean load, as a fraction of the capacity; None: all requests at once, to measure the capacity.
        bursts: Half of the requests arrive in `BURSTS` bursts.
    """

    side: str
    repetition: int
    load: float | None
    bursts: bool = False

    def file(self, folder: Path) -> Path:
        """Where its result is, or will be."""
        load = "capacity" if self.load is None else f"{self.load}{'-bursts' if self.bursts else ''}"
        return folder / f"{self.side}-{self.repetition}-{load}.json"


CAPACITY = Cell("fcfs", 0, None)


def cells(
    loads: Sequence[float],
    burst_loads: Sequence[float],
    repetitions: int,
    sides: Sequence[str],
    low_sides: Sequence[str],
    controls: int,
) -> list[Cell]:
    """The capacity first; then load by load, the first one with all sides; repetition by repetition; controls last.

    In every other repetition sides go backwards, so that none is always the first.
    """
    cells = [CAPACITY]
    for index, (load, bursts) in enumerate(arrival_settings(loads, burst_loads)):
        mine = list(low_sides if index else sides)
        for repetition in range(repetitions):
            order = mine[:: 1 if repetition % 2 == 0 else -1]
            cells += [Cell(side, repetition, load, bursts) for side in order]
    return cells + [Cell("fcfs_again", repetition, loads[0]) for repetition in range(controls)]


def arrival_settings(loads: Sequence[float], burst_loads: Sequence[float]) -> list[tuple[float, bool]]:
    """(load, bursts) in the order of runs and table."""
    return [(load, False) for load in loads] + [(load, True) for load in burst_loads]


def asks(
    prompts: Sequence[str],
    repetition: int,
    rate: float | None,
    max_tokens: int,
    seed: int,
    lengths: Sequence[int] | None = None,
    bursts: bool = False,
) -> list[Ask]:
    """The requests of a run: always the same, each with its own sampling seed; order and times are the repetition's.

    Without a rate all are there at once. Else arrivals are those of a Poisson process of which it is known that each of
    `PARTS` equal parts of the len(prompts) / rate seconds gets its share of the requests, and with lengths (of the answers,
    by prompt) its share of short and long ones: any request may come in any part, but every repetition has the load that
    is asked for, from begin to end, and only its bursts are chance. With `bursts` the same arrivals are moved within each of
    `BURSTS` parts of the time: half of them to its first tenth.
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
    if bursts:
        part, within = np.divmod(shares * BURSTS, 1.0)
        shares = (part + np.interp(within, [0.0, 0.5, 1.0], [0.0, 0.1, 1.0])) / BURSTS
    at = np.zeros(count) if rate is None else shares * count / rate
    return [
        Ask(f"q{number}", prompts[number], float(when), int(number), max_tokens)
        for number, when in zip(order.tolist(), at.tolist(), strict=True)
    ]
