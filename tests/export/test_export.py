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
from export.parity import PATTERNS, check_tokenizer, measure_parity
from predictors.artifact import Conditions, open_artifact
from predictors.modules import (
    URGENCY_LEVELS,
    BucketHead,
    Conditioning,
    Heads,
    RegressionHead,
    UrgencyHead,
    load_checkpoint,
)
from predictors.runtime import open_runtime
from predictors.tokenizer import PromptTokenizer
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.files import sha256_file
from tests.export.conftest import CALIBRATION, PLAIN, TRAINING_INFO, write_checkpoint
from tests.predictors.predictors import TOWER
from tests.predictors.test_manifest_schema import errors as schema_errors
from tests.predictors.test_manifest_schema import read as read_manifest

PROMPTS = ["name 3 rivers", "write a long story of the number 12", "essay", "the list " * 40]


EXPORTS = {  # name -> checkpoint, older exporter
    "bert": ("bert", False),
    "deberta": ("deberta", False),
    "bert-legacy": ("bert", True),
    "deberta-legacy": ("deberta", True),
    "distilbert-legacy": ("distilbert", True),
    "modernbert-legacy": ("modernbert", True),
    "opt-legacy": ("opt", True),
    "plain-legacy": ("plain", True),
}
SERVED = ["small-llm", "large-llm", None, "never heard of"]
TEMPERATURES = [1.0, None, 0.3, 0.0]


