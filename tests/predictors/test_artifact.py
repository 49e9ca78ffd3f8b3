from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import onnx
import pytest

from predictors.artifact import hash_files, open_artifact, write_manifest
from predictors.manifest import FORMAT_VERSION, Conditions, Manifest, content_version, parse_manifest
from predictors.runtime import open_runtime
from scheduler_core.errors import InputError
from tests.predictors.fakes import write_artifact


def change_manifest(folder: Path, **changes: Any) -> None:
    """Edits manifest.json; its version is made that of the new content."""
    content = content_of(folder) | changes
    content["artifact_version"] = content_version(content)
    (folder / "manifest.json").write_text(json.dumps(content))


def content_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return content


def parse(content: dict[str, Any], **changes: Any) -> Manifest:
    """The manifest of changed content, whose version is made to fit unless it is among the changes."""
    changed = content | changes
    return parse_manifest({**changed, "artifact_version": content_version(changed), **changes})


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


def test_every_field_is_needed_and_an_edited_one_is_another_version(rich_folder: Path) -> None:
    with pytest.raises(InputError, match="artifact_version: got .*changed after the export"):
        parse_manifest(content_of(rich_folder) | {"max_length": 17})
    for field in content_of(rich_folder):
        content = content_of(rich_folder)
        del content[field]
        with pytest.raises(InputError, match=f"artifact manifest, {field}"):
            parse_manifest(content)


@pytest.mark.parametrize("name", ["model.onnx", "tokenizer.json", "manifest.json"])
def test_changed_or_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_artifact(tmp_path / "a")
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-2])
    reason = "a file with valid JSON" if name == "manifest.json" else rf"artifact file {name}: got 'SHA-256"
    with pytest.raises(InputError, match=reason):
        open_artifact(folder)
    (folder / name).unlink()
    with pytest.raises(InputError, match=rf"{name}.*exist"):
        open_artifact(folder)
    with pytest.raises(InputError, match="nowhere"):
        open_artifact(tmp_path / "nowhere")


