"""The simulator against queueing theory.

With one seat and a time per step only, a request of n output tokens takes n steps: a single-server queue whose
service time is n * base_s. Every mean is over independent runs; the test allows four of its standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import Trace
from tests.scheduler_core.helpers import simulate, trace_row

BASE_S = 0.25
STEP_TIME = LinearStepTime(base_s=BASE_S, per_prefill_token_s=0, per_decode_s=0, per_context_token_s=0)
NUM_RUNS, WARM_UP = 16, 200
CAP = 4000

Lengths = Callable[[np.random.Generator, int], np.ndarray]


def waits(policy: str, load: float, lengths: Lengths, mean_tokens: float, num_requests: int) -> np.ndarray:
    """Mean queueing delay of each of NUM_RUNS runs, in seconds, without their first WARM_UP requests.

    The busier the server, the longer its waits depend on each other, and the more requests are needed.
    """
    means = []
    for seed in range(NUM_RUNS):
        rng = np.random.default_rng(seed)
        arrivals = np.cumsum(rng.exponential(mean_tokens * BASE_S / load, num_requests))
        tokens = lengths(rng, num_requests)
        pairs = zip(arrivals.tolist(), tokens.tolist(), strict=True)
        rows = tuple(trace_row(str(i), at_s, 1, num, CAP) for i, (at_s, num) in enumerate(pairs))
        limits = SchedulerConfig(max_num_seqs=1)
        result = simulate(Trace(rows), policy, scheduler=limits, step_time=STEP_TIME)
        assert result.metrics["littles_law_error"] < 1e-9
        assert len(result.records) == num_requests
        means.append(np.mean([r.queueing_delay_s for r in result.records if int(r.request_id) >= WARM_UP]))
    return np.array(means)


def check(means: np.ndarray, expected: float) -> None:
    error = means.std(ddof=1) / math.sqrt(means.size)
    assert error < 0.05 * expected, "the runs are long enough to tell"
    assert means.mean() == pytest.approx(expected, abs=4 * error)


def constant(tokens: int) -> Lengths:
    return lambda rng, size: np.full(size, tokens)


def geometric(mean: float) -> Lengths:
    return lambda rng, size: np.minimum(rng.geometric(1 / mean, size), CAP)


@pytest.mark.parametrize(("load", "num_requests"), [(0.3, 600), (0.7, 1600)])
def test_constant_lengths_wait_as_in_m_d_1(load: float, num_requests: int) -> None:
    """Pollaczek-Khinchine: W = rho S / (2 (1 - rho))."""
    service_s = 8 * BASE_S
    check(waits("fcfs", load, constant(8), 8, num_requests), load * service_s / (2 * (1 - load)))


@pytest.mark.parametrize(("load", "num_requests"), [(0.3, 1000), (0.7, 1800)])
def test_geometric_lengths_wait_as_in_m_g_1(load: float, num_requests: int) -> None:
    """Pollaczek-Khinchine: W = lambda E[S^2] / (2 (1 - rho)); a geometric length is the discrete M/M/1."""
    mean = 10.0
    second_moment = (2 * mean**2 - mean) * BASE_S**2
    rate = load / (mean * BASE_S)
    check(waits("fcfs", load, geometric(mean), mean, num_requests), rate * second_moment / (2 * (1 - load)))


def test_oracle_sjf_waits_as_cobham_says() -> None:
    """Non-preemptive priority by length: W = sum over n of p_n W0 / ((1 - rho_<n) (1 - rho_<=n)), W0 = lambda E[S^2]/2."""
    mean, load = 10.0, 0.7
    n = np.arange(1, 2000)
    p = (1 / mean) * (1 - 1 / mean) ** (n - 1)
    rate = load / (mean * BASE_S)
    upto = np.cumsum(rate * p * n * BASE_S)
    below = upto - rate * p * n * BASE_S
    residual = rate * (2 * mean**2 - mean) * BASE_S**2 / 2
    expected = float(np.sum(p * residual / ((1 - below) * (1 - upto))))
    check(waits("sjf", load, geometric(mean), mean, 1200), expected)
