"""Whether a run was long enough for a steady state, without which its latencies depend on its length."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from scheduler_core.simulator.tables import Columns

#: Minimum duration of the arrivals in mean latencies; the engine fills during the first one or two.
MIN_TURNOVERS = 10.0
#: Requests accumulate if more than this fraction of the arrivals stays, and their number in the system grows by more than
#: this multiple of its mean. A load of 1.05 leaves 5 %; below saturation both are random numbers near 0.
MAX_ACCUMULATED, MAX_GROWTH = 0.03, 0.5
#: First part of the arrivals, in which the engine fills.
_WARM_UP = 0.25


def steady_state(requests: Columns) -> dict[str, float | None]:
    """Measures of the stationarity of a run, from the columns [n] of its finished requests; None without two arrival times.

    `turnovers` is the duration of the arrivals divided by the mean latency, which is how often the requests in the system
    were replaced. The other two are of the arrivals after the first quarter: `accumulated_fraction` is the slope of the
    number of requests in the system over the number of arrivals (1 - 1 / rho at a load rho > 1), and `relative_growth` is
    the growth of that number, by the same line, divided by its mean.
    """
    arrivals = np.sort(requests["arrival_s"])
    num, duration_s = len(arrivals), float(arrivals[-1] - arrivals[0])
    if duration_s <= 0:
        return {"turnovers": None, "accumulated_fraction": None, "relative_growth": None}
    in_system = np.arange(1, num + 1) - np.searchsorted(np.sort(requests["finish_s"]), arrivals, side="right")
    in_system = in_system[int(_WARM_UP * num) :]
    position = np.arange(len(in_system)) - (len(in_system) - 1) / 2
    slope = float(position @ in_system / max(position @ position, 1.0))
    return {
        "turnovers": duration_s / float(requests["ttlt_s"].mean()),
        "accumulated_fraction": slope,
        "relative_growth": slope * len(in_system) / float(in_system.mean()),
    }


def unsteady(measures: Sequence[Mapping[str, float | None]], repeat: int | None = 1) -> str | None:
    """What prevents a steady state, as a sentence, judged by the means over runs (seeds) of `steady_state`; None if nothing
    does, or all requests arrived at once. `repeat` is that of the trace, for advice; None for a workload."""
    names = ("turnovers", "accumulated_fraction", "relative_growth")
    values = np.array([[one[name] for name in names] for one in measures], float)
    if not values.size or np.isnan(values).any():
        return None
    turnovers, accumulated, growth = values.mean(axis=0).tolist()
    problems = []
    is_short, is_growing = turnovers < MIN_TURNOVERS, accumulated > MAX_ACCUMULATED and growth > MAX_GROWTH
    if is_short:
        needed = f"at least {MIN_TURNOVERS:g} are needed"
        problems.append(f"requests arrived for {turnovers:.2g} times the mean latency, {needed}")
    if is_growing:
        problems.append(f"{accumulated:.0%} of the arriving requests accumulated until the end")
    if not problems:
        return None
    advice = "more workload.num_requests"
    if repeat is not None:
        # Accumulating requests show at a lower load only in a much longer run.
        factor = max(MIN_TURNOVERS / turnovers, MIN_TURNOVERS if is_growing else 2.0)
        advice = f"--repeat {math.ceil(repeat * factor)}"
    return (
        f"no steady state: {' and '.join(problems)}, so a longer run has other latencies; use {advice}, or a lower load or "
        "rate if the engine is overloaded"
    )
