"""Estimates and the goodness of fits: against independent optimisers, scipy, differences and known laws."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from training.fitting.estimate import SIGMA_FLOOR, SortedLengths, compared_families, estimate, family_of
from training.fitting.goodness import bootstrap, group_seed, ks_p_values
from training.fitting.kernels import groups as kernel
from training.fitting.kernels.special import t_constants, t_log_sf_and_hazard, t_sf

NAMES = ("log-t", "log-normal", "gamma", "weibull", "exponential")
varied = st.lists(st.integers(1, 600), min_size=3, max_size=30)
lists = st.lists(st.integers(1, 900), min_size=4, max_size=40).filter(lambda x: len(set(x)) > 2)


@pytest.mark.parametrize("nu", [0.7, 1.0, 3.5, 9.9, 20.0, 100.0, 5000.0, math.inf])
def test_student_tail_equals_scipys(nu):
    law = stats.norm if math.isinf(nu) else stats.t(nu)
    constants = t_constants(nu)
    assert constants[0] == pytest.approx(float(law.logpdf(0.0)), abs=1e-11)  # scipy loses digits at large nu
    for z in (-50.0, -3.0, -0.4, 0.0, 1e-3, 0.7, 2.0, 9.0, 30.0, 200.0):
        assert t_sf(z, nu, constants) == pytest.approx(float(law.sf(z)), rel=1e-10, abs=1e-300)
        if law.sf(z) > 1e-280:
            log_sf, hazard = t_log_sf_and_hazard(z, nu, constants)
            assert log_sf == pytest.approx(float(np.log(law.sf(z))), rel=1e-10, abs=1e-12)
            assert hazard == pytest.approx(float(law.pdf(z) / law.sf(z)), rel=1e-8)
    if math.isinf(nu):  # far out, Mills
        log_sf, hazard = t_log_sf_and_hazard(1000.0, nu, constants)
        assert hazard == pytest.approx(1000.0 + 1.0 / 1000.0, rel=1e-9)
        assert log_sf == pytest.approx(float(stats.norm.logsf(1000.0)), rel=1e-12)


#: Family -> (parameters as in a fits file) -> scipy's distribution of X: slow and independent of the fitter.
SCIPY: dict[str, Callable[..., object]] = {
    "log-normal": lambda mu, sigma, nu=math.inf: stats.lognorm(sigma, scale=math.exp(mu)),
    "gamma": lambda shape, scale: stats.gamma(shape, scale=scale),
    "weibull": lambda shape, scale: stats.weibull_min(shape, scale=scale),
    "exponential": lambda scale: stats.expon(scale=scale),
}


class LogTOfScipy:
    """The log-t by scipy's Student-t of ln X."""

    def __init__(self, mu: float, sigma: float, nu: float) -> None:
        self.t = stats.t(nu, loc=mu, scale=sigma) if math.isfinite(nu) else stats.norm(mu, sigma)

    def logpdf(self, x):
        return self.t.logpdf(np.log(x)) - np.log(x)

    def logsf(self, x):
        return self.t.logsf(np.log(x))

    def cdf(self, x):
        return self.t.cdf(np.log(x))


def scipy_distribution(family: str, **parameters: float):
    if family == "log-t":
        return LogTOfScipy(**parameters)
    return SCIPY[family](**parameters)


def log_likelihood(distribution, lengths, finished, *, integers: bool = False) -> float:
    """Of answers [N]; cut ones contribute ln P(X > length)."""
    x = np.asarray(lengths, dtype=float)
    if integers:
        with np.errstate(divide="ignore"):
            ended = np.log(distribution.cdf(x + 0.5) - distribution.cdf(x - 0.5))
    else:
        ended = distribution.logpdf(x)
    return float(np.where(finished, ended, distribution.logsf(x)).sum())


def sample(rows, finished=None, weights=None):
    lengths = np.concatenate(rows).astype(np.int64)
    ended = np.ones(len(lengths), bool) if finished is None else np.concatenate(finished).astype(bool)
    offsets = np.cumsum([0, *map(len, rows)])
    return SortedLengths.of(lengths, ended, offsets, None if weights is None else np.concatenate(weights))


