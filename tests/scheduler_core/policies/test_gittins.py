"""The Gittins index against closed forms and brute force, and its order by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_core.lengths import LogT
from scheduler_core.lengths.quantiles import LEVELS
from scheduler_core.policies import make_policy
from scheduler_core.policies.gittins import gittins_boost, gittins_rank, remaining_tokens
from scheduler_core.policies.work_left import TokenTimes
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.request import RequestState, Status
from tests.scheduler_core.helpers import prediction, request

TIMES = TokenTimes()


def test_a_constant_hazard_has_a_constant_index() -> None:
    """Exponential of mean 50 tokens: 50 token times whatever has been generated. Its boost is
    (1/gamma) ln(1/(gamma m)), m = 0.5 s, under every plan."""
    tokens = np.linspace(0.0, 3000.0, 30_001)
    survival = np.exp(-tokens / 50.0)
    for start in (0, 400, 2000):
        rest = tokens[start:] - tokens[start], survival[start:] / survival[start]
        assert gittins_rank(*rest, 0.0, 0.01) == pytest.approx(0.5, rel=1e-3)
        value = gittins_boost(*rest, 0.0, 0.01, 0.4)
        assert value == pytest.approx(-math.log(0.4 * 0.5) / 0.4, rel=1e-2)


@pytest.mark.parametrize("generated", [0, 16, 96])
def test_a_known_length_is_the_remaining_work(generated: int) -> None:
    """As SRPT; its boost is that of Yu & Scully, (1/gamma) ln(1/(1 - exp(-gamma W)))."""
    rest = remaining_tokens(prediction(100, sigma=1e-6).table(1000), 1000, generated)
    work = 0.2 + 0.01 * (100 - generated)
    assert gittins_rank(*rest, 0.2, 0.01) == pytest.approx(work, rel=1e-3)
    expected = -math.log(-math.expm1(-0.3 * work)) / 0.3
    assert gittins_boost(*rest, 0.2, 0.01, 0.3) == pytest.approx(expected, rel=1e-3)
    refuted = remaining_tokens(prediction(100, sigma=1e-6).table(1000), 1000, 500)
    assert gittins_rank(*refuted, 0.0, 1.0) == 500.0
    assert gittins_rank(*remaining_tokens(None, 1000, generated), 0.0, 1.0) == 1000.0 - generated


discrete = st.lists(
    st.tuples(st.integers(1, 500), st.floats(0.01, 1.0)), min_size=1, max_size=6, unique_by=lambda p: p[0]
)


@given(atoms=discrete, setup_s=st.floats(0.0, 5.0), gamma=st.floats(0.01, 1.0))
def test_the_index_is_the_best_plan_by_brute_force(
    atoms: list[tuple[int, float]], setup_s: float, gamma: float
) -> None:
    lengths, weights = np.array(sorted(atoms)).T
    p = weights / weights.sum()
    after = np.concatenate([[1.0], 1.0 - np.cumsum(p)])
    tokens = np.concatenate([[0.0], np.repeat(lengths, 2)])
    survival = np.concatenate([[1.0], np.stack([after[:-1], np.maximum(after[1:], 0.0)], axis=1).ravel()])
    work = setup_s + 0.01 * lengths
    ranks, boosts = [], []
    for plan in work:
        spent = np.minimum(work, plan)
        ends = work <= plan
        ranks.append((p @ spent) / p[ends].sum())
        boosts.append((p[ends] @ np.exp(gamma * work[ends])) / (p @ np.expm1(gamma * spent)))
    assert gittins_rank(tokens, survival, setup_s, 0.01) == pytest.approx(min(ranks), rel=1e-6)
    value = gittins_boost(tokens, survival, setup_s, 0.01, gamma)
    assert value == pytest.approx(math.log(max(boosts)) / gamma, rel=1e-6, abs=1e-9)


@given(
    mu=st.floats(2.0, 7.0),
    sigma=st.floats(0.05, 1.2),
    generated=st.integers(0, 300),
    setup_s=st.floats(0.0, 1.0),
)
def test_the_index_of_a_log_t_is_that_of_its_integrals(
    mu: float, sigma: float, generated: int, setup_s: float
) -> None:
    length = LengthPrediction(mu, sigma, 3.5)
    rest = remaining_tokens(length.table(2000), 2000, generated)
    value = gittins_rank(*rest, setup_s, 0.01)
    grid = np.concatenate([[generated], np.geomspace(generated + 0.25, 2000.0, 1000)])
    # An output has at least one token.
    alive = np.where(grid < 1.0, 1.0, LogT(mu, sigma, 3.5).sf(np.maximum(grid, 1e-9)))
    if alive[0] < 1e-4:
        return
    rel = 0.1 if alive[0] > 0.2 else 0.3  # in the tail the table has few points
    alive = alive / alive[0]
    spent = setup_s + 0.01 * np.cumsum(np.diff(grid) * (alive[1:] + alive[:-1]) / 2)
    ended = 1.0 - alive[1:]
    ended[-1] = 1.0
    is_plan = (grid[1:] >= generated + 1.0) & (ended > 0.0)
    exact = float(np.min(spent[is_plan] / ended[is_plan]))
    assert value == pytest.approx(exact, rel=rel, abs=0.002)
    assert value <= setup_s + 0.01 * float(LogT(mu, sigma, 3.5).expected(2000, generated)) * 1.03 + 0.01


@pytest.mark.parametrize(("gamma", "of_arrival"), [(1e-4, False), (1e4, True)])
def test_the_boost_is_between_the_index_and_arrival(gamma: float, of_arrival: bool) -> None:
    tail, mean = make_policy("boost_gittins", {"gamma_per_s": gamma}), make_policy("gittins")
    states = [
        RequestState(request(f"r{k}", 0.01 * k, prompt=10, cap=2000), order=k, prediction=prediction(900 - 40 * k, s))
        for k, s in enumerate((0.1, 1.2, 0.4, 0.9, 0.6, 1.5))
    ]  # fmt: skip
    for policy in (tail, mean):
        for state in states:
            policy.on_prediction(state)
    order = sorted(states, key=lambda state: tail.key(state, 0.0))
    expected = states if of_arrival else sorted(states, key=lambda state: mean.key(state, 0.0))
    assert order == expected


def two_lengths(short: float, long: float, share: float) -> LengthPrediction:
    """Short with probability `share`, else long."""
    logs = tuple(math.log(short if level <= share else long) for level in LEVELS)
    return LengthPrediction(logs[len(logs) // 2], 0.5, 3.5, quantiles=logs)


def test_a_gamble_is_served_until_it_is_lost() -> None:
    """Four of five outputs have about 10 tokens, the others 500: the plan to stop at about 10 costs less for each end than the
    mean of 100, and than a sure 60. After 16 tokens the gamble is lost; the sure output displaces it if the difference is more than
    the time to compute its tokens again."""
    policy = make_policy("gittins")
    gamble = RequestState(request("a", prompt=1, cap=600), order=0, prediction=two_lengths(10, 500, 0.8))
    sure = RequestState(request("b", prompt=1, cap=600), order=1, prediction=prediction(60, sigma=1e-6))
    for state in (gamble, sure):
        policy.on_prediction(state)
    assert policy.key(gamble, 0.0) < policy.key(sure, 0.0) < TIMES.decode_s * 100
    gamble.status = Status.RUNNING
    gamble.num_output_tokens, gamble.num_computed_tokens = 31, 31
    assert policy.key(gamble, 0.0) > 3.0 * policy.key(sure, 0.0)
    assert policy.may_preempt(gamble, sure, 0.0)
    # 8,000 tokens would take 0.44 s, more than the difference.
    gamble.num_computed_tokens = 8000
    assert not policy.may_preempt(gamble, sure, 0.0)


def test_what_the_prefix_cache_has_costs_nothing() -> None:
    policy = make_policy("gittins")
    new, cached = (RequestState(request(name, prompt=5000), order=k) for k, name in enumerate("ab"))
    for state in (new, cached):
        state.prediction = prediction(20, sigma=1e-6)
        policy.on_prediction(state)
    cached.cached_tokens, cached.host_cached_tokens = 4992, 1000
    assert policy.key(new, 0.0) == pytest.approx(5000 * TIMES.prefill_s + 20 * TIMES.decode_s, rel=1e-3)
    expected = 8 * TIMES.prefill_s + 1000 * TIMES.reload_s + 20 * TIMES.decode_s
    assert policy.key(cached, 0.0) == pytest.approx(expected, rel=1e-3)
