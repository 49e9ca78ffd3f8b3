"""The artifact folder: what export writes and every consumer verifies before use.

An artifact holds `model.onnx`, `tokenizer.json`, `normalization.json` and `manifest.json`. The manifest names every
file with its SHA-256, so that a folder is either exactly what was exported or is refused. Nothing here needs torch or
onnxruntime.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from scheduler_core.errors import InputError
from scheduler_core.files import existing_file, sha256_file, write_json

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
MODEL = "model.onnx"
TOKENIZER = "tokenizer.json"
NORMALIZATION = "normalization.json"
REQUIRED_FILES = (MODEL, TOKENIZER, NORMALIZATION)

TruncationSide = Literal["left", "right"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One input or output of the graph; a dimension is a size or the name of a free axis."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    unit: str


INPUTS = (
    TensorSpec(name="input_ids", dtype="int64", shape=("batch", "seq"), unit="token id"),
    TensorSpec(name="attention_mask", dtype="int64", shape=("batch", "seq"), unit="1 = token, 0 = padding"),
)
OUTPUTS = (
    TensorSpec(name="mu", dtype="float32", shape=("batch",), unit="log tokens"),
    TensorSpec(name="sigma", dtype="float32", shape=("batch",), unit="log tokens"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Content of `manifest.json`.

    Attributes:
        artifact_id: Name of what is predicted with, chosen at export.
        artifact_version: Changes whenever model, tokenizer or normalisation change.
        created: Time of export, ISO 8601 in UTC.
        nu: Degrees of freedom of the log-t length distribution.
        max_length: Most tokens the model reads, special tokens included.
        truncation_side: The end of a longer prompt that is dropped.
        pad_token_id: Token id of padding.
        files: File name -> hex SHA-256 of every file but the manifest.
        served_models: LLMs whose lengths the artifact predicts; empty if not declared.
        training_data: What it was trained on: file name and SHA-256.
        metrics: Metrics of the checkpoint, as training wrote them.
        parity: Shape ("batch x seq") -> largest absolute difference between torch and ONNX Runtime.
        versions: Package -> version at export.
        license: Licence of the artifact, if stated.
        inputs, outputs: Tensors of the graph.
    """

    artifact_id: str
    artifact_version: str
    created: str
    nu: float
    max_length: int
    truncation_side: TruncationSide
    pad_token_id: int
    files: Mapping[str, str]
    served_models: tuple[str, ...] = ()
    training_data: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    parity: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    license: str | None = None
    inputs: tuple[TensorSpec, ...] = INPUTS
    outputs: tuple[TensorSpec, ...] = OUTPUTS


@dataclass(frozen=True, slots=True)
class Artifact:
    """A verified artifact folder."""

    path: Path
    manifest: Manifest

    @property
    def model_path(self) -> Path:
        """The ONNX graph."""
        return self.path / MODEL

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer in the format of the `tokenizers` package."""
        return self.path / TOKENIZER


def open_artifact(path: str | Path) -> Artifact:
    """Reads and verifies an artifact folder.

    Raises:
        InputError: The folder, its manifest or a file is missing, the format is newer than this program, a manifest
            field is wrong, or a file's SHA-256 differs from the manifest.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise InputError("artifact", str(path), "an existing artifact folder, as export-onnx writes it")
    manifest = _read_manifest(existing_file(folder / MANIFEST, "artifact"))
    for name, expected in manifest.files.items():
        file = folder / name
        if not file.is_file():
            raise InputError(
                f"artifact file {name}", str(file), "a file that the manifest lists and that exists"
            )
        actual = sha256_file(file)
        if actual != expected:
            raise InputError(f"artifact file {name}", f"SHA-256 {actual}", f"{expected}, as in {MANIFEST}")
    return Artifact(folder, manifest)


def write_manifest(folder: str | Path, manifest: Manifest) -> None:
    """Writes `manifest` into `folder`, after checking that it reads back as the same manifest.

    Raises:
        InputError: A field could not be read back.
    """
    content = {"format_version": FORMAT_VERSION, **asdict(manifest)}
    parsed = _parse(json.loads(json.dumps(content, allow_nan=False)))
    assert parsed.files == manifest.files
    write_json(Path(folder) / MANIFEST, content)


def hash_files(folder: str | Path) -> dict[str, str]:
    """File name -> SHA-256 of every file in `folder` but the manifest."""
    return {
        file.name: sha256_file(file)
        for file in sorted(Path(folder).iterdir())
        if file.is_file() and file.name != MANIFEST
    }


