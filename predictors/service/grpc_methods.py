"""gRPC methods of tailcast.predictor.v1.Predictor.

Handlers take and return bytes, so that malformed requests get INVALID_ARGUMENT instead of INTERNAL.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.message import Message

from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.calls import PredictorCalls
from predictors.service.errors import ErrorStatus, trailing_metadata
from predictors.service.messages import parse

SERVICE = pb.DESCRIPTOR.services_by_name["Predictor"].full_name
Context = grpc.aio.ServicerContext[Any, Any]


async def abort(context: Context, error: Exception) -> NoReturn:
    """Ends a call with the status and details of an error."""
    status = ErrorStatus.of(error)
    await context.abort(status.code, status.message, trailing_metadata(status))
    raise AssertionError("abort raises")


def unary(
    method: Callable[[Any, Context], Awaitable[Message]], kind: type[Message] | None = None
) -> grpc.RpcMethodHandler[Any, Any]:
    """The gRPC handler of a method that takes bytes, or a message of type `kind`, and can raise."""

    async def handle(data: bytes, context: Context) -> bytes:
        try:
            response = await method(data if kind is None else parse(kind, data), context)
            data = response.SerializeToString()
        except Exception as error:
            await abort(context, error)
        return data

    return grpc.unary_unary_rpc_method_handler(handle)


def predictor_handler(calls: PredictorCalls) -> grpc.GenericRpcHandler[Any, Any]:
    """gRPC handler of tailcast.predictor.v1.Predictor."""

    async def predict(data: bytes, context: Context) -> Message:
        calls.check_capacity("Predict")
        with calls.counted("Predict"):
            request = parse(pb.PredictRequest, data)
        calls.receive_trace(context.invocation_metadata() or ())
        return await calls.predict(request, context.time_remaining(), method="Predict")

    async def predict_batch(data: bytes, context: Context) -> Message:
        with calls.counted("PredictBatch"):
            request = parse(pb.PredictBatchRequest, data)
        calls.receive_trace(context.invocation_metadata() or ())
        return await calls.predict_batch(request, context.time_remaining())

    async def observe(data: bytes, context: Context) -> Message:
        with calls.counted("Observe"):
            return await calls.observe(parse(pb.ObserveRequest, data))

    async def metadata(request: pb.GetMetadataRequest, context: Context) -> Message:
        return calls.metadata(request)

    methods = {
        "Predict": unary(predict),
        "PredictBatch": unary(predict_batch),
        "Observe": unary(observe),
        "GetMetadata": unary(metadata, pb.GetMetadataRequest),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)
