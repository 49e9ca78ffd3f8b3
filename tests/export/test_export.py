"""`export-onnx`: artifacts of every encoder give the checkpoint's numbers, and bad input writes nothing; variants of an artifact."""

import gc
import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow.parquet as pq
import pytest
import torch

from export.commands.export_onnx import main
from export.exporter import ExportConfig, export_onnx
from export.parity import check_tokenizer, measure_padding, measure_parity
from export.variants.evaluate import rejection_reasons, split_prompts
from export.variants.run import VariantsConfig
from predictors.artifact import open_artifact
from predictors.manifest import Conditions
from predictors.modules.checkpoint import load_checkpoint, save_checkpoint
from predictors.modules.config import Conditioning
from predictors.modules.encoder import build_encoder, load_tokenizer
from predictors.modules.heads import URGENCY_LEVELS, BucketHead, Heads, RegressionHead, UrgencyHead
from predictors.runtime import open_runtime
from predictors.tokenizer import PromptTokenizer
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.shell.files import sha256_file
from tailcast.commands.export_variants import main as export_variants
from tests.export import conftest
from tests.export.conftest import EXPORTS, Folders, export
from tests.predictors.fakes import read_manifest
from tests.predictors.test_artifact import private_key_file, public_key_file
from tests.predictors.test_shipped import errors as schema_errors
from tests.training.checkpoints import TOWER, predictor
from tests.training.data import write_rows, write_sample_file
from tests.training.tiny import tiny_bert

PROMPTS = ["name 3 rivers", "write a long story of the number 12", "essay", "the list " * 40]
REGRESSION = Heads(regression=RegressionHead(TOWER))
TWO = Heads(urgency=UrgencyHead(TOWER, levels=("now", "later")), bucket=BucketHead(TOWER, edges=(9,)))
MATES = "batch mates change mu by 0.005 of its standard deviation, allowed 1e-05"
METRICS = {"r2": 0.6, "tau": 0.5, "p50": 0.5, "p90": 0.9, "p99": 0.99, "crps_tokens": 100.0}


@pytest.mark.parametrize("name", EXPORTS)
def test_graphs_have_the_lowest_ir_version_of_their_operators(artifacts: Folders, name: str) -> None:
    graph = onnx.load(artifacts[name] / "model.onnx")
    lowest = onnx.helper.find_min_ir_version_for(list(graph.opset_import), ignore_unknown=True)
    assert graph.ir_version == lowest <= 9  # ONNX Runtime 1.17 reads version 9 at most


@pytest.mark.parametrize("name", EXPORTS)
def test_artifact_predicts_like_the_checkpoint(artifacts: Folders, checkpoints: Folders, name: str) -> None:
    checkpoint = load_checkpoint(checkpoints[EXPORTS[name][0]])
    tokens = checkpoint.tokenizer(PROMPTS, truncation=True, max_length=48, padding=True, return_tensors="pt")
    is_plain = checkpoint.config.conditioning is None
    numbers = torch.tensor([1, 2, 0, 0])
    temperatures = torch.tensor([1.0, float("nan"), 0.3, 0.0])
    with torch.no_grad():
        expected = checkpoint.model(tokens["input_ids"], tokens["attention_mask"], numbers, temperatures)
    served = ["tiny-llm", None, "", "tiny-llm"] if is_plain else ["small-llm", "large-llm", None, "other"]
    predicted = open_runtime(artifacts[name]).predict(PROMPTS, served, [1.0, None, 0.3, 0.0], batch_size=2)
    arrays = predicted.arrays()
    if is_plain:
        assert open_artifact(artifacts[name]).manifest.abstain_threshold is None
        np.testing.assert_array_equal(arrays.pop("nu"), np.full(4, 3.5))
    assert set(arrays) == set(expected)
    for output, values in expected.items():
        np.testing.assert_allclose(arrays[output], values.numpy(), atol=1e-5, rtol=1e-5, err_msg=output)
        assert np.ptp(arrays[output], axis=0).max() > 1e-4, output


@pytest.mark.parametrize("name", EXPORTS)
def test_graph_has_free_axes_and_no_traces_of_this_machine(artifacts: Folders, name: str) -> None:
    assert schema_errors(read_manifest(artifacts[name])) == []
    graph = onnx.load(artifacts[name] / "model.onnx").graph
    manifest = open_artifact(artifacts[name]).manifest
    for tensors, specs in ((graph.input, manifest.inputs), (graph.output, manifest.outputs)):
        assert [tensor.name for tensor in tensors] == [spec.name for spec in specs]
        for tensor, spec in zip(tensors, specs, strict=True):
            axes = tensor.type.tensor_type.shape.dim
            assert [axis.dim_param or axis.dim_value for axis in axes] == list(spec.shape)
    assert not re.search(rb"site-packages|\.py\b", (artifacts[name] / "model.onnx").read_bytes())


