"""The best of many candidates: all of them in full, or successive halving (Jamieson & Talwalkar 2016)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.simulator.sweep.capacity import Target
from scheduler_core.simulator.sweep.tables import metric

Settings = Mapping[str, Any]
#: (candidates, requests per simulation) -> for each candidate the results of its seeds.
Evaluate = Callable[[Sequence[Settings], int], Sequence[Sequence[Mapping[str, Any]]]]


@dataclass(frozen=True, slots=True)
class Scored:
    """A candidate and what it came to.

    Attributes:
        settings: Its settings.
        num_requests: Requests of each of its simulations.
        objective: Mean of the objective over seeds.
        excess: By how much it misses its targets, the sum of relative excesses of the means; 0: it meets all.
    """

    settings: Settings
    num_requests: int
    objective: float
    excess: float


def score(
    settings: Settings,
    num_requests: int,
    results: Sequence[Mapping[str, Any]],
    objective: str,
    targets: Sequence[Target],
) -> Scored:
    """Means over seeds of the objective and of what the targets are about."""

    def mean(name: str) -> float:
        return float(np.mean([metric(one["metrics"], name) for one in results]))

    excess = 0.0
    for one in targets:
        value = mean(one.metric)
        if not one.met_by(value):
            excess += abs(value - one.bound) / (abs(one.bound) or 1.0)
    return Scored(settings, num_requests, mean(objective), excess)


def best_first(scored: Sequence[Scored], maximise: bool) -> list[Scored]:
    """Those that meet the targets by their objective, then the others by how little they miss."""
    sign = -1.0 if maximise else 1.0
    return sorted(scored, key=lambda one: (one.excess, sign * one.objective))


def rungs(num_candidates: int, num_requests: int, eta: int, min_requests: int) -> list[tuple[int, int]]:
    """(candidates, requests) of each rung: requests grow by eta up to the full number while candidates shrink by it.

    Raises:
        InputError: `eta` is below 2, or `min_requests` is not from 1 to `num_requests`.
    """
    if eta < 2:
        raise InputError("eta", eta, "integers > 1")
    if not 1 <= min_requests <= num_requests:
        raise InputError("min_requests", min_requests, f"integers from 1 to num_requests = {num_requests}")
    sizes = [num_requests]
    while sizes[0] // eta >= min_requests and len(sizes) < 1 + int(np.log(num_candidates) / np.log(eta)):
        sizes.insert(0, sizes[0] // eta)
    counts = [max(1, num_candidates // eta**place) for place in range(len(sizes))]
    return list(zip(counts, sizes, strict=True))


def successive_halving(
    candidates: Sequence[Settings],
    schedule: Sequence[tuple[int, int]],
    evaluate: Evaluate,
    objective: str,
    targets: Sequence[Target],
    maximise: bool,
) -> list[Scored]:
    """Each rung simulates those that are left with more requests than the one before, and keeps the best.

    Returns:
        All candidates, best first: by the rung they reached, then as in `best_first`.
    """
    alive = list(candidates)
    ranking: list[Scored] = []
    for place, (count, num_requests) in enumerate(schedule):
        alive = alive[:count]
        found = evaluate(alive, num_requests)
        scored = [
            score(settings, num_requests, results, objective, targets)
            for settings, results in zip(alive, found, strict=True)
        ]
        order = best_first(scored, maximise)
        last = place == len(schedule) - 1
        kept = len(order) if last else schedule[place + 1][0]
        ranking = order[kept:] + ranking
        alive = [one.settings for one in order[:kept]]
        if last:
            ranking = order + ranking
    return ranking
