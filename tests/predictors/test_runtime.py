from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predictors.artifact import Conditions, LexicalInput, hash_files
from predictors.lexical import FEATURE_NAMES, FEATURE_VERSION
from predictors.runtime import CPU, open_runtime
from scheduler_core.errors import InputError, TailcastError
from tests.predictors.fakes import (
    NU,
    expected,
    expected_rich,
    write_artifact,
    write_lexical_artifact,
    write_rich_artifact,
)

PROMPTS = ["name three rivers", "sea", "write a long essay about the sea", "a a a a", "unknown words", "sea"]


def open_manifest(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return content


@pytest.mark.parametrize("batch_size", [1, 2, 4, 32])
def test_predictions_do_not_depend_on_batching(artifact_folder: Path, batch_size: int) -> None:
    found = open_runtime(artifact_folder).predict(PROMPTS, batch_size=batch_size)
    reference = np.array([expected(prompt) for prompt in PROMPTS])
    assert set(found.arrays()) == {"mu", "sigma", "nu"}
    np.testing.assert_allclose(found.mu, reference[:, 0], rtol=1e-6)
    np.testing.assert_allclose(found.sigma, reference[:, 1], rtol=1e-6)
    np.testing.assert_array_equal(found.nu, NU)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_all_heads_follow_prompt_served_model_and_temperature(rich_folder: Path, batch_size: int) -> None:
    names = ["tiny-llm", "huge-llm", None, "never heard of", "", "huge-llm"]
    temperatures = [0.5, None, 1.0, 0.0, float("nan"), 2.0]
    found = open_runtime(rich_folder).predict(PROMPTS, names, temperatures, batch_size=batch_size)
    assert len(found) == 6
    for row, one in enumerate(found.rows()):
        number = {"tiny-llm": 1, "huge-llm": 2}.get(names[row] or "", 0)
        wanted = expected_rich(PROMPTS[row], number, np.nan_to_num(temperatures[row] or 0.0))
        for name, value in wanted.items():
            np.testing.assert_allclose(getattr(one, name), value, rtol=1e-5, err_msg=name)
            np.testing.assert_array_equal(getattr(found, name)[row], getattr(one, name))


def test_bad_conditions_are_named(rich_folder: Path, artifact_folder: Path) -> None:
    runtime = open_runtime(rich_folder)
    with pytest.raises(InputError, match="temperature: got -1"):
        runtime.predict(["sea"], None, [-1.0])
    with pytest.raises(InputError, match="served_models: got '2 entries'; allowed: 1"):
        runtime.predict(["sea"], ["tiny-llm"] * 2)
    with pytest.raises(InputError, match="temperatures: got '0 entries'; allowed: 1"):
        runtime.predict(["sea"], None, [])
    with pytest.raises(InputError, match="served_model: got 'other'"):
        open_runtime(artifact_folder).predict(["sea"], ["other"])
    ignored = open_runtime(artifact_folder).predict(["sea"], ["tiny-llm"], [0.7])
    np.testing.assert_array_equal(ignored.mu, open_runtime(artifact_folder).predict(["sea"]).mu)


def test_no_prompts_give_empty_arrays(artifact_folder: Path, rich_folder: Path) -> None:
    found = open_runtime(artifact_folder).predict([])
    assert {name: values.shape for name, values in found.arrays().items()} == {
        "mu": (0,),
        "sigma": (0,),
        "nu": (0,),
    }
    rich = open_runtime(rich_folder).predict([], [], [])
    assert rich.urgency is not None
    assert rich.urgency.shape == (0, 3)
    assert rich.rows() == []


def test_lexical_artifact_reads_features_of_the_text(lexical_folder: Path) -> None:
    runtime = open_runtime(lexical_folder)
    runtime.warm_up()
    found = runtime.predict(["sea", "name three rivers", "x" * 3000], batch_size=2)
    np.testing.assert_allclose(found.mu, np.log1p([3, 17, 3000]), rtol=1e-5)
    np.testing.assert_allclose(found.sigma, 0.5, rtol=1e-6)
    assert [prompt.truncated for prompt in runtime.tokenizer(["sea", "x" * 3000])] == [False, True]
    assert len(runtime.predict([])) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feature_version": FEATURE_VERSION + 1}, "feature_version"),
        ({"feature_names": ("a",)}, "feature_names"),
    ],
)
def test_lexical_artifact_of_other_features_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    lexical = LexicalInput(
        **(
            {"feature_names": tuple(FEATURE_NAMES), "feature_version": FEATURE_VERSION, "max_chars": 9}
            | changes
        )
    )
    folder = write_lexical_artifact(tmp_path / "a", lexical=lexical)
    with pytest.raises(InputError, match=f"artifact manifest, lexical, {message}"):
        open_runtime(folder)


def test_graph_that_is_not_what_the_manifest_says_is_refused(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "a", conditioning=Conditions(unknown_models=True, temperature=True))
    with pytest.raises(InputError, match=r"model\.onnx, inputs: got \['attention_mask', 'input_ids'\]"):
        open_runtime(folder)
    folder = write_artifact(tmp_path / "b", heads=("length", "rank"))
    with pytest.raises(InputError, match=r"model\.onnx, outputs: got .*'rank'"):
        open_runtime(folder)
    folder = write_rich_artifact(tmp_path / "c", urgency_levels=("now", "late"))
    with pytest.raises(TailcastError, match=r"urgency with shape \(1, 3\), not \(1, 2\)"):
        open_runtime(folder).predict(["sea"])


def test_long_prompt_is_truncated_to_max_length(artifact_folder: Path) -> None:
    runtime = open_runtime(artifact_folder)
    found = runtime.predict(["sea " * 14, "sea " * 1000])
    assert found.mu is not None
    assert found.mu[0] == found.mu[1]


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
    found = runtime.predict(["sea sea sea"])
    assert found.mu == pytest.approx([expected("sea", max_length=3)[0]])


def test_two_onnxruntime_packages_are_warned_of(
    artifact_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    open_runtime(artifact_folder)
    assert "both installed" not in caplog.text
    monkeypatch.setattr("predictors.runtime.metadata.version", lambda name: "1.31.1")
    open_runtime(artifact_folder)
    assert "onnxruntime and onnxruntime-gpu are both installed" in caplog.text
