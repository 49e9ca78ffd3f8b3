"""gRPC methods of tailcast.predictor.v1.Predictor.

Handlers take and return bytes, so that malformed requests get INVALID_ARGUMENT instead of INTERNAL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.message import Message

from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.calls import PredictorCalls
from predictors.service.errors import ClosedError, ErrorStatus, trailing_metadata
from predictors.service.messages import parse
from predictors.service.tracing import TRACE_KEYS

SERVICE = pb.DESCRIPTOR.services_by_name["Predictor"].full_name
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs
# Maximum number of requests in flight per stream; the next one is read when an outcome has been sent.
MAX_STREAM_REQUESTS = 128
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


class PredictorMethods:
    """Handlers of the gRPC methods."""

    def __init__(self, calls: PredictorCalls) -> None:
        self._calls = calls
        self._readers: set[asyncio.Future[None]] = set()  # of the open streams

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """The handler for a gRPC server."""
        methods: dict[str, Any] = {
            "Predict": unary(self._predict),
            "PredictBatch": unary(self._predict_batch),
            "PredictStream": grpc.stream_stream_rpc_method_handler(self._predict_stream),
            "GetMetadata": unary(self._metadata, pb.GetMetadataRequest),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def end_streams(self) -> None:
        """Stops reading from streams; they end after their requests in flight."""
        for reader in list(self._readers):
            reader.cancel()

    async def _predict(self, data: bytes, context: Context) -> Message:
        self._calls.check_capacity("Predict")
        with self._calls.counted("Predict"):
            request = parse(pb.PredictRequest, data)
        return await self._calls.predict(
            request, context.time_remaining(), method="Predict", trace=self._trace(context)
        )

    async def _predict_batch(self, data: bytes, context: Context) -> Message:
        with self._calls.counted("PredictBatch"):
            request = parse(pb.PredictBatchRequest, data)
        return await self._calls.predict_batch(request, context.time_remaining(), self._trace(context))

    async def _metadata(self, request: pb.GetMetadataRequest, context: Context) -> Message:
        return self._calls.metadata(request)

    async def _predict_stream(self, requests: object, context: Context) -> None:
        """Reads, predicts and writes concurrently, with bounded memory."""
        slots, writing = asyncio.Semaphore(MAX_STREAM_REQUESTS), asyncio.Lock()
        trace = self._trace(context)

        async def respond(request: pb.PredictRequest) -> None:
            outcome = await self._calls.outcome(
                request, context.time_remaining(), method="PredictStream", trace=trace
            )
            async with writing:
                await context.write(outcome.SerializeToString())
            slots.release()

        async def read(responses: asyncio.TaskGroup) -> None:
            while True:
                await slots.acquire()
                data = await context.read()
                if data is EOF:
                    return
                with self._calls.counted("PredictStream"):
                    request = parse(pb.PredictRequest, data)
                responses.create_task(respond(request))

        end: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as responses:
                reader = asyncio.ensure_future(read(responses))
                self._readers.add(reader)
                reader.add_done_callback(self._readers.discard)
                try:
                    await asyncio.wait([reader])
                finally:
                    reader.cancel()
                end = ClosedError() if reader.cancelled() else reader.exception()
        except ExceptionGroup as errors:  # from writing
            end = errors.exceptions[0]
        if isinstance(end, Exception):  # after the outcomes of all requests that were read
            await abort(context, end)

    def _trace(self, context: Context) -> dict[str, str] | None:
        if self._calls.tracing is None:
            return None
        metadata = dict(context.invocation_metadata() or ())
        return {key: value for key in TRACE_KEYS if isinstance(value := metadata.get(key), str)}