@pytest.fixture(scope="module")
def artifacts(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Artifact folders by kind of encoder and exporter."""
    root = tmp_path_factory.mktemp("exported")
    made = {name: root / name for name in EXPORTS}
    for name, (kind, legacy) in EXPORTS.items():
        config = ExportConfig(checkpoint=str(checkpoints[kind]), out=str(made[name]), legacy_exporter=legacy)
        export_onnx(config)
    return made


@pytest.mark.parametrize("name", EXPORTS)
def test_artifact_predicts_what_the_checkpoint_predicts(
    artifacts: dict[str, Path], checkpoints: dict[str, Path], name: str
) -> None:
    checkpoint = load_checkpoint(checkpoints[EXPORTS[name][0]])
    tokens = checkpoint.tokenizer(PROMPTS, truncation=True, max_length=48, padding=True, return_tensors="pt")
    is_plain = checkpoint.config.conditioning is None
    numbers = torch.tensor([1, 2, 0, 0])
    temperatures = torch.tensor([1.0, float("nan"), 0.3, 0.0])
    with torch.no_grad():
        wanted = checkpoint.model(tokens["input_ids"], tokens["attention_mask"], numbers, temperatures)
    served = ["tiny-llm", None, "", "tiny-llm"] if is_plain else SERVED
    predicted = open_runtime(artifacts[name]).predict(PROMPTS, served, TEMPERATURES, batch_size=2)
    found = predicted.arrays()
    if is_plain:
        np.testing.assert_array_equal(found.pop("nu"), np.full(4, 3.5))
    assert set(found) == set(wanted)
    for output, values in wanted.items():
        np.testing.assert_allclose(found[output], values.numpy(), atol=1e-5, rtol=1e-5, err_msg=output)
        assert np.ptp(found[output], axis=0).max() > 1e-4, output


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["distilbert", "modernbert", "opt"])
def test_default_exporter_takes_the_other_encoders_too(
    checkpoints: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    manifest = export_onnx(ExportConfig(checkpoint=str(checkpoints[kind]), out=str(tmp_path / "a")))
    assert max(manifest.parity["by_output"].values()) <= 1e-4
    assert set(manifest.parity["by_output"]) == {tensor.name for tensor in manifest.outputs}


@pytest.mark.parametrize("name", ["bert", "opt-legacy"])
def test_artifact_follows_the_served_model_and_the_temperature(artifacts: dict[str, Path], name: str) -> None:
    runtime = open_runtime(artifacts[name])
    names = ["small-llm", "large-llm", None, "small-llm", "small-llm"]
    found = runtime.predict(["name 3 rivers"] * 5, names, [1.0, 1.0, 1.0, 0.2, None]).arrays()
    for output, values in found.items():
        assert len(np.unique(values.round(5), axis=0)) == (1 if output == "urgency" else 5), output
    unset = runtime.predict(["name 3 rivers"]).arrays()
    unknown = runtime.predict(["name 3 rivers"], ["never heard of"], [float("nan")]).arrays()
    assert all(np.array_equal(unset[output], unknown[output]) for output in unset)


@pytest.mark.parametrize("name", EXPORTS)
def test_manifest_fits_the_published_schema(artifacts: dict[str, Path], name: str) -> None:
    content = read_manifest(artifacts[name])
    assert schema_errors(content) == []
    assert schema_errors(content | {"parity": None}) == ["$.parity"]
    content["outputs"][0]["shape"] = "batch"
    assert schema_errors(content) == ["$.outputs[0].shape"]


@pytest.mark.parametrize("name", EXPORTS)
def test_graph_has_free_axes_and_no_traces_of_this_machine(artifacts: dict[str, Path], name: str) -> None:
    graph = onnx.load(artifacts[name] / "model.onnx").graph
    manifest = open_artifact(artifacts[name]).manifest
    for found, specs in ((graph.input, manifest.inputs), (graph.output, manifest.outputs)):
        assert [tensor.name for tensor in found] == [spec.name for spec in specs]
        for tensor, spec in zip(found, specs, strict=True):
            axes = tensor.type.tensor_type.shape.dim
            assert [axis.dim_param or axis.dim_value for axis in axes] == list(spec.shape)
    content = (artifacts[name] / "model.onnx").read_bytes()
    assert not re.search(rb"site-packages|\.py\b", content)


def test_manifest_tells_where_the_artifact_comes_from_and_what_it_gives(
    artifacts: dict[str, Path], checkpoints: dict[str, Path]
) -> None:
    manifest = open_artifact(artifacts["deberta"]).manifest
    assert manifest.artifact_id == "deberta"
    assert re.fullmatch(r"[0-9a-f]{12}", manifest.artifact_version)
    assert manifest.nu is None
    assert (manifest.max_length, manifest.truncation_side) == (48, "right")
    assert manifest.heads == ("length", "urgency", "bucket", "regression", "rank")
    assert manifest.served_models == ("small-llm", "large-llm")
    assert manifest.conditioning == Conditions(unknown_models=True, temperature=True)
    assert manifest.urgency_levels == URGENCY_LEVELS
    assert manifest.abstain_threshold == 0.35
    assert manifest.bucket_edges == (64, 512)
    assert {name: list(table) for name, table in manifest.calibration.items()} == CALIBRATION.to_json()
    assert manifest.training_data == TRAINING_INFO["data"]
    assert manifest.metrics == TRAINING_INFO["metrics"]
    parity = manifest.parity
    shapes = [shape.split(" ", 1) for shape in parity["max_abs_diff"]]
    assert {pattern for _, pattern in shapes} == set(PATTERNS)
    assert {"1x1", "1x2", "2x1", "1x48", "64x1", "64x32", "42x48"} <= {size for size, _ in shapes}
    assert set(parity["by_output"]) == {tensor.name for tensor in manifest.outputs}
    largest = max(parity["max_abs_diff"].values())
    assert max(parity["by_output"].values()) == largest <= parity["tolerance"] == 1e-4
    assert parity["padding"] <= 1e-4
    assert manifest.versions["torch"] == torch.__version__
    assert manifest.files["normalization.json"] == sha256_file(checkpoints["deberta"] / "normalization.json")
    run = json.loads((artifacts["deberta"] / "run.json").read_text())
    assert run["config"]["checkpoint"] == str(checkpoints["deberta"])
    assert run["config"]["seed"] == 0


def test_manifest_of_a_plain_predictor(artifacts: dict[str, Path]) -> None:
    manifest = open_artifact(artifacts["plain-legacy"]).manifest
    assert (manifest.nu, manifest.heads, manifest.conditioning) == (3.5, ("length",), None)
    assert manifest.served_models == ("tiny-llm",)
    assert (manifest.urgency_levels, manifest.bucket_edges, manifest.calibration) == ((), (), {})
    assert manifest.abstain_threshold is None
    assert [tensor.name for tensor in manifest.outputs] == ["mu", "sigma"]
    with pytest.raises(InputError, match="served_model: got 'other'; allowed: empty or one of tiny-llm"):
        open_runtime(artifacts["plain-legacy"]).predict(["x"], ["other"])


def test_left_truncation_travels_with_the_artifact(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "bert", **PLAIN, max_length=8, truncation_side="left")
    export_onnx(ExportConfig(checkpoint=str(checkpoint), out=str(tmp_path / "a"), legacy_exporter=True))
    runtime = open_runtime(tmp_path / "a")
    prompts = ["story " * 50 + "name the rivers", "name the rivers", "story story story"]
    mu = runtime.predict(prompts).mu
    loaded = load_checkpoint(checkpoint)
    ids = loaded.tokenizer("story " * 50 + "name the rivers", truncation=True, max_length=8)["input_ids"]
    with torch.no_grad():
        wanted = loaded.model(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.int64))["mu"]
    assert mu is not None
    assert mu[0] == pytest.approx(float(wanted), abs=1e-5)


@pytest.mark.parametrize(
    ("conditioning", "inputs"),
    [
        (Conditioning(("a",), width=4, temperature=False), ["served_model"]),
        (Conditioning(("a", "b"), width=4, unknown=False), ["served_model", "temperature"]),
    ],
)
def test_inputs_are_those_the_heads_see(
    tmp_path: Path, conditioning: Conditioning, inputs: list[str]
) -> None:
    heads = Heads(regression=RegressionHead(TOWER))
    checkpoint = write_checkpoint(tmp_path, "bert", heads=heads, conditioning=conditioning)
    manifest = export_onnx(
        ExportConfig(checkpoint=str(checkpoint), out=str(tmp_path / "a"), legacy_exporter=True)
    )
    assert [tensor.name for tensor in manifest.inputs] == ["input_ids", "attention_mask", *inputs]
    assert [tensor.name for tensor in manifest.outputs] == ["regression_tokens"]
    runtime = open_runtime(tmp_path / "a")
    runtime.warm_up()
    predicted = runtime.predict(["name 3 rivers"], ["a"], [1.0])
    assert (predicted.mu, predicted.nu, len(predicted)) == (None, None, 1)
    if conditioning.unknown:
        assert len(runtime.predict(["name"], ["other"])) == 1
    else:
        for name in ("other", None):
            with pytest.raises(InputError, match="served_model: got .*; allowed: one of a, b"):
                runtime.predict(["name"], [name])


def test_two_levels_and_two_buckets_are_exported_too(tmp_path: Path) -> None:
    heads = Heads(urgency=UrgencyHead(TOWER, levels=("now", "later")), bucket=BucketHead(TOWER, edges=(9,)))
    checkpoint = write_checkpoint(tmp_path, "bert", heads=heads, conditioning=None)
    export_onnx(ExportConfig(checkpoint=str(checkpoint), out=str(tmp_path / "a"), legacy_exporter=True))
    found = open_runtime(tmp_path / "a").predict(PROMPTS)
    for values in (found.urgency, found.bucket):
        assert values is not None
        assert values.shape == (4, 2)
        np.testing.assert_allclose(values.sum(axis=1), 1, rtol=1e-6)


def test_abstain_threshold_is_the_users_or_the_checkpoints(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    options = {"legacy_exporter": True, "out": str(tmp_path / "a"), "abstain_threshold": 0.5}
    manifest = export_onnx(ExportConfig(checkpoint=str(checkpoints["bert"]), **options))
    assert manifest.abstain_threshold == 0.5
    with pytest.raises(InputError, match="the checkpoint has no urgency head"):
        export_onnx(ExportConfig(checkpoint=str(checkpoints["plain"]), **options, overwrite=True))


def test_version_names_the_content(
    artifacts: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    again = export_onnx(
        ExportConfig(checkpoint=str(checkpoints["bert"]), out=str(tmp_path / "a"), legacy_exporter=True)
    )
    assert again.artifact_version == open_artifact(artifacts["bert-legacy"]).manifest.artifact_version
    assert again.artifact_version != open_artifact(artifacts["bert"]).manifest.artifact_version


def test_names_given_by_the_user_are_kept_and_an_old_artifact_is_replaced_on_demand(
    checkpoints: dict[str, Path],
    artifacts: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
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
    before = (out / "manifest.json").read_bytes()
    assert main([str(checkpoints["bert"]), "--out", str(out), *arguments]) == 2
    assert "--overwrite true replaces this artifact" in one_error_line(capsys)
    assert (out / "manifest.json").read_bytes() == before
    assert main([str(checkpoints["bert"]), "--out", str(out), *arguments, "--overwrite", "true"]) == 0
    manifest = open_artifact(out).manifest
    assert (manifest.artifact_id, manifest.license) == ("mine", "MIT")
    assert re.fullmatch(r"2\+[0-9a-f]{12}", manifest.artifact_version)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("name", ["precious.txt", "manifest.json"])
def test_folder_that_is_no_artifact_is_not_replaced(
    name: str, checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).write_text("{}")
    assert main([str(checkpoints["bert"]), "--out", str(tmp_path / "a"), "--overwrite", "true"]) == 2
    assert "export-onnx: error: out: got" in one_error_line(capsys)
    assert [(path.name, path.read_text()) for path in (tmp_path / "a").iterdir()] == [(name, "{}")]


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
        (
            lambda folder: (folder / "training.json").write_text('{"urgency": {"abstain_threshold": 2}}'),
            "training.json, urgency.abstain_threshold: got 2",
        ),
    ],
    ids=["folder", "no config", "bad config", "bad weights", "no tokenizer", "bad metrics", "bad threshold"],
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
        (["x", "--out", "y", "--abstain_threshold", "1.5"], "abstain_threshold"),
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

        def shifted(*inputs: torch.Tensor, **conditions: torch.Tensor) -> object:
            found = forward(*inputs, **conditions)
            # The exporters trace without data to look at; only the comparison sees the shift.
            return found if torch.jit.is_tracing() else found | {"rank": found["rank"] + 10}

        checkpoint.model.forward = shifted
        return checkpoint

    monkeypatch.setattr("predictors.modules.load_checkpoint", another_model_than_was_exported)
    with pytest.raises(TailcastError, match=r"at 5x16 full: rank differs by \d\.\d+; allowed: 0.0001"):
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
        checkpoint.model.heads["length"].mu.rest[-1].bias.fill_(float("nan"))
    with pytest.raises(TailcastError, match="mu differs by nan"):
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