@pytest.mark.parametrize(("version", "advice"), [(FORMAT_VERSION + 1, "upgrade"), (4, "export it again")])
def test_another_format_tells_what_to_do(artifact_folder: Path, version: int, advice: str) -> None:
    with pytest.raises(InputError, match=rf"format_version: got \d+; allowed: .*{advice}"):
        parse_manifest(content_of(artifact_folder) | {"format_version": version, "something_new": {}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not empty"),
        (b"{", "valid JSON"),
        (b"\xff\xfe\x00", "valid JSON"),
        (b'{"format_version": true}', "format_version: got True"),
        (b'{"nu": 1, "a": {"b": 1, "b": 2}}', "the key 'b' stands twice"),
        (b'{"nu": NaN}', "NaN is not a finite number"),
        (b'{"a": ' * 101 + b"1" + b"}" * 101, "deeper than 100 levels"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_broken_json_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    folder = write_artifact(tmp_path / "a")
    (folder / "manifest.json").write_bytes(text)
    with pytest.raises(InputError, match=rf"^artifact.*{re.escape(message)}"):
        open_artifact(folder)


TABLES = {"sigma_scale": [1.0], "mu_shift": [0.0]}
ENCODER = {"architecture": "bag", "source": "fake", "num_parameters": 32, "num_layers": None, "width": 2}
WRONG: list[tuple[str, object, str]] = [
    # field, value, what the error names
    *((field, value, field) for field, values in {
        "artifact_id": ["", "a\nb", "x" * 501],
        "created": ["now", "2026-01-02T03:04:05", "2026-01-02T03:04:05+01:00", 1],
        "heads": [[], "length", ["mood"], ["length", "length"]],
        "files": [None, {}, {"model.onnx": "0" * 64}],
        "encoder": [None, {}, ENCODER | {"more": 1}],
        "nu": [0, 10**400, True, "3.5"],
        "max_length": [0, 16.0, True, None, 10**30],
        "served_models": ["tiny-llm", ["a", "a"], [""]],
        "urgency_levels": [["now", "late"]],
        "abstain_threshold": [0.5, "0.5"],
        "bucket_edges": [[100.0]],
        "calibration": [
            {"sigma_scale": [1.0]}, TABLES | {"x": [1.0]}, TABLES | {"sigma_scale": [0.0]},
            TABLES | {"mu_shift": [0.0, 0.0]}, TABLES | {"mu_shift": [1e7]},
        ],
        "license": [""],
        "inputs": [None, [], [{"name": "input_ids"}]],
        "outputs": [[{"name": "mu", "dtype": "float32", "shape": ["batch"], "unit": "log tokens"}]],
        "tokenizer_files": [["other.json"]],
        "format_version": [True, None, "6", 6.0, 0],
        "something_new": [1],
    }.items() for value in values),
    *(("files", {name: "0" * 64}, f"files, {name}") for name in (
        "../secret", "/etc/passwd", "sub/file", "..", "", ".hidden", "a\\b", "x" * 256,
    )),
    ("opset", {"ai.onnx": True}, "opset, ai.onnx"),
    ("encoder", ENCODER | {"num_parameters": 0}, "encoder, num_parameters"),
]  # fmt: skip
CONTRADICTIONS: list[tuple[str, object, str]] = [
    ("urgency_levels", ["now"], "urgency_levels"),
    ("bucket_edges", [], "bucket_edges"),
    ("bucket_edges", [200.0, 100.0], "bucket_edges"),
    ("served_models", [], "served_models"),
    ("nu", 3.5, "outputs"),
    ("heads", ["length"], "urgency_levels|abstain_threshold"),
    ("conditioning", None, "inputs"),
    ("conditioning", {"unknown_models": True, "temperature": False}, "inputs"),
    ("calibration", TABLES, "calibration"),
]


@pytest.mark.parametrize(("field", "value", "named"), WRONG)
def test_wrong_field_is_named(artifact_folder: Path, field: str, value: object, named: str) -> None:
    with pytest.raises(InputError, match=f"^artifact manifest, {re.escape(named)}[^:]*: got") as caught:
        parse(content_of(artifact_folder), **{field: value})
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(("field", "value", "named"), CONTRADICTIONS)
def test_fields_that_contradict_each_other_are_named(
    rich_folder: Path, field: str, value: object, named: str
) -> None:
    with pytest.raises(InputError, match=f"^artifact manifest, ({named}): got"):
        parse(content_of(rich_folder), **{field: value})


@pytest.mark.parametrize("name", ["notes.txt", ".hidden", "model.onnx.data", ".tailcast.jsonl"])
def test_what_the_manifest_does_not_list_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_artifact(tmp_path / "a")
    (folder / ".tailcast.json").write_text("{}")
    open_artifact(folder)
    (folder / name).mkdir()
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


@pytest.mark.parametrize("location", ["../weights.bin", "/etc/passwd", "sub/w", ""])
def test_weights_outside_the_folder_are_refused(tmp_path: Path, location: str) -> None:
    folder = write_artifact(tmp_path / "a")
    (tmp_path / "weights.bin").write_bytes(b"\0" * 4096)
    model = onnx.load(folder / "model.onnx")
    [tensor] = [each for each in model.graph.initializer if each.name == "table"]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    change_manifest(folder, files=hash_files(folder))
    with pytest.raises(InputError, match=r"artifact file model\.onnx: got .*xternal"):
        open_runtime(folder)


def test_listed_external_weights_are_read(tmp_path: Path, artifact_folder: Path) -> None:
    folder = write_artifact(tmp_path / "a")
    model = onnx.load(folder / "model.onnx")
    options = {"location": "model.onnx.data", "size_threshold": 64}
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, **options)
    write_manifest(folder, open_artifact(artifact_folder).manifest)
    assert "model.onnx.data" in open_artifact(folder).manifest.files
    inside, outside = (open_runtime(each).predict(["sea"]).mu for each in (artifact_folder, folder))
    assert inside == outside
    (folder / "model.onnx.data").write_bytes(b"\0" * 200)
    with pytest.raises(InputError, match=r"model\.onnx\.data: got 'SHA-256"):
        open_artifact(folder)


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
    manifest = Manifest.model_construct(served_models=served_models, conditioning=conditioning)
    for name, number in zip((None, "", "a", "b", "other"), numbers, strict=True):
        if number is None:
            with pytest.raises(InputError, match="served_model: got .*one of a"):
                manifest.served_model_number(name)
        else:
            assert manifest.served_model_number(name) == number
