"""The gRPC methods of the Open Inference Protocol: inference.GRPCInferenceService."""

from __future__ import annotations

import struct
from importlib import metadata
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import Message

from predictors.proto import open_inference_pb2 as oip
from predictors.service.calls import PredictorCalls, parsed
from predictors.service.errors import UnknownArtifactError
from predictors.service.oip import (
    DTYPES,
    PLATFORM,
    Tensor,
    TensorType,
    checked_tensor,
    find,
    infer,
    input_types,
    output_types,
)
from predictors.service.servicer import Context, unary
from scheduler_core.errors import InputError

OIP_SERVICE = oip.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
SERVER_NAME = "tailcast"
CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


class OpenInferenceMethods:
    """The handlers."""

    def __init__(self, calls: PredictorCalls) -> None:
        self._calls = calls

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """What a gRPC server takes."""
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
        parsed(oip.ServerLiveRequest, data)
        return oip.ServerLiveResponse(live=True)

    async def _ready(self, data: bytes, context: Context) -> Message:
        parsed(oip.ServerReadyRequest, data)
        return oip.ServerReadyResponse(ready=self._calls.artifacts.is_ready)

    async def _model_ready(self, data: bytes, context: Context) -> Message:
        request = parsed(oip.ModelReadyRequest, data)
        try:
            served = find(self._calls, request.name, request.version)
        except UnknownArtifactError:
            return oip.ModelReadyResponse(ready=False)
        return oip.ModelReadyResponse(ready=self._calls.artifacts.says_ready(served))

    async def _server_metadata(self, data: bytes, context: Context) -> Message:
        parsed(oip.ServerMetadataRequest, data)
        return oip.ServerMetadataResponse(name=SERVER_NAME, version=metadata.version("tailcast"))

    async def _model_metadata(self, data: bytes, context: Context) -> Message:
        request = parsed(oip.ModelMetadataRequest, data)
        served = find(self._calls, request.name, request.version)
        return oip.ModelMetadataResponse(
            name=served.name,
            versions=[served.version],
            platform=PLATFORM,
            inputs=[_tensor_metadata(tensor) for tensor in input_types(served)],
            outputs=[_tensor_metadata(tensor) for tensor in output_types(served)],
        )

    async def _infer(self, data: bytes, context: Context) -> Message:
        request = parsed(oip.ModelInferRequest, data)
        served = find(self._calls, request.model_name, request.model_version)
        outputs = await infer(
            self._calls,
            served,
            _inputs(request),
            [output.name for output in request.outputs],
            context.time_remaining(),
        )
        response = oip.ModelInferResponse(model_name=served.name, model_version=served.version, id=request.id)
        types = {tensor.name: tensor for tensor in output_types(served)}
        for name, values in outputs.items():
            datatype = types[name].datatype
            output = response.outputs.add(name=name, datatype=datatype, shape=values.shape)
            # A client that sends raw bytes wants raw bytes.
            if request.raw_input_contents:
                response.raw_output_contents.append(values.astype(values.dtype.newbyteorder("<")).tobytes())
            else:
                getattr(output.contents, CONTENTS[datatype]).extend(values.reshape(-1).tolist())
        return response


def from_raw(name: str, datatype: str, shape: list[int], raw: bytes) -> Tensor:
    """A tensor from its raw bytes: little-endian, row by row; BYTES elements each after their length in 4 bytes.

    Raises:
        InputError: The bytes do not fit.
    """
    if datatype == "BYTES":
        return checked_tensor(name, datatype, shape, _byte_strings(name, raw))
    if datatype not in DTYPES:
        return checked_tensor(name, datatype, shape, [])
    dtype = np.dtype(DTYPES[datatype]).newbyteorder("<")
    if len(raw) % dtype.itemsize:
        raise InputError(f"inputs.{name}", f"{len(raw)} raw bytes", f"a multiple of {dtype.itemsize}")
    return checked_tensor(name, datatype, shape, np.frombuffer(raw, dtype=dtype))


def _byte_strings(name: str, raw: bytes) -> list[bytes]:
    found = []
    at = 0
    while at < len(raw):
        if at + 4 > len(raw):
            raise InputError(f"inputs.{name}", "raw bytes that end early", "lengths and bytes in turn")
        (length,) = struct.unpack_from("<I", raw, at)
        at += 4 + length
        if at > len(raw):
            raise InputError(f"inputs.{name}", "raw bytes that end early", "lengths and bytes in turn")
        found.append(raw[at - length : at])
    return found


def _inputs(request: oip.ModelInferRequest) -> dict[str, Tensor]:
    if request.raw_input_contents and len(request.raw_input_contents) != len(request.inputs):
        raise InputError(
            "raw_input_contents", f"{len(request.raw_input_contents)} entries", f"{len(request.inputs)}"
        )
    found: dict[str, Tensor] = {}
    for number, tensor in enumerate(request.inputs):
        if tensor.name in found:
            raise InputError("inputs", tensor.name, "every name once")
        shape = list(tensor.shape)
        if request.raw_input_contents:
            raw = request.raw_input_contents[number]
            found[tensor.name] = from_raw(tensor.name, tensor.datatype, shape, raw)
        elif tensor.datatype in CONTENTS:
            values = list(getattr(tensor.contents, CONTENTS[tensor.datatype]))
            found[tensor.name] = checked_tensor(tensor.name, tensor.datatype, shape, values)
        else:
            raise InputError(
                f"inputs.{tensor.name}.datatype", tensor.datatype, f"one of {', '.join(CONTENTS)}"
            )
    return found


def _tensor_metadata(tensor: TensorType) -> oip.ModelMetadataResponse.TensorMetadata:
    return oip.ModelMetadataResponse.TensorMetadata(
        name=tensor.name, datatype=tensor.datatype, shape=tensor.shape
    )
