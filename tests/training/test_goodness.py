"""Distances of fits from their answers, and their p-values."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from tests.training.reference import scipy_distribution
from training.fitting.estimate import SortedLengths, compared_families, estimate, family_of
from training.fitting.goodness import bootstrap, group_seed, interval_columns, ks_p_values

NAMES = ("log-t", "log-normal", "gamma", "weibull", "exponential")


def fitted(lengths, finished=None, name="log-t", weights=None):
    """(sample, estimates, scipy's distribution with their parameters) of one group."""
    ended = np.ones(len(lengths), bool) if finished is None else np.asarray(finished, bool)
    sample = SortedLengths.of(
        np.asarray(lengths),
        ended,
        np.array([0, len(lengths)]),
        None if weights is None else np.asarray(weights),
    )
    fits = estimate(sample, family_of(name))
    values, _ = fits.family.parameters(fits.solution)
    return sample, fits, scipy_distribution(name, **{key: float(v[0]) for key, v in values.items()})


lists = st.lists(st.integers(1, 900), min_size=4, max_size=40).filter(lambda x: len(set(x)) > 2)


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

    pieces = [0.0, *np.unique(np.minimum(levels, top)), top]
    total = sum(
        integrate.quad(weighted_square, a, b, epsabs=1e-10)[0] for a, b in itertools.pairwise(pieces) if b > a
    )
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


def drawn_groups(count, size, seed, *, cap=10**9, mu=6.0, sigma=0.4):
    rng = np.random.default_rng(seed)
    x = np.maximum(np.rint(np.exp(mu + sigma * rng.standard_t(3.5, (count, size)))), 1).astype(np.int64)
    return SortedLengths.of(np.minimum(x, cap).ravel(), (x <= cap).ravel(), np.arange(count + 1) * size)


def run(sample, family, *, replicates=59, cap=math.inf, seed=0):
    fits = estimate(sample, family)
    ks, _ = fits.distances(sample)
    seeds = [group_seed(seed, str(g)) for g in range(len(sample))]
    found = bootstrap(
        sample,
        fits,
        replicates=replicates,
        confidence=0.8,
        integers=False,
        limits=np.full(len(sample), cap),
        seeds=seeds,
    )
    return fits, ks, found


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


def test_bootstrap_intervals_cover_as_often_as_they_say():
    _, _, result = run(drawn_groups(300, 20, 3), family_of("log-t"))
    for column, truth in ((0, 6.0), (1, math.log(0.4))):
        covered = np.mean((result.low[:, column] <= truth) & (truth <= result.high[:, column]))
        # 80 % of 300: standard error 2.3 %
        assert 0.72 < covered < 0.88


@pytest.mark.parametrize("label", compared_families(3.5))
def test_intervals_of_every_family_hold_the_estimate(label):
    fits, _, result = run(drawn_groups(3, 30, 4), compared_families(3.5)[label], replicates=39)
    columns = interval_columns(fits, result)
    values, _ = fits.family.parameters(fits.solution)
    assert set(columns) == {f"{name}_{end}" for name in set(values) - {"nu"} for end in ("low", "high")}
    for name in set(values) - {"nu"}:
        low, high = columns[f"{name}_low"], columns[f"{name}_high"]
        assert (low < high).all()
        np.testing.assert_allclose((low + high) / 2, values[name], rtol=0.5)


def test_bootstrap_depends_on_the_seed_and_leaves_out_what_is_not_fitted():
    # The last of four groups is censored throughout.
    lengths = np.append(drawn_groups(3, 15, 5).keys // 2, [9] * 15)
    sample = SortedLengths.of(lengths, np.arange(60) < 45, np.arange(5) * 15)
    first, again, other = (run(sample, family_of("log-t"), replicates=19, seed=seed)[2] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.low, again.low)
    assert (first.low[:3] != other.low[:3]).any()
    assert np.isfinite(first.ks_p).tolist() == [True] * 3 + [False]
    assert np.isnan(first.low[3]).all()
