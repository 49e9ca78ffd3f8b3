"""Arrival times drawn for a trace."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.simulator.trace import Trace


def poisson_arrivals(trace: Trace, rate_rps: float, rng: np.random.Generator) -> Trace:
    """The same requests in the same order, with independent exponential gaps between arrivals.

    Args:
        trace: Requests; their own arrival times are dropped.
        rate_rps: Mean arrivals per second, > 0.
        rng: Source of randomness.
    """
    if not 0 < rate_rps < math.inf:
        raise InputError("rate", rate_rps, "requests per second > 0")
    times = np.cumsum(rng.exponential(1.0 / rate_rps, size=len(trace)))
    rows = tuple(replace(row, arrival_s=float(time)) for row, time in zip(trace.requests, times, strict=True))
    return replace(trace, requests=rows)
