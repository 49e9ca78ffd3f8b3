"""Maximum-likelihood estimates: the compiled solver against independent optimisers, and its special cases."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from scheduler_core.errors import InputError
from tests.training.reference import LogTOfScipy, log_likelihood, maximize_log_t, scipy_distribution
from training.fitting.estimate import SIGMA_FLOOR, SortedLengths, compared_families, estimate, family_of
from training.fitting.kernels import groups as kernel

CASTILLO = Path(__file__).parents[3] / "shared" / "data" / "castillo_train.parquet"
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


@settings(max_examples=40, deadline=None)
@given(lengths=varied, cap=st.integers(2, 700), nu=st.sampled_from([1.5, 3.5, 10.0, math.inf]))
def test_both_solvers_find_the_same_optimum(lengths, cap, nu):
    x, finished = np.minimum(lengths, cap), np.array(lengths) < cap
    rows = sample([x], [finished])
    batched = estimate(rows, family_of("log-t", nu))
    reference = estimate(rows, family_of("log-t", nu), solver="lbfgsb")
    assert batched.flags[0] == reference.flags[0]
    assert batched.log_likelihood[0] >= reference.log_likelihood[0] - 1e-9 or math.isnan(
        reference.log_likelihood[0]
    )
    if batched.fitted[0] and batched.log_likelihood[0] - reference.log_likelihood[0] < 1e-12:
        assert batched.solution.m[0] == pytest.approx(reference.solution.m[0], abs=2e-6)
        assert batched.solution.s[0] == pytest.approx(reference.solution.s[0], abs=2e-6)


@pytest.mark.parametrize("cap", [10**9, 260])
@pytest.mark.parametrize("nu", [1.0, 3.5, math.inf])
def test_equals_an_independent_optimiser(cap, nu):
    rng = np.random.default_rng(5)
    for _ in range(2):
        x, finished = draw(rng, 5.0, 0.6, 20, cap)
        values, _, _ = one(x, finished, nu=nu)
        mu, log_sigma = maximize_log_t(x, finished, nu)
        assert values["mu"] == pytest.approx(mu, abs=1e-6)
        assert math.log(values["sigma"]) == pytest.approx(log_sigma, abs=1e-6)


@pytest.mark.skipif(not CASTILLO.exists(), reason="the real lengths are not beside this checkout")
def test_equals_the_reference_solver_on_real_lengths():
    import pyarrow.parquet as pq

    column = pq.read_table(CASTILLO, columns=["output_tokens"]).column(0).combine_chunks()
    real = column.values.to_numpy().reshape(len(column), -1)[::90].astype(np.int64)
    finished = real < 15_000
    rows = sample(list(np.minimum(real, 15_000)), list(finished))
    batched = estimate(rows, family_of("log-t"))
    reference = estimate(rows, family_of("log-t"), solver="lbfgsb")
    compared = batched.fitted & (batched.flags & kernel.SIGMA_FLOOR == 0)
    assert compared.sum() > 200
    assert batched.converged[batched.fitted].all()
    np.testing.assert_allclose(batched.solution.m[compared], reference.solution.m[compared], atol=1e-6)
    np.testing.assert_allclose(batched.solution.s[compared], reference.solution.s[compared], atol=1e-6)


@pytest.mark.parametrize(
    ("name", "fit"),
    [
        ("gamma", lambda x: stats.gamma.fit(x, floc=0)),
        ("weibull", lambda x: stats.weibull_min.fit(x, floc=0)),
    ],
)
def test_uncut_families_equal_scipys_fit(name, fit):
    x, _ = draw(np.random.default_rng(2), 5.0, 0.4, 40)
    shape, _, scale = fit(x)
    values, _, _ = one(x, family=name)
    assert values["shape"] == pytest.approx(shape, rel=1e-4)
    assert values["scale"] == pytest.approx(scale, rel=1e-4)


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


def test_log_t_with_many_degrees_of_freedom_is_the_log_normal():
    x, finished = draw(np.random.default_rng(4), 5.0, 0.5, 30, 200)
    near, _, _ = one(x, finished, nu=1e7)
    limit, _, _ = one(x, finished, nu=math.inf)
    assert near["mu"] == pytest.approx(limit["mu"], abs=1e-5)
    assert near["sigma"] == pytest.approx(limit["sigma"], abs=1e-5)


@settings(max_examples=25, deadline=None)
@given(lengths=varied, factor=st.integers(2, 9), nu=st.sampled_from([2.0, 3.5, math.inf]))
def test_longer_by_a_factor_moves_mu_by_its_logarithm(lengths, factor, nu):
    here, _, a = one(lengths, nu=nu)
    there, _, b = one(factor * np.array(lengths), nu=nu)
    assert b.log_likelihood[0] == pytest.approx(
        a.log_likelihood[0] - len(lengths) * math.log(factor), abs=1e-5
    )
    if len(set(lengths)) > 4:
        assert there["mu"] == pytest.approx(here["mu"] + math.log(factor), abs=1e-5)
        assert there["sigma"] == pytest.approx(here["sigma"], rel=1e-5)


def test_a_group_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(6)
    rows = [draw(rng, 5.0, 0.5, int(size), 300) for size in rng.integers(3, 120, 40)]
    together = estimate(sample([x for x, _ in rows], [f for _, f in rows]), family_of("log-t"))
    for number, (x, finished) in enumerate(rows):
        alone = estimate(sample([x], [finished]), family_of("log-t"))
        assert alone.solution.m[0] == together.solution.m[number]
        assert alone.solution.s[0] == together.solution.s[number]


def test_order_of_answers_does_not_matter():
    x, finished = draw(np.random.default_rng(7), 5.0, 0.5, 60, 250)
    order = np.random.default_rng(8).permutation(60)
    weights = np.random.default_rng(9).uniform(0.5, 3.0, 60)
    a, _, _ = one(x, finished, weights=weights)
    b, _, _ = one(x[order], finished[order], weights=weights[order])
    assert a["mu"] == pytest.approx(b["mu"], abs=1e-9)
    assert a["sigma"] == pytest.approx(b["sigma"], abs=1e-9)


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


def test_groups_of_very_different_sizes():
    rng = np.random.default_rng(11)
    rows = [draw(rng, 5.0, 0.4, size)[0] for size in (3, 48, 49, 10_000)]
    fits = estimate(sample(rows), family_of("log-t"))
    assert fits.converged.all()
    for number, row in enumerate(rows[1:], start=1):
        mu, log_sigma = maximize_log_t(row, np.ones(len(row), bool), 3.5)
        assert fits.solution.m[number] == pytest.approx(mu, abs=1e-5)
        assert fits.solution.s[number] == pytest.approx(log_sigma, abs=1e-5)


def test_free_nu_is_the_best_of_a_fine_grid():
    rng = np.random.default_rng(12)
    rows = [draw(rng, 5.0, 0.5, 60, cap) for cap in (10**9, 400)]
    for x, finished in rows:
        _, _, free = one(x, finished, nu=None)
        grid = [one(x, finished, nu=nu)[2].log_likelihood[0] for nu in [*np.geomspace(1, 100, 80), math.inf]]
        assert free.log_likelihood[0] >= max(grid) - 1e-9
        assert free.solution.nu[0] >= 1.0


def test_free_nu_says_when_it_ends_at_a_bound():
    flat = np.rint(np.exp(np.linspace(4.0, 6.0, 40))).astype(int)  # lighter tails than any Student-t
    _, _, light = one(flat, nu=None)
    assert light.solution.nu[0] == math.inf
    heavy = np.array([100, 101, 99, 100, 102, 98, 100, 101, 3, 20_000, 1, 90_000])
    _, _, fits = one(heavy, nu=None)
    assert fits.solution.nu[0] == 1.0
    assert light.flags[0] & kernel.NU_AT_BOUND
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
    for values, errors in (
        (fits.solution.m, fits.solution.se_m),
        (fits.solution.s, fits.solution.se_s),
    ):
        spread = values[inside].std()
        # The spread of 1500 estimates is itself known to about 2 %; with free nu the information is rougher.
        assert float(np.median(errors[inside])) == pytest.approx(spread, rel=0.25 if free else 0.1)


def test_censoring_is_accounted_for_and_ignoring_it_is_biased():
    rng = np.random.default_rng(14)
    rows = [draw(rng, 5.0, 0.5, 100, 195) for _ in range(800)]
    cut = np.mean([1 - f.mean() for _, f in rows])
    assert 0.25 < cut < 0.35
    lengths, finished = [x for x, _ in rows], [f for _, f in rows]
    right = estimate(sample(lengths, finished), family_of("log-t")).solution
    naive = estimate(sample(lengths), family_of("log-t")).solution
    error_of_mean = right.m.std() / math.sqrt(len(rows))
    assert abs(right.m.mean() - 5.0) < 4 * error_of_mean + 0.002  # lengths are rounded
    assert abs(right.s.mean() - math.log(0.5)) < 0.02
    assert naive.m.mean() < 5.0 - 0.03
    assert naive.s.mean() < math.log(0.5) - 0.15


def test_whole_numbers_as_intervals_remove_the_bias_of_rounding():
    rng = np.random.default_rng(15)
    rows = [draw(rng, 2.3, 0.04, 200)[0] for _ in range(300)]  # ten tokens, of which rounding takes a part
    points = estimate(sample(rows), family_of("log-t")).solution
    intervals = estimate(sample(rows), family_of("log-t"), integers=True)
    assert intervals.converged.all()
    assert abs(intervals.solution.s.mean() - math.log(0.04)) < 0.02
    assert abs(points.s.mean() - math.log(0.04)) > 0.1


def flags_of(*lengths, finished=None, **options):
    return int(one(np.array(lengths), finished, **options)[2].flags[0])


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


def test_nearly_constant_lengths_end_at_the_floor():
    assert flags_of(*[50] * 9, 52) == kernel.SIGMA_FLOOR
    values, _, fits = one([50] * 9 + [52])
    assert values["sigma"] == SIGMA_FLOOR
    assert values["mu"] == pytest.approx(math.log(50), abs=1e-3)
    assert fits.converged[0]


def test_a_median_beyond_the_cap_is_said():
    assert flags_of(40, 60, 80, 80, 80, 80, finished=[1, 1, 0, 0, 0, 0]) == kernel.MEDIAN_EXTRAPOLATED
    assert flags_of(40, 50, 60, 70, 80, finished=[1, 1, 1, 1, 0]) == 0


def test_cut_answers_below_a_tie_do_not_hide_it():
    x = [90, 90, 90, 90, 40, 30]
    values, _, fits = one(x, [True] * 4 + [False] * 2)
    assert fits.flags[0] == kernel.SIGMA_FLOOR
    assert values["mu"] == pytest.approx(math.log(90), abs=1e-3)


@pytest.mark.parametrize("label", compared_families(3.5))
def test_a_family_finds_its_own_parameters(label):
    rng = np.random.default_rng(16)
    family = compared_families(3.5)[label]
    name = {"log_t": "log-t", "log_t_free": "log-t"}.get(label, label.replace("_", "-"))
    parameters = {
        "gamma": {"shape": 2.5, "scale": 400.0},
        "weibull": {"shape": 1.6, "scale": 1200.0},
        "exponential": {"scale": 1000.0},
        "log-normal": {"mu": 7.0, "sigma": 0.6, "nu": math.inf},
        "log-t": {"mu": 7.0, "sigma": 0.6, "nu": 3.5},
    }[name]
    law = scipy_distribution(name, **parameters)
    u = rng.uniform(size=4000)
    x = np.exp(law.t.ppf(u)) if isinstance(law, LogTOfScipy) else law.ppf(u)
    x = np.maximum(np.rint(x), 1)
    cut = np.minimum(x, 1500.0)
    fits = estimate(sample([cut], [x <= 1500]), family)
    found, errors = family.parameters(fits.solution)
    for key, value in parameters.items():
        if key == "nu" and family.nu is not None:
            continue
        assert abs(found[key][0] - value) < 4 * errors[key][0] + 0.003 * abs(value)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"lengths": [0, 5, 6]}, "lengths"),
        ({"offsets": [0, 2]}, "lengths"),
        ({"offsets": [0, 4, 3]}, "offsets"),
        ({"weights": [1.0, math.nan, 1.0]}, "weights"),
        ({"weights": [1.0, 0.0, 1.0]}, "weights"),
    ],
)
def test_bad_answers_are_refused(change, field):
    given_ = {"lengths": [4, 5, 6], "offsets": [0, 3], "weights": [1.0, 1.0, 1.0]} | change
    with pytest.raises(InputError, match=field):
        SortedLengths.of(
            np.array(given_["lengths"]),
            np.ones(3, bool),
            np.array(given_["offsets"]),
            np.array(given_["weights"]),
        )


def test_bad_families_are_refused():
    with pytest.raises(InputError, match="family"):
        family_of("cauchy")
    with pytest.raises(InputError, match="nu"):
        family_of("log-t", -1.0)
    with pytest.raises(InputError, match="solver"):
        estimate(sample([[4, 5, 6]]), family_of("log-t", None), solver="lbfgsb")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("integers", [True, False])
def test_outliers_and_far_tails_do_not_stop_the_solver(name, integers):
    rows = [
        [6, 12, 28, 28, 28, 28, 29, 29, 29, 29],
        [175, 178, 181, 183, 183, 183, 185, 187, 194, 443],
        [222, 224, 224, 224, 224, 224, 226, 230, 375, 600],
        [1, 1, 2, 100_000],
        [70] * 10,
    ]
    fits = estimate(sample(rows), family_of(name), integers=integers)
    assert fits.converged.all()
    assert np.isfinite(fits.log_likelihood).all()
