from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import export.exporter as exporter
from export.cli import main
from export.exporter import ExportConfig, export_onnx
from export.parity import check_tokenizer, measure_parity
from predictors.artifact import open_artifact
from predictors.modules import load_checkpoint
from predictors.runtime import open_runtime
from predictors.tokenizer import PromptTokenizer
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.files import sha256_file
from tests.export.conftest import TRAINING_INFO, write_checkpoint

PROMPTS = ["name 3 rivers", "write a long story of the number 12", "essay", "the list " * 40]


@pytest.fixture(scope="module")
def artifacts(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Artifact folders by kind of encoder and exporter."""
    root = tmp_path_factory.mktemp("exported")
    made = {}
    for name, kind, legacy in (
        ("bert", "bert", False),
        ("bert-legacy", "bert", True),
        ("deberta", "deberta", False),
        ("deberta-legacy", "deberta", True),
    ):
        made[name] = root / name
        export_onnx(
            ExportConfig(checkpoint=str(checkpoints[kind]), out=str(made[name]), legacy_exporter=legacy)
        )
    return made


NAMES = ["bert", "bert-legacy", "deberta", "deberta-legacy"]


@pytest.mark.parametrize("name", NAMES)
def test_artifact_predicts_what_the_checkpoint_predicts(
    artifacts: dict[str, Path], checkpoints: dict[str, Path], name: str
) -> None:
    checkpoint = load_checkpoint(checkpoints[name.removesuffix("-legacy")])
    tokens = checkpoint.tokenizer(PROMPTS, truncation=True, max_length=48, padding=True, return_tensors="pt")
    with torch.no_grad():
        wanted = checkpoint.model(tokens["input_ids"], tokens["attention_mask"])
    mu, sigma = open_runtime(artifacts[name]).predict(PROMPTS, batch_size=2)
    np.testing.assert_allclose(mu, wanted.mu.numpy(), atol=1e-5)
    np.testing.assert_allclose(sigma, wanted.sigma.numpy(), atol=1e-5)
    assert np.ptp(mu) > 1e-3
    assert np.ptp(sigma) > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_graph_has_free_axes_and_no_traces_of_this_machine(artifacts: dict[str, Path], name: str) -> None:
    graph = onnx.load(artifacts[name] / "model.onnx").graph
    for tensor in graph.input:
        assert [axis.dim_param for axis in tensor.type.tensor_type.shape.dim] == ["batch", "seq"]
    assert [tensor.name for tensor in graph.output] == ["mu", "sigma"]
    for tensor in graph.output:
        assert [axis.dim_param for axis in tensor.type.tensor_type.shape.dim] == ["batch"]
    content = (artifacts[name] / "model.onnx").read_bytes()
    assert not re.search(rb"site-packages|\.py\b", content)


@pytest.mark.parametrize("name", ["bert", "deberta"])
def test_manifest_tells_where_the_artifact_comes_from(
    artifacts: dict[str, Path], checkpoints: dict[str, Path], name: str
) -> None:
    manifest = open_artifact(artifacts[name]).manifest
    assert manifest.artifact_id == name
    assert re.fullmatch(r"[0-9a-f]{12}", manifest.artifact_version)
    assert (manifest.nu, manifest.max_length, manifest.truncation_side) == (3.5, 48, "right")
    assert manifest.served_models == ("tiny-llm",)
    assert manifest.training_data == TRAINING_INFO["data"]
    assert manifest.metrics == TRAINING_INFO["metrics"]
    assert set(manifest.parity["max_abs_diff"]) == {"1x1", "1x7", "2x16", "3x33", "8x48", "1x48"}
    assert max(manifest.parity["max_abs_diff"].values()) <= manifest.parity["tolerance"] == 1e-4
    assert manifest.parity["padding"] <= 1e-4
    assert manifest.versions["torch"] == torch.__version__
    assert manifest.files["normalization.json"] == sha256_file(checkpoints[name] / "normalization.json")
    run = json.loads((artifacts[name] / "run.json").read_text())
    assert run["config"]["checkpoint"] == str(checkpoints[name])
    assert run["config"]["seed"] == 0


def test_left_truncation_travels_with_the_artifact(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "bert", max_length=8, truncation_side="left")
    export_onnx(ExportConfig(checkpoint=str(checkpoint), out=str(tmp_path / "a"), legacy_exporter=True))
    runtime = open_runtime(tmp_path / "a")
    mu, _ = runtime.predict(["story " * 50 + "name the rivers", "name the rivers", "story story story"])
    loaded = load_checkpoint(checkpoint)
    ids = loaded.tokenizer("story " * 50 + "name the rivers", truncation=True, max_length=8)["input_ids"]
    with torch.no_grad():
        wanted = loaded.model(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.int64)).mu
    assert mu[0] == pytest.approx(float(wanted), abs=1e-5)


def test_version_names_the_content(
    artifacts: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    again = export_onnx(
        ExportConfig(checkpoint=str(checkpoints["bert"]), out=str(tmp_path / "a"), legacy_exporter=True)
    )
    assert again.artifact_version == open_artifact(artifacts["bert-legacy"]).manifest.artifact_version
    assert again.artifact_version != open_artifact(artifacts["bert"]).manifest.artifact_version


def test_names_given_by_the_user_are_kept_and_an_old_artifact_is_replaced(
    checkpoints: dict[str, Path], artifacts: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "a"
    shutil.copytree(artifacts["bert"], out)
    arguments = [
        "--legacy_exporter",
        "true",
        "--artifact_id",
        "mine",
        "--artifact_version",
        "2",
        "--license",
        "MIT",
    ]
    assert main([str(checkpoints["bert"]), "--out", str(out), *arguments]) == 0
    manifest = open_artifact(out).manifest
    assert (manifest.artifact_id, manifest.artifact_version, manifest.license) == ("mine", "2", "MIT")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_folder_that_is_no_artifact_is_not_replaced(
    checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "precious.txt").write_text("keep me")
    assert main([str(checkpoints["bert"]), "--out", str(tmp_path / "a")]) == 2
    assert "export-onnx: error: out: got" in one_error_line(capsys)
    assert (tmp_path / "a" / "precious.txt").read_text() == "keep me"


def one_error_line(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    return error


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "existing checkpoint folder"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 100), "model.safetensors"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda folder: (folder / "training.json").write_text('{"metrics": []}'), "training.json, metrics"),
    ],
    ids=["folder", "no config", "bad config", "bad weights", "no tokenizer", "bad metrics"],
)
def test_broken_checkpoint_is_one_line_and_nothing_is_written(
    checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], breakage, message: str
) -> None:
    folder = tmp_path / "in" / "checkpoint"
    shutil.copytree(checkpoints["bert"], folder)
    breakage(folder)
    out = tmp_path / "out"
    out.mkdir()
    assert main([str(folder), "--out", str(out / "a"), "--legacy_exporter", "true"]) == 2
    assert message in one_error_line(capsys)
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x"], "required: out"),
        (["--out", "y"], "CHECKPOINT: missing"),
        (["x", "--out", "y", "--tolerance", "0"], "tolerance"),
        (["x", "--out", "y", "--tolerance", "nan"], "tolerance"),
        (["x", "--out", "y", "--seed", "-1"], "seed"),
        (["x", "--out", ""], "out"),
        (["x", "--out", "y", "--artifact_id", " "], "artifact_id"),
    ],
)
def test_bad_option_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in one_error_line(capsys)


def test_parity_failure_writes_nothing(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = load_checkpoint

    def another_model_than_was_exported(path: str) -> object:
        checkpoint = load(path)
        forward = checkpoint.model.forward

        def shifted(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> object:
            parameters = forward(input_ids, attention_mask)
            # The exporters trace without data to look at; only the comparison sees the shift.
            return parameters if torch.jit.is_tracing() else parameters._replace(mu=parameters.mu + 0.01)

        checkpoint.model.forward = shifted
        return checkpoint

    monkeypatch.setattr("predictors.modules.load_checkpoint", another_model_than_was_exported)
    with pytest.raises(TailcastError, match=r"1 x 1 tokens differ by 0\.01"):
        export_onnx(
            ExportConfig(checkpoint=str(checkpoints["bert"]), out=str(tmp_path / "a"), legacy_exporter=True)
        )
    assert list(tmp_path.iterdir()) == []


def test_model_that_torch_cannot_export_is_one_error(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no such operator\nwith many\nlines")

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(
        TailcastError, match="cannot export this model: no such operator; --legacy_exporter true may"
    ):
        export_onnx(ExportConfig(checkpoint=str(checkpoints["bert"]), out=str(tmp_path / "a")))
    assert list(tmp_path.iterdir()) == []


def test_parity_catches_numbers_that_are_no_numbers(
    artifacts: dict[str, Path], checkpoints: dict[str, Path]
) -> None:
    checkpoint = load_checkpoint(checkpoints["bert"])
    with torch.no_grad():
        checkpoint.model.towers.mu[-1].bias.fill_(float("nan"))
    with pytest.raises(TailcastError, match="differ by nan"):
        measure_parity(
            checkpoint.model, open_runtime(artifacts["bert"]), tolerance=1e-4, rng=np.random.default_rng(0)
        )


def test_tokenizer_that_differs_from_training_is_caught(
    artifacts: dict[str, Path], checkpoints: dict[str, Path]
) -> None:
    checkpoint = load_checkpoint(checkpoints["bert"])
    other = PromptTokenizer(artifacts["deberta"] / "tokenizer.json", max_length=48, truncation_side="right")
    with pytest.raises(TailcastError, match="tokenizer differ on"):
        check_tokenizer(checkpoint, other)


def test_config_refuses_what_cannot_be() -> None:
    with pytest.raises(InputError, match="artifact_version"):
        ExportConfig(checkpoint="a", out="b", artifact_version="")
    assert exporter.ExportConfig(checkpoint="a", out="b").tolerance == 1e-4