def test_manifest_tells_the_artifacts_source_and_outputs(artifacts: Folders, checkpoints: Folders) -> None:
    manifest = open_artifact(artifacts["deberta"]).manifest
    assert manifest.artifact_id == "deberta"
    assert re.fullmatch(r"[0-9a-f]{12}", manifest.artifact_version)
    assert manifest.heads == ("length", "urgency", "bucket", "regression", "rank")
    assert manifest.served_models == ("small-llm", "large-llm")
    assert manifest.conditioning == Conditions(unknown_models=True, temperature=True)
    assert manifest.urgency_levels == URGENCY_LEVELS
    assert manifest.abstain_threshold == 0.35
    assert manifest.bucket_edges == (64, 512)
    assert manifest.calibration == asdict(conftest.CALIBRATION)
    assert manifest.training_data == conftest.TRAINING_INFO["data"]
    assert manifest.metrics == conftest.TRAINING_INFO["metrics"]
    parity = manifest.parity
    shapes = {shape.split()[0] for shape in parity["max_abs_diff"]}
    assert {"1x1", "1x2", "2x1", "1x48", "64x1", "64x32", "42x48"} <= shapes
    assert set(parity["by_output"]) == {tensor.name for tensor in manifest.outputs}
    largest = max(parity["max_abs_diff"].values())
    assert max(parity["by_output"].values()) == largest <= parity["tolerance"] == 1e-4
    assert parity["padding"] <= 1e-4
    assert manifest.versions["torch"] == torch.__version__
    assert manifest.files["normalization.json"] == sha256_file(checkpoints["deberta"] / "normalization.json")


def test_left_truncation_travels_with_the_artifact(tmp_path: Path) -> None:
    options = conftest.PLAIN | {"max_length": 8, "truncation_side": "left"}
    checkpoint = conftest.write_checkpoint(tmp_path, "bert", **options)
    export(checkpoint, tmp_path / "a")
    prompt = "story " * 50 + "name the rivers"
    mu = open_runtime(tmp_path / "a").predict([prompt]).mu
    loaded = load_checkpoint(checkpoint)
    ids = loaded.tokenizer(prompt, truncation=True, max_length=8)["input_ids"]
    with torch.no_grad():
        expected = loaded.model(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.int64))["mu"]
    assert mu == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize(
    ("heads", "conditioning", "inputs"),
    [
        (REGRESSION, Conditioning(("a",), width=4, temperature=False), ["served_model"]),
        (REGRESSION, Conditioning(("a", "b"), width=4, unknown=False), ["served_model", "temperature"]),
        (TWO, None, []),
    ],
    ids=["no temperature", "only its own models", "two levels and buckets"],
)
def test_inputs_and_outputs_are_those_of_the_heads(
    tmp_path: Path, heads: Heads, conditioning: Conditioning | None, inputs: list[str]
) -> None:
    checkpoint = conftest.write_checkpoint(tmp_path, "bert", heads=heads, conditioning=conditioning)
    manifest = export(checkpoint, tmp_path / "a")
    assert [tensor.name for tensor in manifest.inputs] == ["input_ids", "attention_mask", *inputs]
    runtime = open_runtime(tmp_path / "a")
    runtime.warm_up()
    arrays = runtime.predict(["name 3 rivers"], ["a"], [1.0]).arrays()
    outputs = {"urgency": (2,), "bucket": (2,)} if heads is TWO else {"regression_tokens": ()}
    assert {name: values.shape[1:] for name, values in arrays.items()} == outputs
    if conditioning is None or conditioning.unknown:
        assert len(runtime.predict(["name"], ["other"])) == 1
    else:
        for name in ("other", None):
            with pytest.raises(InputError, match="served_model: got .*; allowed: one of a, b"):
                runtime.predict(["name"], [name])


