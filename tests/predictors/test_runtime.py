from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predictors.artifact import hash_files
from predictors.runtime import CPU, open_runtime
from scheduler_core.errors import InputError, TailcastError
from tests.predictors.fakes import expected, write_artifact

PROMPTS = ["name three rivers", "sea", "write a long essay about the sea", "a a a a", "unknown words", "sea"]


def open_manifest(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return content


@pytest.mark.parametrize("batch_size", [1, 2, 4, 32])
def test_predictions_do_not_depend_on_batching(artifact_folder: Path, batch_size: int) -> None:
    mu, sigma = open_runtime(artifact_folder).predict(PROMPTS, batch_size=batch_size)
    reference = np.array([expected(prompt) for prompt in PROMPTS])
    np.testing.assert_allclose(mu, reference[:, 0], rtol=1e-6)
    np.testing.assert_allclose(sigma, reference[:, 1], rtol=1e-6)


def test_no_prompts_give_empty_arrays(artifact_folder: Path) -> None:
    mu, sigma = open_runtime(artifact_folder).predict([])
    assert mu.shape == sigma.shape == (0,)


def test_long_prompt_is_truncated_to_max_length(artifact_folder: Path) -> None:
    runtime = open_runtime(artifact_folder)
    mu, _ = runtime.predict(["sea " * 14, "sea " * 1000])
    assert mu[0] == mu[1]


def test_provider_is_the_one_obtained(artifact_folder: Path) -> None:
    assert open_runtime(artifact_folder, provider="cpu").provider == CPU


def test_demanding_cuda_without_cuda_fails(artifact_folder: Path) -> None:
    import onnxruntime as ort

    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    with pytest.raises(InputError, match="provider: got 'cuda'"):
        open_runtime(artifact_folder, provider="cuda")


def test_truncated_model_is_refused_even_with_a_matching_hash(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "a")
    content = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").write_bytes(content[: len(content) // 2])
    manifest = open_manifest(folder) | {"files": hash_files(folder)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"model\.onnx.*valid ONNX model"):
        open_runtime(folder)


def test_failing_session_is_one_clear_error(artifact_folder: Path) -> None:
    with pytest.raises(TailcastError, match=r"ONNX session failed on shape \(1, 3\)"):
        open_runtime(artifact_folder).predict(["crash"])


def test_bad_settings_are_named(artifact_folder: Path) -> None:
    with pytest.raises(InputError, match="threads_per_run"):
        open_runtime(artifact_folder, threads_per_run=0)
    with pytest.raises(InputError, match="batch_size"):
        open_runtime(artifact_folder).predict(["sea"], batch_size=0)


def test_warm_up_fits_short_models(tmp_path: Path) -> None:
    runtime = open_runtime(write_artifact(tmp_path / "a", max_length=3))
    runtime.warm_up()
    mu, _ = runtime.predict(["sea sea sea"])
    assert mu[0] == pytest.approx(expected("sea", max_length=3)[0])


def test_two_onnxruntime_packages_are_warned_of(
    artifact_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    open_runtime(artifact_folder)
    assert "both installed" not in caplog.text
    monkeypatch.setattr("predictors.runtime.metadata.version", lambda name: "1.31.1")
    open_runtime(artifact_folder)
    assert "onnxruntime and onnxruntime-gpu are both installed" in caplog.text
