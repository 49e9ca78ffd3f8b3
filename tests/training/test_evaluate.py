"""Metrics, scores, baselines and noise ceiling, and the command `evaluate` on checkpoints, artifacts, fits, samples and lists."""

import itertools
import json
import re
from dataclasses import asdict

import numpy as np
import onnxruntime as ort
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from predictors.heads import Predicted
from predictors.modules.heads import BucketHead, Heads, LengthHead, RankHead, RegressionHead, UrgencyHead
from predictors.pretrained import shipped_folder
from predictors.runtime import open_runtime
from scheduler_core.errors import InputError
from scheduler_core.lengths import LogQuantiles, LogT
from scheduler_core.lengths.quantiles import LEVELS
from scheduler_core.statistics import kendall_tau
from tests.training.checkpoints import (
    ALL_HEADS,
    MODELS,
    SMALL_TOWER,
    random_checkpoint,
    write_drawn_answers,
)
from tests.training.data import assert_refused, write_lists, write_rows, write_sample_file
from training.commands.evaluate import main
from training.commands.fit_dist import main as fit_dist
from training.evaluating import scores as scoring
from training.evaluating.batch_predictor import InferenceOptions, open_batch_predictor
from training.evaluating.evaluation import Candidate, ScoredPredictor, ceilings, compare
from training.evaluating.report import COLUMNS, report_lines, table_rows
from training.evaluating.rows import EvaluationRows
from training.evaluating.scores import OutputLengths, ranking, regression, score_outputs
from training.evaluating.split_runtime import SplitRuntime
from training.fitting.baselines import baselines_of
from training.fitting.fits import FitOptions, read_fits_or_fit

SPLIT = {"seed": 3, "fractions": [0.5, 0.25, 0.25]}


def test_what_a_constant_says_is_unknown():
    assert ranking([1.0, 1.0, 1.0], [3.0, 2.0, 1.0]) == {"tau": None, "pair_accuracy": 0.5}
    assert ranking([1.0, 2.0], [5.0, 5.0]) == {"tau": None, "pair_accuracy": None}
    assert kendall_tau([1.0], [2.0]) is None
    assert regression(np.array([2.0, 2.0]), np.array([1.0, 3.0]))["r2"] is None
    assert set(regression(np.array([]), np.array([])).values()) == {None}


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12))
def test_pair_accuracy_is_the_share_of_pairs_ordered_right(pairs):
    score, true = (np.array(values, dtype=float) for values in zip(*pairs, strict=True))
    rows = itertools.combinations(range(len(pairs)), 2)
    products = [(score[i] - score[j]) * (true[i] - true[j]) for i, j in rows if true[i] != true[j]]
    right = [(1 + np.sign(product)) / 2 for product in products]
    assert ranking(score, true)["pair_accuracy"] == (pytest.approx(np.mean(right)) if right else None)


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
    in_tokens, in_logs = (scores.crps_tokens, float, float, 1e-9), (scores.crps_log, np.log, np.exp, -5)
    for crps, scale, back, low in (in_tokens, in_logs):
        at = scale(served)

        def squared(y, back=back, at=at):
            return (float(distribution.cdf(back(y))) - (y >= at)) ** 2

        exact, _ = integrate.quad(squared, low, scale(limit), points=[at], limit=200)
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
    assert scoring.standard_quantiles(np.array([0.9]), np.inf)[0, 0] == pytest.approx(stats.norm.ppf(0.9))


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


