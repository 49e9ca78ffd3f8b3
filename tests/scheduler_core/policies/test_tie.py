"""Orders by a predicted length: SSJF, SEPT and TIE, worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from scheduler_core.lengths import LogT
from scheduler_core.policies.base import Policy
from scheduler_core.policies.shortest_first import Sept, Ssjf
from scheduler_core.policies.tie import Tie
from scheduler_core.predictions import LengthPrediction
from scheduler_core.request import RequestState
from tests.scheduler_core.helpers import prediction, request


def waiting(name: str, seen: LengthPrediction | None = None, **values: Any) -> RequestState:
    return RequestState(request(name, **values), order=0, prediction=seen)


def key(policy: Policy, state: RequestState, now: float = 0.0) -> float:
    if state.prediction is not None:
        policy.on_prediction(state)
    return policy.key(state, now)


def test_ssjf_orders_by_predicted_median_and_takes_max_tokens_without_one() -> None:
    policy = Ssjf()
    short, long = waiting("a", prediction(20)), waiting("b", prediction(80))
    unknown, beyond = waiting("c", cap=100), waiting("d", prediction(5000), cap=100)
    assert key(policy, short) == pytest.approx(math.log(20))
    assert key(policy, short) < key(policy, long) < key(policy, unknown) == key(policy, beyond)


def test_sept_orders_by_the_expectation_of_the_capped_length() -> None:
    policy = Sept()
    narrow, wide = waiting("a", prediction(50, sigma=0.1)), waiting("b", prediction(45, sigma=1.5))
    assert key(policy, narrow) == pytest.approx(float(LogT(math.log(50), 0.1).expected(100)))
    assert key(Ssjf(), wide) < key(Ssjf(), narrow), "by median the wide one is shorter"
    fresh = Sept()
    tail = waiting("c", prediction(45, sigma=1.5), cap=4000)
    plain = waiting("d", prediction(50, sigma=0.1), cap=4000)
    assert key(fresh, plain) < key(fresh, tail), "by mean it is longer"
    assert key(fresh, waiting("e", cap=77)) == 77


def test_tie_score_is_mean_plus_beta_times_tail_mean() -> None:
    """sigma -> 0 and median 40: E = CVaR = 40, so the score is 40 (1 + beta)."""
    policy = Tie()
    sure = waiting("a", prediction(40, sigma=1e-6))
    policy.on_prediction(sure)
    assert policy.score(sure) == pytest.approx(40 * 1.1, rel=1e-4)
    policy.on_pressure(num_waiting=30, max_num_seqs=10)
    assert policy.score(sure) == pytest.approx(40 * 1.3, rel=1e-4)
    wide = waiting("b", prediction(40, sigma=0.9))
    policy.on_prediction(wide)
    length = LogT(math.log(40), 0.9)
    assert policy.score(wide) == pytest.approx(
        float(length.expected(100)) + 0.3 * float(length.cvar(0.9, 100))
    )


@pytest.mark.parametrize(
    ("num_waiting", "beta"),
    [(0, 0.1), (10, 0.1), (11, 0.1), (13, 0.15), (20, 0.2), (30, 0.3), (50, 0.5), (900, 0.5)],
)
def test_beta_follows_the_queue_on_a_grid(num_waiting: int, beta: float) -> None:
    """beta = clip(0.1 * Lq / B, 0.1, 0.5) with B = 10, rounded to steps of 0.05."""
    assert Tie().beta(num_waiting, 10) == pytest.approx(beta)


def test_waiting_lowers_the_tie_score_by_gamma_per_tau() -> None:
    """A request that waited 30 s longer is served as if its score were 0.9 of what it is."""
    policy = Tie()
    old = waiting("a", prediction(50, sigma=1e-6), arrival_s=0.0)
    young = waiting("b", prediction(45, sigma=1e-6), arrival_s=30.0)
    assert key(policy, old) == pytest.approx(key(policy, young), abs=1e-6)
    assert key(policy, old, now=0.0) == key(policy, old, now=1e6), "static in time"
