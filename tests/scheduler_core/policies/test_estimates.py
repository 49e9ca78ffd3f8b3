"""The numbers that policies order by, against their definitions, and mean response times in the M/G/1 queue against the formulas."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from scheduler_core.lengths.table import LengthTable
from scheduler_core.policies import make_policy
from scheduler_core.policies.base import Policy
from scheduler_core.policies.estimates import TailRate
from scheduler_core.policies.tail_guard import VirtualFcfs
from scheduler_core.predictions import LengthPrediction
from scheduler_core.request import RequestState
from tests.scheduler_core.helpers import request


def table_of(length: LengthPrediction, max_tokens: int) -> LengthTable:
    return LengthTable(length.mu, length.sigma, length.nu, max_tokens)


lengths = st.tuples(
    st.floats(1.5, 8.0), st.floats(-6.9, 0.18).map(math.exp), st.sampled_from([3.5, 10.0, 1e9])
).map(lambda drawn: LengthPrediction(*drawn))


@settings(max_examples=30, deadline=None)
@given(seen=lengths, cap=st.sampled_from([1, 16, 256, 4096, 15_000]), share=st.floats(0.0, 2.0))
def test_the_table_agrees_with_the_distribution(seen: LengthPrediction, cap: int, share: float) -> None:
    table, exact = table_of(seen, cap), seen.distribution()
    generated = share * math.exp(seen.mu)
    if generated >= cap or generated < 1.0 or exact.sf(generated) < 1e-4:
        generated = 0.0
    rest = float(exact.expected(cap, generated))
    assert table.expected_remaining(generated) == pytest.approx(rest, rel=0.02, abs=0.1)


def test_nothing_is_left_at_the_cap_and_everything_where_the_prediction_is_refuted() -> None:
    table = table_of(LengthPrediction(math.log(50), 1e-6, 3.5), 200)
    assert (table.expected_remaining(200), table.expected_remaining(150)) == (0.0, 50.0)
    assert table.expected_remaining() == pytest.approx(50.0, rel=1e-3)


def test_gamma_is_the_slope_of_the_tail() -> None:
    """Exponential latencies of rate 2: ln 5/(t99 - t95) = 2. Eq. 9, not the 39 times smaller line 17 of the algorithm."""
    rate = TailRate(1.0, 20_000, 20_000, smoothing=1.0, min_per_s=1e-4, max_per_s=100.0)
    latencies = np.random.default_rng(0).exponential(0.5, 20_000)
    assert [rate.finished(float(value)) for value in latencies][-1]
    assert rate.gamma_per_s == pytest.approx(2.0, rel=0.1)
    same = TailRate(1.0, 10, 10, smoothing=1.0, min_per_s=1e-4, max_per_s=7.0)
    assert [same.finished(1.0) for _ in range(10)][-1]
    assert same.gamma_per_s == 7.0, "a collapsed tail does not run away"


def test_virtual_fcfs_is_fcfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work 3, 1, 2 s, arrivals 0, 0, 1. The real engine does the short one first; FCFS would end them at 3, 4 and 6. The
    first was predicted to need 2 s: it leaves the virtual queue after 2 s, and the true second is made up for."""
    monkeypatch.setattr("scheduler_core.policies.tail_guard._REFRESH_EVERY", 3)
    queue = VirtualFcfs(10)
    a, b, c = (RequestState(request(name, at), order=0) for name, at in (("a", 0.0), ("b", 0.0), ("c", 1.0)))
    queue.arrived(a, 0.0, 2.0)
    queue.arrived(b, 0.0, 1.0)
    queue.served(1.0)
    queue.arrived(c, 1.0, 1.0)
    queue.finished(b, 1.0)
    assert queue.backlog == 4.0
    queue.served(1.0)
    queue.advance(2.0)
    queue.served(2.0)
    queue.finished(a, 3.0)
    queue.advance(4.0)
    assert queue.backlog == pytest.approx(2.0), "a is gone with 2 s, owes 1; b is gone at 4"
    queue.served(2.0)
    queue.finished(c, 1.0)
    queue.advance(6.0)
    assert queue.quantile_s == pytest.approx(np.quantile([2.0, 4.0, 5.0], 0.99))
    assert queue.backlog == 0.0


FloatArray = NDArray[np.float64]

MEAN, CAP, NUM, WARM_UP = 1000.0, 100_000, 1600, 200


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


def means(policy: str, load: float, runs: int = 6) -> FloatArray:
    """Mean response times with exponential lengths that are known."""
    found = []
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        arrivals = np.cumsum(rng.exponential(MEAN / load, NUM))
        tokens = np.maximum(np.round(rng.exponential(MEAN, NUM)), 1).astype(int)
        sure = [LengthPrediction(math.log(value), 1e-7, 3.5) for value in tokens]
        found.append(latencies(make_policy(policy), arrivals, tokens, sure)[WARM_UP:].mean())
    return np.array(found)


def check(found: FloatArray, expected: float) -> None:
    error = found.std(ddof=1) / math.sqrt(found.size)
    assert error < 0.1 * expected
    assert found.mean() == pytest.approx(expected, abs=4 * error)


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
    check(means("srpt", 0.8), MEAN * srpt_mean(0.8))
