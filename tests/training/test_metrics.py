"""Metrics of predicted parameters and rankings, scores of outputs, baselines, noise ceiling."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from scheduler_core.errors import InputError
from scheduler_core.lengths import LogT
from tests.training.data import write_lists, write_sample_file
from training.evaluating.baselines import Baselines
from training.evaluating.ceiling import ceilings
from training.evaluating.evaluation import Candidate, ScoredPredictor, compare
from training.evaluating.predictors import PredictedRows, distinct
from training.evaluating.report import report_lines, table_rows
from training.evaluating.rows import EvaluationRows, implied_max_tokens, max_tokens_of, prompts_of
from training.evaluating.scores import (
    OutputLengths,
    kendall_tau,
    ranking,
    regression,
    score_outputs,
    standard_quantiles,
)
from training.fitting.fits import FitOptions, read_fits_or_fit


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
    assert ranking([1.0, 1.0, 1.0], [3.0, 2.0, 1.0]) == {"tau": None, "pair_accuracy": 0.5}
    assert ranking([1.0, 2.0], [5.0, 5.0]) == {"tau": None, "pair_accuracy": None}
    assert kendall_tau([1.0], [2.0]) is None


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


def one_each(lengths, finished, cap):
    count = len(lengths)
    return OutputLengths(
        np.arange(count), np.asarray(lengths, float), np.asarray(finished), np.full(count, cap)
    )


def test_coverage_uses_prompts_whose_quantile_lies_below_max_tokens():
    # medians 50, 50, 50, 200, 200, 100 under a cap of 100
    mu = np.log([50.0, 50.0, 50.0, 200.0, 200.0, 100.0])
    outputs = one_each([40, 60, 100, 30, 100, 100], [True, True, False, True, False, False], 100.0)
    found = score_outputs(mu, np.full(6, 0.3), 3.5, outputs).coverage(0.5)
    # the two outputs with q = 200 beyond max_tokens are left out; truncated at q itself means longer
    assert found["estimate"] == pytest.approx(1 / 4)
    assert found["observed_fraction"] == pytest.approx(4 / 6)
    assert found["low"] == pytest.approx(2 / 6)
    assert found["high"] == pytest.approx(3 / 6)
    # unknown where all quantiles lie beyond max_tokens
    outputs = one_each([100, 100], [False, False], 100.0)
    found = score_outputs(np.log([90.0, 90.0]), np.ones(2), 3.5, outputs).coverage(0.9)
    assert found["estimate"] is None
    assert (found["low"], found["high"]) == (0.0, 1.0)


def test_pinball_losses_are_those_of_the_quantiles():
    mu, sigma = np.log([30.0, 80.0]), np.array([0.4, 0.2])
    outputs = one_each([50, 60], [True, True], np.inf)
    found = score_outputs(mu, sigma, 3.5, outputs).pinball_tokens
    for column, level in enumerate((0.5, 0.9, 0.99)):
        gap = np.array([50.0, 60.0]) - LogT(mu, sigma, 3.5).ppf(level)
        assert found[:, column] == pytest.approx(np.maximum(level * gap, (level - 1) * gap))


@pytest.mark.parametrize("nu", [3.5, np.array([3.5])])
def test_crps_equals_the_integral_over_the_served_length(nu):
    distribution, cap, served = LogT(3.0, 0.4, 3.5), 35.0, 26.0
    exact, _ = integrate.quad(
        lambda x: (float(distribution.cdf(x)) - (x >= served)) ** 2, 1e-9, cap, points=[served], limit=200
    )
    logs, _ = integrate.quad(
        lambda y: (float(distribution.cdf(np.exp(y))) - (y >= np.log(served))) ** 2,
        -5,
        np.log(cap),
        points=[np.log(served)],
        limit=200,
    )
    found = score_outputs(np.array([3.0]), np.array([0.4]), nu, one_each([served], [True], cap))
    assert found.crps_tokens[0] == pytest.approx(exact, rel=0.02)
    assert found.crps_log[0] == pytest.approx(logs, rel=0.02)


def test_a_nu_of_its_own_for_each_prompt_scores_as_one_by_one():
    rng = np.random.default_rng(1)
    mu, sigma, nu = rng.normal(4, 1, 6), rng.uniform(0.2, 1, 6), np.array([1.5, 3.5, 3.5, 20.0, 80.0, 1.5])
    outputs = one_each(rng.integers(5, 200, 6), np.array([True, True, False] * 2), 200.0)
    together = score_outputs(mu, sigma, nu, outputs)
    for row in range(6):
        own = one_each(outputs.lengths[[row]], outputs.finished[[row]], 200.0)
        single = score_outputs(mu[[row]], sigma[[row]], float(nu[row]), own)
        for name in ("pit", "pit_at_limit", "crps_tokens", "crps_log", "nll"):
            assert getattr(together, name)[row] == pytest.approx(getattr(single, name)[0], rel=1e-9)
    assert standard_quantiles(np.array([0.9]), np.inf)[0, 0] == pytest.approx(stats.norm.ppf(0.9))


def drawn(count=400, each=20, cap=150.0, seed=6):
    rng = np.random.default_rng(seed)
    mu, sigma = rng.normal(4.5, 0.6, count), rng.uniform(0.2, 0.8, count)
    owner = np.repeat(np.arange(count), each)
    lengths = np.exp(mu[owner] + sigma[owner] * rng.standard_t(3.5, len(owner)))
    outputs = OutputLengths(owner, np.minimum(lengths, cap), lengths <= cap, np.full(count, cap))
    return mu, sigma, outputs


def test_the_true_distributions_are_calibrated_and_best_in_spite_of_truncation():
    mu, sigma, outputs = drawn()
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


def test_scores_of_parts_make_up_the_whole():
    mu, sigma, outputs = drawn(count=40)
    scores = score_outputs(mu, sigma, 3.5, outputs)
    even = outputs.owner % 2 == 0
    parts = [scores.summary(even), scores.summary(~even)]
    whole = scores.summary()
    assert whole["crps_tokens"] == pytest.approx(np.mean([part["crps_tokens"] for part in parts]))
    assert np.array(whole["pit"]) == pytest.approx(np.mean([part["pit"] for part in parts], axis=0))
    assert scores.summary(np.zeros(len(outputs), dtype=bool))["nll"] is None


@pytest.fixture
def rows(tmp_path):
    path = write_sample_file(tmp_path / "s.parquet", max_tokens=150)
    return EvaluationRows.of(read_fits_or_fit(path, FitOptions()))


def candidate(rows, **changes):
    fits = rows.fits
    return Candidate("own", {}, PredictedRows(**({"mu": fits.mu, "sigma": fits.sigma, "nu": 3.5} | changes)))


def test_the_fits_themselves_beat_the_baselines(rows):
    baselines = Baselines.of(rows.fits, rows.prompts)
    content = compare(rows, candidate(rows), baselines, ceiling_seed=0).content
    assert content["model"]["mu"]["r2"] == pytest.approx(1.0)
    assert content["model"]["kendall_tau"]["median_vs_fitted_mu"] == pytest.approx(1.0)
    assert content["model"]["pair_accuracy"]["fitted_mu"] == pytest.approx(1.0)
    assert set(content["baselines"]) == {"constant", "marginal", "prompt_length"}
    for metrics in content["baselines"].values():
        assert metrics["mu"]["r2"] < 0.9
        for name in ("nll", "crps_tokens", "crps_log_tokens"):
            assert metrics[name] > content["model"][name]
    assert content["baselines"]["constant"]["mu"]["r2"] == pytest.approx(0.0, abs=1e-9)
    assert Baselines.from_json(json.loads(json.dumps(baselines.to_json()))) == baselines
    labels = [label for label, _ in table_rows(content)]
    assert labels[0] == "predictor"
    assert labels[-2:] == ["half of the outputs", "true parameters (simulated)"]
    assert len(report_lines(content)) == len(labels) + 1
    json.dumps(content, allow_nan=False)


def test_the_ceiling_lies_between_nothing_and_the_fits(rows, tmp_path):
    found, info = ceilings(rows, seed=3)
    again, _ = ceilings(rows, seed=3)
    for name, ceiling in found.items():
        assert ceiling.rows.fits.mu.tolist() == again[name].rows.fits.mu.tolist()
    half = ScoredPredictor.of(found["half_of_outputs"].rows, found["half_of_outputs"].prediction).metrics()
    true = ScoredPredictor.of(found["true_parameters"].rows, found["true_parameters"].prediction).metrics()
    assert 0.5 < half["mu"]["r2"] < true["mu"]["r2"] < 1
    # four of eight outputs; prompts with a half that was truncated throughout are left out
    assert 100 < half["num_samples"] == 4 * half["num_prompts"] <= len(rows.outputs) // 2
    assert true["num_samples"] == len(rows.outputs)
    assert true["coverage"]["p50"]["estimate"] == pytest.approx(0.5, abs=0.1)
    assert 0.9 < info["reliability"]["mu"] <= 1
    # halves need enough outputs
    path = write_lists(tmp_path / "x.parquet", [[10, 20, 30], [40, 20, 60]])
    found, info = ceilings(EvaluationRows.of(read_fits_or_fit(path, FitOptions())), seed=0)
    assert set(found) == {"true_parameters"}
    assert info["reliability"] is None


def test_the_report_is_broken_down_by_category(rows):
    content = compare(rows, candidate(rows)).content
    assert set(content["by_category"]) == {"rivers", "code", "story", "essay", "list", "number"}
    assert sum(part["num_prompts"] for part in content["by_category"].values()) == len(rows)
    assert "by_model" not in content
    assert content["baselines"] == {} == content["ceiling"]


def several_models(tmp_path, seed=0):
    rng = np.random.default_rng(seed)
    lengths = [[int(v) for v in rng.integers(20, 40, 6) * (1 + 3 * (row % 2))] for row in range(24)]
    path = write_lists(
        tmp_path / "x.parquet",
        lengths,
        prompt_id=[f"p{row // 2}" for row in range(24)],
        model=[f"m{row % 2}" for row in range(24)],
        dataset=["A" if row < 12 else "B" for row in range(24)],
        temperature=[0.7 if row % 2 else None for row in range(24)],
    )
    return EvaluationRows.of(read_fits_or_fit(path, FitOptions()))


def test_the_median_of_each_served_model_is_a_baseline(tmp_path):
    rows = several_models(tmp_path)
    baselines = Baselines.of(rows.fits, rows.prompts)
    assert baselines.served_models["m1"][0] == pytest.approx(
        np.log(4) + baselines.served_models["m0"][0], abs=0.2
    )
    content = compare(rows, candidate(rows), baselines).content
    assert content["baselines"]["per_model"]["mu"]["r2"] > 0.8 > content["baselines"]["marginal"]["mu"]["r2"]
    mu, _ = baselines.predict(["x", "x"], ["m0", "new"])["per_model"]
    assert mu.tolist() == [baselines.served_models["m0"][0], baselines.marginal_mu]
    assert content["coverage_by_model_and_dataset"]["m0"]["A"]["num_samples"] == 36
    assert set(content["largest_shift"]) == {"model", "dataset"}
    assert rows.temperatures[:2] == [None, 0.7]


def test_baselines_of_single_outputs_stand_on_their_logarithms():
    lengths = np.array([10, 20, 40, 80, 160])
    nothing = np.full(5, np.nan)
    found = Baselines.of_outputs(
        ["p"] * 5, [None] * 5, np.arange(6), lengths, np.ones(5, dtype=bool), nothing, nothing, 3.5
    )
    assert found.constant_mu == pytest.approx(np.log(40))
    assert found.constant_sigma == pytest.approx(found.marginal_sigma)
    with pytest.raises(InputError, match="finished outputs"):
        Baselines.of_outputs(
            ["p"] * 5, [None] * 5, np.arange(6), lengths, np.zeros(5, dtype=bool), nothing, nothing, 3.5
        )
    with pytest.raises(InputError, match="mu_slope"):
        Baselines.from_json({"constant_mu": 1.0})


def test_heads_without_a_distribution_get_what_makes_sense(tmp_path):
    rows = several_models(tmp_path)
    mu = rows.fits.mu
    tokens = np.exp(mu)
    regression_only = ScoredPredictor.of(rows, PredictedRows(regression_tokens=tokens)).metrics()
    assert regression_only["ordered_by"] == "regression"
    assert regression_only["mu"]["r2"] == pytest.approx(1.0)
    assert regression_only["sigma"]["r2"] is None
    assert regression_only["crps_tokens"] is None
    assert regression_only["point"]["mae_tokens"] > 0
    rank = ScoredPredictor.of(rows, PredictedRows(rank=-mu)).metrics()
    assert rank["kendall_tau"]["median_vs_fitted_mu"] == pytest.approx(-1.0)
    assert rank["mu"]["r2"] is None
    bucket = np.zeros((len(rows), 2))
    bucket[np.arange(len(rows)), (tokens > 60).astype(int)] = 1
    buckets = ScoredPredictor.of(rows, PredictedRows(bucket=bucket), (60.0,)).metrics()
    assert buckets["point"]["bucket_accuracy"] == pytest.approx(1.0)
    assert buckets["pair_accuracy"]["fitted_mu"] > 0.7
    with pytest.raises(InputError, match="urgency only"):
        ScoredPredictor.of(rows, PredictedRows()).metrics()


def test_groups_that_were_truncated_throughout_count_for_distributions_only(tmp_path):
    path = write_lists(
        tmp_path / "x.parquet",
        [[100, 100, 100], [10, 20, 30], [40, 20, 60]],
        finished=[[False] * 3, [True] * 3, [True] * 3],
    )
    rows = EvaluationRows.of(read_fits_or_fit(path, FitOptions()))
    prediction = PredictedRows(np.array([9.0, *rows.fits.mu[1:]]), np.array([0.5, *rows.fits.sigma[1:]]), 3.5)
    found = ScoredPredictor.of(rows, prediction).metrics()
    assert found["num_fits_compared"] == 2
    assert found["mu"]["mae"] == 0.0
    assert (found["num_prompts"], found["num_samples"], found["num_censored"]) == (3, 9, 3)
    assert found["coverage"]["p50"]["observed_fraction"] == pytest.approx(6 / 9)
    assert max_tokens_of(rows.fits).tolist() == [100.0, np.inf, np.inf]


def test_prompts_are_needed(tmp_path):
    fits = read_fits_or_fit(write_lists(tmp_path / "x.parquet", [[1, 2, 3]], prompt=["a"]), FitOptions())
    assert prompts_of(fits) == ["a"]
    object.__setattr__(fits.groups, "rows", fits.groups.rows.drop_columns(["prompt"]))
    with pytest.raises(InputError, match="also prompt"):
        prompts_of(fits)


def test_castillos_max_tokens_is_known_by_its_columns(tmp_path):
    columns = {"prompt_tokens": [1], "temperature": [1.0], "top_p": [1.0], "top_k": [50], "category": ["x"]}
    path = write_lists(tmp_path / "c.parquet", [[1, 2, 3]], dataset=["A"], **columns)
    assert implied_max_tokens(path) == 15_000
    assert implied_max_tokens(write_lists(tmp_path / "d.parquet", [[1, 2, 3]], dataset=["A"])) is None
    assert implied_max_tokens(tmp_path / "nothing.parquet") is None


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([None, 0.5])), min_size=1, max_size=20))
def test_distinct_rows_lead_back_to_all(rows):
    columns = list(zip(*rows, strict=True))
    first, of_row = distinct(*columns)
    assert len({rows[at] for at in first}) == len(first) == len(set(rows))
    assert [rows[first[number]] for number in of_row] == rows
