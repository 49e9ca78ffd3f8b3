"""The gRPC methods of tailcast.predictor.v1.Predictor, from bytes to bytes.

Handlers take and give bytes: what cannot be parsed is then our INVALID_ARGUMENT, not the library's INTERNAL or UNKNOWN.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.message import Message

from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.calls import PredictorCalls, parsed
from predictors.service.errors import ClosedError, QueueFullError
from predictors.service.statuses import Failure
from predictors.service.tracing import TRACE_KEYS

SERVICE = pb.DESCRIPTOR.services_by_name["Predictor"].full_name
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs
Context = grpc.aio.ServicerContext[Any, Any]


async def abort(context: Context, error: Exception) -> NoReturn:
    """Ends a call with the status of an error and its details."""
    failure = Failure.of(error)
    await context.abort(failure.code, failure.message, failure.trailing_metadata())
    raise AssertionError("abort raises")


def unary(method: Callable[[bytes, Context], Awaitable[Message]]) -> grpc.RpcMethodHandler[Any, Any]:
    """A gRPC handler of a method that takes bytes, gives a message, and may raise anything."""

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
        calls: What the service does.
        max_streams: Most PredictStream calls at the same time.
        max_stream_requests: Requests of one stream that are under way at the same time; the next one is read when one
            of them has been answered and the answer taken.
    """

    def __init__(self, calls: PredictorCalls, *, max_streams: int, max_stream_requests: int) -> None:
        self._calls = calls
        self._max_streams = max_streams
        self._max_stream_requests = max_stream_requests
        self._streams: set[PredictionStream] = set()
        self._traces = calls.is_tracing

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """What a gRPC server takes."""
        methods: dict[str, Any] = {
            "Predict": unary(self._predict),
            "PredictBatch": unary(self._predict_batch),
            "PredictStream": grpc.stream_stream_rpc_method_handler(self._predict_stream),
            "GetMetadata": unary(self._metadata),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def end_streams(self) -> None:
        """Reads no more requests from streams; they end when what was read is answered."""
        for stream in list(self._streams):
            stream.end()

    async def _predict(self, data: bytes, context: Context) -> Message:
        self._calls.check_room("Predict")
        request = parsed(pb.PredictRequest, data)
        return await self._calls.predict(
            request, context.time_remaining(), method="Predict", trace=self._trace(context)
        )

    async def _predict_batch(self, data: bytes, context: Context) -> Message:
        request = parsed(pb.PredictBatchRequest, data)
        return await self._calls.predict_batch(request, context.time_remaining(), self._trace(context))

    async def _metadata(self, data: bytes, context: Context) -> Message:
        return self._calls.metadata(parsed(pb.GetMetadataRequest, data))

    async def _predict_stream(self, requests: object, context: Context) -> None:
        if len(self._streams) >= self._max_streams:
            await abort(context, QueueFullError(self._max_streams, "streams", "streams are open"))
        stream = PredictionStream(self._calls, context, self._max_stream_requests, self._trace(context))
        self._streams.add(stream)
        try:
            await stream.run()
        except Exception as error:
            await abort(context, error)
        finally:
            self._streams.discard(stream)

    def _trace(self, context: Context) -> dict[str, str] | None:
        if not self._traces:
            return None
        found = dict(context.invocation_metadata() or ())
        return {key: value for key in TRACE_KEYS if isinstance(value := found.get(key), str)}


class PredictionStream:
    """One PredictStream call: reads, predicts and writes at the same time, with bounded memory."""

    def __init__(
        self, calls: PredictorCalls, context: Context, max_requests: int, trace: dict[str, str] | None
    ) -> None:
        self._calls = calls
        self._context = context
        self._trace = trace
        self._num_open = 0  # read and not yet written
        self._answers: deque[bytes] = deque()
        self._changed = asyncio.Event()  # an answer is there, or reading has ended
        self._room = asyncio.Semaphore(max_requests)  # requests that may still be read
        self._tasks: set[asyncio.Task[None]] = set()
        self._reader: asyncio.Task[None] | None = None
        self._is_ending = False

    async def run(self) -> None:
        """Until the client has sent all and got all.

        Raises:
            InputError: Bytes that are no request.
            ClosedError: The server is draining; all that was read has been answered.
        """
        self._reader = asyncio.ensure_future(self._read())
        self._reader.add_done_callback(lambda _: self._changed.set())
        try:
            while not (self._reader.done() and self._num_open == 0):
                await self._changed.wait()
                self._changed.clear()
                while self._answers:
                    await self._context.write(self._answers.popleft())
                    self._num_open -= 1
                    self._room.release()
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
            await self._room.acquire()
            data = await self._context.read()
            if data is EOF:
                return
            request = parsed(pb.PredictRequest, data)
            self._num_open += 1
            task = asyncio.ensure_future(self._answer(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: pb.PredictRequest) -> None:
        outcome = await self._calls.outcome(
            request, self._context.time_remaining(), method="PredictStream", trace=self._trace
        )
        self._answers.append(outcome.SerializeToString())
        self._changed.set()
