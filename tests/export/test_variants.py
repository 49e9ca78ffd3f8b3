import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from export.variants.config import AcceptanceLimits, VariantsConfig
from export.variants.evaluate import rejection_reasons, split_prompts
from predictors.artifact import open_artifact
from predictors.modules.checkpoint import save_checkpoint
from predictors.modules.encoder import load_tokenizer
from predictors.runtime import open_runtime
from scheduler_core.errors import InputError
from tailcast.cli_variants import main
from tests.export.conftest import export
from tests.predictors.predictors import predictor
from tests.predictors.test_artifact import private_key_file, public_key_file
from tests.predictors.test_shipped import errors as schema_errors
from tests.training.data import write_rows, write_sample_file
from tests.training.tiny import tiny_bert

MATES = "batch mates change mu by 0.005 of its standard deviation, allowed 1e-05"
PLAIN = {"r2": 0.6, "tau": 0.5, "p50": 0.5, "p90": 0.9, "p99": 0.99, "crps_tokens": 100.0}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with all heads and conditions whose products are wide enough to be quantized."""
    root = tmp_path_factory.mktemp("variants")
    encoder = tiny_bert(root / "encoder", hidden_size=64)
    save_checkpoint(root / "checkpoint", predictor(encoder), load_tokenizer(encoder), {})
    export(root / "checkpoint", root / "artifact", parity_tokens=64, parity_shapes=0)
    return root / "artifact"


def test_the_command_makes_evaluates_and_reports(artifact, tmp_path):
    data = write_rows(tmp_path / "rows.parquet", num_prompts=18, models=("small-llm", "large-llm"))
    out = tmp_path / "variants"
    arguments = [str(artifact), "--data", str(data), "--out", str(out), "--shapes", '["1x8", "4x500"]']
    key, public_key = private_key_file(tmp_path / "key.pem"), public_key_file(tmp_path / "key.pub")
    arguments += ["--sign", str(key), "--repetitions", "1", "--progress", "false"]
    assert main([*arguments, "--variants", '["fused", "int8", "fp16"]']) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["schema"] == "variants/1"
    assert report["data"]["calibration_prompts"] == 6
    assert report["data"]["num_groups"] == 24  # two served models for each of the other 12 prompts
    variants = report["variants"]
    assert set(variants) == {"fp32", "fused", "int8", "fp16"}
    assert variants["fused"]["accepted"], variants["fused"]["reasons"]
    assert variants["fused"]["steps"]["attention_layers"] == 2
    steps = {"attention_layers": 2, "smoothed_tensors": 6, "int8_products": 12, "int8_tables": 0}
    assert variants["int8"]["steps"] == steps
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
    page = (out / "report.md").read_text()
    assert f"**{best} on cpu**" in page
    assert "| fp32 |" in page
    # No variant of a variant, and no other folder is overwritten.
    assert main([str(out / "fused"), "--data", str(data), "--out", str(tmp_path / "again")]) == 2
    assert main([str(artifact), "--data", str(data), "--out", str(artifact)]) == 2


def reasons(limits=None, precision="int8", probability_shift=0.0, batch_mates=0.0, plain=PLAIN, **changes):
    result = {"precision": precision, "metrics": plain | changes, "batch_mates": {"mu": batch_mates}}
    result["probability_shift"] = {"urgency": probability_shift}
    return list(rejection_reasons(plain, result, limits or AcceptanceLimits()))


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
        ({"probability_shift": 0.02, "limits": AcceptanceLimits(probability_shift=0.05)}, None),
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


@pytest.mark.parametrize(("field", "value"), [("variants", ["int4"]), ("shapes", ["8 by 128"])])
def test_wrong_options_are_named(field, value):
    with pytest.raises(InputError, match=field):
        VariantsConfig(artifact="a", data="d", out="o", **{field: value})
    with pytest.raises(InputError, match="r2_drop"):
        AcceptanceLimits(r2_drop=-0.1)
