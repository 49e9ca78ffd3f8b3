"""The artifact folder: what export writes and every consumer verifies before use.

An artifact holds `model.onnx` and `manifest.json`, and for an encoder `tokenizer.json` and `normalization.json`. The
manifest names every file with its SHA-256, so that a folder is either exactly what was exported or is refused; a
signature of the manifest, where there is one, says by whom. Nothing here needs torch or onnxruntime.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from predictors.manifest import (
    CAPPED_MODEL,
    CONFORMAL,
    FORMAT_VERSION,
    MODEL,
    NORMALIZATION,
    TOKENIZER,
    CappedLengths,
    Conditions,
    EncoderCard,
    Kind,
    LexicalInput,
    Manifest,
    Precision,
    TensorSpec,
    TruncationSide,
)
from predictors.manifest_reader import MANIFEST, SIGNATURE, parse_manifest
from predictors.minisign import read_public_key, verify_file
from predictors.onnx_header import read_opset
from scheduler_core.errors import InputError
from scheduler_core.files import existing_file, sha256_file, write_json

__all__ = [
    "CAPPED_MODEL",
    "CONFORMAL",
    "FORMAT_VERSION",
    "MANIFEST",
    "MODEL",
    "NORMALIZATION",
    "SIGNATURE",
    "TOKENIZER",
    "Artifact",
    "CappedLengths",
    "Conditions",
    "EncoderCard",
    "Kind",
    "LexicalInput",
    "Manifest",
    "Precision",
    "TensorSpec",
    "TruncationSide",
    "content_version",
    "hash_files",
    "open_artifact",
    "write_manifest",
]


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
        """The tokenizer in the format of the `tokenizers` package; a lexical artifact has none."""
        return self.path / TOKENIZER

    @property
    def capped_model_path(self) -> Path:
        """The graph of the capped length; there is one where the manifest's `capped` is set."""
        return self.path / CAPPED_MODEL


def open_artifact(path: str | Path, *, public_key: str | Path | None = None) -> Artifact:
    """Reads and verifies an artifact folder.

    Args:
        path: The folder.
        public_key: A minisign public key, file or base64 line: the manifest must be signed with it. Unset: a signature
            is not looked at.

    Raises:
        InputError: The folder, its manifest or a file is missing, the format is of another version, a manifest field
            is wrong, a file's SHA-256 or the graph's opset differs from the manifest, or the signature is missing or
            wrong.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise InputError("artifact", str(path), "an existing artifact folder, as export-onnx writes it")
    manifest_path = existing_file(folder / MANIFEST, "artifact")
    if public_key is not None:
        verify_file(manifest_path, read_public_key(public_key))
    manifest = _read_manifest(manifest_path)
    for name, expected in manifest.files.items():
        file = folder / name
        if not file.is_file():
            raise InputError(
                f"artifact file {name}", str(file), "a file that the manifest lists and that exists"
            )
        actual = sha256_file(file)
        if actual != expected:
            raise InputError(f"artifact file {name}", f"SHA-256 {actual}", f"{expected}, as in {MANIFEST}")
    opset = read_opset(folder / MODEL)
    if opset != manifest.opset:
        raise InputError(f"artifact file {MODEL}, opset", opset, f"{dict(manifest.opset)}, as in {MANIFEST}")
    return Artifact(folder, manifest)


def write_manifest(folder: str | Path, manifest: Manifest) -> None:
    """Writes `manifest` into `folder`, with the opset of the graph that stands there.

    Raises:
        InputError: A field is wrong or contradicts another one, so that it would not be read back, or the graph is of
            an opset that is not accepted.
    """
    content = replace(manifest, opset=read_opset(Path(folder) / MODEL)).to_json()
    parsed = parse_manifest(json.loads(json.dumps(content, allow_nan=False)))
    assert parsed.files == manifest.files
    write_json(Path(folder) / MANIFEST, content)


def hash_files(folder: str | Path) -> dict[str, str]:
    """File name -> SHA-256 of every file in `folder` but the manifest and its signature."""
    return {
        file.name: sha256_file(file)
        for file in sorted(Path(folder).iterdir())
        if file.is_file() and file.name not in (MANIFEST, SIGNATURE)
    }


def content_version(files: Mapping[str, str]) -> str:
    """Twelve hex digits that change with model, tokenizer, normalisation or conformal quantiles, and with nothing else."""
    digest = hashlib.sha256()
    for name in sorted(files):
        if name in (TOKENIZER, NORMALIZATION, CAPPED_MODEL, CONFORMAL) or name.startswith(MODEL):
            digest.update(f"{name}:{files[name]}\n".encode())
    return digest.hexdigest()[:12]


def _read_manifest(path: Path) -> Manifest:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise InputError("artifact manifest", str(path), f"a file with valid JSON ({error})") from error
    return parse_manifest(content)
