"""`benchmarks.gpu` without a GPU: cheap steps at tiny size, pages, and files in parts."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.training import TEACHER, WEIGHTS, halve, training_table, training_words, write_weights

PART_MIB = 0.01
TABLE = "| size | seconds |\n|---|---|\n| 1 | 0.5 |"


def test_weights_are_halved_in_place(tmp_path: Path) -> None:
    file, weights = tmp_path / "model.safetensors", torch.linspace(-2.0, 2.0, 7)
    save_file({"a": weights}, str(file))
    halve(file, file)
    assert torch.equal(load_file(file)["a"], weights.half())


def _scores(tau: float) -> dict[str, object]:
    coverage = {level: {"estimate": 0.5} for level in ("p50", "p90", "p99")}
    scores = {"mu": {"r2": 0.7}, "kendall_tau": {"median_vs_fitted_mu": tau}, "nll": 6.0}
    return {"num_prompts": 9, "coverage": coverage, "crps_tokens": 99.0, "crps_log_tokens": 0.3, **scores}


def test_a_trained_predictor_has_a_table_and_weights_in_parts(tmp_path: Path) -> None:
    out = tmp_path / "minilm"  # as `examples.pretrained` leaves it
    for name in ("checkpoint", "calibrated", "variants/int8"):
        (out / name).mkdir(parents=True)
    training = {
        "data": {"num_prompts": {"train": 7}, "num_samples": {"train": 70}},
        "config": {"stage1": {"epochs": 8}},
        "throughput": {"stage1": {"train_seconds": 4.5, "tokens_per_second": 1234.0}},
        "metrics": {"best_stage": 2, "best_epoch": 5, "validation_loss": 0.45},
    }
    (out / "checkpoint/training.json").write_text(json.dumps(training))
    evaluation = {"model": _scores(0.61), "compared": {"float32": _scores(0.62)}}
    (out / "evaluation.json").write_text(json.dumps(evaluation))
    save_file({"a": torch.ones(3)}, str(out / "calibrated" / WEIGHTS))
    (out / "variants/int8/model.onnx").write_bytes(b"int8")
    table = training_table("minilm", out)
    assert "| 7 | 70 | 8 | 4.5 | 1234.0 | 6 of stage 2 | 0.4500 |" in table
    assert "| minilm | 9 | 0.700 | 0.610 |" in table
    assert "| float32 | 9 | 0.700 | 0.620 |" in table
    parts = write_weights("minilm", out, PART_MIB)
    assert max(file.stat().st_size for file in parts.iterdir()) <= PART_MIB * 2**20
    subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=parts, check=True)
    (tmp_path / "weights").mkdir()
    for name in ("fp16", "int8"):
        join = f"cat {parts}/minilm-{name}.tar.* | tar --extract --directory {tmp_path}/weights"
        subprocess.run(join, shell=True, check=True)
    assert load_file(tmp_path / "weights/minilm-fp16" / WEIGHTS)["a"].dtype == torch.float16
    assert (tmp_path / "weights/minilm-int8/model.onnx").read_bytes() == b"int8"


@pytest.mark.parametrize("step", ["minilm", "smollm2_full"])
def test_a_teachers_predictions_are_learned_by_minilm(step: str, tmp_path: Path) -> None:
    (tmp_path / TEACHER).write_bytes(b"rows")
    words = training_words(step, tmp_path, tmp_path / "out", None, check=False, teacher=None)
    assert "--accelerator=cuda" in words[words.index("--train_options") + 1]
    assert ("--teacher" in words) == (step == "smollm2_full")
    assert (tmp_path / "out/data" / TEACHER).exists() == (step == "minilm")


def _module(folder: Path, name: str, text: str) -> str:
    (folder / f"{name}.py").write_text(text)
    return name


@pytest.fixture
def fake_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU, and as commands of the steps a module that prints a table and one that does not end; the list of options."""
    _module(tmp_path, "printing", f"print({TABLE!r})")
    _module(tmp_path, "failing", "print('| 1 |')\nraise SystemExit('the GPU is lost')")
    _module(tmp_path, "endless", "import signal\nsignal.pause()")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(gpu, "gpu_name", lambda: "Tesla T0, driver 1.2")
    monkeypatch.setattr(gpu, "STEPS", dict.fromkeys(("printing", "sampling"), ()))
    monkeypatch.setitem(gpu.MEASUREMENTS, "printing", lambda run: run.command("printing"))
    return ["--out", str(tmp_path / "pages"), "--work", str(tmp_path / "work")]


def test_a_step_is_run_again_until_its_page_is_finished(
    fake_steps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(gpu.MEASUREMENTS, "sampling", lambda run: run.command("failing"))
    assert main(fake_steps) == 1
    page = (tmp_path / "pages/printing.md").read_text()
    assert TABLE in page
    assert "Tesla T0, driver 1.2, 20" in page
    assert f"python -m benchmarks.gpu --out {tmp_path}" in page
    assert "Unfinished: the GPU is lost" in (tmp_path / "pages/sampling.md").read_text()
    capsys.readouterr()
    monkeypatch.setitem(gpu.MEASUREMENTS, "sampling", lambda run: run.command("failing", optional=True))
    assert main(fake_steps) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("printing.md exists")
    assert second.endswith("sampling.md")
    assert "Failed: the GPU is lost" in (tmp_path / "pages/sampling.md").read_text()


def test_a_limit_stops_a_step(fake_steps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.MEASUREMENTS, "sampling", lambda run: run.command("endless"))
    assert main([*fake_steps, "--steps", "sampling", "--limit_s", "0"]) == 1
    assert "Unfinished: stopped by --limit_s 0" in (tmp_path / "pages/sampling.md").read_text()


def test_what_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(gpu.STEPS, "sampling", ("no_such_package",))
    assert main(["--check", "--steps", "sampling", "minilm", "--work", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["sampling: skipped, not installed: no_such_package", "minilm: skipped, needs --data"]
    monkeypatch.setattr(gpu, "gpu_name", lambda: None)
    assert main(["--out", str(tmp_path / "out")]) == 2
    assert "no GPU found" in capsys.readouterr().err


@pytest.mark.slow
def test_check_runs_the_cheap_steps(tmp_path: Path) -> None:
    steps = ("onnx_latency", "sampling")
    assert main(["--check", "--steps", *steps, "--work", str(tmp_path), "--limit_s", "1800"]) == 0
    for step in steps:
        page = (tmp_path / "check/pages" / f"{step}.md").read_text()
        assert page.count("\n|") >= 3
        assert "CPU, tiny sizes" in page
