"""The command `evaluate` on checkpoints and artifacts, fits, samples and lists."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.training.data import write_sample_file
from tests.training.tiny import tiny_bert
from training.cli_evaluate import main
from training.config import StageConfig, TrainConfig
from training.train import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """samples.parquet, fits.parquet, and a checkpoint trained on them."""
    from training.cli_fit_dist import main as fit_dist

    root = tmp_path_factory.mktemp("evaluate")
    samples = write_sample_file(root / "samples.parquet", num_prompts=50, max_tokens=150)
    assert fit_dist([str(samples), "--out", str(root / "fits.parquet"), "--alternatives", "false"]) == 0
    config = TrainConfig(
        data=str(samples),
        out=str(root / "checkpoint"),
        encoder=tiny_bert(root / "encoder"),
        max_length=24,
        hidden_sizes=(8, 4),
        dropouts=(0.0, 0.0),
        stage1=StageConfig(epochs=2, learning_rate=1e-3),
        stage2=StageConfig(epochs=1, learning_rate=1e-3),
        split_seed=3,
        threads=1,
        accelerator="cpu",
    )
    train(config)
    return root


def evaluate(predictor, data, out, *options):
    args = [str(predictor), "--data", str(data), "--json", str(out), "--threads", "1", *map(str, options)]
    assert main(args) == 0
    return json.loads(out.read_text())


def test_the_test_split_gives_the_numbers_of_training(folder, tmp_path):
    trained = json.loads((folder / "checkpoint" / "training.json").read_text())["metrics"]["test"]
    for data in ("samples.parquet", "fits.parquet"):
        found = evaluate(folder / "checkpoint", folder / data, tmp_path / "e.json", "--split", "test")
        assert found["model"]["num_prompts"] == trained["model"]["num_prompts"]
        assert found["model"]["crps_tokens"] == pytest.approx(trained["model"]["crps_tokens"], rel=1e-5)
        assert found["baselines"]["marginal"]["nll"] == pytest.approx(trained["baselines"]["marginal"]["nll"])
        assert set(found["by_category"]) == set(trained["by_category"])


def test_splits_make_up_the_whole(folder, tmp_path):
    counts = [
        evaluate(folder / "checkpoint", folder / "fits.parquet", tmp_path / "e.json", "--split", split)[
            "model"
        ]["num_prompts"]
        for split in ("train", "validation", "test", "all")
    ]
    assert counts[3] == 50 == sum(counts[:3])


def test_an_artifact_says_the_same_as_its_checkpoint(folder, tmp_path):
    from export.cli import main as export_onnx

    artifact = tmp_path / "artifact"
    assert export_onnx([str(folder / "checkpoint"), "--out", str(artifact), "--legacy_exporter", "true"]) == 0
    one = evaluate(folder / "checkpoint", folder / "fits.parquet", tmp_path / "a.json", "--split", "test")
    other = evaluate(artifact, folder / "fits.parquet", tmp_path / "b.json", "--split", "test")
    assert (one["predictor"]["kind"], other["predictor"]["kind"]) == ("checkpoint", "artifact")
    assert other["model"]["mu"]["mae"] == pytest.approx(one["model"]["mu"]["mae"], rel=1e-4)
    assert other["baselines"] == one["baselines"]


def test_lists_of_several_models_and_sets(folder, tmp_path):
    rng = np.random.default_rng(2)
    rows = 12
    table = pa.table(
        {
            "dataset": ["A", "B"] * (rows // 2),
            "model": ["x"] * 6 + ["y"] * 6,
            "prompt_id": [f"q{row}" for row in range(rows)],
            "prompt": [f"write a long story of {row}" for row in range(rows)],
            "prompt_tokens": [7] * rows,
            "output_tokens": rng.integers(20, 300, (rows, 10)).tolist(),
        }
    )
    pq.write_table(table, tmp_path / "lists.parquet")
    options = ("--max_tokens", 200, "--figure", tmp_path / "f.png", "--predictions", tmp_path / "p.parquet")
    found = evaluate(folder / "checkpoint", tmp_path / "lists.parquet", tmp_path / "e.json", *options)
    assert set(found["by_model"]) == {"x", "y"}
    assert set(found["by_dataset"]) == {"A", "B"}
    assert found["model"]["num_censored"] > 0
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    predictions = pq.read_table(tmp_path / "p.parquet")
    assert predictions.num_rows == rows
    assert {"prompt_id", "model", "prompt", "mu", "sigma", "nu", "fitted_mu"} <= set(predictions.column_names)
    assert min(predictions.column("sigma").to_pylist()) > 0
    one = evaluate(
        folder / "checkpoint", tmp_path / "lists.parquet", tmp_path / "e.json", "--served_model", "x"
    )
    assert one["model"]["num_prompts"] == 6


def test_a_folder_without_a_split_can_be_evaluated_on_everything_only(folder, tmp_path, capsys):
    import shutil

    shutil.copytree(folder / "checkpoint", tmp_path / "bare")
    (tmp_path / "bare" / "training.json").write_text("{}")
    found = evaluate(tmp_path / "bare", folder / "fits.parquet", tmp_path / "e.json")
    assert found["baselines"] == {}
    args = [
        str(tmp_path / "bare"),
        "--data",
        str(folder / "fits.parquet"),
        "--json",
        str(tmp_path / "n.json"),
    ]
    assert main([*args, "--split", "test"]) == 2
    assert "split: got 'test'; allowed: all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("predictor", "data", "message"),
    [
        ("{dir}/nothing", "{root}/fits.parquet", "predictor: got"),
        ("{root}/encoder", "{root}/fits.parquet", "format_version"),
        ("{root}/checkpoint", "{dir}/nothing.parquet", "data: got"),
        ("{root}/checkpoint", "{dir}/other_nu.parquet", "column nu: got 9.0; allowed: 3.5"),
        ("{root}/checkpoint", "{dir}/nan.parquet", "row 0, column sigma"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(predictor, data, message, folder, tmp_path, capsys):
    fits = pq.read_table(folder / "fits.parquet")
    at = fits.column_names.index("nu")
    pq.write_table(fits.set_column(at, "nu", pa.array([9.0] * len(fits))), tmp_path / "other_nu.parquet")
    at = fits.column_names.index("sigma")
    pq.write_table(
        fits.set_column(at, "sigma", pa.array([float("nan")] * len(fits))), tmp_path / "nan.parquet"
    )
    before = sorted(tmp_path.iterdir())
    places = {"dir": tmp_path, "root": folder}
    args = [predictor.format(**places), "--data", data.format(**places), "--json", str(tmp_path / "e.json")]
    assert main([*args, "--progress", "false"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert message in lines[-1]
    assert not any("Traceback" in line for line in lines)
    assert sorted(tmp_path.iterdir()) == before
