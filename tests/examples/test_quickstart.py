"""The main job itself, at its smallest size: every command, the real LLM, the real endpoint, the report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.shell import Shell, StepFailedError
from scheduler_core.errors import TailcastError

STEPS = ("gen-samples", "join", "fit-dist", "train", "export-onnx", "serve-predictor", "simulate", "report")


def test_quickstart_at_tiny_size(tmp_path: Path) -> None:
    out = tmp_path / "quickstart"
    run = subprocess.run(
        [sys.executable, "-m", "examples.quickstart", "--size", "tiny", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert run.returncode == 0, run.stderr + run.stdout
    lines = [line.split() for line in run.stdout.splitlines() if line.startswith("  ")]
    assert [words[0] for words in lines] == list("abcdefgh")
    assert [words[1] for words in lines] == list(STEPS)

    report = (out / "report.html").read_text(encoding="utf-8")
    assert report.count("data:image/png;base64,") == 3
    assert "http" not in report.replace("https://", "http").split("<body>")[0]
    assert "model.onnx" in json.loads((out / "artifact" / "manifest.json").read_text())["files"]

    results = {
        policy: json.loads((out / f"simulation-{policy}.json").read_text())
        for policy in ("fcfs", "ssjf", "tie", "sjf")
    }
    counts = {result["metrics"]["num_finished"] for result in results.values()}
    assert len(counts) == 1
    assert counts.pop() > 0
    oracle = results["sjf"]["metrics"]["ttft_s"]["mean"]
    assert 0 < oracle < results["fcfs"]["metrics"]["ttft_s"]["mean"]
    for policy in ("ssjf", "tie"):
        assert results[policy]["predictor"]["num_failed"] == 0


def test_the_shipped_set_is_what_its_readme_says() -> None:
    import pyarrow.compute as pc

    from data_gen.samples import read_samples
    from data_gen.sources.open import compose
    from examples.quickstart.sizes import SHIPPED_LIMIT
    from examples.quickstart.steps import SHIPPED_SAMPLES

    samples = read_samples(SHIPPED_SAMPLES)
    prompts = list(dict.fromkeys(samples.column("prompt").to_pylist()))
    assert prompts == [text for _, text in compose(SHIPPED_LIMIT, 2026)[:312]]
    assert samples.num_rows == 312 * 20
    assert pc.max(samples.column("max_tokens")).as_py() == 128
    censored = samples.column("finish_reason").to_pylist().count("length")
    assert f"{100 * censored / samples.num_rows:.1f} %" in (SHIPPED_SAMPLES.parent / "README.md").read_text()
    live = {text for _, text in compose(SHIPPED_LIMIT + 12, 2026)[SHIPPED_LIMIT:]}
    assert live.isdisjoint(prompts)


def test_a_failing_command_names_its_step_and_log(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "logs")
    with pytest.raises(StepFailedError, match=r"step a: .*missing\.txt.*a-gen-samples\.log"):
        shell.run("a", ["gen-samples", str(tmp_path / "missing.txt"), "--out", str(tmp_path / "x.parquet")])
    with pytest.raises(TailcastError, match="not installed"):
        shell.run("b", ["no-such-command"])
