"""The artifact folder: written by export, verified before use, without torch and onnxruntime.

An artifact contains `model.onnx`, `tokenizer.json`, `normalization.json` and `manifest.json`. The manifest
lists every file with its SHA-256, and its version is a hash of its content, so a modified folder is rejected.
A signature of the manifest authenticates the author.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from predictors.manifest import MANIFEST, MODEL, SIGNATURE, Manifest, content_version, parse_manifest
from predictors.pretrained import artifact_folder
from predictors.tiny import WEIGHTS
from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.shell.files import RECORD, existing_file, sha256_file, write_json
from scheduler_core.shell.json_text import read_json_object

# Unlisted files: the manifest, its signature, and the record of the command that wrote the folder.
_UNLISTED = frozenset({MANIFEST, SIGNATURE, RECORD})
#: Kind of the output folder, see `scheduler_core.shell.files.atomic_directory`.
KIND = "artifact"


@dataclass(frozen=True, slots=True)
class Artifact:
    """A verified artifact folder."""

    path: Path
    manifest: Manifest

    @property
    def graph(self) -> Path:
        """Path of model.onnx; InputError for a tiny predictor, which does not have one."""
        if WEIGHTS in self.manifest.files:
            raise InputError("artifact", self.manifest.artifact_id, f"an artifact with the file {MODEL}")
        return self.path / MODEL


def open_artifact(path: str | Path, *, public_key: str | Path | None = None) -> Artifact:
    """Reads and verifies an artifact: a folder, or "pretrained" or "tiny", shipped with tailcast.

    `public_key`: PEM file of the Ed25519 key to verify the signature with; None: do not verify it.

    Raises:
        InputError: A file is missing, unlisted, outside the folder, or differs from its SHA-256 in the
            manifest; or the format, a field, the version or the signature of the manifest is wrong.
    """
    folder = artifact_folder(path)
    if not folder.is_dir():
        allowed = "pretrained, tiny, or an existing artifact folder of export-onnx"
        raise InputError("artifact", str(path), allowed)
    manifest_path = existing_file(folder / MANIFEST, "artifact")
    if public_key is not None:
        from predictors.signing import read_public_key, verify_file

        verify_file(manifest_path, read_public_key(public_key))
    manifest = parse_manifest(read_json_object(manifest_path, "artifact manifest"))
    for name in (MANIFEST, *manifest.files):
        file, field = folder / name, f"artifact file {name}"
        if not file.is_file():
            raise InputError(field, str(file), "a file that the manifest lists and that exists")
        if file.resolve().parent != folder.resolve():
            raise InputError(field, str(file.resolve()), "a file inside the artifact folder")
    unlisted = sorted(set(os.listdir(folder)) - manifest.files.keys() - _UNLISTED)
    if unlisted:
        raise InputError("artifact", unlisted, f"only the files that {MANIFEST} lists")
    for name, expected in manifest.files.items():
        actual = sha256_file(folder / name)
        if actual != expected:
            raise InputError(f"artifact file {name}", f"SHA-256 {actual}", f"{expected}, as in {MANIFEST}")
        if name.endswith(".json") and name not in manifest.tokenizer_files:
            read_json_object(folder / name, f"artifact file {name}")
    return Artifact(folder, manifest)


def write_manifest(folder: str | Path, manifest: Manifest, *, version_prefix: str | None = None) -> Manifest:
    """Writes the manifest of a folder that has all other files of the artifact, and returns the written
    manifest. Its fields `files`, `artifact_version` (after "PREFIX+") and, if there is a graph, `opset` are
    recomputed. InputError if a field is wrong or contradicts another one."""
    folder = Path(folder)
    update: dict[str, object] = {"files": hash_files(folder)}
    if not (folder / WEIGHTS).is_file():
        try:
            import onnx
        except ImportError as error:
            raise MissingExtraError("onnx", "export") from error
        graph = onnx.load(folder / MODEL, load_external_data=False)
        update["opset"] = {entry.domain or "ai.onnx": entry.version for entry in graph.opset_import}
    content = manifest.model_copy(update=update).to_json()
    version = content_version(content)
    content["artifact_version"] = version if version_prefix is None else f"{version_prefix}+{version}"
    written = parse_manifest(content)
    write_json(folder / MANIFEST, content)
    return written


def hash_files(folder: str | Path) -> dict[str, str]:
    """File name -> SHA-256 of the files in `folder` that a manifest lists."""
    return {
        file.name: sha256_file(file)
        for file in sorted(Path(folder).iterdir())
        if file.is_file() and file.name not in _UNLISTED
    }
