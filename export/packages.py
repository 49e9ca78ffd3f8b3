"""Packages of an artifact: a Triton model repository, optionally with a KServe InferenceService.

    triton   NAME/config.pbtxt, NAME/1/: text, or messages and options [, served_model, temperature] in, predictions out
    kserve   models/ (the Triton repository), inference-service.yaml

Triton batches requests; tokenizer and graph run in its Python backend (`triton_model.py`).
"""

from __future__ import annotations

import ast
import json
import logging
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from predictors.artifact import Artifact, open_artifact
from predictors.manifest import TOKENIZER, TensorSpec
from predictors.tokenizer import MAX_CHARS_PER_TOKEN
from scheduler_core.errors import InputError
from scheduler_core.prediction import api_request, requested_amount
from scheduler_core.ranges import check_choice
from scheduler_core.shell.files import atomic_directory, folder_target

logger = logging.getLogger(__name__)
#: Inputs of texts of `triton_model.py`, all optional.
TEXTS = ("text", "messages", "options")
_ROOT_PACKAGE = "scheduler_core"
_ROOT = Path(__file__).resolve().parents[1]

_RESOURCE = """apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata:
  name: {}
  annotations:
    tailcast/artifact-id: {}
    tailcast/artifact-version: {}
spec:
  predictor:
    model:
      modelFormat:
        name: triton
      protocolVersion: v2
      storageUri: {}
"""


@dataclass(frozen=True, kw_only=True)
class PackageConfig:
    """Package an artifact for another serving stack.

    TARGET is triton (a model repository) or kserve (the same repository and an InferenceService for it).
    """

    INPUTS = ("artifact", "public_key")
    OUTPUTS = ("out",)

    target: str
    """triton or kserve."""
    artifact: str
    """Artifact folder written by export-onnx."""
    out: str
    """Folder to write, new or empty."""
    overwrite: bool = False
    """Replace an existing package of the same target at `out`; a folder with other content is kept."""
    public_key: str | None = None
    """PEM file of an Ed25519 public key; the artifact must be signed with the matching private key."""
    name: str = "tailcast"
    """Name of the model."""
    device: Literal["auto", "cpu", "gpu"] = "cpu"
    """Device of the graph; the tokenizer runs on the CPU."""
    storage_uri: str | None = None
    """For kserve: URI where the folder models will be stored, for example pvc://claim/models."""

    def __post_init__(self) -> None:
        check_choice("TARGET", self.target, ("triton", "kserve"))
        for field in ("artifact", "out"):
            if not getattr(self, field):
                raise InputError(field, getattr(self, field), "a path")
        if bool(self.storage_uri) != (self.target == "kserve"):
            raise InputError("storage_uri", self.storage_uri, "set for kserve, unset for triton")
        pattern, allowed = "[A-Za-z0-9_.-]+", "letters, digits, dots, - and _"
        if self.target == "kserve":
            pattern = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
            allowed = "lower-case letters, digits and - (not at the ends), at most 63 characters"
        if not re.fullmatch(pattern, self.name):
            raise InputError("name", self.name, allowed)


def package(config: PackageConfig) -> None:
    """Writes the package; InputError if the artifact is invalid, or the output folder may not be replaced."""
    out = folder_target(config.out, config.target, overwrite=config.overwrite)
    artifact = open_artifact(config.artifact, public_key=config.public_key)
    with atomic_directory(out, config.target, overwrite=config.overwrite) as folder:
        _write_repository(artifact, config, folder if config.target == "triton" else folder / "models")
        if config.target == "kserve":
            manifest = artifact.manifest
            # JSON strings are valid YAML.
            values = map(json.dumps, (manifest.artifact_id, manifest.artifact_version, config.storage_uri))
            resource = _RESOURCE.format(config.name, *values)
            (folder / "inference-service.yaml").write_text(resource, encoding="utf-8")
    logger.info("%s of artifact %s in %s", config.target, artifact.manifest.artifact_id, out)


def _write_repository(artifact: Artifact, config: PackageConfig, folder: Path) -> None:
    version = folder / config.name / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(_model_config(artifact, config), encoding="utf-8")
    for name in artifact.manifest.files:
        if name.startswith(artifact.graph.name):
            shutil.copyfile(artifact.path / name, version / name)
    shutil.copyfile(artifact.path / TOKENIZER, version / TOKENIZER)
    shutil.copyfile(Path(__file__).with_name("triton_model.py"), version / "model.py")
    for file in sorted(_sources(api_request) | _sources(requested_amount)):
        target = version / file.relative_to(_ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def _sources(module: ModuleType) -> set[Path]:
    """The files of a module of scheduler_core, and of those of its modules that are imported for it."""
    sources: set[Path] = set()
    pending = [Path(str(module.__file__))]
    while pending:
        file = pending.pop()
        if file in sources:
            continue
        sources.add(file)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_ROOT_PACKAGE):
                names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
                for name in (part for each in names for part in _packages(each)):
                    path = _ROOT.joinpath(*name.split("."))
                    pending += filter(Path.is_file, (path.with_suffix(".py"), path / "__init__.py"))
    return sources


def _packages(name: str) -> list[str]:
    """A module and the packages that it is in: a.b.c -> a, a.b, a.b.c."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _model_config(artifact: Artifact, config: PackageConfig) -> str:
    """`config.pbtxt`, in protobuf's text format."""
    manifest = artifact.manifest
    lines = [f'name: "{config.name}"', 'backend: "python"', "max_batch_size: 64"]
    # The texts replace the first two inputs of the graph: token ids and attention mask.
    texts = [TensorSpec(name=name, dtype="string", shape=("batch",), unit="UTF-8") for name in TEXTS]
    for kind, tensors in (("input", (*texts, *manifest.inputs[2:])), ("output", manifest.outputs)):
        for tensor in tensors:
            dims = ", ".join(map(str, tensor.shape[1:] or (1,)))  # Triton: [ 1 ] for a scalar per row
            datatype = tensor.datatype.replace("BYTES", "STRING")  # as Triton's configuration calls it
            shape = f"data_type: TYPE_{datatype} dims: [ {dims} ]"
            shape += " optional: true" if tensor in texts else ""
            lines.append(f'{kind} {{ name: "{tensor.name}" {shape} }}')
    lines.append("dynamic_batching { max_queue_delay_microseconds: 1000 }")
    lines.append(f"instance_group {{ count: 1 kind: KIND_{config.device.upper()} }}")
    parameters = {name: getattr(manifest, name) for name in ("max_length", "truncation_side", "pad_token_id")}
    parameters |= {
        "amounts": json.dumps(manifest.amounts),
        "conversations": json.dumps(manifest.conversations),
        "part_tokens": json.dumps(None if manifest.part_tokens is None else asdict(manifest.part_tokens)),
        "threads": 1,
        "max_chars": MAX_CHARS_PER_TOKEN * manifest.max_length,
    }
    for name, value in parameters.items():
        lines.append(f'parameters {{ key: "{name}" value {{ string_value: {json.dumps(str(value))} }} }}')
    return "\n".join(lines) + "\n"
