"""Costs measured from steps: those of a linear engine, whatever the order of its work."""

import random

import pytest

from scheduler_core.engine.step_costs import StepCosts


@pytest.mark.parametrize("seed", range(3))
def test_costs_of_a_linear_engine_are_measured(seed: int) -> None:
    rng, costs = random.Random(seed), StepCosts()
    for _ in range(600):
        prefill, decodes = rng.choice((0, 0, 512, 4096)), rng.randint(1, 30)
        copied = rng.choice((0, 0, 0, 50_000))
        costs.observe(
            0.012 + prefill / 30_000 + 2.5e-4 * decodes + copied / 150_000, prefill, decodes, copied
        )
    assert costs.prefill_s(30_000) == pytest.approx(1.0, rel=0.02)
    assert costs.reload_s(150_000) == pytest.approx(1.0, rel=0.02)
    assert costs.decode_s(1000) == pytest.approx(0.25 + 12.0 / 15.5, rel=0.1)
    assert costs.step_s == pytest.approx(0.012 + 2.5e-4 * 15.5, rel=0.1)


def test_costs_follow_an_engine_that_becomes_slower() -> None:
    costs = StepCosts()
    for factor in (1.0, 3.0):
        for number in range(8000):
            prefill = 1000 * (number % 3)
            costs.observe(factor * (0.01 + prefill / 20_000), prefill, 4)
    assert costs.prefill_s(20_000) == pytest.approx(3.0, rel=0.05)


def test_there_are_typical_costs_before_the_first_step_and_none_below_zero() -> None:
    costs = StepCosts()
    assert 0.0 < costs.prefill_s(1.0) < costs.decode_s(1.0) < 0.01
    for number in range(200):
        costs.observe(0.02 - 1e-5 * number, 10 * number, 1)
    assert costs.prefill_s(1000) == 0.0
