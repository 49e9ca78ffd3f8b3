from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from onnx import helper

from predictors.artifact import content_version, hash_files, open_artifact
from predictors.onnx_header import check_opset, read_header
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
    header = read_header(write(tmp_path / "a", {"": 21, "com.microsoft": 1}))
    assert header.opset == {"ai.onnx": 21, "com.microsoft": 1}
    assert header.external_files == set()
    model = onnx.load(artifact_folder / "model.onnx")
    assert read_header(artifact_folder / "model.onnx").opset == {"ai.onnx": model.opset_import[0].version}
    assert open_artifact(artifact_folder).manifest.opset == {"ai.onnx": 18}


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"hello world", b"\x42\x7f\x00", b"\x3a\xff\xff\xff\xff\x0f"]
)
def test_file_that_is_no_onnx_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(InputError, match=r"artifact file model\.onnx: .*a valid ONNX model"):
        read_header(tmp_path / "model.onnx")


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
    manifest["artifact_version"] = content_version(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"model\.onnx, opset: got .*19.*; allowed: .*18.*as in manifest"):
        open_artifact(folder)


def test_external_files_are_found_wherever_a_tensor_can_be(tmp_path: Path) -> None:
    def outside(name: str) -> onnx.TensorProto:
        tensor = onnx.TensorProto(name=name, dims=[1], data_type=onnx.TensorProto.FLOAT)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=name)
        tensor.external_data.add(key="length", value="4")
        return tensor

    sparse = onnx.SparseTensorProto(values=outside("values"), indices=outside("indices"), dims=[1])
    attributes = [
        helper.make_attribute("tensor", outside("attribute")),
        helper.make_attribute("tensors", [outside("one"), outside("two")]),
        helper.make_attribute("sparse", sparse),
        helper.make_attribute("graph", helper.make_graph([], "g", [], [], [outside("subgraph")])),
        helper.make_attribute("graphs", [helper.make_graph([], "g", [], [], [outside("subgraphs")])]),
    ]
    node = helper.make_node("Op", [], ["o"])
    node.attribute.extend(attributes)
    in_function = helper.make_node("Constant", [], ["o"], value=outside("function"))
    default = helper.make_attribute("default", outside("default"))
    function = helper.make_function("d", "f", [], ["o"], [in_function], [], attribute_protos=[default])
    graph = helper.make_graph([node], "g", [], [], [outside("initializer")])
    graph.sparse_initializer.append(sparse)
    model = helper.make_model(graph, functions=[function])
    model.training_info.add(initialization=helper.make_graph([], "g", [], [], [outside("training")]))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    assert read_header(tmp_path / "model.onnx").external_files == {
        "attribute", "one", "two", "values", "indices", "subgraph", "subgraphs", "function", "default",
        "initializer", "training",
    }  # fmt: skip
