"""Checking a manifest: the fields by the types of `predictors.manifest`, then what they say together."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from predictors.manifest import (
    CAPPED_MODEL,
    FORMAT_VERSION,
    MODEL,
    NORMALIZATION,
    TOKENIZER,
    Manifest,
    TensorSpec,
)
from predictors.onnx_header import check_opset
from scheduler_core.errors import InputError

MANIFEST = "manifest.json"
SIGNATURE = "manifest.json.minisig"

# Fields of the file that follow from the others: compared, not read.
_DERIVED = ("format_version", "tokenizer_files", "inputs", "outputs")
# Not part of the version: an export that is repeated elsewhere, at another time, gives the same one.
_UNVERSIONED = ("artifact_version", "created")
_RUN = "run.json"
_CALIBRATION = ("sigma_scale", "mu_shift")


def content_version(content: Mapping[str, Any]) -> str:
    """Twelve hex digits of the SHA-256 of a manifest's canonical JSON (keys sorted, no spaces, ASCII).

    Args:
        content: The parsed JSON; its fields artifact_version and created, and the hash of run.json, are left out.
    """
    versioned = {name: value for name, value in content.items() if name not in _UNVERSIONED}
    if isinstance(versioned.get("files"), Mapping):
        versioned["files"] = {name: digest for name, digest in versioned["files"].items() if name != _RUN}
    return hashlib.sha256(_canonical(versioned).encode()).hexdigest()[:12]


def parse_manifest(content: Mapping[str, Any]) -> Manifest:
    """The manifest that `content`, the parsed JSON, describes.

    Raises:
        InputError: The format is of another version, a field is missing, unknown, wrong or contradicts another one, or
            the artifact version is not that of the content.
    """
    _check_format(content.get("format_version"))
    fields = {name: value for name, value in content.items() if name not in _DERIVED}
    if isinstance(fields.get("capped"), dict):
        derived = ("inputs", "outputs")
        fields["capped"] = {name: value for name, value in fields["capped"].items() if name not in derived}
    try:
        # Of JSON text, for which pydantic's strict mode takes an array for a tuple.
        manifest = _adapter().validate_json(json.dumps(fields))
    except ValidationError as error:
        raise _input_error(error.errors(include_url=False)[0]) from error
    for name, allowed in _contradictions(manifest):
        raise _wrong(name, fields.get(name.partition(",")[0]), allowed)
    check_opset(manifest.opset, "artifact manifest")
    _check_derived(content, manifest)
    version = content_version(content)
    if manifest.artifact_version.rpartition("+")[2] != version:
        allowed = f"{version}, which follows from the rest of the manifest: it was changed after the export"
        raise _wrong("artifact_version", manifest.artifact_version, allowed)
    return manifest


def manifest_schema() -> dict[str, Any]:
    """JSON Schema of manifest.json, made from the types; rules between fields are not in it."""
    schema = _adapter().json_schema(mode="serialization")
    schema["$defs"]["TensorSpec"] = TypeAdapter(TensorSpec).json_schema(mode="serialization")
    schema["properties"]["files"]["additionalProperties"] = False  # names of another pattern
    tensors = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/TensorSpec"}}
    derived = {
        "format_version": {"const": FORMAT_VERSION},
        "tokenizer_files": {"type": "array", "items": {"type": "string"}},
        "inputs": tensors,
        "outputs": tensors,
    }
    for part, names in ((schema, _DERIVED), (schema["$defs"]["CappedLengths"], ("inputs", "outputs"))):
        part["properties"] |= {name: derived[name] for name in names}
        part["required"] = sorted(part["properties"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:tailcast:artifact-manifest:{FORMAT_VERSION}",
        **schema,
        "title": f"tailcast artifact manifest, format {FORMAT_VERSION}",
    }


@functools.cache
def _adapter() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def _check_format(version: object) -> None:
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise _wrong("format_version", version, str(FORMAT_VERSION))
    if version != FORMAT_VERSION:
        older = "an older tailcast wrote this artifact: export it again"
        newer = "a newer tailcast wrote this artifact: upgrade"
        reason = older if version < FORMAT_VERSION else newer
        raise _wrong("format_version", version, f"{FORMAT_VERSION}; {reason}")


def _contradictions(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Fields that others do not allow, and what they allow."""
    is_encoder, heads = manifest.kind == "encoder", manifest.heads
    for name in ("encoder", "max_length", "truncation_side", "pad_token_id"):
        if (getattr(manifest, name) is not None) is not is_encoder:
            yield name, "a value of an encoder, null of a lexical artifact"
    if not is_encoder and manifest.lexical is None:
        yield "lexical", "an object, because of kind lexical"
    for name in ("nu", "within", "capped"):
        if "length" not in heads and getattr(manifest, name):
            yield name, "null or false, because no length is predicted"
    if "urgency" not in heads and manifest.abstain_threshold is not None:
        yield "abstain_threshold", "null, because no urgency is predicted"
    if len(manifest.urgency_levels) < 2 if "urgency" in heads else manifest.urgency_levels:
        yield "urgency_levels", "two or more names with an urgency head, else none"
    if bool(manifest.bucket_edges) is not ("bucket" in heads):
        yield "bucket_edges", "one or more numbers of tokens with a bucket head, else none"
    if manifest.conditioning is not None and not manifest.served_models:
        yield "served_models", "one or more names, because of conditioning"
    if manifest.capped is not None and manifest.capped.has_nu is not (manifest.nu is None):
        yield "capped, has_nu", "true where nu is null, else false"
    tables = manifest.calibration
    rows = 1 if manifest.conditioning is None else len(manifest.served_models) + 1
    if tables and (
        {name: len(table) for name, table in tables.items()} != dict.fromkeys(_CALIBRATION, rows)
        or min(tables["sigma_scale"]) <= 0
    ):
        yield "calibration", f"empty, or {rows} numbers each: sigma_scale, all above 0, and mu_shift"
    for name in (MODEL, TOKENIZER, NORMALIZATION) if is_encoder else (MODEL,):
        if name not in manifest.files:
            yield "files", f"an object with {name}"
    if (CAPPED_MODEL in manifest.files) is (manifest.capped is None):
        yield "files", f"{CAPPED_MODEL} where capped is set, and only there"
    if {MANIFEST, SIGNATURE} & manifest.files.keys():
        yield "files", "neither the manifest nor its signature"
    if not manifest.opset:
        yield "opset", "an object of operator set: version"


