"""Mean response times in the M/G/1 queue against the formulas; errors over independent runs, four standard errors allowed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scheduler_core.policies import make_policy
from scheduler_core.predictions import LengthPrediction
from tests.scheduler_core.policies.queue_loop import FloatArray, latencies

MEAN, CAP, NUM, WARM_UP = 1000.0, 100_000, 1600, 200


def means(policy: str, load: float, runs: int = 6) -> FloatArray:
    """Mean response times with exponential lengths that are known."""
    found = []
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        arrivals = np.cumsum(rng.exponential(MEAN / load, NUM))
        tokens = np.maximum(np.round(rng.exponential(MEAN, NUM)), 1).astype(int)
        sure = [LengthPrediction(math.log(value), 1e-7, 3.5) for value in tokens]
        found.append(latencies(make_policy(policy), arrivals, tokens, sure, cap=CAP)[WARM_UP:].mean())
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


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_fcfs_is_pollaczek_khinchine(load: float) -> None:
    """E[T] = E[S] + lambda E[S^2]/(2 (1 - rho)) = E[S]/(1 - rho) for exponential lengths."""
    check(means("fcfs", load), MEAN / (1 - load))


def test_srpt_of_known_lengths_reaches_the_least_mean() -> None:
    """At load 0.8 it is 0.45 of FCFS's mean."""
    check(means("srpt", 0.8), MEAN * srpt_mean(0.8))


@pytest.mark.slow
def test_of_memoryless_lengths_every_order_that_does_not_know_them_has_the_mean_of_fcfs() -> None:
    """E[S]/(1 - rho), also with displacement every 25 tokens by a prediction that says nothing."""
    found = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        arrivals = np.cumsum(rng.exponential(100 / 0.6, NUM))
        tokens = np.maximum(np.round(rng.exponential(100.0, NUM)), 1).astype(int)
        unknown = [LengthPrediction(4.0, 1.0, 3.5)] * NUM
        spent = latencies(
            make_policy("elis", {"window_tokens": 25}), arrivals, tokens, unknown, cap=CAP, look_every=25
        )
        found.append(spent[WARM_UP:].mean())
    check(np.array(found), 100.0 / 0.4)