@pytest.mark.parametrize("legacy_exporter", [True, False])
def test_the_mean_over_known_served_models_is_in_the_graph(tmp_path: Path, *, legacy_exporter: bool) -> None:
    conditioning = Conditioning(("a", "b", "c"), width=4, unknown_is_mean=True)
    checkpoint = conftest.write_checkpoint(tmp_path, "bert", conditioning=conditioning)
    options = {"legacy_exporter": legacy_exporter, "parity_tokens": 256, "parity_shapes": 0}
    export(checkpoint, tmp_path / "a", **options)  # compared with torch
    predicted = open_runtime(tmp_path / "a").predict(["name 3 rivers"] * 4, ["a", "other", "b", "c"])
    known = [0, 2, 3]
    for name, values in predicted.arrays().items():
        if name != "sigma":
            np.testing.assert_allclose(values[1], values[known].mean(axis=0), rtol=1e-5, err_msg=name)
    assert predicted.mu is not None and predicted.sigma is not None  # noqa: PT018
    variance = (predicted.sigma[known] ** 2).mean() + predicted.mu[known].var()
    assert predicted.sigma[1] == pytest.approx(np.sqrt(variance), rel=1e-5)


def test_abstain_threshold_is_the_users_or_the_checkpoints(checkpoints: Folders, tmp_path: Path) -> None:
    options = {"abstain_threshold": 0.5, "parity_tokens": 64, "parity_shapes": 0}
    assert export(checkpoints["bert"], tmp_path / "a", **options).abstain_threshold == 0.5
    with pytest.raises(InputError, match="abstain_threshold: got 0.5; .*there is no urgency head"):
        export(checkpoints["plain"], tmp_path / "b", **options)


def test_version_is_of_the_content_and_an_old_artifact_is_replaced_on_demand(
    checkpoints: Folders, artifacts: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a"
    shutil.copytree(artifacts["bert-legacy"], out)
    arguments = [str(checkpoints["bert"]), "--out", str(out), "--legacy_exporter", "true"]
    before = read_manifest(out)
    assert main(arguments) == 2
    assert "--overwrite true replaces this artifact" in one_error_line(capsys)
    assert read_manifest(out) == before
    arguments += ["--overwrite", "true"]
    assert main([*arguments, "--artifact_version", "2"]) == 0
    assert open_artifact(out).manifest.artifact_version == f"2+{before['artifact_version']}"
    assert before["artifact_version"] != open_artifact(artifacts["bert"]).manifest.artifact_version
    assert main([*arguments, "--artifact_id", "mine", "--license", "MIT"]) == 0
    manifest = open_artifact(out).manifest
    assert (manifest.artifact_id, manifest.license) == ("mine", "MIT")
    assert manifest.artifact_version != before["artifact_version"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def one_error_line(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    return error


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "config.json"),
        ("training.json", '{"urgency": {"abstain_threshold": 2}}', "abstain_threshold: got 2"),
    ],
)
def test_broken_checkpoint_is_one_line_and_nothing_is_written(
    checkpoints: Folders,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    file: str,
    content: str,
    message: str,
) -> None:
    folder = tmp_path / "in" / "checkpoint"
    shutil.copytree(checkpoints["bert"], folder)
    (folder / file).write_text(content)
    out = tmp_path / "out"
    out.mkdir()
    assert main([str(folder), "--out", str(out / "a"), "--legacy_exporter", "true"]) == 2
    assert message in one_error_line(capsys)
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x"], "missing: --out"),
        (["--out", "y"], "missing: CHECKPOINT"),
        (["x", "--out", "y", "--abstain_threshold", "1.5"], "abstain_threshold"),
        (["x", "--out", ""], "out"),
        (["x", "--out", "y", "--artifact_id", " "], "artifact_id"),
    ],
)
def test_bad_option_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in one_error_line(capsys)