def _check_derived(content: Mapping[str, Any], manifest: Manifest) -> None:
    expected = manifest.to_json()
    for name, value in expected.items():
        if name not in content:
            raise _wrong(name, "no such field", "a value: the field is required")
        if name in _DERIVED and _canonical(content[name]) != _canonical(value):
            raise _wrong(name, content[name], f"{_canonical(value)}, as the other fields imply")
    if manifest.capped is not None:
        for name in ("inputs", "outputs"):
            actual, value = content["capped"].get(name), expected["capped"][name]
            if _canonical(actual) != _canonical(value):
                raise _wrong(f"capped, {name}", actual, f"{_canonical(value)}, as the other fields imply")


def _canonical(content: object) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _input_error(error: ErrorDetails) -> InputError:
    """A pydantic error as the project's: the field by its path, and what is allowed there."""
    path = [str(step) for step in error["loc"] if step != "[key]"]
    name, kind = ", ".join(path), error["type"]
    if kind == "unexpected_keyword_argument":
        return _wrong(name, error["input"], f"no field of this name in format {FORMAT_VERSION}")
    if kind in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return _wrong(name, "no such field", "a value: the field is required")
    if kind == "value_error":
        return _wrong(name, error["input"], str(error["ctx"]["error"]))
    if kind == "json_invalid":
        return InputError("artifact manifest", "its JSON", f"JSON that pydantic reads ({error['msg']})")
    return _wrong(name, error["input"], re.sub(r"^\w+ should (be|have|match) ", "", error["msg"]))


def _wrong(name: str, value: object, allowed: str) -> InputError:
    return InputError(f"artifact manifest, {name}", value, allowed)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(manifest_schema(), indent=2, sort_keys=True) + "\n")
