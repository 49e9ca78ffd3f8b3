"""Failures of replicas: given ones, random ones, and the ends of drains that take too long."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from scheduler_core.ranges import INTEGERS, check_ranges
from scheduler_core.simulator.trace import MAX_TIME_S


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failure of one replica at a given time."""

    at_s: float
    """Seconds after the first arrival. Without effect if the replica does not run then."""
    replica: int = 0
    """Number of the replica, from 0."""
    down_s: float | None = None
    """Seconds until it is available again. Unset: cluster.restart_s."""

    def __post_init__(self) -> None:
        check_ranges(self, "failures.", at_s=(0, MAX_TIME_S), replica=(0, INTEGERS), down_s=(0, MAX_TIME_S))


@dataclass(frozen=True, kw_only=True)
class FailurePlan:
    """When replicas fail, and what becomes of their requests.

    Attributes:
        failures: (seconds after the first arrival, replica, seconds until it runs again; None: `restart_s`).
        mtbf_s: Mean of the exponential time that a replica runs until it fails; None: never.
        restart_s: Time until a failed replica is available again, with empty caches.
        max_retries: How often a lost request is sent again, at once and from its first token; then it fails.
        retry_started: Whether a request that already had output tokens is sent again.
        seed: Of the random failures; each replica has its own generator.
    """

    failures: tuple[tuple[float, str, float | None], ...] = ()
    mtbf_s: float | None = None
    restart_s: float = 0.0
    max_retries: int = 2
    retry_started: bool = True
    seed: int = 0


class FailureSource:
    """The next failures in order of time; random ones are drawn when a replica joins.

    `next_s` is the time of the next one, infinite without; it may have no effect, because its replica has left.
    """

    def __init__(self, plan: FailurePlan, names: Iterable[str], start_s: float) -> None:
        self._plan = plan
        self._rngs = {
            name: np.random.default_rng([plan.seed, 3, number]) for number, name in enumerate(names)
        }
        #: How often a replica has joined or left; what was planned for one life does not concern the next.
        self._life = dict.fromkeys(self._rngs, 0)
        #: (time, replica, life or -1 for every one, seconds until it runs again).
        self._heap: list[tuple[float, str, int, float]] = []
        for at_s, name, down_s in plan.failures:
            heappush(self._heap, (start_s + at_s, name, -1, plan.restart_s if down_s is None else down_s))

    @property
    def next_s(self) -> float:
        return self._heap[0][0] if self._heap else math.inf

    def joined(self, name: str, now: float) -> None:
        """Called when a replica starts to run."""
        self._life[name] += 1
        if self._plan.mtbf_s is not None:
            at_s = now + float(self._rngs[name].exponential(self._plan.mtbf_s))
            heappush(self._heap, (at_s, name, self._life[name], self._plan.restart_s))

    def left(self, name: str) -> None:
        """Called when a replica was stopped or has failed."""
        self._life[name] += 1

    def kill(self, name: str, at_s: float) -> None:
        """Plans the end of a replica that drains."""
        heappush(self._heap, (at_s, name, self._life[name], math.inf))

    def pop(self) -> tuple[str, float] | None:
        """Removes the next failure: its replica and the seconds until that runs again, infinite if it was killed; None if it
        has no effect."""
        _, name, life, down_s = heappop(self._heap)
        return (name, down_s) if life in (-1, self._life[name]) else None