def test_no_parity_no_artifact(checkpoints: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def another_model_than_was_exported(path: str) -> object:
        checkpoint = load_checkpoint(path)
        forward = checkpoint.model.forward

        def shifted(*inputs: torch.Tensor, **conditions: torch.Tensor) -> object:
            outputs = forward(*inputs, **conditions)
            # The exporters trace without data to look at; only the comparison sees the shift.
            return outputs if torch.jit.is_tracing() else outputs | {"rank": outputs["rank"] + 10}

        checkpoint.model.forward = shifted
        return checkpoint

    monkeypatch.setattr("predictors.modules.checkpoint.load_checkpoint", another_model_than_was_exported)
    with pytest.raises(TailcastError, match=r"at 5x16 full: rank differs by \d\.\d+; allowed: 0.0001"):
        export(checkpoints["bert"], tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_model_that_torch_cannot_export_is_one_error(
    checkpoints: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no such operator\nwith many\nlines")

    monkeypatch.setattr(torch.onnx, "export", fail)
    message = "cannot export this model: no such operator; --legacy_exporter true may"
    with pytest.raises(TailcastError, match=message):
        export(checkpoints["bert"], tmp_path / "a", legacy_exporter=False)
    assert list(tmp_path.iterdir()) == []


def test_tokenizer_that_differs_from_training_is_caught(artifacts: Folders, checkpoints: Folders) -> None:
    other = PromptTokenizer(artifacts["deberta"] / "tokenizer.json", max_length=48, truncation_side="right")
    with pytest.raises(TailcastError, match="tokenizer differ on"):
        check_tokenizer(load_checkpoint(checkpoints["bert"]), other)


def test_numbers_that_depend_on_batch_mates_or_are_none_are_caught(
    artifacts: Folders, checkpoints: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_checkpoint(checkpoints["bert"]).model
    runtime = open_runtime(artifacts["bert"])
    run = runtime._session.run

    class Session:
        @staticmethod
        def run(names: list[str], feed: dict[str, np.ndarray]) -> list[np.ndarray]:
            return [values + 0.001 * feed["input_ids"].shape[1] for values in run(names, feed)]

    rng = np.random.default_rng(0)
    limits = {"rng": rng, "max_tokens": 64, "num_random": 0}
    broken = load_checkpoint(checkpoints["bert"]).model
    with torch.no_grad():
        broken.heads["length"].mu.rest[-1].bias.fill_(float("nan"))
    with pytest.raises(TailcastError, match="mu differs by nan"):
        measure_parity(broken, runtime, **limits)
    monkeypatch.setattr(runtime, "_session", Session())
    assert min(measure_padding(model, runtime, rng=rng).values()) > 1e-3
    with pytest.raises(TailcastError, match="differs by"):
        measure_parity(model, runtime, **limits)


# Published configurations, built with random weights one at a time: DeBERTa-v3-base takes about 5 GB. What is left out is the architecture's default.
TRUE: dict[str, tuple[int, dict[str, Any]]] = {
    "microsoft/deberta-v3-base": (183_831_552, {
        "model_type": "deberta-v2", "vocab_size": 128100, "type_vocab_size": 0, "max_position_embeddings": 512,
        "position_buckets": 256, "relative_attention": True, "max_relative_positions": -1, "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "norm_rel_ebd": "layer_norm",
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
        "layer_norm_eps": 1e-7,
    }),
    "distilbert/distilbert-base-uncased": (66_362_880, {"model_type": "distilbert"}),
    "google-bert/bert-base-uncased": (108_891_648, {"model_type": "bert"}),
    "facebook/opt-125m": (125_239_296, {"model_type": "opt", "dropout": 0.1, "word_embed_proj_dim": 768}),
    "answerdotai/ModernBERT-base": (149_014_272, {"model_type": "modernbert"}),
    "sentence-transformers/all-MiniLM-L6-v2": (22_565_376, {
        "model_type": "bert", "hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536,
    }),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TRUE)
def test_true_architecture_exports_and_gives_torchs_numbers(tmp_path: Path, name: str) -> None:
    size, config = TRUE[name]
    torch.manual_seed(0)
    poolings = ("mean", "last") if config["model_type"] == "opt" else ("cls", "mean", "max")
    options = {"max_length": 512, "pooling": poolings, "prompt_length": True}
    model = predictor(build_encoder(config), **options)
    model.set_calibration(conftest.CALIBRATION)
    tokenizer = load_tokenizer(tiny_bert(tmp_path / "tokenizer"))
    save_checkpoint(tmp_path / "checkpoint", model, tokenizer, conftest.TRAINING_INFO)
    del model
    gc.collect()
    out = tmp_path / "artifact"
    export_onnx(ExportConfig(checkpoint=str(tmp_path / "checkpoint"), out=str(out), parity_shapes=4))
    manifest = open_artifact(out).manifest
    assert manifest.encoder.num_parameters == size
    assert max(manifest.parity["max_abs_diff"].values()) <= 1e-4
    assert manifest.parity["padding"] <= 1e-4
    assert {shape.split()[0] for shape in manifest.parity["max_abs_diff"]} >= {"1x512", "4x512", "64x32"}
    shutil.rmtree(tmp_path)


def test_the_command_makes_evaluates_and_reports(tmp_path):
    # Wide enough that its products are worth quantizing.
    encoder, artifact = tiny_bert(tmp_path / "encoder", hidden_size=64), tmp_path / "artifact"
    save_checkpoint(tmp_path / "checkpoint", predictor(encoder), load_tokenizer(encoder), {})
    export(tmp_path / "checkpoint", artifact, parity_tokens=64, parity_shapes=0)
    data = write_rows(tmp_path / "rows.parquet", num_prompts=18, models=("small-llm", "large-llm"))
    out = tmp_path / "variants"
    arguments = [str(artifact), "--data", str(data), "--out", str(out)]
    key, public_key = private_key_file(tmp_path / "key.pem"), public_key_file(tmp_path / "key.pub")
    arguments += ["--sign", str(key), "--repetitions", "1", "--progress", "false"]
    assert export_variants([*arguments, "--variants", '["fused", "int8", "fp16"]']) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["schema"] == "variants/1"
    assert report["data"]["calibration_prompts"] == 6
    assert report["data"]["num_groups"] == 24  # two served models for each of the other 12 prompts
    variants = report["variants"]
    assert set(variants) == {"fp32", "fused", "int8", "fp16"}
    assert variants["fused"]["accepted"], variants["fused"]["reasons"]
    assert variants["fused"]["steps"]["attention_layers"] == 2
    steps = {
        "attention_layers": 2,
        "smoothed_tensors": 6,
        "int8_products": 12,
        "int8_tables": 0,
        "shifted_outputs": 1,
    }
    assert variants["int8"]["steps"] == steps
    for name in ("fused", "int8", "fp16"):
        assert max(variants[name]["batch_mates"].values()) < 0.01
        assert 0 <= max(variants[name]["rms_to_artifact"].values()) < 0.5
        folder = out / name
        assert folder.is_dir() == variants[name]["accepted"]
        if folder.is_dir():  # a variant is an artifact like any other
            opened = open_artifact(folder, public_key=public_key)
            assert schema_errors(read_manifest(folder)) == []
            assert opened.manifest.variant["name"] == name
            assert opened.manifest.variant["metrics"] == variants[name]["metrics"]
            assert opened.manifest.variant["made_from"] == report["artifact"]["artifact_version"]
            assert opened.manifest.precision == variants[name]["precision"]
            predicted = open_runtime(folder, provider="cpu").predict(["write a list"], ["small-llm"])
            assert predicted.mu is not None
            assert np.isfinite(predicted.mu).all()
    assert variants["int8"]["bytes"] < variants["fp32"]["bytes"]
    # Shapes beyond max_length are skipped.
    assert set(report["latency_ms"]["cpu"]) == {"1x32"}
    best = report["best"]["cpu"]
    assert variants[best]["accepted"]
    page = (out / "report.md").read_text()
    assert f"**{best} on cpu**" in page
    assert "| fp32 |" in page
    # No variant of a variant, and no other folder is overwritten.
    assert export_variants([str(out / "fused"), "--data", str(data), "--out", str(tmp_path / "again")]) == 2
    assert export_variants([str(artifact), "--data", str(data), "--out", str(artifact)]) == 2


def reasons(precision="int8", probability_shift=0.0, batch_mates=0.0, plain=METRICS, **changes):
    result = {"precision": precision, "metrics": plain | changes, "batch_mates": {"mu": batch_mates}}
    result["probability_shift"] = {"urgency": probability_shift}
    return list(rejection_reasons(plain, result))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"r2": 0.5905, "tau": 0.4905, "p50": 0.5095, "p99": 0.9805}, None),
        ({"r2": 0.589}, "R2 of mu changes by -0.0110, allowed 0.01"),
        ({"r2": None}, "R2 of mu is unknown"),
        ({"tau": 0.48}, "Kendall's tau changes"),
        ({"p50": 0.511}, "coverage of P50 changes by +0.0110"),
        ({"p99": float("nan")}, "coverage of P99"),
        ({"probability_shift": 0.02}, "urgency shift by 0.0200"),
        ({"batch_mates": 0.005}, None),
        ({"batch_mates": 0.005, "precision": "fp32"}, MATES),
    ],
)
def test_a_variant_is_rejected_beyond_a_limit(changes, reason):
    assert [reason in text for text in reasons(**changes)] == ([] if reason is None else [True])


def test_calibration_prompts_do_not_evaluate(tmp_path):
    data = write_sample_file(tmp_path / "samples.parquet", num_prompts=12, num_samples=3)
    target = tmp_path / "others.parquet"
    calibration, rows = split_prompts(str(data), target, 128, np.random.default_rng(0))
    prompts, models, _ = zip(*rows, strict=True)
    assert (len(calibration), len(prompts)) == (4, 8)
    assert not set(prompts) & set(calibration)
    evaluation = pq.read_table(target)
    assert len(evaluation) == 24
    assert set(evaluation["prompt"].to_pylist()) == set(prompts)
    # The file still says what it is.
    assert evaluation.schema.metadata == pq.read_table(data).schema.metadata
    assert set(models) == {"m"}


def test_wrong_variants_are_named():
    for variants in (["int4"], ["int8", "int8"], []):
        with pytest.raises(InputError, match="variants: got"):
            VariantsConfig(artifact="a", data="d", out="o", variants=variants)
