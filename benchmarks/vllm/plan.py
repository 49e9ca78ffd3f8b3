"""Order of the runs of a benchmark, and their requests: an interrupted benchmark has comparable runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

SIDES = ("fcfs", "bounded_shortest", "tie", "ssjf", "oracle")
#: Number of parts of a run; the same number of requests arrives in each.
PARTS = 10
#: Number of bursts; half of the requests of each of these parts arrive in its first tenth.
BURSTS = 4


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to send.

    Attributes:
        request_id: Id of the request in this benchmark.
        prompt: Text of the only message, with the role user; or token ids, for an output of exactly `max_tokens` tokens.
        at_s: Due time, in seconds of the clock from the start of the run.
        seed: Sampling seed.
        max_tokens: Limit of output tokens.
        hints: The request's `vllm_xargs`.
    """

    request_id: str
    prompt: str | tuple[int, ...]
    at_s: float
    seed: int
    max_tokens: int
    hints: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cell:
    """One run.

    Attributes:
        side: One of `SIDES`.
        repetition: Selects order and arrivals.
        load: Mean load, as a fraction of the capacity; None: all requests at once, to measure the capacity.
        bursts: Half of the requests arrive in `BURSTS` bursts.
    """

    side: str
    repetition: int
    load: float | None
    bursts: bool = False

    def file(self, folder: Path) -> Path:
        """File of its result."""
        load = "capacity" if self.load is None else f"{self.load}{'-bursts' if self.bursts else ''}"
        return folder / f"{self.side}-{self.repetition}-{load}.json"


CAPACITY = Cell("fcfs", 0, None)


def cells(loads: Sequence[tuple[float, bool]], repetitions: int, sides: Sequence[str]) -> list[Cell]:
    """Capacity run first, then each (load, bursts) with all sides, by repetition.

    Every other repetition reverses the sides, so that no side is always the first.
    """
    return [CAPACITY] + [
        Cell(side, repetition, load, bursts)
        for load, bursts in loads
        for repetition in range(repetitions)
        for side in sides[:: 1 if repetition % 2 == 0 else -1]
    ]


def asks(
    prompts: Sequence[str],
    repetition: int,
    rate: float | None,
    max_tokens: int,
    seed: int,
    lengths: Sequence[int] | None = None,
    bursts: bool = False,
) -> list[Ask]:
    """Requests of a run: prompts and sampling seeds are always the same; order and times depend on the
    repetition.

    Without a rate, all requests arrive at once. Otherwise arrivals are a Poisson process, conditioned on
    equal numbers of requests in `PARTS` equal parts of the len(prompts) / rate seconds. With `lengths`
    (output lengths by prompt), each part also gets the same mix of short and long outputs. Any request can
    come in any part, but every repetition has the requested load from start to end, and only its bursts are
    random. With `bursts`, the same arrivals are moved within each of `BURSTS` parts of the time: half of them
    to its first tenth.
    """
    draws = np.random.default_rng([seed, repetition])
    count = len(prompts)
    # Requests of similar lengths go to different parts.
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