def test_quantiles_are_scored_as_their_distribution():
    rng, limit = np.random.default_rng(6), 400.0
    mu, sigma = rng.normal(4.5, 0.6, 400), rng.uniform(0.2, 0.8, 400)
    skewed = np.expm1(0.5 * stats.norm.ppf(LEVELS)) / 0.5
    quantiles = mu[:, None] + sigma[:, None] * skewed
    owner = np.repeat(np.arange(400), 20)
    lengths = LogQuantiles(quantiles[owner]).ppf(rng.random(len(owner)))
    outputs = OutputLengths(owner, np.minimum(lengths, limit), lengths <= limit, np.full(400, limit))
    scores = score_outputs(mu, sigma, 3.5, outputs, quantiles)
    true, log_t = scores.summary(), score_outputs(mu, 0.8 * sigma, 3.5, outputs).summary()
    for row in true["calibration"]:
        assert row["estimate"] == pytest.approx(row["level"], abs=0.02)
    assert true["pit"] == pytest.approx(np.full(20, 0.05), abs=0.01)
    for name in ("nll", "crps_tokens", "crps_log_tokens"):
        assert true[name] < log_t[name]
    distribution, at = LogQuantiles(quantiles[0]), np.log(outputs.lengths[0])
    z = np.linspace(-5, np.log(limit), 200_001)
    crps = np.trapezoid((distribution.cdf(np.exp(z)) - (z >= at)) ** 2, z)
    assert scores.crps_log[0] == pytest.approx(crps, rel=0.02)


@pytest.fixture
def rows(tmp_path):
    path = write_sample_file(tmp_path / "s.parquet", max_tokens=150)
    return EvaluationRows.of(read_fits_or_fit(path, FitOptions()))


def candidate(rows):
    return Candidate("own", {}, Predicted(mu=rows.fits.mu, sigma=rows.fits.sigma, nu=3.5))


def metrics(rows, *edges, **prediction):
    return ScoredPredictor.of(rows, Predicted(**{"nu": 3.5} | prediction), *edges).metrics()


def test_the_fits_themselves_beat_the_baselines(rows):
    content, _ = compare(rows, candidate(rows), baselines_of(rows.fits), ceiling_seed=0)
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
    metrics = {name: ScoredPredictor.of(*bound).metrics() for name, bound in bounds.items()}
    half, true = metrics["half_of_outputs"], metrics["true_parameters"]
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
    (short, _), (long, _) = (baselines.served_models[name] for name in ("m0", "m1"))
    assert long - short == pytest.approx(np.log(4), abs=0.2)
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
    with pytest.raises(InputError, match="heads: got '.*urgency'"):
        metrics(rows, urgency=np.ones((len(rows), 2)) / 2)


