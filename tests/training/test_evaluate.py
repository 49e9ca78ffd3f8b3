"""The command `evaluate` on checkpoints and artifacts, fits, samples and lists."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from predictors.modules.heads import BucketHead, Heads, LengthHead, RankHead, RegressionHead, UrgencyHead
from tests.training.checkpoints import MODELS, SMALL_TOWER, random_checkpoint, write_drawn_answers
from tests.training.data import assert_refused, write_rows
from training.cli_fit_dist import main as fit_dist
from training.evaluating.baselines import baselines_of
from training.evaluating.cli import main
from training.evaluating.evaluation import CONFORMAL_SCHEMA
from training.evaluating.report import COLUMNS
from training.evaluating.rows import EvaluationRows
from training.fitting.fits import FitOptions, read_fits_or_fit

SPLIT = {"seed": 3, "fractions": [0.5, 0.25, 0.25]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint, outputs drawn from it with and without max_tokens, and fits."""
    root = tmp_path_factory.mktemp("evaluate")
    bare = random_checkpoint(root / "bare")
    lists = write_drawn_answers(root / "lists.parquet", bare, max_tokens=400)
    assert fit_dist([str(lists), "--out", str(root / "fits.parquet"), "--alternatives", "false"]) == 0
    rows = EvaluationRows.of(read_fits_or_fit(lists, FitOptions()))
    info = {"data": {"split": SPLIT, "baselines": asdict(baselines_of(rows.fits))}}
    random_checkpoint(root / "known", info=info)
    for name, heads in (
        ("regression", Heads(regression=RegressionHead(tower=SMALL_TOWER))),
        ("rank", Heads(rank=RankHead(tower=SMALL_TOWER))),
        ("bucket", Heads(bucket=BucketHead(edges=(60.0, 200.0), tower=SMALL_TOWER))),
        ("learnt", Heads(length=LengthHead(tower=SMALL_TOWER, learn_nu=True))),
    ):
        random_checkpoint(root / name, heads=heads)
    random_checkpoint(
        root / "urgency", heads=Heads(urgency=UrgencyHead(tower=SMALL_TOWER)), conditioning=None
    )
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
    table = pq.read_table(folder / "lists.parquet")
    at, names = table.column_names.index("model"), table.column("model").to_pylist()
    others = {
        "swapped": [MODELS[1 - MODELS.index(name)] for name in names],
        "new": [f"new-{n}" for n in names],
    }
    scores = [evaluate(folder / "known/checkpoint", folder / "lists.parquet", tmp_path / "a.json")["model"]]
    for name, models in others.items():
        pq.write_table(table.set_column(at, "model", pa.array(models)), tmp_path / f"{name}.parquet")
        scores.append(
            evaluate(folder / "known/checkpoint", tmp_path / f"{name}.parquet", tmp_path / "b.json")["model"]
        )
    assert scores[0]["crps_log_tokens"] < min(other["crps_log_tokens"] for other in scores[1:])
    assert caplog.text.count("not trained on new-large-llm, new-small-llm") == 1


def test_splits_of_fits_make_up_the_whole_of_the_samples(folder, tmp_path):
    splits = {
        split: evaluate(
            folder / "known/checkpoint", folder / "fits.parquet", tmp_path / "e.json", "--split", split
        )["model"]
        for split in ("train", "validation", "test", "all")
    }
    counts = [metrics["num_prompts"] for metrics in splits.values()]
    assert counts[3] == 120 == sum(counts[:3])
    assert min(counts) > 0
    samples = evaluate(folder / "known/checkpoint", folder / "lists.parquet", tmp_path / "a.json")["model"]
    assert splits["all"]["mu"] == pytest.approx(samples["mu"])
    assert splits["all"]["crps_tokens"] == pytest.approx(samples["crps_tokens"])


def test_an_artifact_says_the_same_as_its_checkpoint(folder, tmp_path):
    from export.cli import main as export_onnx

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


def test_all_heads_compared_in_every_report(folder, tmp_path):
    options = [
        word
        for name in ("regression", "rank", "bucket", "learnt")
        for word in ("--compare+", f"{name}={folder / name / 'checkpoint'}")
    ]
    paths = {name: tmp_path / f"e.{name}" for name in ("html", "markdown", "predictions")}
    options += [word for name, path in paths.items() for word in (f"--{name}", path)]
    found = evaluate(folder / "known/checkpoint", folder / "lists.parquet", tmp_path / "e.json", *options)
    assert set(found["compared"]) == {"regression", "rank", "bucket", "learnt"}
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
    predictions = pq.read_table(paths["predictions"])
    assert predictions.num_rows == 120
    assert {"prompt_id", "model", "prompt", "mu", "sigma", "nu", "fitted_mu"} <= set(predictions.column_names)


def test_some_groups_of_one_served_model_also_for_a_ranking_predictor(folder, tmp_path):
    options = ("--served_model", MODELS[0], "--max-groups", 20, "--seed", 1)
    found = evaluate(folder / "known/checkpoint", folder / "lists.parquet", tmp_path / "e.json", *options)
    assert found["model"]["num_prompts"] == 20
    again = evaluate(folder / "known/checkpoint", folder / "lists.parquet", tmp_path / "f.json", *options)
    assert again["model"] == found["model"]
    page = tmp_path / "e.html"
    found = evaluate(
        folder / "rank/checkpoint", folder / "lists.parquet", tmp_path / "e.json", "--html", page, *options
    )
    assert found["model"]["ordered_by"] == "rank"
    assert found["conformal"] is None
    assert "<h2>Reliability</h2>" not in page.read_text()


def test_baselines_of_another_file(folder, tmp_path, caplog):
    bare = folder / "bare/checkpoint"
    without = evaluate(bare, folder / "lists.parquet", tmp_path / "e.json")
    assert without["baselines"] == {}
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
        (["{root}/rank/checkpoint", "--predictions", "{dir}/p.parquet"], "predictions: got"),
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


def test_conformal_quantiles_of_a_checkpoint_are_evaluated(folder, tmp_path):
    from predictors.manifest import CONFORMAL

    shutil.copytree(folder / "known/checkpoint", tmp_path / "checkpoint")
    offsets = zip(("unknown", *MODELS), (0.0, 10.0, None), strict=True)
    quantiles = {"schema": CONFORMAL_SCHEMA, "levels": [0.9], "served_models": MODELS}
    quantiles["offsets"] = {name: {"p90": {"offset": offset}} for name, offset in offsets}
    (tmp_path / "checkpoint" / CONFORMAL).write_text(json.dumps(quantiles))
    found = evaluate(tmp_path / "checkpoint", folder / "lists.parquet", tmp_path / "e.json")["conformal"]
    assert found["coverage"][MODELS[1]]["p90"] is None
    assert found["coverage"][MODELS[0]]["p90"] is None or found["coverage"][MODELS[0]]["p90"] > 0.95