def single(lengths, finished=None, weights=None):
    return sample([lengths], *(None if part is None else [part] for part in (finished, weights)))


def one(lengths, finished=None, family="log-t", nu=3.5, weights=None, **options):
    """(parameters, standard errors, estimates) of one group."""
    fits = estimate(single(lengths, finished, weights), family_of(family, nu), **options)
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


@settings(max_examples=60, deadline=None)
@given(lengths=varied, cap=st.integers(2, 700), name=st.sampled_from(NAMES), integers=st.booleans())
def test_no_other_parameters_are_likelier(lengths, cap, name, integers):
    x, finished = np.minimum(lengths, cap), np.array(lengths) < cap
    values, _, fits = one(x, finished, name, integers=integers)
    if not finished.any():
        return
    assert fits.converged[0]
    own = fits.log_likelihood[0]

    def likelihood(**parameters):
        return log_likelihood(scipy_distribution(name, **parameters), x, finished, integers=integers)

    assert own == pytest.approx(likelihood(**values), rel=1e-6, abs=1e-5)
    for parameter, step in itertools.product(set(values) - {"nu"}, (-0.02, 0.02)):
        by_sigma = step * values.get("sigma", 0) * (parameter == "mu")
        moved = values | {parameter: values[parameter] * (1 + step) + by_sigma}
        if moved.get("sigma", 1) >= SIGMA_FLOOR and moved.get("shape", 0) <= SIGMA_FLOOR**-1:
            assert likelihood(**moved) <= own + 1e-6 * (1 + abs(own))


@pytest.mark.parametrize("label", compared_families(3.5))
@pytest.mark.parametrize("integers", [True, False])
def test_both_solvers_find_the_same_optimum(label, integers):
    rng = np.random.default_rng(17)
    groups = [draw(rng, 5.0, 0.5, size, cap) for size in (4, 10, 40) for cap in (10**9, 220, 150)]
    lengths = HARD + [x for x, _ in groups]
    rows = sample(lengths, [[True] * len(row) for row in HARD] + [finished for _, finished in groups])
    for each in (rows, sample(lengths, weights=[rng.uniform(0.5, 3.0, len(row)) for row in lengths])):
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
    together = estimate(sample(*zip(*rows, strict=True)), family_of("log-t"))
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
    fits = estimate(sample(*zip(*rows, strict=True)), family_of("log-t", None if free else 3.5))
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


def fitted(lengths, finished=None, name="log-t", weights=None):
    """(sample, estimates, scipy's distribution with their parameters) of one group."""
    values, _, fits = one(lengths, finished, name, weights=weights)
    return single(lengths, finished, weights), fits, scipy_distribution(name, **values)


