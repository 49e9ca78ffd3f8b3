from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from predictors.artifact import Conditions, Manifest, content_version, hash_files, open_artifact
from predictors.lexical import FEATURE_NAMES
from predictors.manifest import checked_temperature
from scheduler_core.errors import InputError
from tests.predictors.fakes import (
    NU,
    RICH,
    write_artifact,
    write_lexical_artifact,
    write_rich_artifact,
)


def change_manifest(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_manifest_reads_back_as_written(artifact_folder: Path) -> None:
    manifest = open_artifact(artifact_folder).manifest
    assert manifest.artifact_id == "tiny"
    assert manifest.nu == NU
    assert manifest.served_models == ("tiny-llm",)
    assert [tensor.name for tensor in manifest.outputs] == ["mu", "sigma"]
    assert manifest.inputs[0].shape == ("batch", "seq")
    assert set(manifest.files) == {"model.onnx", "tokenizer.json", "normalization.json"}


def test_version_follows_the_content_that_predicts(tmp_path: Path) -> None:
    files = hash_files(write_artifact(tmp_path / "a"))
    assert content_version(files) == content_version(dict(reversed(files.items())))
    assert content_version(files) == content_version(files | {"run.json": "0" * 64})
    assert content_version(files) != content_version(files | {"tokenizer.json": "0" * 64})
    assert content_version(files) != content_version(files | {"model.onnx.data": "0" * 64})


def test_missing_folder_and_missing_manifest_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        open_artifact(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"manifest\.json"):
        open_artifact(tmp_path)


@pytest.mark.parametrize("name", ["model.onnx", "tokenizer.json", "normalization.json"])
def test_changed_or_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_artifact(tmp_path / "a")
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1])
    with pytest.raises(InputError, match=rf"artifact file {name}: got 'SHA-256"):
        open_artifact(folder)
    (folder / name).unlink()
    with pytest.raises(InputError, match=rf"artifact file {name}.*exists"):
        open_artifact(folder)


def test_newer_format_asks_for_an_upgrade(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "a")
    change_manifest(folder, format_version=5, something_new={})
    with pytest.raises(InputError, match=r"format_version: got 5; allowed: 4.*upgrade"):
        open_artifact(folder)


def test_older_format_asks_for_a_new_export(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "a")
    change_manifest(folder, format_version=3)
    with pytest.raises(InputError, match=r"format_version: got 3; allowed: 4.*export it again"):
        open_artifact(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00", '{"format_version": true}'])
def test_broken_manifest_is_refused(tmp_path: Path, content: str) -> None:
    folder = write_artifact(tmp_path / "a")
    (folder / "manifest.json").write_text(content)
    with pytest.raises(InputError, match="artifact"):
        open_artifact(folder)


def test_manifest_that_is_no_text_is_refused(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "a")
    (folder / "manifest.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="valid JSON"):
        open_artifact(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "oracle"),
        ("heads", []),
        ("heads", ["length", "length"]),
        ("heads", ["mood"]),
        ("nu", 0),
        ("nu", True),
        ("nu", "3.5"),
        ("max_length", 0),
        ("max_length", 1.5),
        ("truncation_side", "top"),
        ("pad_token_id", -1),
        ("artifact_id", ""),
        ("served_models", "tiny-llm"),
        ("served_models", [1]),
        ("served_models", ["a", "a"]),
        ("conditioning", {"unknown_models": 1, "temperature": True}),
        ("abstain_threshold", 0.5),
        ("bucket_edges", [2, 1]),
        ("bucket_edges", ["2"]),
        ("urgency_levels", "now"),
        ("license", 1),
        ("metrics", []),
        ("inputs", [{"name": "input_ids", "dtype": "int64", "shape": ["batch"], "unit": "id"}]),
        ("outputs", None),
        ("outputs", [{"name": "mu", "dtype": "float32", "shape": ["batch"], "unit": "log tokens"}]),
        ("files", None),
        ("files", {}),
        ("opset", None),
        ("opset", {}),
        ("opset", {"ai.onnx": True}),
        ("opset", {"ai.onnx": 99}),
        ("opset", {"ai.onnx": 20, "org.example": 1}),
        ("encoder", None),
        ("encoder", {"architecture": "bert"}),
        ("precision", "fp8"),
        ("variant", []),
        ("tokenizer_files", []),
        ("capped", {"cvar_level": 0.9}),
    ],
)
def test_wrong_field_is_named(tmp_path: Path, field: str, value: object) -> None:
    folder = write_artifact(tmp_path / "a")
    change_manifest(folder, **{field: value})
    with pytest.raises(InputError, match=f"artifact manifest, {field}"):
        open_artifact(folder)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("urgency_levels", ["now"], "urgency_levels"),
        ("abstain_threshold", 1.5, "abstain_threshold"),
        ("bucket_edges", [], "bucket_edges"),
        ("served_models", [], "served_models"),
        ("nu", 3.5, "outputs"),
        ("heads", ["urgency", "bucket"], "outputs"),
        ("conditioning", None, "inputs"),
    ],
)
def test_fields_that_contradict_each_other_are_named(
    tmp_path: Path, field: str, value: object, named: str
) -> None:
    folder = write_rich_artifact(tmp_path / "a")
    change_manifest(folder, **{field: value})
    with pytest.raises(InputError, match=f"artifact manifest, {named}"):
        open_artifact(folder)


