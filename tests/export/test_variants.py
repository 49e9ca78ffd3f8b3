from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from export.exporter import ExportConfig, export_onnx
from export.variants.config import AcceptanceLimits, VariantsConfig
from export.variants.evaluate import OutputComparison, OutputDifferences, PromptRow, split_prompts
from export.variants.report import VariantResult, best_of, rejection_reasons
from predictors.artifact import open_artifact
from predictors.modules import load_tokenizer, save_checkpoint
from predictors.runtime import open_runtime
from scheduler_core.errors import InputError
from tailcast.cli_variants import main
from tests.predictors.predictors import predictor
from tests.predictors.test_manifest_schema import errors as schema_errors
from tests.predictors.test_signing import private_key_file, public_key_file
from tests.training.data import write_rows, write_sample_file
from tests.training.tiny import tiny_bert

PLAIN = {"r2": 0.6, "tau": 0.5, "p50": 0.5, "p90": 0.9, "p99": 0.99, "crps_tokens": 100.0}
NONE = OutputDifferences(to_artifact={"mu": 0.0}, probability={}, batch_mates={"mu": 0.0})


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with all heads and conditions whose products are wide enough to be quantized."""
    root = tmp_path_factory.mktemp("variants")
    encoder = tiny_bert(root / "encoder", hidden_size=64)
    save_checkpoint(root / "checkpoint", predictor(encoder), load_tokenizer(encoder), {})
    export_onnx(
        ExportConfig(
            checkpoint=str(root / "checkpoint"),
            out=str(root / "artifact"),
            legacy_exporter=True,
            parity_tokens=64,
            parity_shapes=0,
        )
    )
    return root / "artifact"


def test_the_command_makes_evaluates_and_reports(artifact, tmp_path):
    data = write_rows(tmp_path / "rows.parquet", num_prompts=18, models=("small-llm", "large-llm"))
    out = tmp_path / "variants"
    arguments = [str(artifact), "--data", str(data), "--out", str(out), "--shapes", '["1x8", "4x500"]']
    key, public_key = private_key_file(tmp_path / "key.pem"), public_key_file(tmp_path / "key.pub")
    arguments += ["--sign", str(key), "--repetitions", "1", "--progress", "false"]
    arguments += ["--markdown", str(tmp_path / "variants.md")]
    assert main([*arguments, "--variants", '["fused", "int8", "fp16"]']) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["schema"] == "variants/1"
    assert report["data"]["calibration_prompts"] == 6
    assert report["data"]["num_groups"] == 24  # two served models for each of the other 12 prompts
    variants = report["variants"]
    assert set(variants) == {"fp32", "fused", "int8", "fp16"}
    assert variants["fused"]["accepted"], variants["fused"]["reasons"]
    assert variants["fused"]["steps"]["attention_layers"] == 2
    assert variants["int8"]["steps"] == {
        "attention_layers": 2,
        "residuals": 5,
        "smoothed_tensors": 6,
        "int8_products": 12,
        "int8_tables": 0,
    }
    for name in ("fused", "int8", "fp16"):
        assert max(variants[name]["batch_mates"].values()) < 0.01
        assert 0 <= max(variants[name]["rms_to_artifact"].values()) < 0.5
        folder = out / name
        assert folder.is_dir() == variants[name]["accepted"]
        if folder.is_dir():  # a variant is an artifact like any other
            opened = open_artifact(folder, public_key=public_key)
            assert schema_errors(json.loads((folder / "manifest.json").read_text())) == []
            assert opened.manifest.variant["name"] == name
            assert opened.manifest.variant["metrics"] == variants[name]["metrics"]
            assert opened.manifest.variant["made_from"] == report["artifact"]["artifact_version"]
            assert opened.manifest.precision == variants[name]["precision"]
            predicted = open_runtime(folder, provider="cpu").predict(["write a list"], ["small-llm"])
            assert predicted.mu is not None
            assert np.isfinite(predicted.mu).all()
    assert variants["int8"]["bytes"] < variants["fp32"]["bytes"]
    # Shapes beyond max_length are skipped.
    assert set(report["latency_ms"]["cpu"]) == {"1x8"}
    best = report["best"]["cpu"]
    assert variants[best]["accepted"]
    page = (tmp_path / "variants.md").read_text()
    assert f"**{best} on cpu**" in page
    assert "| fp32 |" in page
    # No variant of a variant, and no other folder is overwritten.
    assert main([str(out / "fused"), "--data", str(data), "--out", str(tmp_path / "again")]) == 2
    assert main([str(artifact), "--data", str(data), "--out", str(artifact)]) == 2


def test_an_artifact_without_its_signature_is_no_source(artifact, tmp_path, capsys):
    data = write_rows(tmp_path / "rows.parquet", num_prompts=3)
    arguments = [str(artifact), "--data", str(data), "--out", str(tmp_path / "variants")]
    assert main([*arguments, "--public_key", str(public_key_file(tmp_path / "key.pub"))]) == 2
    assert "signature manifest.json.sig" in capsys.readouterr().err
    assert main([*arguments, "--sign", str(data)]) == 2
    assert "sign: got" in capsys.readouterr().err
    assert not (tmp_path / "variants").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"r2": 0.5905, "tau": 0.4905, "p50": 0.5095, "p99": 0.9805}, None),
        ({"r2": 0.7, "tau": 0.7}, None),
        ({"r2": 0.589}, "R2 of mu drops by 0.0110"),
        ({"r2": None}, "R2 of mu is unknown"),
        ({"tau": 0.48}, "Kendall's tau drops"),
        ({"p50": 0.511}, "coverage of P50 shifts by +0.0110"),
        ({"p90": 0.88}, "coverage of P90 shifts by -0.0200"),
        ({"p99": float("nan")}, "coverage of P99"),
    ],
)
def test_a_variant_is_rejected_beyond_a_limit(changes, reason):
    reasons = rejection_reasons(PLAIN, PLAIN | changes, NONE, AcceptanceLimits(), exact=False)
    assert [reason is not None and reason in text for text in reasons] == [True] * (reason is not None)
    without = dict.fromkeys(PLAIN)
    assert rejection_reasons(without, without, NONE, AcceptanceLimits(), exact=False) == ()


def test_batch_mates_and_probabilities_have_limits():
    some = OutputDifferences(to_artifact={}, probability={"urgency": 0.02}, batch_mates={"mu": 0.005})
    [reason] = rejection_reasons(PLAIN, PLAIN, some, AcceptanceLimits(), exact=False)
    assert "urgency shift by 0.0200" in reason
    reasons = rejection_reasons(PLAIN, PLAIN, some, AcceptanceLimits(probability_shift=0.05), exact=True)
    assert reasons == ("batch mates change mu by 0.005 of its standard deviation, allowed 1e-05",)


def test_the_best_is_the_fastest_that_is_accepted():
    results = [
        VariantResult(name="fp32", precision="fp32", num_bytes=1),
        VariantResult(name="fast", precision="int8", num_bytes=1, reasons=("wrong",)),
        VariantResult(name="even", precision="int8", num_bytes=1),
        VariantResult(name="uneven", precision="fp32", num_bytes=1),
    ]
    latency = {
        "1x1": {"fp32": 4.0, "fast": 1.0, "even": 2.0, "uneven": 1.0},
        "8x8": {"fp32": 40.0, "fast": 1.0, "even": 20.0, "uneven": 41.0},
    }
    assert best_of(results, latency) == "even"  # 2 x 20 < 1 x 41 < 4 x 40


def test_answers_in_other_company_are_compared(artifact):
    rows = [
        PromptRow("write " * (1 + 5 * (n % 7)) + f"{n}", ["small-llm", None][n % 2], 1.0) for n in range(20)
    ]
    runtime = open_runtime(artifact, provider="cpu")
    check = OutputComparison(runtime, rows)
    same = check.compare(runtime)
    assert max(same.to_artifact.values()) == 0
    assert 0 < max(same.batch_mates.values()) < 1e-4

    class Shifted:
        """Answers that depend on the batch, as dynamic quantization makes them."""

        artifact = runtime.artifact

        def run(self, prompts, served_models, temperatures):
            found = runtime.run(prompts, served_models, temperatures)
            found.mu[:] += 0.1 * len(prompts)
            return found

    shifted = check.compare(Shifted())
    spread = runtime.predict(
        [row.prompt for row in rows], [row.served_model for row in rows], [1.0] * 20
    ).mu.std()
    assert shifted.batch_mates["mu"] == pytest.approx(0.7 / spread, rel=1e-2)
    assert shifted.to_artifact["mu"] == pytest.approx(0.1 / spread, rel=1e-2)
    assert shifted.batch_mates["sigma"] < 1e-4


def test_calibration_prompts_do_not_judge(tmp_path):
    data = write_sample_file(tmp_path / "samples.parquet", num_prompts=12, num_samples=3)
    parts = split_prompts(str(data), tmp_path / "others.parquet", 128, np.random.default_rng(0))
    assert len(parts.calibration) == 4
    assert len(parts.rows) == 8
    assert not {row.prompt for row in parts.rows} & set(parts.calibration)
    import pyarrow.parquet as pq

    judged = pq.read_table(parts.file)
    assert len(judged) == 24
    assert set(judged["prompt"].to_pylist()) == {row.prompt for row in parts.rows}
    # The file still says what it is.
    assert judged.schema.metadata == pq.read_table(data).schema.metadata
    assert {row.served_model for row in parts.rows} == {"m"}


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("variants", {"variants": ["int4"]}),
        ("variants", {"variants": []}),
        ("shapes", {"shapes": ["8 by 128"]}),
        ("shapes", {"shapes": ["0x128"]}),
        ("repetitions", {"repetitions": 0}),
        ("out", {"out": ""}),
    ],
)
def test_wrong_options_are_named(field, options):
    with pytest.raises(InputError, match=field):
        VariantsConfig(**({"artifact": "a", "data": "d", "out": "o"} | options))
    with pytest.raises(InputError, match="r2_drop"):
        AcceptanceLimits(r2_drop=-0.1)
