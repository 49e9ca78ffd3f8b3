"""The simulator and SRPT against queueing theory, and the simulator against the loads at which no policy keeps up (RAD, Theorems 1 and 2).

With one slot and a time per step only, a request of n output tokens takes n steps: a single-server queue whose
service time is n * base_s. Every mean is over independent runs; the test allows four of its standard errors.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.policies import make_policy
from scheduler_core.policies.base import Policy
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.request import RequestState
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.records import request_columns
from scheduler_core.simulator.step_time import rad_bounds
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import Trace
from tests.scheduler_core.helpers import request, simulate, trace_row

STEP_TIME = LinearStepTime(
    base_s=0.01, per_prefill_token_s=1e-4, per_decode_s=1e-4, per_context_token_s=0.0, per_swapped_token_s=0.0
)
T_COL, PROMPT, OUTPUT = 8, 64, 9
RAD = SchedulerConfig(
    max_num_seqs=T_COL, max_num_batched_tokens=64, batching="rad",
    batching_parameters={"n": 100_000, "t_row": 16, "t_red": 16},
)  # fmt: skip
FloatArray = NDArray[np.float64]
MEAN, CAP, NUM = 1000.0, 100_000, 1600


def trace_at(arrivals: Sequence[float]) -> Trace:
    """Equal requests."""
    rows = [trace_row(f"r{number}", float(at), PROMPT, OUTPUT, OUTPUT) for number, at in enumerate(arrivals)]
    return Trace(tuple(rows))


BOUNDS = rad_bounds(trace_at([0.0]), RAD, STEP_TIME)


def at_load(load: float, count: int = 1500) -> tuple[np.ndarray, np.ndarray]:
    """Arrivals, and latencies under RAD with the n that its theorem 2 asks for up to load 0.9."""
    arrivals = np.cumsum(np.random.default_rng(7).exponential(BOUNDS.expected_s / load, count))
    limits = replace(RAD, batching_parameters={**RAD.batching_parameters, "n": BOUNDS.num_per_cycle})
    columns = request_columns(simulate(trace_at(arrivals), scheduler=limits, step_time=STEP_TIME).records)
    return arrivals, columns["ttlt_s"][np.argsort(columns["arrival_s"], kind="stable")]


def test_rads_bounds_worked_out_by_hand() -> None:
    """Prompt of 64 in chunks of lcm(16, 8, 16) = 16 tokens: 4 steps of 0.01 + 16e-4 = 0.0464 s. The last one samples the
    first token; the other 8 take steps of 0.01 + 8e-4 s that 8 requests share: 8 x 0.0108 / 8 = 0.0108 s of the engine's
    time, or 8 x 0.0108 s of the request's. n > 7 T_max / (0.1 T_R) = 7 x 0.1328 / 0.00572 = 162.5."""
    assert BOUNDS.expected_s == pytest.approx(0.0464 + 0.0108)
    assert (BOUNDS.longest_s, BOUNDS.num_per_cycle) == (pytest.approx(0.0464 + 0.0864), 163)
    with pytest.raises(InputError, match="epsilon"):
        rad_bounds(trace_at([0.0]), RAD, STEP_TIME, epsilon=1.0)


def test_rad_keeps_up_below_its_bound_and_nobody_does_above() -> None:
    """Below the bound times do not grow with the number of requests; at 1.1 of it the backlog grows by a tenth of the time.

    With load 1.1 the last of N requests arrives at N T_R/1.1 and cannot be done before N T_R, so it takes at least a tenth
    of its arrival time.
    """
    arrivals, times = at_load(0.9)
    thirds = [part.mean() for part in np.array_split(times, 3)]
    assert thirds[2] < 2.5 * thirds[0]
    assert times.max() < 0.1 * arrivals[-1]
    arrivals, times = at_load(1.1)
    assert times[-T_COL:].max() > 0.08 * arrivals[-1]
    assert np.polyfit(arrivals, times, 1)[0] == pytest.approx(0.1, abs=0.04)


BASE_S = 0.25
QUEUE_STEP = LinearStepTime(base_s=BASE_S, per_prefill_token_s=0, per_decode_s=0, per_context_token_s=0)
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


def latencies(
    policy: Policy, arrivals: FloatArray, tokens: NDArray[np.int64], predictions: list[LengthPrediction]
) -> FloatArray:
    """Time from arrival to last token of each request on one server, preemption free of charge; a token takes a second.

    Of the policy keys alone are used; the smallest, then the earliest, is served. Arrivals are ascending, in seconds.
    """
    present: dict[int, RequestState] = {}
    keys: dict[int, float] = {}
    found = np.zeros(len(arrivals))
    now, coming = 0.0, 0
    while coming < len(arrivals) or present:
        if not present:
            now = max(now, float(arrivals[coming]))
        while coming < len(arrivals) and arrivals[coming] <= now:
            item = request(str(coming), float(arrivals[coming]), prompt=1, cap=CAP)
            state = RequestState(item, order=coming, prediction=predictions[coming])
            policy.on_prediction(state)
            present[coming], keys[coming] = state, policy.key(state, now)
            coming += 1
        best = min(present, key=lambda index: (keys[index], index))
        state = present[best]
        left = float(tokens[best]) - state.num_output_tokens
        work = min(left, float(arrivals[coming]) - now) if coming < len(arrivals) else left
        now += work
        # Parts of a token are work too: the policies only read the number.
        state.num_output_tokens += work  # type: ignore[assignment]
        if tokens[best] - state.num_output_tokens <= 1e-9:
            found[best] = now - arrivals[best]
            policy.on_finish(state)
            del present[best], keys[best]
        else:
            keys[best] = policy.key(state, now)
    return found


def mean_times(policy: str, load: float, runs: int = 6) -> FloatArray:
    """Mean response times with exponential lengths that are known."""
    found = []
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        arrivals = np.cumsum(rng.exponential(MEAN / load, NUM))
        tokens = np.maximum(np.round(rng.exponential(MEAN, NUM)), 1).astype(int)
        sure = [LengthPrediction(math.log(value), 1e-7, 3.5) for value in tokens]
        found.append(latencies(make_policy(policy), arrivals, tokens, sure)[WARM_UP:].mean())
    return np.array(found)


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
    check_mean(mean_times("srpt", 0.8), MEAN * srpt_mean(0.8), 0.1)