def content_version(files: Mapping[str, str]) -> str:
    """Twelve hex digits that change with the model, tokenizer or normalisation, and with nothing else."""
    digest = hashlib.sha256()
    for name in sorted(files):
        if name in REQUIRED_FILES or name.startswith(MODEL):
            digest.update(f"{name}:{files[name]}\n".encode())
    return digest.hexdigest()[:12]


def _read_manifest(path: Path) -> Manifest:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise InputError("artifact manifest", str(path), f"a file with valid JSON ({error})") from error
    return _parse(content)


def _parse(content: object) -> Manifest:
    if not isinstance(content, dict):
        raise InputError("artifact manifest", content, "a JSON object")
    _check_format(content.get("format_version"))
    side = _text(content, "truncation_side")
    if side not in ("left", "right"):
        raise _wrong("truncation_side", side, "left or right")
    served = content.get("served_models", [])
    if not isinstance(served, list) or not all(isinstance(name, str) and name for name in served):
        raise _wrong("served_models", served, "a list of names")
    licence = content.get("license")
    if licence is not None and not isinstance(licence, str):
        raise _wrong("license", licence, "a string or null")
    return Manifest(
        artifact_id=_text(content, "artifact_id"),
        artifact_version=_text(content, "artifact_version"),
        created=_text(content, "created"),
        nu=_nu(content.get("nu")),
        max_length=_integer(content, "max_length", minimum=1),
        truncation_side=cast(TruncationSide, side),
        pad_token_id=_integer(content, "pad_token_id", minimum=0),
        files=_files(content.get("files")),
        served_models=tuple(served),
        training_data=_mapping(content, "training_data"),
        metrics=_mapping(content, "metrics"),
        parity=_mapping(content, "parity"),
        versions=_mapping(content, "versions"),
        license=licence,
        inputs=_tensors(content, "inputs", INPUTS),
        outputs=_tensors(content, "outputs", OUTPUTS),
    )


def _check_format(version: object) -> None:
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise _wrong("format_version", version, f"an integer from 1 to {FORMAT_VERSION}")
    if version > FORMAT_VERSION:
        raise _wrong(
            "format_version",
            version,
            f"at most {FORMAT_VERSION}; a newer tailcast wrote this artifact: upgrade",
        )


def _wrong(name: str, value: object, allowed: str) -> InputError:
    return InputError(f"artifact manifest, {name}", value, allowed)


def _text(content: Mapping[str, Any], name: str) -> str:
    value = content.get(name)
    if not isinstance(value, str) or not value:
        raise _wrong(name, value, "a string that is not empty")
    return value


def _integer(content: Mapping[str, Any], name: str, minimum: int) -> int:
    value = content.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise _wrong(name, value, f"an integer >= {minimum}")
    return value


def _nu(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not (0 < value < math.inf):
        raise _wrong("nu", value, "a finite number > 0")
    return float(value)


def _mapping(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = content.get(name, {})
    if not isinstance(value, dict):
        raise _wrong(name, value, "a JSON object")
    return value


def _files(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _wrong("files", value, "an object of file name: SHA-256")
    for name in REQUIRED_FILES:
        if name not in value:
            raise _wrong("files", sorted(value), f"a list with {name}")
    for name, digest in value.items():
        if not name or name in (".", "..", MANIFEST) or "/" in name or "\\" in name:
            raise _wrong("files", name, "names of files inside the artifact folder, without a path")
        if not isinstance(digest, str) or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise _wrong(f"files, {name}", digest, "a SHA-256 in lower-case hex")
    return value


def _tensors(
    content: Mapping[str, Any], name: str, required: tuple[TensorSpec, ...]
) -> tuple[TensorSpec, ...]:
    value = content.get(name)
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise _wrong(name, value, "a list of objects with name, dtype, shape and unit")
    tensors = []
    for entry in value:
        shape = entry.get("shape")
        if not isinstance(shape, list) or not all(isinstance(axis, int | str) for axis in shape):
            raise _wrong(f"{name}, shape", shape, "a list of sizes and axis names")
        tensors.append(
            TensorSpec(
                name=_text(entry, "name"),
                dtype=_text(entry, "dtype"),
                shape=tuple(shape),
                unit=_text(entry, "unit"),
            )
        )
    missing = {tensor.name for tensor in required} - {tensor.name for tensor in tensors}
    if missing:
        raise _wrong(name, [tensor.name for tensor in tensors], f"a list with {', '.join(sorted(missing))}")
    return tuple(tensors)
