"""Maximum-likelihood estimates: the compiled solver against independent optimisers, and its special cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.reference import log_likelihood, scipy_distribution
from training.fitting.estimate import SIGMA_FLOOR, SortedLengths, compared_families, estimate, family_of
from training.fitting.kernels import groups as kernel

NAMES = ("log-t", "log-normal", "gamma", "weibull", "exponential")


def sample(rows, finished=None, weights=None):
    """A Sample of lists of lengths."""
    lengths = np.concatenate([np.asarray(row) for row in rows]).astype(np.int64)
    ended = (
        np.ones(len(lengths), bool) if finished is None else np.concatenate([np.asarray(r) for r in finished])
    )
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    flat = None if weights is None else np.concatenate([np.asarray(row, float) for row in weights])
    return SortedLengths.of(lengths, ended.astype(bool), offsets, flat)


def one(lengths, finished=None, family="log-t", nu=3.5, weights=None, **options):
    """(parameters, standard errors, estimates) of one group."""
    fits = estimate(
        sample([lengths], None if finished is None else [finished], None if weights is None else [weights]),
        family_of(family, nu),
        **options,
    )
    values, errors = fits.family.parameters(fits.solution)
    return {k: float(v[0]) for k, v in values.items()}, {k: float(v[0]) for k, v in errors.items()}, fits


HARD = [
    [6, 12, 28, 28, 28, 28, 29, 29, 29, 29],
    [175, 178, 181, 183, 183, 183, 185, 187, 194, 443],
    [222, 224, 224, 224, 224, 224, 226, 230, 375, 600],
    [128, 128, 293, 122, 127, 128, 127, 290, 293, 302],  # two maxima over nu
    [1, 1, 2, 100_000],
    [70] * 10,
]


def draw(rng, mu, sigma, count, cap=10**9):
    lengths = np.maximum(np.rint(np.exp(mu + sigma * rng.standard_t(3.5, count))), 1)
    return np.minimum(lengths, cap).astype(np.int64), lengths <= cap


varied = st.lists(st.integers(1, 600), min_size=3, max_size=30)


@settings(max_examples=60, deadline=None)
@given(lengths=varied, cap=st.integers(2, 700), name=st.sampled_from(NAMES), integers=st.booleans())
def test_no_other_parameters_are_likelier(lengths, cap, name, integers):
    x, finished = np.minimum(lengths, cap), np.array(lengths) < cap
    values, _, fits = one(x, finished, name, integers=integers)
    if not finished.any():
        return
    assert fits.converged[0]
    own = fits.log_likelihood[0]
    assert own == pytest.approx(
        log_likelihood(scipy_distribution(name, **values), x, finished, integers=integers), rel=1e-6, abs=1e-5
    )
    steps = {"mu": 0.02, "sigma": 0.0, "shape": 0.0, "scale": 0.0}
    for parameter in set(values) - {"nu"}:
        for sign in (-1, 1):
            moved = dict(values)
            moved[parameter] = values[parameter] * (1 + sign * 0.02) + sign * steps[parameter] * values.get(
                "sigma", 0
            )
            if moved.get("sigma", 1) < SIGMA_FLOOR or moved.get("shape", 0) > SIGMA_FLOOR**-1:
                continue
            other = log_likelihood(scipy_distribution(name, **moved), x, finished, integers=integers)
            assert other <= own + 1e-6 * (1 + abs(own))


@pytest.mark.parametrize("label", compared_families(3.5))
@pytest.mark.parametrize("integers", [True, False])
def test_both_solvers_find_the_same_optimum(label, integers):
    rng = np.random.default_rng(17)
    groups = [draw(rng, 5.0, 0.5, size, cap) for size in (4, 10, 40) for cap in (10**9, 220, 150)]
    lengths = HARD + [x for x, _ in groups]
    rows = sample(lengths, [[True] * len(row) for row in HARD] + [finished for _, finished in groups])
    weighted = sample(lengths, weights=[rng.uniform(0.5, 3.0, len(row)) for row in lengths])
    for each in (rows, weighted):
        batched, reference = (
            estimate(each, compared_families(3.5)[label], solver=solver, integers=integers)
            for solver in ("batched", "lbfgsb")
        )
        np.testing.assert_allclose(batched.log_likelihood, reference.log_likelihood, rtol=0, atol=1e-8)
        assert batched.converged[batched.fitted].all()
        assert reference.converged[reference.fitted].all()
        regular = np.isfinite(batched.solution.se_m)
        regular &= batched.flags & (kernel.SIGMA_FLOOR | kernel.CONSTANT) == 0
        assert regular.sum() > 5
        np.testing.assert_array_equal(batched.flags[regular], reference.flags[regular])
        for name in ("m", "s", "se_m", "se_s"):
            mine, other = (getattr(fits.solution, name)[regular] for fits in (batched, reference))
            np.testing.assert_allclose(mine, other, rtol=1e-3, atol=1e-5)


def test_log_normal_and_exponential_have_their_closed_forms():
    x, _ = draw(np.random.default_rng(3), 4.0, 0.7, 25)
    values, errors, _ = one(x, family="log-normal")
    assert values["mu"] == pytest.approx(np.log(x).mean(), abs=1e-9)
    assert values["sigma"] == pytest.approx(np.log(x).std(), rel=1e-9)
    assert values["nu"] == math.inf
    assert errors["mu"] == pytest.approx(values["sigma"] / 5, rel=1e-6)
    assert errors["sigma"] == pytest.approx(values["sigma"] / math.sqrt(50), rel=1e-6)
    finished = x < 80
    cut = np.minimum(x, 80)
    values, errors, _ = one(cut, finished, family="exponential")
    assert values["scale"] == pytest.approx(cut.sum() / finished.sum(), rel=1e-9)
    assert errors["scale"] == pytest.approx(values["scale"] / math.sqrt(finished.sum()), rel=1e-6)


def test_a_fit_depends_neither_on_other_groups_nor_on_the_order_of_samples():
    rng = np.random.default_rng(6)
    rows = [draw(rng, 5.0, 0.5, int(size), 300) for size in rng.integers(3, 120, 40)]
    together = estimate(sample([x for x, _ in rows], [f for _, f in rows]), family_of("log-t"))
    for number, (x, finished) in enumerate(rows):
        order = rng.permutation(len(x))
        _, _, own = one(x[order], finished[order])
        assert own.solution.m[0] == together.solution.m[number]
        assert own.solution.s[0] == together.solution.s[number]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("integers", [True, False])
def test_a_weight_of_two_is_two_answers(name, integers):
    x, finished = draw(np.random.default_rng(10), 5.0, 0.5, 15, 250)
    weights = np.array([1.0, 2.0, 3.0] * 5)
    times = weights.astype(int)
    a, a_errors, first = one(x, finished, name, weights=weights, integers=integers)
    b, b_errors, second = one(np.repeat(x, times), np.repeat(finished, times), name, integers=integers)
    assert a == pytest.approx(b, rel=1e-6)
    assert a_errors == pytest.approx(b_errors, rel=1e-5, nan_ok=True)
    assert first.log_likelihood[0] == pytest.approx(second.log_likelihood[0], rel=1e-9)


@pytest.mark.parametrize("cap", [10**9, 400])
def test_free_nu_is_the_best_of_a_fine_grid(cap):
    x, finished = draw(np.random.default_rng(12), 5.0, 0.5, 60, cap)
    _, _, free = one(x, finished, nu=None)
    grid = [one(x, finished, nu=nu)[2].log_likelihood[0] for nu in [*np.geomspace(1, 100, 80), math.inf]]
    assert free.log_likelihood[0] >= max(grid) - 1e-9


@pytest.mark.parametrize(
    ("lengths", "nu"),
    [
        (np.rint(np.exp(np.linspace(4.0, 6.0, 40))), math.inf),  # lighter tails than any Student-t
        ([100, 101, 99, 100, 102, 98, 100, 101, 3, 20_000, 1, 90_000], 1.0),
    ],
)
def test_free_nu_at_a_bound_is_flagged(lengths, nu):
    _, _, fits = one(lengths, nu=None)
    assert fits.solution.nu[0] == nu
    assert fits.flags[0] & kernel.NU_AT_BOUND


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("cap", [10**9, 230])  # 230: about 30 % are cut
def test_standard_errors_are_the_spread_of_estimates(free, cap):
    rng = np.random.default_rng(13)
    rows = [draw(rng, 5.0, 0.5, 100, cap) for _ in range(1500)]
    fits = estimate(
        sample([x for x, _ in rows], [f for _, f in rows]), family_of("log-t", None if free else 3.5)
    )
    inside = np.isfinite(fits.solution.se_m) & np.isfinite(fits.solution.nu)
    for values, errors in ((fits.solution.m, fits.solution.se_m), (fits.solution.s, fits.solution.se_s)):
        spread = values[inside].std()
        # The spread of 1500 estimates is itself known to about 2 %; with free nu the information is rougher.
        assert float(np.median(errors[inside])) == pytest.approx(spread, rel=0.25 if free else 0.1)


@pytest.mark.parametrize("name", NAMES)
def test_degenerate_groups_are_flagged_with_defined_parameters(name):
    values, _, fits = one([7, 7, 7, 7], family=name)
    floor = 0 if name == "exponential" else kernel.SIGMA_FLOOR
    assert fits.flags[0] == kernel.CONSTANT | floor
    assert fits.converged[0]
    assert all(math.isfinite(v) for k, v in values.items() if k != "nu")
    values, errors, fits = one([50, 50, 60], [False] * 3, family=name)
    assert fits.flags[0] == kernel.ALL_CENSORED
    assert not fits.converged[0]
    assert not fits.fitted[0]
    assert all(math.isnan(v) for v in errors.values())
    if "mu" in values:
        assert values["mu"] == pytest.approx(math.log(60))
    assert one([5, 9], family=name)[2].flags[0] == kernel.TOO_FEW_SAMPLES
    assert one([5], [False], family=name)[2].flags[0] == kernel.TOO_FEW_SAMPLES | kernel.ALL_CENSORED


@pytest.mark.parametrize(
    ("lengths", "finished", "flags", "mode"),
    [
        ([50] * 9 + [52], None, kernel.SIGMA_FLOOR, 50),
        # Censored samples below a tie do not hide it.
        ([90, 90, 90, 90, 40, 30], [1, 1, 1, 1, 0, 0], kernel.SIGMA_FLOOR, 90),
        ([40, 60, 80, 80, 80, 80], [1, 1, 0, 0, 0, 0], kernel.MEDIAN_EXTRAPOLATED, None),
        ([40, 50, 60, 70, 80], [1, 1, 1, 1, 0], 0, None),
    ],
)
def test_ties_and_extrapolated_medians_are_flagged(lengths, finished, flags, mode):
    values, _, fits = one(lengths, finished)
    assert fits.flags[0] == flags
    assert fits.converged[0]
    assert (values["sigma"] == SIGMA_FLOOR) == (mode is not None)
    if mode is not None:
        assert values["mu"] == pytest.approx(math.log(mode), abs=1e-3)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gamma", {"shape": 2.5, "scale": 400.0}),
        ("weibull", {"shape": 1.6, "scale": 1200.0}),
        ("exponential", {"scale": 1000.0}),
    ],
)
def test_a_family_finds_its_own_parameters(name, parameters):
    drawn = scipy_distribution(name, **parameters).ppf(np.random.default_rng(16).uniform(size=4000))
    x = np.maximum(np.rint(drawn), 1)
    values, errors, _ = one(np.minimum(x, 1500.0), x <= 1500, name)
    for key, value in parameters.items():
        assert abs(values[key] - value) < 4 * errors[key] + 0.003 * value
