"""The gRPC methods of the Open Inference Protocol: inference.GRPCInferenceService."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import grpc
from google.protobuf.message import Message

from predictors.proto import open_inference_pb2 as oip
from predictors.service.calls import PredictorCalls, parsed
from predictors.service.errors import UnknownArtifactError
from predictors.service.oip import (
    PLATFORM,
    InputTensors,
    Tensor,
    TensorType,
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
            _inputs(request, InputTensors(self._calls, served)),
            dict.fromkeys(output.name for output in request.outputs),
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


def _inputs(request: oip.ModelInferRequest, tensors: InputTensors) -> dict[str, Tensor]:
    raws = request.raw_input_contents
    if raws and len(raws) != len(request.inputs):
        raise InputError("raw_input_contents", f"{len(raws)} entries", f"{len(request.inputs)}")
    for number, tensor in enumerate(request.inputs):
        name, datatype, shape = tensor.name, tensor.datatype, tensor.shape
        if raws:
            tensors.add_raw(name, datatype, shape, raws[number])
            continue
        count = tensors.expect(name, datatype, shape)
        if datatype not in CONTENTS:
            raise InputError(f"inputs.{name}.datatype", datatype, f"one of {', '.join(CONTENTS)}")
        values = getattr(tensor.contents, CONTENTS[datatype])
        if len(values) != count:
            raise InputError(f"inputs.{name}", f"{len(values)} values", f"{count}, as its shape says")
        tensors.add(name, datatype, shape, list(values))
    return tensors.tensors


def _tensor_metadata(tensor: TensorType) -> oip.ModelMetadataResponse.TensorMetadata:
    return oip.ModelMetadataResponse.TensorMetadata(
        name=tensor.name, datatype=tensor.datatype, shape=tensor.shape
    )
