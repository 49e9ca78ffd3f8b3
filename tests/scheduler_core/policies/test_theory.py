"""Mean response times in the M/G/1 queue against the formulas; errors over independent runs, four standard errors allowed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from scheduler_core.policies import make_policy
from scheduler_core.policies.base import Policy
from scheduler_core.predictions import LengthPrediction
from scheduler_core.request import RequestState
from tests.scheduler_core.helpers import request

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
    + integral over t < x of dt/(1 - rho(t))], m2(x) and rho(x)/lambda second and first moment of S up to x; S of mean 1.
    """
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
