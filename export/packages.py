"""An artifact as a Triton model repository, or as KServe's layout around it.

    triton   NAME/config.pbtxt, NAME/1/: text [, served_model, temperature] in, predictions out
    kserve   models/ (that repository), inference-service.yaml, metadata/NAME.json (as `GET v2/models/NAME` gives it)

Triton batches requests; tokenizer and graph run in its Python backend (`triton_model.py`).
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from scheduler_core.errors import InputError
from scheduler_core.files import atomic_directory, folder_target, write_json

if TYPE_CHECKING:
    from predictors.artifact import Artifact, TensorSpec

logger = logging.getLogger(__name__)

Device = Literal["auto", "cpu", "gpu"]
TARGETS = ("triton", "kserve")

_TYPES = {"float32": "TYPE_FP32", "int64": "TYPE_INT64", "string": "TYPE_STRING"}
_DATATYPES = {"float32": "FP32", "int64": "INT64", "string": "BYTES"}
_KINDS = {"auto": "KIND_AUTO", "cpu": "KIND_CPU", "gpu": "KIND_GPU"}
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")
_RESOURCE_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-")
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


@dataclass(frozen=True, kw_only=True)
class PackageConfig:
    """Package an artifact for another serving stack.

    TARGET is triton (a model repository) or kserve (that repository with the resource that serves it).
    """

    INPUTS = ("artifact", "public_key")
    OUTPUTS = ("out",)

    target: str
    """triton or kserve."""
    artifact: str
    """Artifact folder, as export-onnx writes it."""
    out: str
    """Folder to write, new or empty."""
    overwrite: bool = False
    """Replace an earlier package of the same target at `out`; a folder with anything else in it is never replaced."""
    public_key: str | None = None
    """PEM file of an Ed25519 public key that the artifact has to be signed with."""
    name: str = "tailcast"
    """Name of the model."""
    max_batch_size: int = 64
    """Maximum number of prompts in a batch of the server."""
    max_queue_delay_us: int = 1000
    """How long a request may wait for others to share a batch, microseconds."""
    instances: int = 1
    """Copies of the model that run at the same time."""
    device: Device = "cpu"
    """Where the graph runs; the tokenizer runs on the CPU."""
    threads: int = 1
    """Threads of one call of the graph on the CPU."""
    storage_uri: str | None = None
    """Of kserve: where the folder models will be, as in pvc://claim/models."""

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise InputError("TARGET", self.target, ", ".join(TARGETS))
        for field in ("artifact", "out"):
            if not getattr(self, field):
                raise InputError(field, getattr(self, field), "a path")
        if bool(self.storage_uri) != (self.target == "kserve"):
            raise InputError("storage_uri", self.storage_uri, "set for kserve, and for nothing else")
        if not self.name or set(self.name) - _NAME_CHARACTERS:
            raise InputError("name", self.name, "letters, digits, dots, - and _")
        name = self.name
        if self.target == "kserve" and (
            len(name) > 63 or set(name) - _RESOURCE_CHARACTERS or name != name.strip("-")
        ):
            allowed = (
                "lower-case letters, digits and -, beginning and ending with a letter or digit, at most 63"
            )
            raise InputError("name", name, allowed)
        for field in ("max_batch_size", "instances", "threads"):
            if getattr(self, field) < 1:
                raise InputError(field, getattr(self, field), "an integer >= 1")
        if self.max_queue_delay_us < 0:
            raise InputError("max_queue_delay_us", self.max_queue_delay_us, "an integer >= 0")


def package(config: PackageConfig) -> None:
    """Writes the package.

    Raises:
        InputError: The artifact is refused, or the folder may not be written.
    """
    from predictors.artifact import open_artifact

    out = folder_target(config.out, config.target, overwrite=config.overwrite)
    artifact = open_artifact(config.artifact, public_key=config.public_key)
    with atomic_directory(out, config.target, overwrite=config.overwrite) as folder:
        if config.target == "triton":
            write_repository(artifact, config, folder)
        else:
            _write_kserve(artifact, config, folder)
    logger.info("%s of artifact %s in %s", config.target, artifact.manifest.artifact_id, out)


