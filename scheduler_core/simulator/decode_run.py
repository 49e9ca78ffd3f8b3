"""Consecutive decode steps of the same requests, timed from their start.

The end of the k-th step is a function of the start and k alone, so that taking the steps one by one or many at once
gives the same times to the last bit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple


class StepGroup(NamedTuple):
    """Consecutive steps, each `growth_s` >= 0 longer than the one before.

    Attributes:
        first_s: Duration of the first.
        growth_s: What each takes longer, in seconds.
        num_steps: Number of steps, > 0.
    """

    first_s: float
    growth_s: float
    num_steps: int

    @property
    def longest_s(self) -> float:
        """Duration of the last."""
        return self.first_s + self.growth_s * (self.num_steps - 1)

    @property
    def total_s(self) -> float:
        """Sum of the durations."""
        return self.num_steps * (self.first_s + self.growth_s * (self.num_steps - 1) / 2)


Steps = Sequence[StepGroup]


class DecodeRun(ABC):
    """A run of decode steps.

    Args:
        start_s: Start of the first step.

    Attributes:
        num_done: Steps taken so far; whoever takes steps counts them here.
    """

    __slots__ = ("_start_s", "num_done")

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self.num_done = 0

    @abstractmethod
    def elapsed_s(self, num_steps: int) -> float:
        """Seconds from the start to the end of step number `num_steps`, counted from 1; it grows with every step."""

    def at(self, num_steps: int) -> float:
        """End of step number `num_steps`, counted from 1."""
        return self._start_s + self.elapsed_s(num_steps)

    def end_s(self, more_steps: int) -> float:
        """When the run will have taken `more_steps` steps more."""
        return self._start_s + self.elapsed_s(self.num_done + more_steps)

    def steps_to_reach(self, time_s: float, limit: int) -> int:
        """The fewest steps more, from 1 to `limit`, that end at or after `time_s`; `limit` if none does.

        Hardly looks further ahead than that.
        """
        high = min(self._guess(time_s, limit), limit)
        low, width = high, 1
        while high < limit and self.end_s(high) < time_s:
            low, high, width = high, min(high + width, limit), 2 * width
        if low == high:  # end_s(high) >= time_s, or high = limit
            width = 1
            while low and self.end_s(low) >= time_s:
                low, high, width = max(low - width, 0), low, 2 * width
        while high - low > 1:
            middle = (low + high) // 2
            if self.end_s(middle) < time_s:
                low = middle
            else:
                high = middle
        return high

    def steps(self, first: int, num_steps: int) -> Steps:
        """Durations of `num_steps` steps from number `first` on, counted from 0."""
        ends = [self.elapsed_s(step) if step else 0.0 for step in range(first, first + num_steps + 1)]
        return [StepGroup(after - before, 0.0, 1) for before, after in pairwise(ends)]

    def _guess(self, time_s: float, limit: int) -> int:
        """Roughly how many steps more it takes to end at or after the time, at least 1; looks no further than `limit`."""
        return 1


class PolynomialRun(DecodeRun):
    """Every step takes a fixed time longer than the one before: k first_s + growth_s k (k-1) / 2.

    Args:
        start_s: Start of the first step.
        first_s: Duration of the first step.
        growth_s: What each step takes longer than the one before.
    """

    __slots__ = ("_first_s", "_growth_s")

    def __init__(self, start_s: float, first_s: float, growth_s: float) -> None:
        super().__init__(start_s)
        self._first_s = first_s
        self._growth_s = growth_s

    def elapsed_s(self, num_steps: int) -> float:
        return num_steps * self._first_s + self._growth_s * (num_steps * (num_steps - 1) // 2)

    def steps(self, first: int, num_steps: int) -> Steps:
        if not num_steps:
            return ()
        return (StepGroup(self._first_s + first * self._growth_s, self._growth_s, num_steps),)

    def _guess(self, time_s: float, limit: int) -> int:
        half = self._growth_s / 2
        linear = self._first_s - half
        elapsed = max(time_s - self._start_s, 0.0)
        root = linear + math.sqrt(linear * linear + 4 * half * elapsed)
        return max(1, math.ceil(2 * elapsed / root) - self.num_done) if root > 0 else 1


class PiecewiseRun(DecodeRun):
    """Stretches of steps of equal duration.

    Args:
        start_s: Start of the first step.
        stretch: From the number of a step (from 0): (its duration, the number of the first step that may take
            another time).
    """

    __slots__ = ("_before_s", "_each_s", "_firsts", "_known", "_stretch")

    def __init__(self, start_s: float, stretch: Callable[[int], tuple[float, int]]) -> None:
        super().__init__(start_s)
        self._stretch = stretch
        self._firsts: list[int] = []
        self._before_s: list[float] = []
        self._each_s: list[float] = []
        self._known = 0

    def elapsed_s(self, num_steps: int) -> float:
        while self._known < num_steps:
            self._extend()
        place = bisect_right(self._firsts, num_steps - 1) - 1
        return self._before_s[place] + (num_steps - self._firsts[place]) * self._each_s[place]

    def steps(self, first: int, num_steps: int) -> Steps:
        last = first + num_steps
        while self._known < last:
            self._extend()
        groups = []
        place = bisect_right(self._firsts, first) - 1
        while first < last:
            end = self._firsts[place + 1] if place + 1 < len(self._firsts) else self._known
            groups.append(StepGroup(self._each_s[place], 0.0, min(end, last) - first))
            first, place = end, place + 1
        return groups

    def _guess(self, time_s: float, limit: int) -> int:
        elapsed = time_s - self._start_s
        last = self.num_done + limit
        while self._known < last and (not self._known or self.elapsed_s(self._known) < elapsed):
            self._extend()
        place = max(bisect_right(self._before_s, elapsed) - 1, 0)
        steps = self._firsts[place] + math.ceil((elapsed - self._before_s[place]) / self._each_s[place])
        return max(1, steps - self.num_done)

    def _extend(self) -> None:
        first = self._known
        self._before_s.append(self.elapsed_s(first) if first else 0.0)
        each_s, self._known = self._stretch(first)
        self._firsts.append(first)
        self._each_s.append(each_s)


class SteppedRun(DecodeRun):
    """Every step has a duration of its own, worked out once and remembered.

    Args:
        start_s: Start of the first step.
        step: Duration of the step of that number, from 0.
    """

    __slots__ = ("_ends", "_step")

    def __init__(self, start_s: float, step: Callable[[int], float]) -> None:
        super().__init__(start_s)
        self._step = step
        self._ends = [0.0]

    def elapsed_s(self, num_steps: int) -> float:
        ends = self._ends
        while len(ends) <= num_steps:
            ends.append(ends[-1] + self._step(len(ends) - 1))
        return ends[num_steps]
