"""Shares of a count with exact confidence bounds (Clopper and Pearson 1934)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta

from scheduler_core.errors import InputError

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Rate:
    """`num_hits` out of `num_cases`; the rate of no cases is None.

    Attributes:
        num_hits: How often it happened.
        num_cases: How often it could have.
    """

    num_hits: int
    num_cases: int

    @classmethod
    def of(cls, hits: NDArray[np.bool_], cases: NDArray[np.bool_] | None = None) -> Rate:
        """From flags [N]: how many of `cases` (default: all) are `hits`."""
        counted = np.ones(len(hits), dtype=bool) if cases is None else cases
        return cls(int(np.sum(hits & counted)), int(np.sum(counted)))

    @property
    def value(self) -> float | None:
        """The share, or None without cases."""
        return self.num_hits / self.num_cases if self.num_cases else None

    def to_json(self) -> dict[str, Any]:
        """Share, exact two-sided 95 % interval, and counts."""
        tail = (1 - CONFIDENCE) / 2
        low = lower_bound(self.num_hits, self.num_cases, tail)
        high = upper_bound(self.num_hits, self.num_cases, tail)
        return {"value": self.value, "low": low, "high": high, "hits": self.num_hits, "cases": self.num_cases}


def upper_bound(num_hits: int, num_cases: int, delta: float) -> float:
    """Clopper-Pearson: the true rate is above it with probability at most `delta`; 1 without cases.

    Raises:
        InputError: The counts contradict each other, or `delta` is not between 0 and 1.
    """
    _check(num_hits, num_cases, delta)
    if num_hits == num_cases:
        return 1.0
    return float(beta.ppf(1 - delta, num_hits + 1, num_cases - num_hits))


def lower_bound(num_hits: int, num_cases: int, delta: float) -> float:
    """Clopper-Pearson: the true rate is below it with probability at most `delta`; 0 without cases."""
    _check(num_hits, num_cases, delta)
    if num_hits == 0:
        return 0.0
    return float(beta.ppf(delta, num_hits, num_cases - num_hits + 1))


def _check(num_hits: int, num_cases: int, delta: float) -> None:
    if not 0 <= num_hits <= num_cases:
        raise InputError("hits", num_hits, f"0 to the number of cases, {num_cases}")
    if not 0 < delta < 1:
        raise InputError("delta", delta, "a number between 0 and 1")
