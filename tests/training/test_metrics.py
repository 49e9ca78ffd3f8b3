"""Metrics of predicted parameters and distributions."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import integrate

from scheduler_core.errors import InputError
from scheduler_core.lengths import LogT
from tests.training.data import write_lists, write_sample_file
from training.baselines import Baselines
from training.evaluation import evaluate_predictions, full_report, prompts_of, report_lines
from training.fitting.fits_file import read_fits_or_fit
from training.fitting.options import FitOptions
from training.metrics import coverage, distribution_metrics, kendall_tau, pinball, regression


def test_regression_follows_the_definitions():
    found = regression([1.0, 2.0, 4.0], [1.0, 3.0, 3.0])
    assert found["mae"] == pytest.approx(2 / 3)
    assert found["rmse"] == pytest.approx(np.sqrt(2 / 3))
    assert found["mape"] == pytest.approx((0 + 1 / 2 + 1 / 4) / 3)
    assert found["r2"] == pytest.approx(1 - 2 / np.sum((np.array([1, 2, 4]) - 7 / 3) ** 2))
    assert regression([2.0, 2.0], [1.0, 3.0])["r2"] is None
    assert regression([], []) == {"r2": None, "mae": None, "rmse": None, "mape": None}


def test_ranking_of_a_constant_is_unknown():
    assert kendall_tau([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1.0)
    assert kendall_tau([1.0, 1.0, 1.0], [3.0, 2.0, 1.0]) is None


def test_coverage_uses_prompts_whose_quantile_lies_below_the_cap():
    quantile = np.array([50.0, 50.0, 50.0, 200.0, 200.0, 100.0])
    lengths = np.array([40.0, 60.0, 100.0, 30.0, 100.0, 100.0])
    finished = np.array([True, True, False, True, False, False])
    found = coverage(quantile, 0.5, lengths, finished, np.full(6, 100.0))
    # the two answers with q = 200 beyond the cap are left out; cut at q itself means longer
    assert found["estimate"] == pytest.approx(1 / 4)
    assert found["known_share"] == pytest.approx(4 / 6)
    assert found["low"] == pytest.approx(2 / 6)
    assert found["high"] == pytest.approx(3 / 6)


def test_coverage_is_unknown_where_all_quantiles_lie_beyond_the_cap():
    found = coverage(np.full(2, 200.0), 0.9, np.full(2, 100.0), np.zeros(2, dtype=bool), np.full(2, 100.0))
    assert found["estimate"] is None
    assert (found["low"], found["high"]) == (0.0, 1.0)


def test_pinball_loss():
    assert pinball(np.array([10.0, 2.0]), np.array([4.0, 4.0]), 0.9) == pytest.approx((0.9 * 6 + 0.1 * 2) / 2)


def test_crps_equals_the_integral_over_the_served_length():
    distribution, cap, served = LogT(np.array([3.0]), np.array([0.4]), 3.5), 35.0, 26.0
    exact, _ = integrate.quad(
        lambda x: (float(distribution.cdf(x)[0]) - (x >= served)) ** 2, 1e-9, cap, points=[served], limit=200
    )
    found = distribution_metrics(
        distribution, np.array([0]), np.array([served]), np.array([True]), np.array([cap])
    )
    assert found["crps_tokens"] == pytest.approx(exact, rel=0.02)


def test_the_true_distributions_are_calibrated_and_best_in_spite_of_a_cap():
    rng = np.random.default_rng(6)
    mu, sigma = rng.normal(4.5, 0.6, 400), rng.uniform(0.2, 0.8, 400)
    group = np.repeat(np.arange(400), 20)
    drawn = np.exp(mu[group] + sigma[group] * rng.standard_t(3.5, 8000))
    cap = 150.0
    finished, lengths, caps = drawn <= cap, np.minimum(drawn, cap), np.full(8000, cap)

    def metrics(shift, factor):
        return distribution_metrics(LogT(mu + shift, sigma * factor, 3.5), group, lengths, finished, caps)

    true = metrics(0.0, 1.0)
    for level in ("p50", "p90", "p99"):
        row = true["coverage"][level]
        error = 3 * np.sqrt(row["level"] * (1 - row["level"]) / (8000 * row["known_share"]))
        assert row["estimate"] == pytest.approx(row["level"], abs=error)
        assert row["low"] <= row["estimate"]
    for row in true["calibration"]:
        assert row["estimate"] == pytest.approx(row["level"], abs=0.03)
    for other in (metrics(0.2, 1.0), metrics(-0.2, 1.0), metrics(0.0, 1.5), metrics(0.0, 0.6)):
        assert other["nll"] > true["nll"]
        assert other["crps_tokens"] > true["crps_tokens"]


@pytest.fixture
def fits(tmp_path):
    return read_fits_or_fit(write_sample_file(tmp_path / "s.parquet", max_tokens=150), FitOptions())


def test_the_fits_themselves_beat_the_baselines(fits):
    baselines = Baselines.of(fits, prompts_of(fits))
    report = full_report(fits, fits.mu, fits.sigma, baselines)
    assert report["model"]["mu"]["r2"] == pytest.approx(1.0)
    assert report["model"]["kendall_tau"]["median_vs_fitted_mu"] == pytest.approx(1.0)
    assert set(report["baselines"]) == {"constant", "marginal", "prompt_length"}
    for metrics in report["baselines"].values():
        assert metrics["mu"]["r2"] < 0.9
        assert metrics["nll"] > report["model"]["nll"]
        assert metrics["crps_tokens"] > report["model"]["crps_tokens"]
    assert report["baselines"]["constant"]["mu"]["r2"] == pytest.approx(0.0, abs=1e-9)
    assert Baselines.from_json(baselines.to_json()) == baselines
    assert len(report_lines(report)) == 5


def test_the_report_is_broken_down_by_category(fits):
    report = full_report(fits, fits.mu, fits.sigma, None)
    assert set(report["by_category"]) == {"rivers", "code", "story", "essay", "list", "number"}
    assert sum(part["num_prompts"] for part in report["by_category"].values()) == len(fits)
    assert "by_model" not in report
    assert report["baselines"] == {}


def test_groups_that_were_cut_throughout_count_for_distributions_only(tmp_path):
    path = write_lists(
        tmp_path / "x.parquet",
        [[100, 100, 100], [10, 20, 30], [40, 20, 60]],
        finished=[[False] * 3, [True] * 3, [True] * 3],
    )
    fits = read_fits_or_fit(path, FitOptions())
    found = evaluate_predictions(fits, np.array([9.0, *fits.mu[1:]]), np.array([0.5, *fits.sigma[1:]]))
    assert found["num_fits_compared"] == 2
    assert found["mu"]["mae"] == 0.0
    assert (found["num_prompts"], found["num_samples"], found["num_censored"]) == (3, 9, 3)
    assert found["coverage"]["p50"]["known_share"] == pytest.approx(6 / 9)


def test_prompts_are_needed(tmp_path):
    fits = read_fits_or_fit(write_lists(tmp_path / "x.parquet", [[1, 2, 3]], prompt=["a"]), FitOptions())
    without = read_fits_or_fit(tmp_path / "x.parquet", FitOptions())
    assert prompts_of(fits) == ["a"]
    groups = without.groups
    object.__setattr__(groups, "rows", groups.rows.drop_columns(["prompt"]))
    with pytest.raises(InputError, match="also prompt"):
        prompts_of(without)


def test_baselines_without_a_number_are_named():
    with pytest.raises(InputError, match="mu_slope"):
        Baselines.from_json({"constant_mu": 1.0})
