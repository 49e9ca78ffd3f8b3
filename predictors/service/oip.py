"""The Open Inference Protocol (https://kserve.github.io): named tensors in, named tensors out, and its gRPC methods.

A model is an artifact, its name the artifact's id. Inputs, N rows each, as [N] or [N, 1]:

| input | type | |
|---|---|---|
| prompt | BYTES | the texts |
| served_model | BYTES | optional; an empty name: unknown |
| temperature | FP32 | optional; NaN: unknown |
| max_tokens | INT64 | optional |

Outputs are those of the artifact's graph, nu where it is fixed, and with max_tokens expected_tokens, cvar_tokens and
quantile_tokens (0.5, 0.9, 0.99) of the truncated length.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from predictors.proto import open_inference_pb2 as oip
from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.artifacts import ServedArtifact
from predictors.service.calls import PredictorCalls, gather_in_chunks
from predictors.service.errors import UnknownArtifactError, renamed
from predictors.service.grpc_methods import Context, unary
from predictors.service.messages import DEFAULT_QUANTILE_LEVELS, parse
from scheduler_core.errors import InputError

Tensor = NDArray[Any]

OIP_SERVICE = oip.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
SERVER_NAME = "tailcast"
PLATFORM = "onnxruntime_onnx"
DTYPES: dict[str, Any] = {"BYTES": np.object_, "INT64": "<i8", "FP32": "<f4", "FP64": "<f8"}
# Python types of values in JSON or protobuf; null is NaN.
PYTHON_TYPES: dict[str, set[type]] = {
    "BYTES": {str, bytes},
    "INT64": {int},
    "FP32": {int, float, type(None)},
}
CONTENTS = {
    "BYTES": "bytes_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
# Output of the graph -> field of the response, where their names differ.
RESPONSE_FIELDS = {"urgency": "urgency.probabilities", "bucket": "bucket_probabilities"}


@dataclass(frozen=True, slots=True)
class TensorType:
    """Name, datatype and shape of an input or output; -1 is any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


INPUTS = (
    TensorType("prompt", "BYTES", (-1,)),
    TensorType("served_model", "BYTES", (-1,)),
    TensorType("temperature", "FP32", (-1,)),
    TensorType("max_tokens", "INT64", (-1,)),
)
TRUNCATED_LENGTH_OUTPUTS = (
    TensorType("expected_tokens", "FP64", (-1,)),
    TensorType("cvar_tokens", "FP64", (-1,)),
    TensorType("quantile_tokens", "FP64", (-1, len(DEFAULT_QUANTILE_LEVELS))),
)


def output_types(served: ServedArtifact) -> list[TensorType]:
    """Outputs of a model; the last three only with max_tokens."""
    manifest = served.pipeline.runtime.artifact.manifest
    types = [
        TensorType(output.name, "FP32", (-1, *(size for size in output.shape[1:] if isinstance(size, int))))
        for output in manifest.outputs
    ]
    if "length" in manifest.heads:
        if manifest.nu is not None:
            types.append(TensorType("nu", "FP32", (-1,)))
        types += TRUNCATED_LENGTH_OUTPUTS
    return types


def find(calls: PredictorCalls, name: str, version: str) -> ServedArtifact:
    """The artifact of that id and version (empty: any); raises UnknownArtifactError if there is none."""
    if not name:
        raise UnknownArtifactError("model name", name, f"one of {', '.join(calls.artifacts.names)}")
    served = calls.artifacts.get(name)
    if version and version != served.version:
        raise UnknownArtifactError("model version", version, f"empty or {served.version}")
    return served


async def infer(
    calls: PredictorCalls,
    served: ServedArtifact,
    inputs: Mapping[str, list[Any]],
    names: Collection[str],
    timeout_s: float | None,
) -> dict[str, Tensor]:
    """Predicts N rows; raises the TailcastError of the first row that failed.

    Args:
        calls: The service's methods.
        served: The model.
        inputs: Input name -> values.
        names: Names of the outputs, in order; empty: all.
        timeout_s: Seconds until the caller gives up; None: never.
    """
    available = {
        output.name: output
        for output in output_types(served)
        if "max_tokens" in inputs or output not in TRUNCATED_LENGTH_OUTPUTS
    }
    for name in names:
        if name not in available:
            raise InputError("outputs", name, f"out of {', '.join(available)}")

    async def outcome(request: pb.PredictRequest) -> pb.PredictResponse | Exception:
        try:
            return await calls.predict(request, timeout_s, method="ModelInfer")
        except Exception as error:
            return error

    responses = await gather_in_chunks((one.ByteSize(), outcome(one)) for one in _requests(served, inputs))
    succeeded: list[pb.PredictResponse] = []
    for row, response in enumerate(responses):
        if isinstance(response, InputError):
            raise renamed(response, f"{response.field}[{row}]")
        if isinstance(response, Exception):
            raise response
        succeeded.append(response)
    return {
        name: np.array(
            [_value(response, name) for response in succeeded], dtype=DTYPES[available[name].datatype]
        ).reshape(len(succeeded), *available[name].shape[1:])
        for name in names or available
    }


