from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

from predictors.artifact import (
    FORMAT_VERSION,
    Conditions,
    Manifest,
    content_version,
    hash_files,
    open_artifact,
    write_manifest,
)
from predictors.manifest import checked_temperature, parse_manifest
from predictors.runtime import open_runtime
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.json_text import read_json_object
from tests.predictors.fakes import NU, RICH, write_artifact, write_rich_artifact


def change_manifest(folder: Path, *, with_version: bool = False, **changes: Any) -> None:
    """Edits manifest.json; `with_version`: its version is made that of the new content."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text()) | changes
    if with_version:
        content["artifact_version"] = content_version(content)
    path.write_text(json.dumps(content))


def content_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return content


def parse(content: dict[str, Any], **changes: Any) -> Manifest:
    """The manifest of changed content, whose version is made to fit unless it is among the changes."""
    changed = content | changes
    version = content_version(changed)
    return parse_manifest(
        changed if "artifact_version" in changes else changed | {"artifact_version": version}
    )


def test_manifest_reads_back_as_written(artifact_folder: Path) -> None:
    manifest = open_artifact(artifact_folder).manifest
    assert manifest.artifact_id == "tiny"
    assert manifest.nu == NU
    assert manifest.served_models == ("tiny-llm",)
    assert [tensor.name for tensor in manifest.outputs] == ["mu", "sigma"]
    assert manifest.inputs[0].shape == ("batch", "seq")
    assert set(manifest.files) == {"model.onnx", "tokenizer.json", "normalization.json"}


def test_version_follows_the_content(artifact_folder: Path, tmp_path: Path) -> None:
    content = content_of(artifact_folder)
    version = content["artifact_version"]
    assert version == content_version(dict(reversed(content.items())))
    assert re.fullmatch("[0-9a-f]{12}", version)
    same = {"created": "2027-01-01T00:00:00+00:00", "artifact_version": "another"}
    assert content_version(content | same | {"files": content["files"] | {"run.json": "0" * 64}}) == version
    assert content_version(content | {"files": content["files"] | {"model.onnx.data": "0" * 64}}) != version
    others = [write_artifact(tmp_path / str(nu), nu=nu) for nu in (3.5, 3.6)]
    versions = [open_artifact(folder).manifest.artifact_version for folder in others]
    assert versions[0] == version != versions[1]
    prefixed = open_artifact(write_artifact(tmp_path / "prefixed", artifact_version="1.2+x")).manifest
    assert prefixed.artifact_version == f"1.2+x+{version}"


# Edits that leave every field in its range, of the artifact with all heads and a calibration.
EDITS: dict[str, Any] = {
    "artifact_id": "another",
    "artifact_version": "0123456789ab",
    "heads": ["urgency", "length", "bucket", "regression", "rank"],
    "files": {"model.onnx": "0" * 64, "tokenizer.json": "0" * 64, "normalization.json": "0" * 64},
    "opset": {"ai.onnx": 19},
    "encoder": {
        "architecture": "bag",
        "source": "fake",
        "num_parameters": 33,
        "num_layers": None,
        "width": 2,
    },
    "precision": "int8",
    "variant": {"name": "int8"},
    "max_length": 17,
    "truncation_side": "left",
    "pad_token_id": 1,
    "conversations": True,
    "served_models": ["huge-llm", "tiny-llm"],
    "conditioning": {"unknown_models": False, "temperature": True},
    "urgency_levels": ["soon", "now", "late"],
    "abstain_threshold": 0.5,
    "bucket_edges": [200.0],
    "calibration": {"sigma_scale": [1.0, 1.0, 2.0], "mu_shift": [0.0, 0.0, 0.0]},
    "training_data": {"name": "x"},
    "metrics": {"x": 1},
    "parity": {"x": 1},
    "versions": {"x": "1"},
    "license": "MIT",
}
# Fields whose other values contradict one that follows from them: see `test_wrong_field_is_named`.
IMPLIED = {"format_version", "inputs", "outputs", "tokenizer_files", "nu", "within"}


@pytest.mark.parametrize("field", EDITS)
def test_an_edited_number_is_another_version(rich_folder: Path, field: str) -> None:
    content = content_of(rich_folder)
    assert content[field] != EDITS[field]
    with pytest.raises(
        InputError, match="artifact manifest, artifact_version: got .*changed after the export"
    ):
        parse_manifest(content | {field: EDITS[field]})
    if field != "artifact_version":
        parse(content, **{field: EDITS[field]})


def test_every_field_is_edited(rich_folder: Path) -> None:
    fields = set(content_of(rich_folder))
    assert fields == EDITS.keys() | IMPLIED | {"created"}
    assert fields - {"license"} <= {row[0] for row in WRONG} | {row[0] for row in WRONG_OF_RICH}
    for field in fields:
        content = content_of(rich_folder)
        del content[field]
        with pytest.raises(InputError, match=f"artifact manifest, {field}"):
            parse_manifest(content)


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
    change_manifest(folder, format_version=FORMAT_VERSION + 1, something_new={})
    with pytest.raises(InputError, match=r"format_version: got \d+; allowed: .*upgrade"):
        open_artifact(folder)


def test_older_format_asks_for_a_new_export(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "a")
    change_manifest(folder, format_version=4)
    with pytest.raises(InputError, match=r"format_version: got 4; allowed: .*export it again"):
        open_artifact(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not empty"),
        (b"{", "valid JSON"),
        (b"[]", "a JSON object"),
        (b"\x00", "valid JSON"),
        (b"\xff\xfe\x00", "valid JSON"),
        (b'{"format_version": true}', "format_version: got True"),
        (b'{"nu": 1, "a": {"b": 1, "b": 2}}', "the key 'b' stands twice"),
        (b'{"nu": NaN}', "NaN is not a finite number"),
        (b'{"nu": -Infinity}', "-Infinity is not a finite number"),
        (b'{"nu": 1e999}', "1e999 is not a finite number"),
        (b'{"nu": ' + b"1" * 5000 + b"}", "valid JSON"),
        (b'{"a": ' * 101 + b"1" + b"}" * 101, "deeper than 100 levels"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    ],
)
def test_broken_json_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    folder = write_artifact(tmp_path / "a")
    (folder / "manifest.json").write_bytes(text)
    with pytest.raises(InputError, match=rf"^artifact.*{re.escape(message)}"):
        open_artifact(folder)
    # The same in another file of an artifact whose hashes are right.
    folder = write_artifact(tmp_path / "b")
    (folder / "normalization.json").write_bytes(text)
    if "format_version" not in message:
        change_manifest(folder, with_version=True, files=hash_files(folder))
        with pytest.raises(InputError, match=rf"^artifact file normalization.json.*{re.escape(message)}"):
            open_artifact(folder)


def test_json_of_a_hundred_levels_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": ' * 100 + "1" + "}" * 100)
    assert read_json_object(tmp_path / "a.json", "x")["a"]["a"]


ENCODER = {"architecture": "bag", "source": "fake", "num_parameters": 32, "num_layers": None, "width": 2}
TABLES = {"sigma_scale": [1.0], "mu_shift": [0.0]}
WRONG: list[tuple[str, object, str]] = [
    # field, value, what the error names
    *((field, value, field) for field, values in {
        "artifact_id": ["", 1, None, "a\nb", "x" * 501],
        "artifact_version": ["", 1, None],
        "created": ["", "now", "2026-01-02", "2026-01-02T03:04:05", "2026-01-02T03:04:05+01:00", 1],
        "heads": [[], None, "length", ["mood"], ["length", "length"], [1]],
        "files": [None, {}, [], {"model.onnx": "0" * 64}],
        "opset": [None, {}, [], {"ai.onnx": 20, "org.example": 1}, {"ai.onnx": 99}, {"ai.onnx": 12}],
        "encoder": [None, [], {}, ENCODER | {"more": 1}],
        "precision": ["fp8", None, 32],
        "variant": [[], None],
        "nu": [0, -1, 0.09, 1e10, 10**400, True, "3.5", [3.5]],
        "within": [1, None, "false"],
        "max_length": [0, -1, 1.5, 16.0, True, "16", None, 10**7, 10**30],
        "truncation_side": ["top", None, 1],
        "pad_token_id": [-1, 0.0, True, None, 2**31],
        "conversations": [0, None, "true"],
        "served_models": ["tiny-llm", [1], ["a", "a"], [""], None],
        "conditioning": [True, [], {}],
        "urgency_levels": ["now", ["now", "late"], None],
        "abstain_threshold": [0.5, True, "0.5"],
        "bucket_edges": [[100.0], None, 100.0],
        "calibration": [
            [], None, {"sigma_scale": [1.0]}, TABLES | {"x": [1.0]}, TABLES | {"sigma_scale": [0.0]},
            TABLES | {"mu_shift": [0.0, 0.0]}, TABLES | {"mu_shift": ["0"]}, TABLES | {"mu_shift": [1e7]},
        ],
        "training_data": [[], None],
        "metrics": [[], None],
        "parity": [[], None],
        "versions": [[], None, {"torch": 2}],
        "license": [1, ""],
        "inputs": [None, [], [{"name": "input_ids"}]],
        "outputs": [None, [], [{"name": "mu", "dtype": "float32", "shape": ["batch"], "unit": "log tokens"}]],
        "tokenizer_files": [[], None, ["other.json"]],
        "format_version": [True, None, "6", 6.0, 0],
        "something_new": [1],
    }.items() for value in values),
    ("files", {"model.onnx": "abc"}, "files, model.onnx"),
    ("files", {"model.onnx": "A" * 64}, "files, model.onnx"),
    *(("files", {name: "0" * 64}, f"files, {name}") for name in (
        "../secret", "/etc/passwd", "sub/file", "..", ".", "", ".hidden", "a\\b", "x" * 256,
    )),
    ("opset", {"ai.onnx": True}, "opset, ai.onnx"),
    ("opset", {"ai.onnx": 18.0}, "opset, ai.onnx"),
    *(("encoder", ENCODER | {name: value}, f"encoder, {name}") for name, value in (
        ("architecture", ""), ("source", 1), ("num_parameters", 0), ("num_parameters", 10**14), ("num_layers", 0),
        ("num_layers", 10**5), ("width", 0), ("width", 10**7), ("width", 2.0),
    )),
]  # fmt: skip
WRONG_OF_RICH: list[tuple[str, object, str]] = [
    ("urgency_levels", ["now"], "urgency_levels"),
    ("urgency_levels", ["now", "now", "late"], "urgency_levels"),
    ("urgency_levels", ["now", "late"], "outputs"),
    ("abstain_threshold", 1.5, "abstain_threshold"),
    ("abstain_threshold", -0.1, "abstain_threshold"),
    ("bucket_edges", [], "bucket_edges"),
    ("bucket_edges", [200.0, 100.0], "bucket_edges"),
    ("bucket_edges", [100.0, 100.0], "bucket_edges"),
    ("bucket_edges", [0], "bucket_edges, 0"),
    ("bucket_edges", [1e10], "bucket_edges, 0"),
    ("bucket_edges", ["2"], "bucket_edges, 0"),
    ("bucket_edges", [100.0, 200.0], "outputs"),
    ("served_models", [], "served_models"),
    ("nu", 3.5, "outputs"),
    ("within", True, "outputs"),
    ("heads", ["urgency", "bucket"], "outputs"),
    ("heads", ["length"], "urgency_levels|abstain_threshold"),
    ("conditioning", None, "inputs"),
    ("conditioning", {"unknown_models": 1, "temperature": True}, "conditioning, unknown_models"),
    ("conditioning", {"unknown_models": True, "temperature": False}, "inputs"),
    ("conditioning", {"unknown_models": True, "temperature": True, "x": 1}, "conditioning, x"),
    ("calibration", TABLES, "calibration"),
]


@pytest.mark.parametrize(("field", "value", "named"), WRONG)
def test_wrong_field_is_named(artifact_folder: Path, field: str, value: object, named: str) -> None:
    with pytest.raises(InputError, match=f"^artifact manifest, {re.escape(named)}[^:]*: got") as caught:
        parse(content_of(artifact_folder), **{field: value})
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(("field", "value", "named"), WRONG_OF_RICH)
def test_fields_that_contradict_each_other_are_named(
    rich_folder: Path, field: str, value: object, named: str
) -> None:
    with pytest.raises(InputError, match=f"^artifact manifest, ({named}): got"):
        parse(content_of(rich_folder), **{field: value})


@pytest.mark.parametrize("name", ["notes.txt", ".hidden", "model.onnx.data", "folder", ".tailcast.jsonl"])
def test_what_the_manifest_does_not_list_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_artifact(tmp_path / "a")
    (folder / ".tailcast.json").write_text("{}")
    open_artifact(folder)
    if name == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).write_text("x")
    with pytest.raises(InputError, match=rf"artifact: got \['{re.escape(name)}'\]; allowed: .*no other"):
        open_artifact(folder)


@pytest.mark.parametrize("name", ["manifest.json", "model.onnx", "tokenizer.json"])
def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_artifact(tmp_path / "a")
    (tmp_path / "current").symlink_to(folder)
    open_artifact(tmp_path / "current")
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(InputError, match=rf"artifact file {name}: got .*inside the artifact folder"):
        open_artifact(folder)


@pytest.mark.parametrize("location", ["weights.bin", "../weights.bin", "/etc/passwd", "sub/w", ""])
@pytest.mark.parametrize("nested", [False, True], ids=["initializer", "attribute of a subgraph"])
def test_weights_outside_the_listed_files_are_refused(tmp_path: Path, location: str, nested: bool) -> None:
    folder = write_artifact(tmp_path / "a")
    model = onnx.load(folder / "model.onnx")
    tensor = next(each for each in model.graph.initializer if each.name == "table")
    outside = onnx.TensorProto(name="outside", dims=tensor.dims, data_type=tensor.data_type)
    outside.data_location = onnx.TensorProto.EXTERNAL
    outside.external_data.add(key="location", value=location)
    if nested:
        node = helper.make_node("Constant", [], ["value"], value=outside)
        branch = helper.make_graph([node], "branch", [], [])
        model.graph.node.append(helper.make_node("If", ["c"], ["o"], then_branch=branch, else_branch=branch))
    else:
        model.graph.initializer.append(outside)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    change_manifest(folder, with_version=True, files=hash_files(folder))
    with pytest.raises(
        InputError, match=rf"model\.onnx, external data: got \['{location}'\]; allowed: files that"
    ):
        open_artifact(folder)


def test_listed_external_weights_are_read(tmp_path: Path, artifact_folder: Path) -> None:
    folder = write_artifact(tmp_path / "a")
    model = onnx.load(folder / "model.onnx")
    onnx.save(
        model,
        folder / "model.onnx",
        save_as_external_data=True,
        location="model.onnx.data",
        size_threshold=64,
    )
    write_manifest(folder, open_artifact(artifact_folder).manifest)
    assert "model.onnx.data" in open_artifact(folder).manifest.files
    inside, outside = (open_runtime(each).predict(["sea"]).mu for each in (artifact_folder, folder))
    assert inside == outside
    (folder / "model.onnx.data").write_bytes(b"\0" * 200)
    with pytest.raises(InputError, match=r"model\.onnx\.data: got 'SHA-256"):
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
    manifest = Manifest.draft(
        artifact_id="x",
        artifact_version="1",
        created="2026-01-02T03:04:05+00:00",
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


FUZZED = ("manifest.json", "model.onnx", "tokenizer.json", "normalization.json")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FUZZED), where=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255))
def test_a_changed_byte_is_refused_or_changes_nothing(
    artifact_folder: Path, tmp_path: Path, name: str, where: float, mask: int
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(artifact_folder, folder, dirs_exist_ok=True)
    content = bytearray((folder / name).read_bytes())
    content[int(where * len(content))] ^= mask
    (folder / name).write_bytes(content)
    try:
        runtime = open_runtime(folder, provider="cpu")
    except TailcastError:
        return
    assert name == "manifest.json"  # spaces, or the time of the export
    assert runtime.predict(["sea"]).mu == open_runtime(artifact_folder, provider="cpu").predict(["sea"]).mu


@pytest.mark.parametrize("name", ["model.onnx", "tokenizer.json"])
@pytest.mark.parametrize("part", [0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
def test_a_truncated_file_with_the_right_hash_is_one_line(tmp_path: Path, name: str, part: float) -> None:
    folder = write_artifact(tmp_path / "a")
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int(part * len(content))])
    change_manifest(folder, with_version=True, files=hash_files(folder))
    with pytest.raises(InputError, match=f"^artifact file {name}") as caught:
        open_runtime(folder)
    assert len(str(caught.value).splitlines()) == 1
