"""`config.pbtxt` of Triton models: what a model takes and gives, how it is batched, what runs it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from predictors.artifact import TensorSpec

Device = Literal["auto", "cpu", "gpu"]

_TYPES = {"float32": "TYPE_FP32", "int64": "TYPE_INT64", "string": "TYPE_STRING"}
_KINDS = {"auto": "KIND_AUTO", "cpu": "KIND_CPU", "gpu": "KIND_GPU"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A model in an ensemble; inputs and outputs go by their own names."""

    model: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model of a repository.

    Attributes:
        name: Of the model and its folder.
        backend: onnxruntime or python; None for an ensemble.
        inputs, outputs: Tensors as the graph has them; a row's scalar gets a dimension of 1 in Triton.
        max_batch_size: Most rows of a batch.
        max_queue_delay_us: How long a request waits for others to share a batch, microseconds; None: no batching by
            the server (an ensemble's steps do their own).
        instances: Copies that run at the same time.
        device: Where.
        parameters: Of the backend.
        op_library: Library of operators that the graph needs beside ONNX Runtime's own.
        steps: Of an ensemble.
    """

    name: str
    backend: str | None
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    max_queue_delay_us: int | None = None
    instances: int = 1
    device: Device = "cpu"
    parameters: Mapping[str, str] = field(default_factory=dict)
    op_library: str | None = None
    steps: tuple[Step, ...] = ()

    def to_text(self) -> str:
        """The file's content, in protobuf's text format."""
        lines = [f"name: {_quoted(self.name)}"]
        if self.backend is None:
            lines.append('platform: "ensemble"')
        else:
            lines.append(f"backend: {_quoted(self.backend)}")
        lines.append(f"max_batch_size: {self.max_batch_size}")
        # The Python backend sees the dimensions as they are here, and reshapes by itself.
        reshapes = self.backend == "onnxruntime"
        for kind, tensors in (("input", self.inputs), ("output", self.outputs)):
            lines += [f"{kind} {{ {_tensor(tensor, reshapes)} }}" for tensor in tensors]
        if self.max_queue_delay_us is not None:
            lines.append(f"dynamic_batching {{ max_queue_delay_microseconds: {self.max_queue_delay_us} }}")
        if self.backend is not None:
            lines.append(f"instance_group {{ count: {self.instances} kind: {_KINDS[self.device]} }}")
        for name, value in self.parameters.items():
            lines.append(f"parameters {{ key: {_quoted(name)} value {{ string_value: {_quoted(value)} }} }}")
        if self.op_library is not None:
            lines.append(f"model_operations {{ op_library_filename: {_quoted(self.op_library)} }}")
        if self.steps:
            steps = " ".join(_step(step) for step in self.steps)
            lines.append(f"ensemble_scheduling {{ {steps} }}")
        return "\n".join(lines) + "\n"

    def metadata(self) -> dict[str, object]:
        """What the Open Inference Protocol's `GET v2/models/NAME` tells of the tensors."""
        return {
            "name": self.name,
            "inputs": [_described(tensor) for tensor in self.inputs],
            "outputs": [_described(tensor) for tensor in self.outputs],
        }


def _dims(tensor: TensorSpec) -> list[int]:
    return [size if isinstance(size, int) else -1 for size in tensor.shape[1:]] or [1]


def _tensor(tensor: TensorSpec, reshapes: bool) -> str:
    dims = ", ".join(str(size) for size in _dims(tensor))
    reshape = " reshape { shape: [ ] }" if reshapes and len(tensor.shape) == 1 else ""
    return f"name: {_quoted(tensor.name)} data_type: {_TYPES[tensor.dtype]} dims: [ {dims} ]{reshape}"


def _step(step: Step) -> str:
    maps = [("input_map", step.inputs), ("output_map", step.outputs)]
    mapped = " ".join(
        f"{kind} {{ key: {_quoted(name)} value: {_quoted(name)} }}" for kind, names in maps for name in names
    )
    return f"step {{ model_name: {_quoted(step.model)} model_version: -1 {mapped} }}"


def _described(tensor: TensorSpec) -> dict[str, object]:
    datatypes = {"float32": "FP32", "int64": "INT64", "string": "BYTES"}
    return {"name": tensor.name, "datatype": datatypes[tensor.dtype], "shape": [-1, *_dims(tensor)]}


def _quoted(text: str) -> str:
    return json.dumps(text)


def names_of(tensors: Sequence[TensorSpec]) -> tuple[str, ...]:
    """Their names."""
    return tuple(tensor.name for tensor in tensors)
