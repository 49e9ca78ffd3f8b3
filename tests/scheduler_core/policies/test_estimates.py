"""The numbers that policies order by, against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_core.errors import InputError
from scheduler_core.lengths.table import LengthTable
from scheduler_core.policies.estimates import TailRate, WorkRate, boost_s
from scheduler_core.policies.predicted_boost import Coverage, predicted_boost_s
from scheduler_core.policies.virtual_fcfs import PredictionBias, VirtualFcfs
from scheduler_core.predictions import LengthPrediction
from scheduler_core.request import Request, RequestState


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
    rest = exact.remaining(generated)
    assert table.expected_remaining(generated) == pytest.approx(float(rest.expected(cap)), rel=0.02, abs=0.1)
    assert table.cdf(cap) == 1.0
    assert table.cdf(generated) == pytest.approx(float(exact.cdf(generated)), abs=0.01)


def test_nothing_is_left_at_the_cap_and_everything_where_the_prediction_is_refuted() -> None:
    table = table_of(LengthPrediction(math.log(50), 1e-6, 3.5), 200)
    assert table.expected_remaining(200) == 0.0
    assert table.expected_remaining(150) == 50.0
    assert table.expected_remaining() == pytest.approx(50.0, rel=1e-3)


def test_a_boost_of_a_sure_length_is_that_of_known_work() -> None:
    """100 tokens of 1 ms and a prompt of 20 ms: 0.12 s."""
    sure = table_of(LengthPrediction(math.log(100), 1e-6, 3.5), 1000)
    assert predicted_boost_s(sure, 2.0, 1e-3, 0.02) == pytest.approx(boost_s(0.12, 2.0), rel=1e-3)


def test_a_boost_of_two_lengths_by_hand() -> None:
    """Half 1 s, half 3 s, gamma = 1/s: E[exp] = (e + e^3)/2 = 11.40191, so b = ln(11.40191/10.40191) = 0.09180."""
    table = table_of(LengthPrediction(0.0, 1.0, 3.5), 8)
    table.points = np.array([0.0, 1.0, 1.0, 3.0, 3.0])
    table.survival = np.array([1.0, 1.0, 0.5, 0.5, 0.0])
    assert predicted_boost_s(table, 1.0, 1.0, 0.0) == pytest.approx(0.09180, abs=1e-5)


def state(name: str = "a", arrival_s: float = 0.0) -> RequestState:
    made = RequestState(
        Request(request_id=name, arrival_s=arrival_s, prompt_tokens=10, max_tokens=100), order=0
    )
    made.prefill_target_tokens = 10
    return made


def test_work_adds_up_to_busy_time() -> None:
    """Step 1: 10 prompt tokens in 0.1 s, 10 ms each. Step 2: two decodes in 0.04 s, 20 ms each. Half-life of one step:
    (0.1/2 + ...) leaves the ratios as they are."""
    rate = WorkRate(1.0, 1.0, half_life_steps=1.0)
    first, second = state("a"), state("b")
    first.num_computed_tokens = 10
    rate.on_tokens(first, 10)
    rate.on_step(0.1)
    first.num_computed_tokens = second.num_computed_tokens = 11
    rate.on_tokens(first, 1)
    rate.on_tokens(second, 1)
    rate.on_step(0.04)
    assert rate.prefill_token_s == pytest.approx(0.01)
    assert rate.decode_token_s == pytest.approx(0.02)
    assert rate.step_s == pytest.approx((0.1 / 2 + 0.04) / 1.5)
    rate.on_step(5.0)
    assert rate.decode_token_s == pytest.approx(0.02), "a step without tokens says nothing"


def test_gamma_is_the_slope_of_the_tail() -> None:
    """Exponential latencies of rate 2: ln 5/(t99 - t95) = 2. Eq. 9, not the 39 times smaller line 17 of the algorithm."""
    rate = TailRate(1.0, window=20_000, update_every=20_000, smoothing=1.0)
    latencies = np.random.default_rng(0).exponential(0.5, 20_000)
    assert [rate.finished(float(value)) for value in latencies][-1]
    assert rate.gamma_per_s == pytest.approx(2.0, rel=0.1)
    same = TailRate(1.0, window=10, update_every=10, smoothing=1.0, max_per_s=7.0)
    assert [same.finished(1.0) for _ in range(10)][-1]
    assert same.gamma_per_s == 7.0, "a collapsed tail does not run away"


def test_virtual_fcfs_is_fcfs() -> None:
    """Work 3, 1, 2 s, arrivals 0, 0, 1. The real engine does the short one first; FCFS would end them at 3, 4 and 6. The
    first was predicted to need 2 s: it leaves the virtual queue after 2 s, and the true second is made up for."""
    queue = VirtualFcfs(window=10, refresh_every=3, quantile=0.5)
    a, b, c = state("a"), state("b"), state("c", 1.0)
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
    assert queue.quantile_s == pytest.approx(np.median([2.0, 4.0, 5.0]))
    assert queue.backlog == 0.0


def test_virtual_fcfs_forgets_the_work_of_the_aborted_and_believes_the_latest_prediction() -> None:
    """Prompts of work 1, 4 tokens expected: 5. One is aborted before it has left: 5 less; one after: its 5 are given back. A
    prediction of 10 for one that has left takes the other 6 from the credit. A token takes 3 s more than its work."""
    queue = VirtualFcfs(window=10, refresh_every=1, quantile=0.5)
    gone, waits, third = state("g"), state("w"), state("t")
    for item in (gone, waits, third):
        queue.arrived(item, 1.0, 4.0)
    queue.served(5.0)
    queue.advance(5.0, 3.0)
    assert queue.quantile_s == 5.0 + 3.0 * 4.0
    assert queue.backlog == 10.0
    queue.predicted(gone, 10.0)
    assert queue.backlog == 16.0
    queue.dropped(gone)
    assert queue.backlog == 5.0
    queue.dropped(waits)
    assert queue.backlog == 0.0


def test_prediction_bias_is_learned_for_each_size_by_itself() -> None:
    """Short ones are predicted right, those of 1000 have 700; only sizes that were seen are corrected."""
    bias = PredictionBias(prior_requests=1.0)
    assert bias.ratio(bias.group(1000.0)) == 1.0
    for _ in range(99):
        bias.learn(10.0, 10.0)
        bias.learn(1000.0, 700.0)
    assert bias.ratio(bias.group(10.0)) == pytest.approx(1.0)
    assert bias.ratio(bias.group(1000.0)) == pytest.approx(0.7, abs=0.01)
    assert bias.ratio(bias.group(100.0)) == 1.0
    assert bias.group(0.0) == bias.group(1.0) == 0
    with pytest.raises(InputError, match="prior_requests"):
        PredictionBias(0.0)


def test_virtual_fcfs_learns_how_far_predictions_are_off() -> None:
    """All are predicted twice too long, and served in any order: the backlog, twice too long at first, comes near the true one.
    What has left the virtual queue before that was known is made up for when it finishes."""
    rng = np.random.default_rng(1)
    queue = VirtualFcfs(window=100, refresh_every=10)
    lengths = rng.integers(20, 60, 1200)
    every = [state(f"r{index}") for index in range(len(lengths))]
    for item, tokens in zip(every, lengths, strict=True):
        queue.arrived(item, 0.0, 2.0 * tokens)
    assert queue.backlog == 2.0 * lengths.sum()
    done = np.argsort(rng.random(len(lengths)))[:600]
    for index in done:
        queue.served(float(lengths[index]))
        queue.finished(every[index], float(lengths[index]))
        queue.advance(0.0)
    assert queue.backlog == pytest.approx(lengths.sum() - lengths[done].sum(), rel=0.1)


@pytest.mark.parametrize(("shift", "bad"), [(0.0, False), (0.7, True), (-0.7, True)])
def test_coverage_tells_a_wrong_predictor_from_a_right_one(shift: float, bad: bool) -> None:
    rng = np.random.default_rng(4)
    coverage = Coverage(window=300, min_count=50)
    for index in range(300):
        mu = float(rng.normal(4.0, 0.5))
        true = math.exp(mu + 0.5 * rng.standard_t(3.5))
        table = table_of(LengthPrediction(mu + shift, 0.5, 3.5), 4096)
        coverage.finished(table, int(min(max(round(true), 1), 4096)))
        assert (coverage.gap is None) == (index < 49)
    assert coverage.gap is not None
    assert (coverage.gap > 0.2) is bad
    sure = Coverage(min_count=1)
    sure.finished(table_of(LengthPrediction(math.log(40), 1e-6, 3.5), 100), 40)
    assert sure.gap == pytest.approx(0.0, abs=1e-6), "knowing the length is no fault"


def test_wrong_arguments_are_named() -> None:
    for make, named in (
        (lambda: WorkRate(0.0, 1.0), "prefill_token_s"),
        (lambda: TailRate(1.0, smoothing=0.0), "smoothing"),
        (lambda: TailRate(1.0, window=5, update_every=6), "window"),
        (lambda: Coverage(5, 6), "min_count"),
    ):
        with pytest.raises(InputError, match=named):
            make()
