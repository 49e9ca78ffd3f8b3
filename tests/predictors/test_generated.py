"""Published files that are generated: the manifest's JSON Schema, which real manifests fit, and the code of the .proto."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema

from predictors.manifest import FORMAT_VERSION, manifest_schema
from predictors.proto.generate import ROOT, generate

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


def test_checked_in_code_is_what_the_proto_generates(tmp_path: Path) -> None:
    assert generate(tmp_path) == 0
    fresh = [path.relative_to(tmp_path) for path in tmp_path.rglob("*.py*")]
    assert len(fresh) == 6
    for path in fresh:
        advice = f"run python -m predictors.proto.generate ({path.name})"
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), advice
