"""The published JSON Schema: real manifests fit it, and it refuses what the reader refuses, as far as a schema can."""

from __future__ import annotations

import json
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from predictors.artifact import FORMAT_VERSION, Manifest
from predictors.manifest import HEADS, PRECISIONS, REQUIRED_FILES, TRUNCATION_SIDES
from predictors.onnx_header import OPSETS

SCHEMA = json.loads(
    resources.files("predictors").joinpath("manifest.schema.json").read_text(encoding="utf-8")
)
DERIVED = {"format_version", "tokenizer_files", "inputs", "outputs"}


def errors(content: object) -> list[str]:
    validator = jsonschema.Draft202012Validator(SCHEMA)
    return [error.json_path for error in validator.iter_errors(content)]


def read(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return content


def test_schema_is_one_and_knows_every_field() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert set(SCHEMA["properties"]) == {field.name for field in fields(Manifest)} | DERIVED
    assert SCHEMA["properties"]["format_version"]["const"] == FORMAT_VERSION
    assert SCHEMA["properties"]["heads"]["items"]["enum"] == list(HEADS)
    assert SCHEMA["properties"]["kind"]["enum"] == list(REQUIRED_FILES)
    assert SCHEMA["properties"]["precision"]["enum"] == list(PRECISIONS)
    assert SCHEMA["properties"]["truncation_side"]["enum"] == [*TRUNCATION_SIDES, None]
    assert SCHEMA["properties"]["opset"]["propertyNames"]["enum"] == list(OPSETS)


def test_manifests_fit(artifact_folder: Path, rich_folder: Path, lexical_folder: Path) -> None:
    for folder in (artifact_folder, rich_folder, lexical_folder):
        assert errors(read(folder)) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format_version", 2),
        ("kind", "oracle"),
        ("heads", []),
        ("heads", ["mood"]),
        ("nu", 0),
        ("max_length", 0),
        ("max_length", None),
        ("truncation_side", None),
        ("encoder", None),
        ("precision", "fp8"),
        ("opset", {}),
        ("opset", {"org.example": 1}),
        ("tokenizer_files", []),
        ("served_models", ["a", "a"]),
        ("files", {"model.onnx": "a" * 64}),
        ("files", {"../x": "a" * 64}),
        ("files", {"model.onnx": "abc"}),
        ("capped", {"cvar_level": 0.9}),
        ("abstain_threshold", 0.5),
        ("license", 1),
        ("inputs", []),
        ("inputs", [{"name": "x"}]),
        ("something_new", 1),
    ],
)
def test_wrong_field_is_refused(artifact_folder: Path, field: str, value: object) -> None:
    assert errors(read(artifact_folder) | {field: value})


@pytest.mark.parametrize("field", sorted(SCHEMA["required"]))
def test_missing_field_is_refused(artifact_folder: Path, field: str) -> None:
    content = read(artifact_folder)
    del content[field]
    assert errors(content)
