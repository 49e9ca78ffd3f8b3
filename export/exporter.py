"""Checkpoint folder -> verified artifact folder."""

from __future__ import annotations

import dataclasses
import logging
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from predictors.artifact import (
    MANIFEST,
    MODEL,
    NORMALIZATION,
    TOKENIZER,
    Manifest,
    TruncationSide,
    content_version,
    hash_files,
    write_manifest,
)
from scheduler_core.errors import InputError
from scheduler_core.files import atomic_directory, writable_target, write_json

if TYPE_CHECKING:
    from predictors.modules import Checkpoint

logger = logging.getLogger(__name__)

VERSIONS_OF = (
    "tailcast",
    "torch",
    "transformers",
    "tokenizers",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "numpy",
)


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Exports a checkpoint as an artifact: one ONNX graph, its tokenizer and a manifest, checked against torch."""

    checkpoint: str
    """Checkpoint folder, as train writes it."""
    out: str
    """Artifact folder to write; an earlier artifact there is replaced once the new one has passed all checks."""
    artifact_id: str | None = None
    """Name of the artifact; default: the name of the checkpoint folder."""
    artifact_version: str | None = None
    """Version of the artifact; default: twelve digits that follow from its content."""
    license: str | None = None
    """Licence of the artifact (SPDX), for the manifest."""
    legacy_exporter: bool = False
    """Use torch's older TorchScript exporter: several times faster, a larger graph with the same numbers."""
    tolerance: float = 1e-4
    """Largest difference from torch that passes, in log tokens."""
    seed: int = 0
    """Seed of the random tokens that the comparison with torch uses."""

    def __post_init__(self) -> None:
        for name in ("checkpoint", "out"):
            if not getattr(self, name):
                raise InputError(name, getattr(self, name), "the path of a folder")
        for name in ("artifact_id", "artifact_version"):
            value = getattr(self, name)
            if value is not None and not value.strip():
                raise InputError(name, value, "a name that is not empty, or unset")
        if not 0 < self.tolerance < 1:
            raise InputError("tolerance", self.tolerance, "a number in (0, 1), log tokens")
        if self.seed < 0:
            raise InputError("seed", self.seed, "an integer >= 0")


def export_onnx(config: ExportConfig) -> Manifest:
    """Exports as `config` says; nothing appears at `config.out` unless every check passes.

    Returns:
        The manifest that was written.

    Raises:
        InputError: The checkpoint is refused, or `out` holds something that is no artifact.
        TailcastError: The model cannot be exported, or differs from torch by more than the tolerance.
    """
    out = _checked_target(config.out)
    from predictors.modules import load_checkpoint

    checkpoint = load_checkpoint(config.checkpoint)
    with atomic_directory(out) as folder:
        manifest = _write(config, checkpoint, folder)
    logger.info("artifact %s version %s in %s", manifest.artifact_id, manifest.artifact_version, out)
    return manifest


def _checked_target(path: str) -> Path:
    out = writable_target(path, "out")
    if out.is_dir() and any(out.iterdir()) and not (out / MANIFEST).is_file():
        raise InputError("out", path, "a new or empty folder, or an earlier artifact to replace")
    return out


def _write(config: ExportConfig, checkpoint: Checkpoint, folder: Path) -> Manifest:
    import numpy as np

    from export.graph import export_graph
    from export.parity import check_tokenizer, measure_parity
    from predictors.runtime import open_runtime

    versions = toolchain_versions()
    export_graph(checkpoint.model, folder / MODEL, legacy_exporter=config.legacy_exporter)
    for name in (TOKENIZER, NORMALIZATION):
        shutil.copyfile(checkpoint.path / name, folder / name)
    run = {"command": "export-onnx", "config": dataclasses.asdict(config), "versions": versions}
    write_json(folder / "run.json", run)
    files = hash_files(folder)
    training = checkpoint.training_info
    manifest = Manifest(
        artifact_id=config.artifact_id or checkpoint.path.resolve().name,
        artifact_version=config.artifact_version or content_version(files),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        nu=checkpoint.config.nu,
        max_length=checkpoint.config.max_length,
        truncation_side=cast(TruncationSide, checkpoint.config.truncation_side),
        pad_token_id=int(cast(int, checkpoint.tokenizer.pad_token_id)),
        files=files,
        served_models=checkpoint.config.served_models,
        training_data=_object(training, "data"),
        metrics=_object(training, "metrics"),
        versions=versions,
        license=config.license,
    )
    write_manifest(folder, manifest)
    # From here on the artifact is read as any consumer reads it: what is checked is what is shipped.
    runtime = open_runtime(folder, provider="cpu")
    check_tokenizer(checkpoint, runtime.tokenizer)
    parity = measure_parity(
        checkpoint.model, runtime, tolerance=config.tolerance, rng=np.random.default_rng(config.seed)
    )
    for shape, difference in parity.max_abs_diff.items():
        logger.info("parity at %s: %.2g", shape, difference)
    manifest = dataclasses.replace(manifest, parity=dataclasses.asdict(parity))
    write_manifest(folder, manifest)
    return manifest


def toolchain_versions() -> dict[str, str]:
    """Versions of what took part in the export."""
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in VERSIONS_OF}


def _object(info: Mapping[str, Any], name: str) -> dict[str, Any]:
    content = info.get(name, {})
    if not isinstance(content, dict):
        raise InputError(f"checkpoint training.json, {name}", content, "a JSON object")
    return content