class InputTensors:
    """Values of the inputs of one request by name; name, type and shape are checked before values are converted."""

    def __init__(self, max_rows: int) -> None:
        self.values: dict[str, list[Any]] = {}
        self._max_rows = max_rows

    def expect(self, name: str, datatype: str, shape: Sequence[int]) -> int:
        """Checks name, type and shape of an input; returns the number of its values."""
        types = {tensor.name: tensor.datatype for tensor in INPUTS}
        if name not in types:
            raise InputError("inputs", name, f"out of {', '.join(types)}")
        if name in self.values:
            raise InputError("inputs", name, "every name once")
        if datatype != types[name]:
            raise InputError(f"inputs.{name}.datatype", datatype, types[name])
        if len(shape) not in (1, 2) or list(shape[1:]) not in ([], [1]) or shape[0] < 0:
            raise InputError(f"inputs.{name}.shape", shape[:3], "[N] or [N, 1]")
        if not 1 <= shape[0] <= self._max_rows:
            raise InputError(f"inputs.{name}", f"{shape[0]} rows", f"1 to {self._max_rows} of them")
        return shape[0]

    def add(self, name: str, datatype: str, count: int, values: list[Any]) -> None:
        """Adds the values of an expected input; raises InputError if they do not fit."""
        if len(values) != count or not set(map(type, values)) <= PYTHON_TYPES[datatype]:
            raise InputError(
                f"inputs.{name}",
                f"values that do not fit {datatype} [{count}]",
                "values of that type and shape",
            )
        if datatype == "BYTES":
            values = [_text(name, value) for value in values]
        self.values[name] = values

    def add_raw(self, name: str, datatype: str, shape: Sequence[int], raw: bytes) -> None:
        """Adds an input from little-endian bytes; BYTES elements each after their length in 4 bytes."""
        count = self.expect(name, datatype, shape)
        if datatype == "BYTES":
            self.add(name, datatype, count, _byte_strings(name, raw, count))
            return
        dtype = np.dtype(DTYPES[datatype])
        if len(raw) != count * dtype.itemsize:
            raise InputError(f"inputs.{name}", f"{len(raw)} raw bytes", str(count * dtype.itemsize))
        self.add(name, datatype, count, np.frombuffer(raw, dtype=dtype).tolist())


def _byte_strings(name: str, raw: bytes, count: int) -> list[bytes]:
    strings = []
    at = 0
    for _ in range(count):
        (length,) = struct.unpack_from("<I", raw, at) if at + 4 <= len(raw) else (len(raw),)
        at += 4 + length
        strings.append(raw[at - length : at])
    if at != len(raw):
        raise InputError(
            f"inputs.{name}", f"{len(raw)} raw bytes", f"{count} times a length and as many bytes"
        )
    return strings


def _text(name: str, value: str | bytes) -> str:
    try:
        return value.encode().decode() if isinstance(value, str) else value.decode()
    except UnicodeError as error:
        raise InputError(f"inputs.{name}", "bytes that are not UTF-8", "UTF-8") from error


def _requests(served: ServedArtifact, inputs: Mapping[str, list[Any]]) -> Iterator[pb.PredictRequest]:
    """The rows, one by one; errors in any of them are raised before the first."""
    if "prompt" not in inputs:
        raise InputError("inputs", sorted(inputs), "a list with prompt")
    num_rows = len(inputs["prompt"])
    for name, values in inputs.items():
        if len(values) != num_rows:
            raise InputError(f"inputs.{name}", f"{len(values)} rows", f"{num_rows}, as of the prompts")
    for row, value in enumerate(inputs.get("max_tokens", ())):
        if not -(2**63) <= value < 2**63:
            raise InputError(f"inputs.max_tokens[{row}]", value, "an integer of 64 bits")
    return (
        pb.PredictRequest(
            artifact_id=served.name,
            **{
                name: values[row]
                for name, values in inputs.items()
                if values[row] is not None and values[row] == values[row]  # null or NaN: unknown
            },
        )
        for row in range(num_rows)
    )