@settings(max_examples=50, deadline=None)
@given(lengths=lists, name=st.sampled_from(NAMES))
def test_distances_of_uncut_answers_equal_scipys(lengths, name):
    sample, fits, distribution = fitted(lengths, name=name)
    ks, ad = fits.distances(sample)
    x = np.sort(np.asarray(lengths, dtype=float))
    assert ks[0] == pytest.approx(stats.kstest(x, distribution.cdf).statistic, abs=1e-7)
    u = distribution.cdf(x)
    if u[-1] < 1 - 1e-12 and u[0] > 1e-12:
        n = len(x)
        i = np.arange(1, n + 1)
        textbook = -n - np.mean((2 * i - 1) * (np.log(u) + np.log1p(-u[::-1])))
        assert ad[0] == pytest.approx(textbook, rel=1e-4, abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(lengths=lists, cap=st.integers(50, 800))
def test_distances_of_cut_answers_look_below_the_smallest_cut(lengths, cap):
    x, finished = np.minimum(lengths, cap), np.asarray(lengths) < cap
    if not finished.any() or finished.all():
        return
    sample, fits, distribution = fitted(x, finished)
    ks, ad = fits.distances(sample)
    grid = np.unique(np.concatenate([x[finished], x[finished] - 1e-9, [cap - 1e-9]]))
    empirical = np.array([(x[finished] <= at).mean() * finished.mean() for at in grid])
    assert ks[0] == pytest.approx(np.abs(empirical - distribution.cdf(grid)).max(), abs=1e-6)
    top = float(distribution.cdf(cap))
    if top < 1e-9 or top > 1 - 1e-9:
        return
    levels = np.sort(distribution.cdf(np.sort(x[finished])))

    def weighted_square(u):
        share = np.searchsorted(levels, u, side="right") / len(x)
        return (share - u) ** 2 / (u * (1 - u))

    pieces = itertools.pairwise(np.unique([0.0, *np.minimum(levels, top), top]))
    total = sum(integrate.quad(weighted_square, *piece, epsabs=1e-10)[0] for piece in pieces)
    assert ad[0] == pytest.approx(len(x) * total, rel=1e-4, abs=1e-6)


def test_weights_count_in_the_distances_and_censored_groups_have_none():
    x = np.array([10, 20, 30, 45, 80, 200])
    weights = np.array([1.0, 3.0, 1.0, 2.0, 1.0, 1.0])
    sample, fits, _ = fitted(x, weights=weights)
    repeated, again, _ = fitted(np.repeat(x, weights.astype(int)))
    np.testing.assert_allclose(fits.distances(sample), again.distances(repeated), rtol=1e-6)
    sample, fits, _ = fitted([50, 60, 70], [False] * 3)
    assert np.isnan(fits.distances(sample)).all()


def test_p_values_equal_scipys_one_by_one_and_by_the_table():
    rng = np.random.default_rng(0)
    for count in (3, 10, 20, 100):
        statistics = np.clip(rng.uniform(0.5 / count, 1.9 / math.sqrt(count), 2000), 0, 1)
        exact = stats.kstwo.sf(statistics[:150], count)
        np.testing.assert_allclose(ks_p_values(statistics[:150], np.full(150, count)), exact, atol=1e-12)
        np.testing.assert_allclose(ks_p_values(statistics, np.full(2000, count))[:150], exact, atol=2e-5)
    mixed = ks_p_values(np.array([0.2, np.nan, 0.2]), np.array([10, 10, 30]))
    assert np.isnan(mixed[1])
    assert mixed[0] > mixed[2]


def drawn_groups(count, size, seed, *, cap=10**9):
    x, finished = draw(np.random.default_rng(seed), 6.0, 0.4, count * size, cap)
    return SortedLengths.of(x, finished, np.arange(count + 1) * size)


def run(sample, family, *, replicates=59, cap=math.inf, seed=0):
    fits = estimate(sample, family)
    ks, _ = fits.distances(sample)
    options = {"limits": np.full(len(sample), cap), "integers": False}
    seeds = [group_seed(seed, str(g)) for g in range(len(sample))]
    return fits, ks, bootstrap(sample, fits, replicates=replicates, seeds=seeds, **options)


@pytest.mark.parametrize("cap", [10**9, 500])
def test_bootstrap_p_values_are_uniform_under_the_truth_and_plain_ones_are_not(cap):
    sample = drawn_groups(300, 20, 1, cap=cap)
    _fits, ks, found = run(sample, family_of("log-t"), cap=cap)
    known = ~np.isnan(found.ks_p)
    assert known.sum() >= 299
    assert stats.kstest(found.ks_p[known], "uniform").pvalue > 1e-3
    assert stats.kstest(found.ad_p[known], "uniform").pvalue > 1e-3
    plain = ks_p_values(ks, np.full(len(ks), 20))
    assert np.mean(plain[known]) > 0.65  # flatters: its mean would be a half


def test_bootstrap_depends_on_the_seed_and_leaves_out_what_is_not_fitted():
    # The last of four groups is censored throughout.
    lengths = np.append(drawn_groups(3, 15, 5).keys // 2, [9] * 15)
    sample = SortedLengths.of(lengths, np.arange(60) < 45, np.arange(5) * 15)
    first, again, other = (run(sample, family_of("log-t"), replicates=19, seed=seed)[2] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.ad_p, again.ad_p)
    assert (first.ad_p[:3] != other.ad_p[:3]).any()
    assert np.isfinite(first.ks_p).tolist() == [True] * 3 + [False]
    assert np.isnan(first.ad_p[3])
