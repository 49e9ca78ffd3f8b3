"""Arrival processes: Poisson, gamma (bursty), diurnal, spikes, all at once, or arrivals of a trace."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.ranges import FINITE, POSITIVE, check_choice, check_ranges
from scheduler_core.simulator.trace import MAX_TIME_S
from scheduler_core.statistics import FloatArray

Process = Literal["poisson", "gamma", "diurnal", "spikes", "at_once", "trace"]


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """Arrival process of requests. With the same seed, another rate only scales the arrival times."""

    process: Process = "poisson"
    """poisson (independent exponential gaps); gamma (gaps with coefficient of variation cv: bursty above 1); diurnal
    (Poisson with a periodic rate); spikes (every gap_s a random number of simultaneous requests); at_once (all at
    time 0: offline work); trace (arrivals of the file with the lengths, scaled to the rate if it is set)."""
    rate_rps: float | None = None
    """Mean arrivals per second. Unset: 1 for the random processes, the rate of the trace for trace, the rate
    that follows from gap_s and max_burst for spikes."""
    cv: float = 3.0
    """gamma: coefficient of variation of the gaps; 1 is Poisson."""
    period_s: float = 86_400.0
    """diurnal: period in seconds."""
    swing: float = 0.8
    """diurnal: relative amplitude from 0 to 1; the rate varies between (1 - swing) and (1 + swing) times its
    mean, starts at the mean and rises."""
    gap_s: float = 0.1
    """spikes: seconds between two spikes (Semantic Scheduling, section 4.1: 0.1 or 1.0)."""
    max_burst: int = 10
    """spikes: maximum number of requests in a spike; the number is uniform from 0."""
    max_gap_ratio: float | None = None
    """poisson, gamma: longest gap, in mean gaps (Vidur clips its Poisson gaps at 3, which makes the rate
    1 / (1 - exp(-3)) = 1.052 times the nominal one). Unset: no limit."""

    def __post_init__(self) -> None:
        check_choice("process", self.process, get_args(Process))
        check_ranges(self, rate_rps=(POSITIVE, FINITE), cv=(1e-6, 1000.0), max_gap_ratio=(POSITIVE, FINITE))
        check_ranges(self, period_s=(1e-6, MAX_TIME_S), swing=(0.0, 1.0))
        check_ranges(self, gap_s=(1e-6, MAX_TIME_S), max_burst=(1, 1_000_000))

    def times(self, num: int, rng: np.random.Generator) -> FloatArray:
        """Arrival times in seconds, ascending; shape [num]. Not for process trace, which reads a file."""
        rate = 1.0 if self.rate_rps is None else self.rate_rps
        if self.process == "at_once":
            return np.zeros(num)
        if self.process == "spikes":
            return self._spikes(num, rng)
        if self.process == "diurnal":
            return self._diurnal(np.cumsum(rng.exponential(1.0, num)) / rate)
        if self.process == "poisson":
            gaps = rng.exponential(1.0, num)
        else:  # of mean 1 and coefficient of variation cv
            gaps = rng.gamma(self.cv**-2, 1.0 / self.cv**-2, num)
        if self.max_gap_ratio is not None:
            gaps = np.minimum(gaps, self.max_gap_ratio)
        return np.asarray(np.cumsum(gaps) / rate)

    def _spikes(self, num: int, rng: np.random.Generator) -> FloatArray:
        gap_s = self.gap_s if self.rate_rps is None else self.max_burst / 2 / self.rate_rps
        sizes: list[int] = []
        total = 0
        while total < num:
            sizes.append(int(rng.integers(0, self.max_burst, endpoint=True)))
            total += sizes[-1]
        return np.repeat(np.arange(len(sizes)) * gap_s, sizes)[:num]

    def _diurnal(self, operational: FloatArray) -> FloatArray:
        """Transforms arrivals of a constant rate to the diurnal rate, by the inverse of its cumulative rate.

        Solves t + swing P/(2 pi) (1 - cos(2 pi t / P)) = u by interpolation on 10,000 points per period.
        """
        grid, turn = np.linspace(0.0, 1.0, 10_001), 2 * math.pi
        mass = grid + self.swing / turn * (1 - np.cos(turn * grid))
        periods = operational / self.period_s
        complete = np.floor(periods)
        return np.asarray((complete + np.interp(periods - complete, mass, grid)) * self.period_s)


def check_rate(name: str, rate_rps: float, num: int) -> None:
    """Raises `InputError` if the last of `num` requests would arrive too late for the simulated clock."""
    if not num / MAX_TIME_S <= rate_rps < math.inf:
        raise InputError(name, rate_rps, f"at least {num / MAX_TIME_S:g}: {num} requests in {MAX_TIME_S:g} s")


def at_rate(times: FloatArray, rate_rps: float) -> FloatArray:
    """Scales ascending arrivals [N] to a mean rate between the first and the last; all gaps have the same
    factor, which preserves bursts. `InputError` if they are all at the same time."""
    span = float(times[-1] - times[0])
    factor = (len(times) - 1) / span / rate_rps if span > 0 else math.inf
    if not factor * span < math.inf:
        raise InputError(
            "rate_rps", rate_rps, "unset, because all requests of the trace arrive at the same time"
        )
    return np.asarray((times - times[0]) * factor)
