from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from onnx import helper

from predictors.artifact import hash_files, open_artifact
from predictors.onnx_header import check_opset, read_opset
from scheduler_core.errors import InputError
from tests.predictors.fakes import write_artifact


def write(path: Path, opsets: dict[str, int]) -> Path:
    model = helper.make_model(
        helper.make_graph([], "g", [], []),
        opset_imports=[helper.make_opsetid(domain, version) for domain, version in opsets.items()],
    )
    onnx.save(model, path)
    return path


def test_opset_is_the_one_onnx_reads(tmp_path: Path, artifact_folder: Path) -> None:
    assert read_opset(write(tmp_path / "a", {"": 21, "com.microsoft": 1})) == {
        "ai.onnx": 21,
        "com.microsoft": 1,
    }
    model = onnx.load(artifact_folder / "model.onnx")
    assert read_opset(artifact_folder / "model.onnx") == {"ai.onnx": model.opset_import[0].version}
    assert open_artifact(artifact_folder).manifest.opset == {"ai.onnx": 18}


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"hello world", b"\x42\x7f\x00", b"\x3a\xff\xff\xff\xff\x0f"]
)
def test_file_that_is_no_onnx_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(InputError, match=r"artifact file model\.onnx: .*a valid ONNX model"):
        read_opset(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("opset", "message"),
    [
        ({"ai.onnx": 12}, "x, opset ai.onnx: got 12; allowed: a version from 13"),
        ({"ai.onnx": 99}, "x, opset ai.onnx: got 99"),
        ({"ai.onnx": 20, "evil": 1}, "x, opset: got 'evil'; allowed: only ai.onnx"),
    ],
)
def test_unexpected_opset_is_refused(opset: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_opset(opset, "x")


def test_graph_of_another_opset_than_the_manifest_says_is_refused(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "a")
    model = onnx.load(folder / "model.onnx")
    model.opset_import[0].version = 19
    onnx.save(model, folder / "model.onnx")
    manifest = json.loads((folder / "manifest.json").read_text()) | {"files": hash_files(folder)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"model\.onnx, opset: got .*19.*; allowed: .*18.*as in manifest"):
        open_artifact(folder)
