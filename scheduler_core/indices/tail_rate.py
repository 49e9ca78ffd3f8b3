"""gamma-Ada: the rate at which the tail of the latency falls, estimated from finished requests (UniBoost, Eq. 9)."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from scheduler_core.errors import InputError

_LOG_RATIO = math.log(5.0)


class TailRate:
    """gamma_hat = ln(0.05/0.01)/(t99 - t95) = ln 5/(t99 - t95), smoothed, within bounds.

    Args:
        gamma_per_s: Value before there is an estimate.
        window: Latest latencies that are looked at.
        update_every: New latencies between two estimates.
        smoothing: beta of gamma <- (1 - beta) gamma + beta gamma_hat.
        lowest_per_s, highest_per_s: Bounds of gamma.
        shortest_s: Least t99 - t95, against a tail that has collapsed.
    """

    __slots__ = (
        "_highest",
        "_latencies",
        "_lowest",
        "_new",
        "_shortest_s",
        "_smoothing",
        "_update_every",
        "gamma_per_s",
    )

    def __init__(
        self,
        gamma_per_s: float,
        *,
        window: int = 1000,
        update_every: int = 100,
        smoothing: float = 0.2,
        lowest_per_s: float = 1e-4,
        highest_per_s: float = 100.0,
        shortest_s: float = 1e-3,
    ) -> None:
        if not 0 < lowest_per_s <= gamma_per_s <= highest_per_s:
            raise InputError("gamma_per_s", gamma_per_s, f"numbers in [{lowest_per_s:g}, {highest_per_s:g}]")
        if not 1 <= update_every <= window:
            raise InputError("window, update_every", (window, update_every), "1 <= update_every <= window")
        if not 0 < smoothing <= 1:
            raise InputError("smoothing", smoothing, "numbers in (0, 1]")
        self.gamma_per_s = gamma_per_s
        self._latencies: deque[float] = deque(maxlen=window)
        self._new = 0
        self._update_every = update_every
        self._smoothing = smoothing
        self._lowest, self._highest, self._shortest_s = lowest_per_s, highest_per_s, shortest_s

    def finished(self, latency_s: float) -> bool:
        """A request has finished after `latency_s` seconds; True if gamma was estimated anew."""
        self._latencies.append(latency_s)
        self._new += 1
        if self._new < self._update_every or len(self._latencies) < self._update_every:
            return False
        self._new = 0
        t95, t99 = np.quantile(np.fromiter(self._latencies, float), (0.95, 0.99))
        estimate = _LOG_RATIO / max(float(t99 - t95), self._shortest_s)
        mixed = (1.0 - self._smoothing) * self.gamma_per_s + self._smoothing * estimate
        self.gamma_per_s = min(max(mixed, self._lowest), self._highest)
        return True
