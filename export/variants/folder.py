"""A variant as an artifact folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import onnx

from predictors.artifact import (
    MODEL,
    Artifact,
    Manifest,
    Precision,
    write_manifest,
)
from scheduler_core.files import write_json


def write_variant(
    artifact: Artifact,
    model: onnx.ModelProto,
    folder: Path,
    *,
    name: str,
    precision: Precision,
    run: Mapping[str, Any],
) -> Manifest:
    """Writes an artifact folder with another graph; all other files are those of `artifact`, without its signature.

    Args:
        artifact: What the variant is made from.
        model: Its graph.
        folder: A new folder.
        name: The variant.
        precision: Of its weights and activations.
        run: Content of run.json.

    Returns:
        The manifest; its `variant` names the artifact it was made from.
    """
    folder.mkdir(parents=True)
    for file in artifact.manifest.files:
        if not file.startswith(MODEL) and file != "run.json":
            shutil.copyfile(artifact.path / file, folder / file)
    onnx.save(model, folder / MODEL)
    write_json(folder / "run.json", dict(run))
    manifest = replace(
        artifact.manifest,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        precision=precision,
        variant={"name": name, "made_from": artifact.manifest.artifact_version},
        parity={},
    )
    return write_manifest(folder, manifest)


def note_result(folder: Path, manifest: Manifest, result: Mapping[str, Any]) -> Manifest:
    """Adds what was measured of a variant to its manifest."""
    return write_manifest(folder, replace(manifest, variant={**manifest.variant, **result}))


def size_of(folder: Path) -> int:
    """Bytes of the graph with its weights."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.name.startswith(MODEL))
