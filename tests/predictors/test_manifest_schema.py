"""The published JSON Schema: it is the one of the types, real manifests fit it, and it refuses wrong fields."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from predictors.artifact import FORMAT_VERSION
from predictors.manifest import manifest_schema

SCHEMA = json.loads(
    resources.files("predictors").joinpath("manifest.schema.json").read_text(encoding="utf-8")
)


def errors(content: object) -> list[str]:
    validator = jsonschema.Draft202012Validator(SCHEMA)
    return [error.json_path for error in validator.iter_errors(content)]


def read(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return content


def test_schema_is_that_of_the_types() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert manifest_schema() == SCHEMA, "python -m predictors.manifest > predictors/manifest.schema.json"
    assert SCHEMA["properties"]["format_version"]["const"] == FORMAT_VERSION


def test_manifests_fit(artifact_folder: Path, rich_folder: Path) -> None:
    for folder in (artifact_folder, rich_folder):
        assert errors(read(folder)) == []
        assert read(folder).keys() == SCHEMA["properties"].keys() == set(SCHEMA["required"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format_version", 4),
        ("heads", []),
        ("heads", ["mood"]),
        ("nu", 0),
        ("nu", True),
        ("max_length", 0),
        ("truncation_side", "top"),
        ("encoder", {}),
        ("precision", "fp8"),
        ("served_models", ["a", "a"]),
        ("files", {"../x": "a" * 64}),
        ("files", {"model.onnx": "abc"}),
        ("abstain_threshold", 1.5),
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
