"""Export of a checkpoint folder as a verified artifact folder."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from predictors.artifact import KIND, write_manifest
from predictors.manifest import (
    MANIFEST,
    MODEL,
    NORMALIZATION,
    TOKENIZER,
    Conditions,
    EncoderCard,
    Manifest,
)
from scheduler_core.errors import InputError
from scheduler_core.lengths.quantiles import LEVELS
from scheduler_core.ranges import INTEGERS, check_ranges
from scheduler_core.shell.files import atomic_directory, folder_target, write_json
from scheduler_core.shell.versions import versions_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from predictors.modules.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

# Environment variable that holds the password of the signing key.
PASSWORD = "TAILCAST_SIGNING_PASSWORD"
#: Packages whose versions an artifact records.
TOOLCHAIN = ("torch", "transformers", "tokenizers", "onnx", "onnxscript", "onnxruntime", "numpy")


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Export a checkpoint as an artifact: one ONNX graph, its tokenizer and a manifest, checked against torch."""

    INPUTS = ("checkpoint", "sign")
    OUTPUTS = ("out",)

    checkpoint: str
    """Checkpoint folder written by train."""
    out: str
    """Artifact folder to write; it is created only if every check passes."""
    overwrite: bool = False
    """Replace an existing artifact at `out`; a folder with other content is kept."""
    artifact_id: str | None = None
    """Name of the artifact; default: the name of the checkpoint folder."""
    artifact_version: str | None = None
    """Prefix of the version, as in 1.2.0+3f9c2d41b07a; the hex digits are a hash of the content."""
    license: str | None = None
    """SPDX license identifier to record in the manifest."""
    abstain_threshold: float | None = None
    """Abstain if the highest urgency probability is below this, and always if the prediction is nearly uniform. Default:
    urgency.abstain_threshold in the checkpoint's training.json, or none."""
    sign: str | None = None
    """PEM file with an Ed25519 private key that signs the manifest (manifest.json.sig). The password of the
    key, if any, is read from the environment variable TAILCAST_SIGNING_PASSWORD."""
    legacy_exporter: bool = False
    """Use torch's older TorchScript exporter: faster, with a larger graph and the same predictions."""
    parity_tokens: int = 2048
    """Maximum number of tokens, including padding, of a batch in the comparison with torch; 32768 covers 64 x 512."""
    parity_shapes: int = 8
    """Number of random shapes in the comparison with torch, in addition to edge shapes and padding patterns."""
    seed: int = 0
    """Seed of the random shapes, tokens and conditions in the comparison with torch."""

    def __post_init__(self) -> None:
        for name in ("checkpoint", "out"):
            if not getattr(self, name):
                raise InputError(name, getattr(self, name), "the path of a folder")
        for name in ("artifact_id", "artifact_version"):
            value = getattr(self, name)
            if value is not None and not value.strip():
                raise InputError(name, value, "a name that is not empty, or unset")
        check_ranges(self, abstain_threshold=(0.0, 1.0))
        check_ranges(self, parity_tokens=(64, INTEGERS), parity_shapes=(0, INTEGERS), seed=(0, INTEGERS))


def export_onnx(config: ExportConfig) -> Manifest:
    """Exports the checkpoint and returns the manifest; `config.out` is created only if every check passes.

    Raises:
        InputError: The checkpoint is invalid, or `out` may not be replaced.
        TailcastError: The model cannot be exported, or differs from torch by more than the tolerance.
    """
    out = folder_target(config.out, KIND, overwrite=config.overwrite)
    from predictors.modules.checkpoint import load_checkpoint

    key = None if config.sign is None else signing_key(config.sign)
    checkpoint = load_checkpoint(config.checkpoint)
    with atomic_directory(out, KIND, overwrite=config.overwrite) as folder:
        manifest = _write(config, checkpoint, folder)
        if key is not None:
            from predictors.signing import sign_file

            sign_file(folder / MANIFEST, key)
    logger.info("artifact %s version %s in %s", manifest.artifact_id, manifest.artifact_version, out)
    return manifest


def signing_key(path: str) -> Ed25519PrivateKey:
    """The private key of `--sign`; InputError if the file does not contain one."""
    from predictors.signing import read_private_key

    return read_private_key(path, os.environ.get(PASSWORD))


def _write(config: ExportConfig, checkpoint: Checkpoint, folder: Path) -> Manifest:
    import numpy as np

    from export.graph import export_graph
    from export.parity import check_tokenizer, measure_parity
    from predictors.runtime import open_runtime

    manifest = _manifest(config, checkpoint)
    export_graph(checkpoint.model, manifest, folder / MODEL, legacy_exporter=config.legacy_exporter)
    for name in (TOKENIZER, NORMALIZATION):
        shutil.copyfile(checkpoint.path / name, folder / name)
    run = {"command": "export-onnx", "config": dataclasses.asdict(config), "versions": manifest.versions}
    write_json(folder / "run.json", run)
    write_manifest(folder, manifest)
    # The checks load the artifact the same way as its users do.
    runtime = open_runtime(folder, provider="cpu")
    check_tokenizer(checkpoint, runtime.tokenizer)
    parity = measure_parity(
        checkpoint.model,
        runtime,
        rng=np.random.default_rng(config.seed),
        max_tokens=config.parity_tokens,
        num_random=config.parity_shapes,
    )
    manifest = manifest.model_copy(update={"parity": {"seed": config.seed} | parity})
    return write_manifest(folder, manifest, version_prefix=config.artifact_version)


def _manifest(config: ExportConfig, checkpoint: Checkpoint) -> Manifest:
    """The manifest, except for the fields that are computed from the files."""
    from predictors.modules.encoder import config_of, state_width

    predictor, training, encoder = checkpoint.config, checkpoint.training_info, checkpoint.model.encoder
    heads, conditioning = predictor.heads, predictor.conditioning
    calibration = checkpoint.model.calibration
    architecture = config_of(encoder)
    threshold = config.abstain_threshold
    if threshold is None and heads.urgency is not None:
        threshold = training.get("urgency", {}).get("abstain_threshold")
    return Manifest.model_construct(
        artifact_id=config.artifact_id or checkpoint.path.resolve().name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        heads=heads.names,
        encoder=EncoderCard(
            architecture=str(architecture["model_type"]),
            source=predictor.encoder,
            num_parameters=sum(weight.numel() for weight in encoder.parameters()),
            num_layers=architecture.get("num_hidden_layers", architecture.get("n_layers")),
            width=state_width(encoder),
        ),
        nu=None if heads.length is None or heads.length.learn_nu else heads.length.nu,
        within=heads.length is not None and heads.length.within,
        quantile_levels=LEVELS if heads.length is not None and heads.length.quantiles else (),
        max_length=predictor.max_length,
        truncation_side=predictor.truncation_side,
        pad_token_id=checkpoint.tokenizer.pad_token_id,
        conversations=predictor.conversations,
        part_tokens=predictor.part_tokens,
        amounts=predictor.amounts,
        served_models=predictor.known_models,
        conditioning=None
        if conditioning is None
        else Conditions(unknown_models=conditioning.unknown, temperature=conditioning.temperature),
        urgency_levels=() if heads.urgency is None else heads.urgency.levels,
        abstain_threshold=threshold,
        bucket_edges=() if heads.bucket is None else heads.bucket.edges,
        calibration={}
        if calibration.is_identity
        else {name: table for name, table in dataclasses.asdict(calibration).items() if table},
        training_data=training.get("data", {}),
        metrics=training.get("metrics", {}),
        versions=versions_of(TOOLCHAIN),
        license=config.license,
    )
