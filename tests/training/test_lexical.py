"""Trees on lexical features: training, the exported graph, the artifact."""

from __future__ import annotations

import json
import shutil

import numpy as np
import onnx
import pytest
import yaml

from predictors.artifact import open_artifact, write_manifest
from predictors.lexical import FEATURE_NAMES
from predictors.modules import Calibration
from predictors.runtime import open_runtime
from scheduler_core.errors import InputError
from scheduler_core.files import sha256_file
from tests.training.data import prompts, write_lists
from training.calibrating.cli import main as calibrate
from training.evaluating.cli import main as evaluate
from training.evaluating.rows import EvaluationRows
from training.fitting.fits_file import read_fits_or_fit
from training.fitting.options import FitOptions
from training.lexical.cli import main
from training.lexical.config import TrainLexicalConfig
from training.lexical.ensemble import float32_floor
from training.lexical.graph import with_calibration
from training.lexical.table import LexicalTable, ModelEffects
from training.lexical.train import train_lexical


def write_data(path, seed=0, count=150, shift=0.0, spread=1.0):
    """Answers of two served models, the second 1.5 times as long; words decide the length.

    `shift` is added to the mu that the words mean, and `spread` is a factor on their sigma.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for number, (prompt, mu, sigma) in enumerate(prompts(count)):
        for factor, model in ((1.0, "a"), (1.5, "b")):
            drawn = factor * np.exp(mu + shift + spread * sigma * rng.standard_t(3.5, 6))
            rows.append((f"p{number}", model, prompt, np.clip(drawn, 1, 900).astype(int).tolist()))
    ids, models, texts, lengths = (list(column) for column in zip(*rows, strict=True))
    temperatures = [None if row % 5 == 0 else 0.7 for row in range(len(rows))]
    return write_lists(
        path,
        lengths,
        prompt_id=ids,
        model=models,
        prompt=texts,
        temperature=temperatures,
        max_tokens=[900] * len(rows),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """answers.parquet, other.parquet, and an artifact trained on the first."""
    root = tmp_path_factory.mktemp("lexical")
    data = write_data(root / "answers.parquet")
    write_data(root / "other.parquet", seed=1, count=50)
    options = ["--num_trees", "30", "--min_samples_leaf", "5", "--validation_share", "0.3"]
    assert main(["--data", str(data), "--out", str(root / "artifact"), *options]) == 0
    return root


def test_the_artifact_is_verified_and_predicts(folder):
    artifact = open_artifact(folder / "artifact")
    manifest = artifact.manifest
    assert manifest.kind == "lexical"
    assert manifest.served_models == ("a", "b")
    assert manifest.lexical.feature_names == FEATURE_NAMES
    assert manifest.files == {"model.onnx": sha256_file(folder / "artifact" / "model.onnx")}
    assert max(manifest.parity["max_abs_diff"].values()) <= 1e-5
    runtime = open_runtime(folder / "artifact")
    texts = ["write a short list of 3", "write a long essay of 4", "", "\ud800"]
    found = runtime.predict(texts, ["a"] * 4, [0.7] * 4)
    assert found.mu[1] - found.mu[0] > 0.8
    assert (found.sigma > 0).all()
    longer = runtime.predict(texts[:2], ["b"] * 2, [0.7] * 2)
    assert (longer.mu - found.mu[:2]).mean() == pytest.approx(np.log(1.5), abs=0.2)
    unknown = runtime.predict(texts[:2], ["new"] * 2, [None] * 2)
    assert (found.mu[:2] - 0.05 <= unknown.mu).all()
    assert (unknown.mu <= longer.mu + 0.05).all()


def test_it_is_evaluated_beside_its_baselines(folder, tmp_path):
    out = tmp_path / "e.json"
    args = [str(folder / "artifact"), "--data", str(folder / "other.parquet"), "--json", str(out)]
    assert evaluate([*args, "--progress", "false"]) == 0
    found = json.loads(out.read_text())
    assert found["predictor"]["kind"] == "lexical artifact"
    assert found["model"]["mu"]["r2"] > 0.7
    for metrics in found["baselines"].values():
        assert found["model"]["crps_log_tokens"] < metrics["crps_log_tokens"]
    assert evaluate([*args[:2], str(folder / "answers.parquet"), *args[3:], "--split", "validation"]) == 0
    split = json.loads(out.read_text())["model"]["num_prompts"]
    assert 0.2 * 300 < split < 0.4 * 300


def test_it_is_calibrated_and_calibrated_again(folder, tmp_path):
    data = write_data(tmp_path / "longer.parquet", seed=2, count=150, shift=0.6, spread=2.0)
    args = [str(folder / "artifact"), "--data", str(data), "--progress", "false"]
    assert calibrate([*args, "--out", str(tmp_path / "out")]) == 0
    manifest = open_artifact(tmp_path / "out").manifest
    assert set(manifest.files) == {"model.onnx", "conformal.json", "run.json"}
    assert manifest.artifact_version != open_artifact(folder / "artifact").manifest.artifact_version
    shift, scale = manifest.calibration["mu_shift"], manifest.calibration["sigma_scale"]
    texts, served = ["write a short list of 3", "write a long essay of 4"], ["b", "a"]
    before = open_runtime(folder / "artifact").predict(texts, served, [0.7] * 2)
    after = open_runtime(tmp_path / "out").predict(texts, served, [0.7] * 2)
    numbers = [2, 1]
    assert after.sigma == pytest.approx(before.sigma * np.array(scale)[numbers], rel=1e-5)
    assert after.mu == pytest.approx(before.mu + np.array(shift)[numbers] * before.sigma, abs=1e-5)
    assert (after.mu > before.mu + 0.3).all()
    new = write_data(tmp_path / "new.parquet", seed=3, count=150, shift=0.6, spread=2.0)
    out = tmp_path / "e.json"
    words = ["--data", str(new), "--json", str(out), "--progress", "false", "--ceiling", "false"]
    assert evaluate([str(tmp_path / "out"), *words]) == 0
    found = json.loads(out.read_text())
    for level in ("p50", "p90"):
        row = found["model"]["coverage"][level]
        assert row["estimate"] == pytest.approx(row["level"], abs=0.06)
        assert found["conformal"]["coverage"]["all"][level] == pytest.approx(row["level"], abs=0.08)
    # What is calibrated again starts from what the trees say.
    assert calibrate([str(tmp_path / "out"), *args[1:], "--out", str(tmp_path / "again")]) == 0
    assert open_artifact(tmp_path / "again").manifest.calibration == manifest.calibration


def test_what_cannot_be_calibrated_is_one_line(folder, tmp_path, capsys):
    old = tmp_path / "old"
    shutil.copytree(folder / "artifact", old)
    graph = onnx.load(old / "model.onnx")
    table = next(tensor for tensor in graph.graph.initializer if tensor.name == "mu_shift")
    graph.graph.initializer.remove(table)
    onnx.save(graph, old / "model.onnx")
    write_manifest(old, open_artifact(folder / "artifact").manifest)
    words = ["--data", str(folder / "answers.parquet"), "--out", str(tmp_path / "out")]
    assert calibrate([str(old), *words]) == 2
    assert "also mu_shift" in capsys.readouterr().err.strip().splitlines()[-1]
    assert calibrate([str(folder / "artifact"), *words, "--out", str(folder)]) == 2
    assert (
        "a path that does not contain that of predictor" in capsys.readouterr().err.strip().splitlines()[-1]
    )
    with pytest.raises(InputError, match="mu_shift"):
        with_calibration((folder / "artifact" / "model.onnx").read_bytes(), Calibration.identity(5))


def test_training_again_gives_the_same_bytes(folder, tmp_path):
    config = TrainLexicalConfig(
        data=[str(folder / "answers.parquet")],
        out=str(tmp_path / "again"),
        num_trees=30,
        min_samples_leaf=5,
        validation_share=0.3,
    )
    manifest = train_lexical(config)
    assert manifest.artifact_version == open_artifact(folder / "artifact").manifest.artifact_version


def test_several_files_and_a_validation_file(folder, tmp_path):
    config = TrainLexicalConfig(
        data=[str(folder / "answers.parquet"), str(folder / "other.parquet")],
        validation=str(folder / "other.parquet"),
        out=str(tmp_path / "two"),
        num_trees=5,
        min_samples_leaf=5,
    )
    manifest = train_lexical(config)
    assert manifest.training_data["num_rows"] == 400
    assert manifest.training_data["split"] is None
    assert set(manifest.metrics["sigma"]["trials"]) == {"fitted", "residuals"}


def test_effects_of_served_models_are_prompt_for_prompt(folder):
    rows = EvaluationRows.of(read_fits_or_fit(folder / "answers.parquet", FitOptions()))
    # The model with longer answers gets the short prompts more often; its effect is not blurred by that.
    short = np.array(["short" in prompt for prompt in rows.prompts])
    is_a = np.array([name == "a" for name in rows.served_models])
    kept = np.flatnonzero(~(is_a & short & (np.arange(len(rows)) % 3 > 0)))
    table = LexicalTable.of(rows, 1000).take(kept)
    effects = ModelEffects.of(table)
    assert effects.names == ("a", "b")
    assert effects.table[2, 0] - effects.table[1, 0] == pytest.approx(np.log(1.5), abs=0.06)
    assert effects.table[0].tolist() == [0.0, 0.0]
    assert effects.numbers(["b", None, "x"]).tolist() == [2, 0, 0]
    assert table.inputs(effects).shape == (len(kept), len(FEATURE_NAMES) + 3)


def test_thresholds_are_rounded_down():
    values = np.array([0.1, 1 / 3, -0.1, 2.0, 1e-50])
    found = float32_floor(values)
    assert found.dtype == np.float32
    assert (found.astype(float) <= values).all()
    assert (np.nextafter(found, np.float32(np.inf)).astype(float) > values).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "{root}/nothing.parquet"], "data: got"),
        (["--num_trees", "0"], "num_trees: got 0"),
        (["--validation_share", "1.5"], "validation_share: got 1.5"),
        (["--nu", "0"], "nu: got 0"),
        (["--group_by", "prompt"], "also prompt_id"),
    ],
)
def test_bad_input_is_one_line(options, message, folder, tmp_path, capsys):
    words = [word.format(root=folder) for word in options]
    if "--data" not in words:
        words = ["--data", str(folder / "answers.parquet"), *words]
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert message in lines[-1]
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_not_replaced(folder, tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(InputError, match="an earlier artifact"):
        train_lexical(TrainLexicalConfig(data=[str(folder / "answers.parquet")], out=str(tmp_path)))


def test_the_shipped_configuration_is_read():
    import training

    path = f"{training.__path__[0]}/configs/gbm-lexical.yaml"
    with open(path, encoding="utf-8") as stream:
        content = yaml.safe_load(stream)
    config = TrainLexicalConfig(data=["x"], out="y", **content)
    assert config.artifact_id == "gbm-lexical"
