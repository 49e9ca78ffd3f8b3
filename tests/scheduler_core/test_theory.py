"""The simulator and SRPT against queueing theory.

With one slot and a time per step only, a request of n output tokens takes n steps: a single-server queue whose
service time is n * base_s. Every mean is over independent runs; the test allows four of its standard errors.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.trace_predictions import oracle_predictions
from tests.scheduler_core.helpers import simulate, trace_row

FloatArray = NDArray[np.float64]
#: Mean length in tokens, and number of requests of a run, under SRPT.
MEAN, NUM = 40.0, 1200
BASE_S = 0.25
QUEUE_STEP = LinearStepTime(
    base_s=BASE_S, per_prefill_token_s=0, per_decode_s=0, per_context_token_s=0, per_swapped_token_s=0
)
NUM_RUNS, WARM_UP = 16, 200
MAX_TOKENS = 4000

Lengths = Callable[[np.random.Generator, int], np.ndarray]


def waits(policy: str, load: float, lengths: Lengths, mean_tokens: float, num_requests: int) -> np.ndarray:
    """Mean queueing delay of each of NUM_RUNS runs, in seconds, without their first WARM_UP requests.

    The busier the server, the longer its waits depend on each other, and the more requests are needed.
    """
    means = []
    for seed in range(NUM_RUNS):
        rng = np.random.default_rng(seed)
        arrivals = np.cumsum(rng.exponential(mean_tokens * BASE_S / load, num_requests))
        pairs = zip(arrivals.tolist(), lengths(rng, num_requests).tolist(), strict=True)
        rows = tuple(trace_row(str(i), at_s, 1, num, MAX_TOKENS) for i, (at_s, num) in enumerate(pairs))
        limits = SchedulerConfig(max_num_seqs=1)
        result = simulate(Trace(rows), policy, scheduler=limits, step_time=QUEUE_STEP)
        assert result.metrics["littles_law_error"] < 1e-9
        assert len(result.records) == num_requests
        means.append(np.mean([r.queueing_delay_s for r in result.records if int(r.request_id) >= WARM_UP]))
    return np.array(means)


def check_mean(means: np.ndarray, expected: float, most_error: float = 0.05) -> None:
    error = means.std(ddof=1) / math.sqrt(means.size)
    assert error < most_error * expected, "the runs are long enough to tell"
    assert means.mean() == pytest.approx(expected, abs=4 * error)


def geometric(mean: float) -> Lengths:
    return lambda rng, size: np.minimum(rng.geometric(1 / mean, size), MAX_TOKENS)


@pytest.mark.parametrize(("load", "num_requests"), [(0.3, 600), (0.7, 1600)])
def test_constant_lengths_wait_as_in_m_d_1(load: float, num_requests: int) -> None:
    """Pollaczek-Khinchine: W = rho S / (2 (1 - rho))."""
    means = waits("fcfs", load, lambda rng, size: np.full(size, 8), 8, num_requests)
    check_mean(means, load * (8 * BASE_S) / (2 * (1 - load)))


@pytest.mark.parametrize(("load", "num_requests"), [(0.3, 1000), (0.7, 1800)])
def test_geometric_lengths_wait_as_in_m_g_1(load: float, num_requests: int) -> None:
    """Pollaczek-Khinchine: W = lambda E[S^2] / (2 (1 - rho)); a geometric length is the discrete M/M/1."""
    mean = 10.0
    second_moment = (2 * mean**2 - mean) * BASE_S**2
    rate = load / (mean * BASE_S)
    expected = rate * second_moment / (2 * (1 - load))
    check_mean(waits("fcfs", load, geometric(mean), mean, num_requests), expected)


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
    check_mean(waits("sjf", load, geometric(mean), mean, 1200), expected)


def mean_times(policy: str, load: float, runs: int = 5) -> FloatArray:
    """Mean response times in seconds with exponential lengths that are known; preemption is free of charge."""
    means = []
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        arrivals = np.cumsum(rng.exponential(MEAN * BASE_S / load, NUM)).tolist()
        tokens = np.maximum(np.round(rng.exponential(MEAN, NUM)), 1).astype(int).tolist()
        rows = [
            trace_row(str(i), at_s, 1, num, MAX_TOKENS)
            for i, (at_s, num) in enumerate(zip(arrivals, tokens, strict=True))
        ]
        trace = Trace(tuple(rows))
        limits = SchedulerConfig(max_num_seqs=1, preemption="swap", num_kv_blocks=100_000)
        result = simulate(
            trace, policy, scheduler=limits, step_time=QUEUE_STEP, predictions=oracle_predictions(trace)
        )
        means.append(np.mean([r.ttlt_s for r in result.records if int(r.request_id) >= WARM_UP]))
    return np.array(means)


def srpt_mean(load: float) -> float:
    """Schrage & Miller 1966: E[T] = integral over x of f(x) [lambda (m2(x) + x^2 (1 - F(x))) / (2 (1 - rho(x))^2)
    + integral over t < x of dt/(1 - rho(t))], m2(x) and rho(x)/lambda second and first moment of S up to x; S of mean 1."""
    x = np.linspace(0.0, 30.0, 30_001)
    density, step = np.exp(-x), x[1]

    def upto(values: FloatArray) -> FloatArray:
        return np.concatenate([[0.0], np.cumsum((values[1:] + values[:-1]) * step / 2)])

    rho = load * upto(x * density)
    waiting = load * (upto(x**2 * density) + x**2 * density) / (2 * (1 - rho) ** 2)
    return float(upto(density * (waiting + upto(1 / (1 - rho))))[-1])


def test_srpt_of_known_lengths_reaches_the_least_mean() -> None:
    """At load 0.8 it is 0.45 of FCFS's mean."""
    check_mean(mean_times("srpt", 0.8), MEAN * BASE_S * srpt_mean(0.8), 0.1)
