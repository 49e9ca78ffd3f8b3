"""Metrics of predicted parameters and rankings, scores of outputs, baselines, noise ceiling."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from scheduler_core.errors import InputError
from scheduler_core.lengths import LogT
from tests.training.data import write_lists, write_sample_file
from training.evaluating.baselines import baselines_of
from training.evaluating.ceiling import ceilings
from training.evaluating.evaluation import Candidate, ScoredPredictor, compare
from training.evaluating.predictors import PredictedRows
from training.evaluating.report import report_lines, table_rows
from training.evaluating.rows import EvaluationRows
from training.evaluating.scores import (
    OutputLengths,
    kendall_tau,
    ranking,
    regression,
    score_outputs,
    standard_quantiles,
)
from training.fitting.fits import FitOptions, read_fits_or_fit


def test_what_a_constant_says_is_unknown():
    assert ranking([1.0, 1.0, 1.0], [3.0, 2.0, 1.0]) == {"tau": None, "pair_accuracy": 0.5}
    assert ranking([1.0, 2.0], [5.0, 5.0]) == {"tau": None, "pair_accuracy": None}
    assert kendall_tau([1.0], [2.0]) is None
    assert regression(np.array([2.0, 2.0]), np.array([1.0, 3.0]))["r2"] is None
    assert set(regression(np.array([]), np.array([])).values()) == {None}


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12))
def test_pair_accuracy_is_the_share_of_pairs_ordered_right(pairs):
    score, true = (np.array(values, dtype=float) for values in zip(*pairs, strict=True))
    right = []
    for i, j in itertools.combinations(range(len(pairs)), 2):
        if true[i] != true[j]:
            agree = (score[i] - score[j]) * (true[i] - true[j])
            right.append(0.5 if agree == 0 else float(agree > 0))
    found = ranking(score, true)["pair_accuracy"]
    assert found == (pytest.approx(np.mean(right)) if right else None)


def one_each(lengths, finished=True, limit=np.inf):
    count = len(lengths)
    finished = np.broadcast_to(np.asarray(finished), count)
    return OutputLengths(np.arange(count), np.asarray(lengths, float), finished, np.full(count, limit))


def test_coverage_uses_prompts_whose_quantile_lies_below_max_tokens():
    # medians 50, 50, 50, 200, 200, 100 with max_tokens 100
    mu = np.log([50.0, 50.0, 50.0, 200.0, 200.0, 100.0])
    outputs = one_each([40, 60, 100, 30, 100, 100], [True, True, False, True, False, False], 100.0)
    coverage = score_outputs(mu, np.full(6, 0.3), 3.5, outputs).coverage(0.5)
    # the two outputs with q = 200 beyond max_tokens are left out; truncated at q itself means longer
    expected = {"level": 0.5, "estimate": 1 / 4, "observed_fraction": 4 / 6, "low": 2 / 6, "high": 3 / 6}
    assert coverage == pytest.approx(expected)
    # unknown where all quantiles lie beyond max_tokens
    outputs = one_each([100, 100], False, 100.0)
    coverage = score_outputs(np.log([90.0, 90.0]), np.ones(2), 3.5, outputs).coverage(0.9)
    assert (coverage["estimate"], coverage["low"], coverage["high"]) == (None, 0.0, 1.0)


@pytest.mark.parametrize("nu", [3.5, np.array([3.5])])
def test_crps_equals_the_integral_over_the_served_length(nu):
    distribution, limit, served = LogT(3.0, 0.4, 3.5), 35.0, 26.0
    scores = score_outputs(np.array([3.0]), np.array([0.4]), nu, one_each([served], True, limit))
    for crps, scale, low in ((scores.crps_tokens, float, 1e-9), (scores.crps_log, np.log, -5)):
        back = np.exp if scale is np.log else float
        at = scale(served)
        exact, _ = integrate.quad(
            lambda y, back=back, at=at: (float(distribution.cdf(back(y))) - (y >= at)) ** 2,
            low,
            scale(limit),
            points=[at],
            limit=200,
        )
        assert crps[0] == pytest.approx(exact, rel=0.02)


def test_a_nu_of_its_own_for_each_prompt_scores_as_one_by_one():
    rng = np.random.default_rng(1)
    mu, sigma, nu = rng.normal(4, 1, 6), rng.uniform(0.2, 1, 6), np.array([1.5, 3.5, 3.5, 20.0, 80.0, 1.5])
    outputs = one_each(rng.integers(5, 200, 6), [True, True, False] * 2, 200.0)
    together = score_outputs(mu, sigma, nu, outputs)
    for row in range(6):
        own = one_each(outputs.lengths[[row]], outputs.finished[[row]], 200.0)
        single = score_outputs(mu[[row]], sigma[[row]], float(nu[row]), own)
        assert together.crps_log[row] == pytest.approx(single.crps_log[0], rel=1e-9)
    assert standard_quantiles(np.array([0.9]), np.inf)[0, 0] == pytest.approx(stats.norm.ppf(0.9))


def test_the_true_distributions_are_calibrated_and_best_in_spite_of_truncation():
    rng, limit = np.random.default_rng(6), 150.0
    mu, sigma = rng.normal(4.5, 0.6, 400), rng.uniform(0.2, 0.8, 400)
    owner = np.repeat(np.arange(400), 20)
    lengths = np.exp(mu[owner] + sigma[owner] * rng.standard_t(3.5, len(owner)))
    outputs = OutputLengths(owner, np.minimum(lengths, limit), lengths <= limit, np.full(400, limit))
    true = score_outputs(mu, sigma, 3.5, outputs).summary()
    for level in ("p50", "p90", "p99"):
        row = true["coverage"][level]
        error = 3 * np.sqrt(row["level"] * (1 - row["level"]) / (8000 * row["observed_fraction"]))
        assert row["estimate"] == pytest.approx(row["level"], abs=error)
        assert row["low"] <= row["estimate"]
    for row in true["calibration"]:
        assert row["estimate"] == pytest.approx(row["level"], abs=0.03)
    assert sum(true["pit"]) == pytest.approx(1.0)
    # Spread over [F(max_tokens), 1], the truncated outputs leave the histogram flat.
    assert true["pit"] == pytest.approx(np.full(20, 0.05), abs=3 * np.sqrt(0.05 / 8000) + 0.003)
    for shift, factor in ((0.2, 1.0), (-0.2, 1.0), (0.0, 1.5), (0.0, 0.6)):
        other = score_outputs(mu + shift, sigma * factor, 3.5, outputs).summary()
        for name in ("nll", "crps_tokens", "crps_log_tokens"):
            assert other[name] > true[name]


@pytest.fixture
def rows(tmp_path):
    path = write_sample_file(tmp_path / "s.parquet", max_tokens=150)
    return EvaluationRows.of(read_fits_or_fit(path, FitOptions()))


def candidate(rows):
    return Candidate("own", {}, PredictedRows(rows.fits.mu, rows.fits.sigma, 3.5))


def metrics(rows, *edges, **prediction):
    return ScoredPredictor.of(rows, PredictedRows(**prediction), *edges).metrics()


def test_the_fits_themselves_beat_the_baselines(rows):
    baselines = baselines_of(rows.fits)
    content, _ = compare(rows, candidate(rows), baselines, ceiling_seed=0)
    assert content["model"]["mu"]["r2"] == pytest.approx(1.0)
    assert content["model"]["kendall_tau"]["median_vs_fitted_mu"] == pytest.approx(1.0)
    assert content["model"]["pair_accuracy"]["fitted_mu"] == pytest.approx(1.0)
    assert set(content["baselines"]) == {"constant", "marginal", "prompt_length"}
    for metrics in content["baselines"].values():
        assert metrics["mu"]["r2"] < 0.9
        for name in ("nll", "crps_tokens", "crps_log_tokens"):
            assert metrics[name] > content["model"][name]
    labels = [label for label, _ in table_rows(content)]
    assert labels[0] == "predictor"
    assert labels[-2:] == ["half of the outputs", "true parameters (simulated)"]
    assert len(report_lines(content)) == len(labels) + 1
    json.dumps(content, allow_nan=False)
    assert set(content["by_category"]) == {"rivers", "code", "story", "essay", "list", "number"}
    assert sum(part["num_prompts"] for part in content["by_category"].values()) == len(rows)
    assert "by_model" not in content


def test_the_ceiling_lies_between_nothing_and_the_fits(rows, tmp_path):
    bounds, info = ceilings(rows, seed=3)
    again, _ = ceilings(rows, seed=3)
    for name, (simulated, _) in bounds.items():
        assert simulated.fits.mu.tolist() == again[name][0].fits.mu.tolist()
    half, true = (
        ScoredPredictor.of(*bounds[name]).metrics() for name in ("half_of_outputs", "true_parameters")
    )
    assert 0.5 < half["mu"]["r2"] < true["mu"]["r2"] < 1
    # four of eight outputs; prompts with a half that was truncated throughout are left out
    assert 100 < half["num_samples"] == 4 * half["num_prompts"] <= len(rows.outputs) // 2
    assert true["num_samples"] == len(rows.outputs)
    assert true["coverage"]["p50"]["estimate"] == pytest.approx(0.5, abs=0.1)
    assert 0.9 < info["reliability"]["mu"] <= 1
    # halves need enough outputs
    path = write_lists(tmp_path / "x.parquet", [[10, 20, 30], [40, 20, 60]])
    bounds, info = ceilings(EvaluationRows.of(read_fits_or_fit(path, FitOptions())), seed=0)
    assert set(bounds) == {"true_parameters"}
    assert info["reliability"] is None


def several_models(tmp_path, seed=0):
    rng = np.random.default_rng(seed)
    lengths = [[int(v) for v in rng.integers(20, 40, 6) * (1 + 3 * (row % 2))] for row in range(24)]
    columns = {"prompt_id": [f"p{row // 2}" for row in range(24)], "model": ["m0", "m1"] * 12}
    columns |= {"dataset": ["A"] * 12 + ["B"] * 12, "temperature": [None, 0.7] * 12}
    path = write_lists(tmp_path / "x.parquet", lengths, **columns)
    return EvaluationRows.of(read_fits_or_fit(path, FitOptions()))


def test_the_median_of_each_served_model_is_a_baseline(tmp_path):
    rows = several_models(tmp_path)
    baselines = baselines_of(rows.fits)
    assert baselines.served_models["m1"][0] == pytest.approx(
        np.log(4) + baselines.served_models["m0"][0], abs=0.2
    )
    content, _ = compare(rows, candidate(rows), baselines)
    assert content["baselines"]["per_model"]["mu"]["r2"] > 0.8 > content["baselines"]["marginal"]["mu"]["r2"]
    mu, _ = baselines.predict(["x", "x"], ["m0", "new"])["per_model"]
    assert mu.tolist() == [baselines.served_models["m0"][0], baselines.marginal_mu]
    assert rows.temperatures[:2] == [None, 0.7]


def test_baselines_of_single_outputs_are_of_their_logarithms(tmp_path):
    path = write_lists(tmp_path / "x.parquet", [[10], [20], [40], [80], [160]], prompt=["p"] * 5)
    fits = read_fits_or_fit(path, FitOptions(), min_samples=1)
    baselines = baselines_of(fits)
    assert baselines.constant_mu == pytest.approx(np.log(40))
    assert baselines.constant_sigma == pytest.approx(baselines.marginal_sigma)
    fits.groups.flat_finished[:] = False
    with pytest.raises(InputError, match="finished outputs"):
        baselines_of(fits)


def test_heads_without_a_distribution_get_what_makes_sense(tmp_path):
    rows = several_models(tmp_path)
    mu, tokens = rows.fits.mu, np.exp(rows.fits.mu)
    by_regression = metrics(rows, regression_tokens=tokens)
    assert by_regression["ordered_by"] == "regression"
    assert by_regression["mu"]["r2"] == pytest.approx(1.0)
    assert by_regression["sigma"]["r2"] is by_regression["crps_tokens"] is None
    assert by_regression["point"]["mae_tokens"] > 0
    by_rank = metrics(rows, rank=-mu)
    assert by_rank["kendall_tau"]["median_vs_fitted_mu"] == pytest.approx(-1.0)
    assert by_rank["mu"]["r2"] is None
    by_bucket = metrics(rows, (60.0,), bucket=np.eye(2)[(tokens > 60).astype(int)])
    assert by_bucket["point"]["bucket_accuracy"] == pytest.approx(1.0)
    assert by_bucket["pair_accuracy"]["fitted_mu"] > 0.7
    with pytest.raises(InputError, match="urgency only"):
        metrics(rows)


def test_groups_that_were_truncated_throughout_count_for_distributions_only(tmp_path):
    finished = [[False] * 3] + [[True] * 3] * 20
    path = write_lists(
        tmp_path / "x.parquet", [[100] * 3] + [[10, 20, 30], [40, 20, 60]] * 10, finished=finished
    )
    rows = EvaluationRows.of(read_fits_or_fit(path, FitOptions()))
    mu, sigma = np.array([9.0, *rows.fits.mu[1:]]), np.array([0.5, *rows.fits.sigma[1:]])
    content = metrics(rows, mu=mu, sigma=sigma)
    assert content["num_fits_compared"] == 20
    assert content["mu"]["mae"] == 0.0
    few = ScoredPredictor.of(rows, PredictedRows(mu, sigma)).metrics(np.arange(20))
    assert (few["num_fits_compared"], few["mu"]["r2"]) == (19, None)
    assert set(few["kendall_tau"].values()) - {None}
    assert (content["num_prompts"], content["num_samples"], content["num_censored"]) == (21, 63, 3)
    assert content["coverage"]["p50"]["observed_fraction"] == pytest.approx(60 / 63)
    assert rows.outputs.max_tokens.tolist() == [100.0] + [np.inf] * 20