def write_repository(artifact: Artifact, config: PackageConfig, folder: Path) -> None:
    """Writes the model repository into an empty folder."""
    from predictors.artifact import MODEL, TOKENIZER

    version = folder / config.name / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(_model_config(artifact, config), encoding="utf-8")
    for name in artifact.manifest.files:
        if name.startswith(MODEL):
            shutil.copyfile(artifact.path / name, version / name)
    shutil.copyfile(artifact.tokenizer_path, version / TOKENIZER)
    shutil.copyfile(Path(__file__).with_name("triton_model.py"), version / "model.py")


def metadata(artifact: Artifact, name: str) -> dict[str, object]:
    """The model's tensors as the Open Inference Protocol's `GET v2/models/NAME` describes them."""
    inputs, outputs = _tensors(artifact)
    return {
        "name": name,
        **{
            kind: [
                {"name": tensor.name, "datatype": _DATATYPES[tensor.dtype], "shape": [-1, *_dims(tensor)]}
                for tensor in tensors
            ]
            for kind, tensors in (("inputs", inputs), ("outputs", outputs))
        },
    }


def _write_kserve(artifact: Artifact, config: PackageConfig, folder: Path) -> None:
    (folder / "models").mkdir()
    write_repository(artifact, config, folder / "models")
    manifest = artifact.manifest
    # JSON strings are YAML strings.
    values = {
        "name": config.name,
        "artifact_id": json.dumps(manifest.artifact_id),
        "artifact_version": json.dumps(manifest.artifact_version),
        "storage_uri": json.dumps(config.storage_uri),
    }
    (folder / "inference-service.yaml").write_text(_RESOURCE.format(**values), encoding="utf-8")
    (folder / "metadata").mkdir()
    write_json(folder / "metadata" / f"{config.name}.json", metadata(artifact, config.name))


def _tensors(artifact: Artifact) -> tuple[list[TensorSpec], Sequence[TensorSpec]]:
    """Inputs and outputs of the packaged model: text in place of the graph's two tensors of token ids."""
    from predictors.artifact import TensorSpec

    text = TensorSpec(name="text", dtype="string", shape=("batch",), unit="UTF-8")
    return [text, *artifact.manifest.inputs[2:]], artifact.manifest.outputs


def _model_config(artifact: Artifact, config: PackageConfig) -> str:
    """`config.pbtxt`, in protobuf's text format."""
    from predictors.tokenizer import MAX_CHARS_PER_TOKEN

    manifest = artifact.manifest
    assert manifest.max_length is not None
    parameters = {
        "threads": config.threads,
        "max_length": manifest.max_length,
        "truncation_side": manifest.truncation_side,
        "pad_token_id": manifest.pad_token_id,
        "max_chars": MAX_CHARS_PER_TOKEN * manifest.max_length,
    }
    lines = [f'name: "{config.name}"', 'backend: "python"', f"max_batch_size: {config.max_batch_size}"]
    for kind, tensors in zip(("input", "output"), _tensors(artifact), strict=True):
        for tensor in tensors:
            dims = ", ".join(str(size) for size in _dims(tensor))
            lines.append(
                f'{kind} {{ name: "{tensor.name}" data_type: {_TYPES[tensor.dtype]} dims: [ {dims} ] }}'
            )
    lines.append(f"dynamic_batching {{ max_queue_delay_microseconds: {config.max_queue_delay_us} }}")
    lines.append(f"instance_group {{ count: {config.instances} kind: {_KINDS[config.device]} }}")
    lines += [
        f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'
        for name, value in parameters.items()
    ]
    return "\n".join(lines) + "\n"


def _dims(tensor: TensorSpec) -> list[int]:
    """Dimensions after the batch; a row's scalar has one of 1 in Triton."""
    return [size if isinstance(size, int) else -1 for size in tensor.shape[1:]] or [1]
