"""Lexical artifacts as what `calibrate` works on: the tables go into the graph, and the manifest says so."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from predictors.artifact import KIND, MODEL, Artifact, open_artifact, write_manifest
from predictors.manifest import CONFORMAL
from predictors.modules import Calibration
from scheduler_core.errors import InputError
from scheduler_core.files import atomic_directory, write_json
from training.calibrating.conformal import ConformalQuantiles
from training.calibrating.subject import Subject, split_in
from training.evaluating.artifacts import open_artifact_predictor
from training.evaluating.predictors import DEFAULT_NU, RunOptions
from training.lexical.graph import with_calibration


def lexical_subject(folder: Path, options: RunOptions) -> Subject:
    """Verifies and loads an artifact of `train-lexical`, without the calibration it may have.

    Raises:
        InputError: It is refused, is one of `export-onnx`, or its graph holds no tables to calibrate.
    """
    artifact = open_artifact(folder)
    manifest = artifact.manifest
    if manifest.kind != "lexical":
        raise InputError(
            "predictor",
            str(folder),
            "the checkpoint that this artifact was exported from: calibrate it, then export it again",
        )
    graph = artifact.model_path.read_bytes()
    names = () if manifest.conditioning is None else manifest.served_models
    with tempfile.TemporaryDirectory() as temporary:
        plain = Path(temporary)
        _write_folder(plain, artifact, graph, Calibration.identity(len(names)), {})
        opened = open_artifact_predictor(plain, options)
    return Subject(
        served_models=tuple(names),
        nu=DEFAULT_NU if manifest.nu is None else manifest.nu,
        split=split_in(manifest.training_data),
        predict=opened.predict,
        kind=KIND,
        write=partial(_write, artifact, graph),
    )


def _write(
    artifact: Artifact,
    graph: bytes,
    out: Path,
    overwrite: bool,
    calibration: Calibration,
    conformal: ConformalQuantiles,
    summary: Mapping[str, Any],
) -> None:
    records = {
        CONFORMAL: conformal.to_json(),
        "run.json": {"command": "calibrate", "calibration": dict(summary)},
    }
    with atomic_directory(out, KIND, overwrite=overwrite) as folder:
        _write_folder(folder, artifact, graph, calibration, records)


def _write_folder(
    folder: Path, artifact: Artifact, graph: bytes, calibration: Calibration, records: Mapping[str, Any]
) -> None:
    """The artifact with another calibration, and JSON files beside it."""
    (folder / MODEL).write_bytes(with_calibration(graph, calibration))
    for name, content in records.items():
        write_json(folder / name, content)
    write_manifest(
        folder,
        replace(
            artifact.manifest,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            calibration={} if calibration.is_identity else calibration.to_json(),
        ),
    )
