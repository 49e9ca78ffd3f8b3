"""The artifact folder: what export writes and every consumer verifies before use.

An artifact holds `model.onnx` and `manifest.json`, and for an encoder `tokenizer.json` and `normalization.json`. The
manifest names every file with its SHA-256, so that a folder is either exactly what was exported or is refused. Nothing
here needs torch or onnxruntime.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from predictors.manifest import (
    FORMAT_VERSION,
    MODEL,
    NORMALIZATION,
    TOKENIZER,
    Conditions,
    Kind,
    LexicalInput,
    Manifest,
    TensorSpec,
    TruncationSide,
)
from predictors.manifest_reader import MANIFEST, parse_manifest
from scheduler_core.errors import InputError
from scheduler_core.files import existing_file, sha256_file, write_json

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST",
    "MODEL",
    "NORMALIZATION",
    "TOKENIZER",
    "Artifact",
    "Conditions",
    "Kind",
    "LexicalInput",
    "Manifest",
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


def open_artifact(path: str | Path) -> Artifact:
    """Reads and verifies an artifact folder.

    Raises:
        InputError: The folder, its manifest or a file is missing, the format is of another version, a manifest field
            is wrong, or a file's SHA-256 differs from the manifest.
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
        InputError: A field is wrong or contradicts another one.
    """
    content = manifest.to_json()
    parsed = parse_manifest(json.loads(json.dumps(content, allow_nan=False)))
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
        if name in (TOKENIZER, NORMALIZATION) or name.startswith(MODEL):
            digest.update(f"{name}:{files[name]}\n".encode())
    return digest.hexdigest()[:12]


def _read_manifest(path: Path) -> Manifest:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise InputError("artifact manifest", str(path), f"a file with valid JSON ({error})") from error
    return parse_manifest(content)