@pytest.mark.parametrize(
    ("lexical", "named"),
    [
        (None, "lexical"),
        ({"feature_names": [], "feature_version": 1, "max_chars": 10}, "lexical, feature_names"),
        ({"feature_names": ["a"], "feature_version": 0, "max_chars": 10}, "lexical, feature_version"),
        ({"feature_names": ["a"], "feature_version": 1, "max_chars": "10"}, "lexical, max_chars"),
    ],
)
def test_wrong_lexical_input_is_named(tmp_path: Path, lexical: object, named: str) -> None:
    folder = write_lexical_artifact(tmp_path / "a")
    change_manifest(folder, lexical=lexical)
    with pytest.raises(InputError, match=f"artifact manifest, {named}: got"):
        open_artifact(folder)


def test_a_manifest_that_would_not_read_back_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="artifact manifest, abstain_threshold"):
        write_rich_artifact(tmp_path / "a", abstain_threshold=2.0)
    assert not (tmp_path / "a" / "manifest.json").exists()


def test_manifest_of_all_heads_reads_back_as_written(rich_folder: Path) -> None:
    manifest = open_artifact(rich_folder).manifest
    for name, value in RICH.items():
        assert getattr(manifest, name) == value
    content = json.loads((rich_folder / "manifest.json").read_text())
    shapes = {tensor["name"]: tensor["shape"] for tensor in content["inputs"] + content["outputs"]}
    assert shapes["temperature"] == shapes["served_model"] == shapes["nu"] == ["batch"]
    assert (shapes["urgency"], shapes["bucket"]) == (["batch", 3], ["batch", 2])


def test_lexical_manifest_needs_no_tokenizer(lexical_folder: Path) -> None:
    manifest = open_artifact(lexical_folder).manifest
    assert (manifest.kind, manifest.max_length, manifest.pad_token_id) == ("lexical", None, None)
    assert set(manifest.files) == {"model.onnx"}
    assert [tensor.name for tensor in manifest.inputs] == ["features"]
    assert manifest.inputs[0].shape == ("batch", len(FEATURE_NAMES))


@pytest.mark.parametrize(
    ("served_models", "conditioning", "numbers"),
    [
        # of None, "", a, b, other
        ((), None, [0, 0, 0, 0, 0]),
        (("a", "b"), None, [0, 0, 0, 0, None]),
        (("a", "b"), Conditions(unknown_models=True, temperature=True), [0, 0, 1, 2, 0]),
        (("a", "b"), Conditions(unknown_models=False, temperature=True), [None, None, 1, 2, None]),
        (("a",), Conditions(unknown_models=False, temperature=False), [1, 1, 1, None, None]),
    ],
)
def test_served_models_are_numbered_or_refused(
    served_models: tuple[str, ...], conditioning: Conditions | None, numbers: list[int | None]
) -> None:
    manifest = Manifest(
        artifact_id="x",
        artifact_version="1",
        created="now",
        heads=("rank",),
        files={},
        served_models=served_models,
        conditioning=conditioning,
    )
    for name, number in zip((None, "", "a", "b", "other"), numbers, strict=True):
        if number is None:
            with pytest.raises(InputError, match="served_model: got .*one of a"):
                manifest.served_model_number(name)
        else:
            assert manifest.served_model_number(name) == number


@pytest.mark.parametrize("value", [-0.1, float("inf")])
def test_bad_temperature_is_named(value: float) -> None:
    with pytest.raises(InputError, match="temperature"):
        checked_temperature(value)
    assert checked_temperature(0.0) == 0.0
    assert math.isnan(checked_temperature(None))


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "sub/file", "manifest.json", ".."])
def test_manifest_cannot_reach_outside_its_folder(tmp_path: Path, name: str) -> None:
    folder = write_artifact(tmp_path / "a")
    files = json.loads((folder / "manifest.json").read_text())["files"]
    change_manifest(folder, files=files | {name: "0" * 64})
    with pytest.raises(InputError, match="inside the artifact folder"):
        open_artifact(folder)


def test_bad_digest_in_manifest_is_named(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "a")
    files = json.loads((folder / "manifest.json").read_text())["files"]
    change_manifest(folder, files=files | {"model.onnx": "abc"})
    with pytest.raises(InputError, match=r"files, model\.onnx"):
        open_artifact(folder)
