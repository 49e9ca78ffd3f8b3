"""An artifact as a Triton model repository: text goes in, predictions come out.

    NAME            ensemble: text [, served_model, temperature] [, max_tokens] -> predictions
    NAME_tokenizer  text -> input_ids, attention_mask
    NAME_model      the artifact's model.onnx
    NAME_length     its length.onnx, on request

Each model but the ensemble is batched by Triton. Requests share a batch only if their tensors have the same shape, so
the tokenizer rounds the number of columns up.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

from export.triton.model_config import Device, ModelConfig, Step, names_of
from predictors.artifact import MODEL, TOKENIZER, Artifact, TensorSpec
from predictors.tokenizer import LAST_CUT_CHARS_PER_TOKEN
from scheduler_core.errors import InputError

Runtime = Literal["onnxruntime", "python"]

TEXT = TensorSpec(name="text", dtype="string", shape=("batch",), unit="UTF-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryOptions:
    """How the models are run.

    Attributes:
        name: Of the ensemble; the other models' names begin with it.
        runtime: onnxruntime: Triton's onnxruntime backend, the tokenizer by the operators of onnxruntime-extensions.
            python: Triton's Python backend with the packages onnxruntime and tokenizers; any tokenizer.
        capped: Also take max_tokens, and give the outputs of length.onnx.
        max_batch_size: Most rows of a batch.
        max_queue_delay_us: How long a request waits for others to share a batch, microseconds.
        instances: Copies of each model.
        device: Where the predictor runs; the others run on the CPU.
        threads: Threads of one call of the predictor on the CPU.
        seq_multiple: Columns are rounded up to a multiple of it.
        extensions_library: The library of onnxruntime-extensions as the server finds it.
    """

    name: str
    runtime: Runtime = "onnxruntime"
    capped: bool = False
    max_batch_size: int = 64
    max_queue_delay_us: int = 1000
    instances: int = 1
    device: Device = "cpu"
    threads: int = 1
    seq_multiple: int = 32
    extensions_library: str = "libortextensions.so"

    def __post_init__(self) -> None:
        if not self.name or set(self.name) - set(
            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-."
        ):
            raise InputError("name", self.name, "letters, digits, dots, - and _")
        for field in ("max_batch_size", "instances", "threads", "seq_multiple"):
            if getattr(self, field) < 1:
                raise InputError(field, getattr(self, field), "an integer >= 1")
        if self.max_queue_delay_us < 0:
            raise InputError("max_queue_delay_us", self.max_queue_delay_us, "an integer >= 0")


def model_configs(artifact: Artifact, options: RepositoryOptions) -> list[ModelConfig]:
    """The models, the ensemble first.

    Raises:
        InputError: The artifact is no encoder, or has no length.onnx where that is asked for.
    """
    manifest = artifact.manifest
    if manifest.kind != "encoder":
        raise InputError("artifact manifest, kind", manifest.kind, "encoder, which reads token ids")
    if options.capped and manifest.capped is None:
        raise InputError("capped", True, f"false: artifact {manifest.artifact_id} has no length.onnx")
    assert manifest.max_length is not None
    # What has a default is left to it: Triton has no text to compute lexical features from.
    given = tuple(tensor for tensor in manifest.inputs if not tensor.optional)
    tokens, conditions = given[:2], given[2:]
    is_python = options.runtime == "python"
    threads = {"threads" if is_python else "intra_op_thread_count": str(options.threads)}
    shared = {
        "backend": options.runtime,
        "max_batch_size": options.max_batch_size,
        "max_queue_delay_us": options.max_queue_delay_us,
        "instances": options.instances,
    }
    models = [
        ModelConfig(
            name=f"{options.name}_tokenizer",
            inputs=(TEXT,),
            outputs=tokens,
            parameters=_tokenizer_parameters(artifact, options) if is_python else {},
            op_library=None if is_python else options.extensions_library,
            **shared,  # type: ignore[arg-type]
        ),
        ModelConfig(
            name=f"{options.name}_model",
            inputs=given,
            outputs=manifest.outputs,
            device=options.device,
            parameters=threads,
            **shared,  # type: ignore[arg-type]
        ),
    ]
    inputs, outputs = (TEXT, *conditions), manifest.outputs
    if options.capped and manifest.capped is not None:
        capped = manifest.capped
        models.append(
            ModelConfig(
                name=f"{options.name}_length",
                inputs=capped.inputs,
                outputs=capped.outputs,
                parameters=threads,
                **shared,  # type: ignore[arg-type]
            )
        )
        inputs, outputs = (*inputs, capped.inputs[-1]), (*outputs, *capped.outputs)
    steps = tuple(
        Step(model=model.name, inputs=names_of(model.inputs), outputs=names_of(model.outputs))
        for model in models
    )
    ensemble = ModelConfig(
        name=options.name,
        backend=None,
        inputs=inputs,
        outputs=outputs,
        max_batch_size=options.max_batch_size,
        steps=steps,
    )
    return [ensemble, *models]


def write_repository(artifact: Artifact, options: RepositoryOptions, folder: Path) -> list[ModelConfig]:
    """Writes the repository into an empty folder; returns its models.

    Raises:
        InputError: The artifact, or its tokenizer under the onnxruntime backend, cannot be served so.
    """
    models = model_configs(artifact, options)
    ensemble, tokenizer, predictor, *rest = models
    for model in models:
        (folder / model.name / "1").mkdir(parents=True)
        (folder / model.name / "config.pbtxt").write_text(model.to_text(), encoding="utf-8")
    # Git and object stores drop empty folders, and Triton wants one of a version in an ensemble too.
    (folder / ensemble.name / "1" / ".keep").touch()
    place = folder / tokenizer.name / "1"
    if options.runtime == "python":
        shutil.copyfile(artifact.tokenizer_path, place / TOKENIZER)
        _copy_backend("tokenizer.py", place)
    else:
        from export.text.tokenizer_graph import tokenizer_graph

        graph = tokenizer_graph(artifact, seq_multiple=options.seq_multiple)
        (place / MODEL).write_bytes(graph.SerializeToString())
    sources = [[artifact.path / name for name in artifact.manifest.files if name.startswith(MODEL)]]
    sources += [[artifact.capped_model_path]] if rest else []
    for model, files in zip((predictor, *rest), sources, strict=True):
        place = folder / model.name / "1"
        for file in files:
            shutil.copyfile(file, place / (file.name if file.name.startswith(MODEL) else MODEL))
        if options.runtime == "python":
            _copy_backend("session.py", place)
    return models


def _tokenizer_parameters(artifact: Artifact, options: RepositoryOptions) -> dict[str, str]:
    manifest = artifact.manifest
    assert manifest.max_length is not None
    return {
        "max_length": str(manifest.max_length),
        "truncation_side": str(manifest.truncation_side),
        "pad_token_id": str(manifest.pad_token_id),
        "seq_multiple": str(options.seq_multiple),
        "max_chars": str(LAST_CUT_CHARS_PER_TOKEN * manifest.max_length),
    }


def _copy_backend(name: str, place: Path) -> None:
    source = resources.files("export.triton.backends").joinpath(name)
    (place / "model.py").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
