"""KServe's layout: the model repository, the resource that serves it, and what the Open Inference Protocol tells of it.

models/                  what `storageUri` points at: a Triton model repository, KServe's runtime for it is Triton
inference-service.yaml   the resource, protocol version v2
metadata/NAME.json       inputs and outputs of each model, as `GET v2/models/NAME` gives them
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from export.triton.model_config import ModelConfig
from export.triton.repository import RepositoryOptions, write_repository
from predictors.artifact import Artifact
from scheduler_core.errors import InputError
from scheduler_core.files import write_json

_RESOURCE = """apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata:
  name: {name}
  annotations:
    tailcast/artifact-id: {artifact_id}
    tailcast/artifact-version: {artifact_version}
spec:
  predictor:
    model:
      modelFormat:
        name: triton
      protocolVersion: v2
      storageUri: {storage_uri}
"""


def write_kserve(
    artifact: Artifact, options: RepositoryOptions, storage_uri: str, folder: Path
) -> Sequence[ModelConfig]:
    """Writes the layout into an empty folder; returns the models.

    Args:
        artifact: What is served.
        options: Of the repository; the resource is named like the ensemble.
        storage_uri: Where the folder `models` will lie.
        folder: To write into.

    Raises:
        InputError: As `write_repository`, or the name cannot be that of a Kubernetes resource.
    """
    name = options.name
    allowed = "lower-case letters, digits and -, beginning and ending with a letter or digit, at most 63"
    if len(name) > 63 or set(name) - set("abcdefghijklmnopqrstuvwxyz0123456789-") or name != name.strip("-"):
        raise InputError("name", name, allowed)
    if not storage_uri:
        raise InputError(
            "storage_uri", storage_uri, "where the folder models will lie, as in pvc://claim/models"
        )
    (folder / "models").mkdir()
    models = write_repository(artifact, options, folder / "models")
    manifest = artifact.manifest
    # JSON strings are YAML strings.
    quoted = {
        "name": name,
        "artifact_id": json.dumps(manifest.artifact_id),
        "artifact_version": json.dumps(manifest.artifact_version),
        "storage_uri": json.dumps(storage_uri),
    }
    (folder / "inference-service.yaml").write_text(_RESOURCE.format(**quoted), encoding="utf-8")
    (folder / "metadata").mkdir()
    for model in models:
        write_json(folder / "metadata" / f"{model.name}.json", model.metadata())
    return models
