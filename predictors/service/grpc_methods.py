"""The gRPC methods of tailcast.predictor.v1.Predictor, from bytes to bytes.

Handlers take and return bytes: malformed ones are then our INVALID_ARGUMENT, not the library's INTERNAL or UNKNOWN.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.message import Message

from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.calls import PredictorCalls
from predictors.service.errors import ClosedError, ErrorStatus, QueueFullError
from predictors.service.messages import parse
from predictors.service.tracing import TRACE_KEYS

SERVICE = pb.DESCRIPTOR.services_by_name["Predictor"].full_name
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs
Context = grpc.aio.ServicerContext[Any, Any]


async def abort(context: Context, error: Exception) -> NoReturn:
    """Ends a call with the status of an error and its details."""
    status = ErrorStatus.of(error)
    await context.abort(status.code, status.message, status.trailing_metadata())
    raise AssertionError("abort raises")


def unary(method: Callable[[bytes, Context], Awaitable[Message]]) -> grpc.RpcMethodHandler[Any, Any]:
    """The gRPC handler of a method from bytes to a message, which may raise anything."""

    async def handle(data: bytes, context: Context) -> bytes:
        try:
            response = await method(data, context)
            data = response.SerializeToString()
        except Exception as error:
            await abort(context, error)
        return data

    return grpc.unary_unary_rpc_method_handler(handle)


class PredictorMethods:
    """The handlers.

    Args:
        calls: The service's methods.
        max_streams: Maximum number of PredictStream calls at the same time.
        max_stream_requests: Requests of one stream in flight; the next one is read when an outcome has been sent.
    """

    def __init__(self, calls: PredictorCalls, *, max_streams: int, max_stream_requests: int) -> None:
        self._calls = calls
        self._max_streams = max_streams
        self._max_stream_requests = max_stream_requests
        self._streams: set[_PredictStream] = set()

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """The handler for a gRPC server."""
        methods: dict[str, Any] = {
            "Predict": unary(self._predict),
            "PredictBatch": unary(self._predict_batch),
            "PredictStream": grpc.stream_stream_rpc_method_handler(self._predict_stream),
            "GetMetadata": unary(self._metadata),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def end_streams(self) -> None:
        """Reads no more requests from streams; they end when those in flight are answered."""
        for stream in list(self._streams):
            stream.end()

    async def _predict(self, data: bytes, context: Context) -> Message:
        self._calls.check_capacity("Predict")
        request = parse(pb.PredictRequest, data)
        return await self._calls.predict(
            request, context.time_remaining(), method="Predict", trace=self._trace(context)
        )

    async def _predict_batch(self, data: bytes, context: Context) -> Message:
        request = parse(pb.PredictBatchRequest, data)
        return await self._calls.predict_batch(request, context.time_remaining(), self._trace(context))

    async def _metadata(self, data: bytes, context: Context) -> Message:
        return self._calls.metadata(parse(pb.GetMetadataRequest, data))

    async def _predict_stream(self, requests: object, context: Context) -> None:
        if len(self._streams) >= self._max_streams:
            await abort(context, QueueFullError(self._max_streams, "streams", "streams are open"))
        stream = _PredictStream(self._calls, context, self._max_stream_requests, self._trace(context))
        self._streams.add(stream)
        try:
            await stream.run()
        except Exception as error:
            await abort(context, error)
        finally:
            self._streams.discard(stream)

    def _trace(self, context: Context) -> dict[str, str] | None:
        if self._calls.tracing is None:
            return None
        metadata = dict(context.invocation_metadata() or ())
        return {key: value for key in TRACE_KEYS if isinstance(value := metadata.get(key), str)}


class _PredictStream:
    """One PredictStream call: reads, predicts and writes at the same time, with bounded memory."""

    def __init__(
        self, calls: PredictorCalls, context: Context, max_requests: int, trace: dict[str, str] | None
    ) -> None:
        self._calls = calls
        self._context = context
        self._trace = trace
        self._num_open = 0  # read and not yet written
        self._outcomes: deque[bytes] = deque()
        self._changed = asyncio.Event()  # an outcome is there, or reading has ended
        self._slots = asyncio.Semaphore(max_requests)
        self._tasks: set[asyncio.Task[None]] = set()
        self._reader: asyncio.Task[None] | None = None
        self._is_ending = False

    async def run(self) -> None:
        """Serves until all requests of the client are answered.

        Raises:
            InputError: Bytes that are not a request.
            ClosedError: The server is draining; all requests in flight have been answered.
        """
        self._reader = asyncio.ensure_future(self._read())
        self._reader.add_done_callback(lambda _: self._changed.set())
        try:
            while not (self._reader.done() and self._num_open == 0):
                await self._changed.wait()
                self._changed.clear()
                while self._outcomes:
                    await self._context.write(self._outcomes.popleft())
                    self._num_open -= 1
                    self._slots.release()
            if not self._reader.cancelled():
                self._reader.result()
            if self._is_ending:
                raise ClosedError
        finally:
            self._reader.cancel()
            for task in self._tasks:
                task.cancel()

    def end(self) -> None:
        """Reads no more."""
        self._is_ending = True
        if self._reader is not None:
            self._reader.cancel()

    async def _read(self) -> None:
        while True:
            await self._slots.acquire()
            data = await self._context.read()
            if data is EOF:
                return
            request = parse(pb.PredictRequest, data)
            self._num_open += 1
            task = asyncio.ensure_future(self._predict(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _predict(self, request: pb.PredictRequest) -> None:
        outcome = await self._calls.outcome(
            request, self._context.time_remaining(), method="PredictStream", trace=self._trace
        )
        self._outcomes.append(outcome.SerializeToString())
        self._changed.set()