def test_groups_that_were_truncated_throughout_count_for_distributions_only(tmp_path):
    lengths, finished = [[100] * 3] + [[10, 20, 30], [40, 20, 60]] * 10, [[False] * 3] + [[True] * 3] * 20
    path = write_lists(tmp_path / "x.parquet", lengths, finished=finished)
    rows = EvaluationRows.of(read_fits_or_fit(path, FitOptions()))
    mu, sigma = np.array([9.0, *rows.fits.mu[1:]]), np.array([0.5, *rows.fits.sigma[1:]])
    content = metrics(rows, mu=mu, sigma=sigma)
    assert content["num_fits_compared"] == 20
    assert content["mu"]["mae"] == 0.0
    few = ScoredPredictor.of(rows, Predicted(mu=mu, sigma=sigma, nu=3.5)).metrics(np.arange(20))
    assert (few["num_fits_compared"], few["mu"]["r2"]) == (19, None)
    assert set(few["kendall_tau"].values()) - {None}
    assert (content["num_prompts"], content["num_samples"], content["num_censored"]) == (21, 63, 3)
    assert content["coverage"]["p50"]["observed_fraction"] == pytest.approx(60 / 63)
    assert rows.outputs.max_tokens.tolist() == [100.0] + [np.inf] * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint, outputs drawn from it with and without max_tokens, and fits."""
    root = tmp_path_factory.mktemp("evaluate")
    lists = write_drawn_answers(root / "lists.parquet", random_checkpoint(root / "bare"), max_tokens=400)
    assert fit_dist([str(lists), "--out", str(root / "fits.parquet"), "--alternatives", "false"]) == 0
    rows = EvaluationRows.of(read_fits_or_fit(lists, FitOptions()))
    info = {"data": {"split": SPLIT, "baselines": asdict(baselines_of(rows.fits))}}
    random_checkpoint(root / "known", info=info)
    heads = {
        "regression": Heads(regression=RegressionHead(tower=SMALL_TOWER)),
        "rank": Heads(rank=RankHead(tower=SMALL_TOWER)),
        "bucket": Heads(bucket=BucketHead(edges=(60.0, 200.0), tower=SMALL_TOWER)),
        "learnt": Heads(length=LengthHead(tower=SMALL_TOWER, learn_nu=True)),
        "urgency": Heads(urgency=UrgencyHead(tower=SMALL_TOWER)),
    }
    for name, each in heads.items():
        random_checkpoint(root / name, heads=each, **{"conditioning": None} if name == "urgency" else {})
    return root


def evaluate(predictor, data, out, *options):
    args = [str(predictor), "--data", str(data), "--json", str(out), "--threads", "1", "--progress", "false"]
    args += ["--overwrite", "true"]
    assert main([*args, *map(str, options)]) == 0
    text = out.read_text()
    assert "NaN" not in text
    return json.loads(text)


def test_outputs_drawn_from_the_predictions_are_calibrated(folder, tmp_path):
    found = evaluate(folder / "known/checkpoint", folder / "lists.parquet", tmp_path / "e.json")
    model = found["model"]
    assert (model["num_prompts"], model["num_samples"]) == (120, 960)
    for level, error in (("p50", 0.06), ("p90", 0.05), ("p99", 0.03)):
        assert model["coverage"][level]["estimate"] == pytest.approx(float(level[1:]) / 100, abs=error)
    assert model["mu"]["r2"] > 0.8
    # the true parameters beat all baselines, and cannot beat what they are given in the simulation by much
    for name in ("constant", "marginal", "per_model", "prompt_length"):
        assert model["crps_log_tokens"] < found["baselines"][name]["crps_log_tokens"]
    assert found["ceiling"]["true_parameters"]["mu"]["r2"] == pytest.approx(model["mu"]["r2"], abs=0.1)
    assert set(found["by_model"]) == set(MODELS)
    assert set(found["by_dataset"]) == {"A", "B"}


def test_the_served_model_is_an_input_and_an_unknown_one_is_reported(folder, tmp_path, caplog):
    table, scores = pq.read_table(folder / "lists.parquet"), []
    names = table.column("model").to_pylist()
    swapped = [MODELS[1 - MODELS.index(name)] for name in names]
    for models in (names, swapped, [f"new-{name}" for name in names]):
        at = table.column_names.index("model")
        pq.write_table(table.set_column(at, "model", pa.array(models)), tmp_path / "x.parquet")
        found = evaluate(folder / "known/checkpoint", tmp_path / "x.parquet", tmp_path / "e.json")
        scores.append(found["model"]["crps_log_tokens"])
    assert scores[0] < min(scores[1:])
    assert caplog.text.count("not trained on new-large-llm, new-small-llm") == 1


def test_splits_of_fits_make_up_the_whole_of_the_samples(folder, tmp_path):
    def model_of(file, *options):
        return evaluate(folder / "known/checkpoint", folder / file, tmp_path / "e.json", *options)["model"]

    names = ("train", "validation", "test", "all")
    *splits, whole = (model_of("fits.parquet", "--split", name) for name in names)
    counts = [metrics["num_prompts"] for metrics in splits]
    assert whole["num_prompts"] == 120 == sum(counts)
    assert min(counts) > 0
    samples = model_of("lists.parquet")
    assert whole["mu"] == pytest.approx(samples["mu"])
    assert whole["crps_tokens"] == pytest.approx(samples["crps_tokens"])


def test_an_artifact_says_the_same_as_its_checkpoint(folder, tmp_path):
    from export.commands.export_onnx import main as export_onnx

    artifact = tmp_path / "artifact"
    checkpoint = folder / "known/checkpoint"
    assert export_onnx([str(checkpoint), "--out", str(artifact), "--legacy_exporter", "true"]) == 0
    options = ("--compare+", f"onnx={artifact}", "--ceiling", "false")
    found = evaluate(checkpoint, folder / "lists.parquet", tmp_path / "e.json", *options)
    assert found["predictor"]["kind"] == "checkpoint"
    assert found["compared"]["onnx"]["predictor"]["kind"] == "artifact"
    for name in ("mae", "r2"):
        assert found["compared"]["onnx"]["mu"][name] == pytest.approx(found["model"]["mu"][name], rel=1e-3)
    single = evaluate(artifact, folder / "lists.parquet", tmp_path / "f.json", "--ceiling", "false")
    assert single["baselines"] == found["baselines"]
    assert single["ceiling"] == {}


def test_one_run_of_the_encoder_per_prompt_gives_the_predictions_of_the_whole_graph(tmp_path, monkeypatch):
    from export.commands.export_onnx import main as export_onnx

    checkpoint = random_checkpoint(tmp_path / "bare", heads=ALL_HEADS)
    assert export_onnx([str(checkpoint), "--out", str(tmp_path / "all"), "--legacy_exporter", "true"]) == 0
    rng = np.random.default_rng(0)
    texts = [f"{'word ' * number}?" for number in range(9)]
    for folder, names in ((tmp_path / "all", MODELS), (shipped_folder("pretrained"), ("gpt-4o", None, ""))):
        runtime = open_runtime(folder, provider="cpu")
        prompts = [texts[number] for number in (0, 0, 0, *rng.integers(0, 9, 30))]
        models = [names[number] for number in rng.integers(0, len(names), 33)]
        temperatures = [[None, np.nan, 0.5, 1.0][number] for number in rng.integers(0, 4, 33)]
        whole = runtime.predict(prompts, models, temperatures).arrays()
        split = SplitRuntime(runtime).predict(prompts, models, temperatures, batch_size=4, progress=False)
        assert split.arrays().keys() == whole.keys() >= {"mu", "sigma", "nu"}
        for name, values in split.arrays().items():
            np.testing.assert_allclose(values, whole[name], atol=1e-4, rtol=1e-4)
        by_name = SplitRuntime(runtime).predict_as(texts, names[:2], [[0.5], [np.nan]])
        alone = runtime.predict(texts, [names[1]] * 9, [None] * 9).arrays()
        np.testing.assert_allclose(by_name[names[1]].mu, alone["mu"], atol=1e-4)
        assert len(SplitRuntime(runtime).predict([], [], [])) == 0
    opened, lengths = open_batch_predictor(folder, InferenceOptions(progress=False)), []
    run = ort.InferenceSession.run
    monkeypatch.setattr(
        ort.InferenceSession,
        "run",
        lambda self, names, feed: lengths.append(len(feed.get("input_ids", ()))) or run(self, names, feed),
    )
    opened.predict(texts * 3, ["gpt-4o"] * 9 + ["gpt-4"] * 9 + [None] * 9, [None] * 27)
    assert sum(lengths) == len(texts)


def test_all_heads_compared_in_every_report(folder, tmp_path):
    others = ("regression", "rank", "bucket", "learnt")
    options = [word for name in others for word in ("--compare+", f"{name}={folder / name / 'checkpoint'}")]
    paths = {name: tmp_path / f"e.{name}" for name in ("html", "markdown")}
    options += [word for name, path in paths.items() for word in (f"--{name}", path)]
    found = evaluate(folder / "known/checkpoint", folder / "lists.parquet", tmp_path / "e.json", *options)
    assert set(found["compared"]) == set(others)
    assert found["compared"]["learnt"]["crps_tokens"] > 0
    page = paths["html"].read_text()
    assert page.count("<svg") == 1
    for label in ("regression", "per-model median", "true parameters (simulated)"):
        assert f"<td>{label}</td>" in page
    text = paths["markdown"].read_text()
    assert re.search(r"\| rank \| \d+ \| - \|", text)
    for row in ("| predictor |", "| per-model median |", "| half of the outputs |"):
        assert row in text
    for line in re.findall(r"(?m)^\| rank .*$", text):
        assert line.count("|") == 2 + len(COLUMNS)


def test_some_groups_of_one_served_model_also_for_a_ranking_predictor(folder, tmp_path):
    page = tmp_path / "e.html"
    options = ("--served_model", MODELS[0], "--max-groups", 20, "--seed", 1, "--html", page)
    found, again, ranked = (
        evaluate(folder / name / "checkpoint", folder / "lists.parquet", tmp_path / "e.json", *options)
        for name in ("known", "known", "rank")
    )
    assert again["model"] == found["model"]
    assert found["model"]["num_prompts"] == 20
    found = ranked
    assert found["model"]["ordered_by"] == "rank"
    assert "<h2>Reliability</h2>" not in page.read_text()


def test_baselines_of_another_file(folder, tmp_path, caplog):
    bare = folder / "bare/checkpoint"
    assert evaluate(bare, folder / "lists.parquet", tmp_path / "e.json")["baselines"] == {}
    assert "--baselines_from" in caplog.text
    train = write_rows(tmp_path / "train.parquet", num_prompts=90, num_samples=8)
    test = write_rows(tmp_path / "test.parquet", num_prompts=40, num_samples=8, seed=1)
    found = evaluate(bare, test, tmp_path / "f.json", "--baselines-from", train, "--ceiling", "false")
    trees, per_model = found["compared"]["boosted trees"], found["baselines"]["per_model"]
    assert trees["crps_log_tokens"] < per_model["crps_log_tokens"]
    assert trees["mu"]["r2"] > 0.8


def test_a_single_output_per_prompt_is_enough_for_the_distribution(folder, tmp_path):
    lists = write_drawn_answers(tmp_path / "one.parquet", folder / "bare/checkpoint", num_answers=1)
    page = tmp_path / "e.html"
    options = ("--html", page, "--markdown", tmp_path / "e.md")
    found = evaluate(folder / "known/checkpoint", lists, tmp_path / "e.json", *options)
    assert found["model"]["num_fits_compared"] == 0
    assert found["model"]["mu"]["r2"] is None
    assert found["model"]["crps_tokens"] < found["baselines"]["marginal"]["crps_tokens"]
    assert found["model"]["kendall_tau"]["median_vs_one_output"] > 0.3
    assert found["model"]["coverage"]["p50"]["estimate"] == pytest.approx(0.5, abs=0.15)
    assert found["ceiling"] == {"reliability": None, "seed": 0}
    header, _, first = re.findall(r"(?m)^\|.*$", (tmp_path / "e.md").read_text())[:3]
    cells = dict(zip(header.split(" | "), first.split(" | "), strict=True))
    assert (cells["fits"], cells["tau"], cells["outputs"]) == ("0", "-", "120")
    assert float(cells["tau, one output"]) > 0.3
    assert "<th>tau, one output</th>" in page.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["{dir}/nothing"], "predictor: got"),
        (["{root}/known/checkpoint", "--data", "{dir}/nothing.parquet"], "data: got"),
        (["{root}/known/checkpoint", "--data", "{dir}/other_nu.parquet"], "column nu: got 9.0; allowed: 3.5"),
        (["{root}/bare/checkpoint", "--split", "test"], "split: got 'test'; allowed: all"),
        (["{root}/known/checkpoint", "--compare+", "x={root}/bare"], "compare: got"),
        (["{root}/urgency/checkpoint"], "a head that predicts the length"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(options, message, folder, tmp_path, capsys):
    fits = pq.read_table(folder / "fits.parquet")
    at = fits.column_names.index("nu")
    pq.write_table(fits.set_column(at, "nu", pa.array([9.0] * len(fits))), tmp_path / "other_nu.parquet")
    words = [word.format(dir=tmp_path, root=folder) for word in options]
    if "--data" not in words:
        words += ["--data", str(folder / "lists.parquet")]
    words += ["--json", str(tmp_path / "e.json"), "--progress", "false"]
    assert_refused(main, words, message, tmp_path, capsys)
