from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from predictors.artifact import content_version, hash_files, open_artifact
from scheduler_core.errors import InputError
from tests.predictors.fakes import NU, write_artifact


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
    change_manifest(folder, format_version=2, something_new={})
    with pytest.raises(InputError, match=r"format_version: got 2.*upgrade"):
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
        ("nu", 0),
        ("nu", "3.5"),
        ("max_length", 0),
        ("max_length", 1.5),
        ("truncation_side", "middle"),
        ("pad_token_id", -1),
        ("artifact_id", ""),
        ("served_models", "tiny-llm"),
        ("served_models", [1]),
        ("license", 1),
        ("metrics", []),
        ("inputs", [{"name": "input_ids", "dtype": "int64", "shape": ["batch"], "unit": "id"}]),
        ("outputs", None),
        ("outputs", [{"name": "mu", "dtype": "float32", "shape": "batch", "unit": "log tokens"}]),
        ("files", None),
        ("files", {}),
    ],
)
def test_wrong_field_is_named(tmp_path: Path, field: str, value: object) -> None:
    folder = write_artifact(tmp_path / "a")
    change_manifest(folder, **{field: value})
    with pytest.raises(InputError, match=f"artifact manifest, {field}"):
        open_artifact(folder)


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