def _value(response: pb.PredictResponse, name: str) -> Any:
    if name == "quantile_tokens":
        return [quantile.tokens for quantile in response.truncated_length.quantiles]
    if name in ("expected_tokens", "cvar_tokens"):
        return getattr(response.truncated_length, name)
    value: Any = response
    for part in RESPONSE_FIELDS.get(name, name).split("."):
        value = getattr(value, part)
    return value


class OpenInferenceMethods:
    """The gRPC methods: inference.GRPCInferenceService."""

    def __init__(self, calls: PredictorCalls) -> None:
        self._calls = calls

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """The handler for a gRPC server."""
        methods: dict[str, Any] = {
            "ServerLive": unary(self._live),
            "ServerReady": unary(self._ready),
            "ModelReady": unary(self._model_ready),
            "ServerMetadata": unary(self._server_metadata),
            "ModelMetadata": unary(self._model_metadata),
            "ModelInfer": unary(self._infer),
        }
        return grpc.method_handlers_generic_handler(OIP_SERVICE, methods)

    async def _live(self, data: bytes, context: Context) -> Message:
        parse(oip.ServerLiveRequest, data)
        return oip.ServerLiveResponse(live=True)

    async def _ready(self, data: bytes, context: Context) -> Message:
        parse(oip.ServerReadyRequest, data)
        return oip.ServerReadyResponse(ready=self._calls.artifacts.is_ready)

    async def _model_ready(self, data: bytes, context: Context) -> Message:
        request = parse(oip.ModelReadyRequest, data)
        try:
            served = find(self._calls, request.name, request.version)
        except UnknownArtifactError:
            return oip.ModelReadyResponse(ready=False)
        return oip.ModelReadyResponse(ready=self._calls.artifacts.is_artifact_ready(served))

    async def _server_metadata(self, data: bytes, context: Context) -> Message:
        parse(oip.ServerMetadataRequest, data)
        return oip.ServerMetadataResponse(name=SERVER_NAME, version=metadata.version("tailcast"))

    async def _model_metadata(self, data: bytes, context: Context) -> Message:
        request = parse(oip.ModelMetadataRequest, data)
        served = find(self._calls, request.name, request.version)
        response = oip.ModelMetadataResponse(name=served.name, versions=[served.version], platform=PLATFORM)
        for tensors, types in ((response.inputs, INPUTS), (response.outputs, output_types(served))):
            for tensor in types:
                tensors.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        return response

    async def _infer(self, data: bytes, context: Context) -> Message:
        request = parse(oip.ModelInferRequest, data)
        served = find(self._calls, request.model_name, request.model_version)
        names = dict.fromkeys(output.name for output in request.outputs)
        inputs = _inputs(request, InputTensors(self._calls.max_batch_requests))
        outputs = await infer(self._calls, served, inputs, names, context.time_remaining())
        response = oip.ModelInferResponse(model_name=served.name, model_version=served.version, id=request.id)
        datatypes = {tensor.name: tensor.datatype for tensor in output_types(served)}
        for name, values in outputs.items():
            output = response.outputs.add(name=name, datatype=datatypes[name], shape=values.shape)
            # A client that sends raw bytes gets raw bytes.
            if request.raw_input_contents:
                response.raw_output_contents.append(values.tobytes())
            else:
                getattr(output.contents, CONTENTS[datatypes[name]]).extend(values.reshape(-1).tolist())
        return response


def _inputs(request: oip.ModelInferRequest, tensors: InputTensors) -> dict[str, list[Any]]:
    raws = request.raw_input_contents
    if raws and len(raws) != len(request.inputs):
        raise InputError("raw_input_contents", f"{len(raws)} entries", f"{len(request.inputs)}")
    for number, tensor in enumerate(request.inputs):
        if raws:
            tensors.add_raw(tensor.name, tensor.datatype, tensor.shape, raws[number])
            continue
        count = tensors.expect(tensor.name, tensor.datatype, tensor.shape)
        values = getattr(tensor.contents, CONTENTS[tensor.datatype])
        if len(values) != count:
            raise InputError(f"inputs.{tensor.name}", f"{len(values)} values", f"{count}, as of its shape")
        tensors.add(tensor.name, tensor.datatype, count, list(values))
    return tensors.values
