"""The asynchronous client: what schedulers and simulators use."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc

from predictors.client.coalescing import Coalescer
from predictors.client.errors import PredictorError
from predictors.client.messages import (
    all_failed,
    batch_results,
    call_failed,
    call_metadata,
    channel_credentials,
    channel_options,
    checked_address,
    chunks,
    length_prediction,
    request_message,
    succeeded,
)
from predictors.client.pool import LeastBusy
from predictors.client.retrying import Clock, Result, RetryPolicy, Send
from predictors.client.settings import ClientSettings, checked_timeout
from predictors.client.streaming import PredictionStream
from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto import predictor_v1_pb2_grpc
from scheduler_core.predictions import LengthPrediction
from scheduler_core.predictor import PredictionRequest

if TYPE_CHECKING:
    from grpc.aio import Channel

SMALL_BATCH = 8
"""Requests that go together in one call although calls are left: dear enough to send apart, few enough not to wait long
for the slowest of them."""


class GrpcPredictor:
    """Asynchronous client; implements `scheduler_core.predictor.Predictor`.

    Nothing in it blocks the event loop: connecting, name look-ups, waits and retries happen beside the caller.

    Args:
        address: "host:port" or "unix:PATH".
        settings: Limits.
        clock: Monotonic seconds.
        rng: Randomness of the waits between tries; default: seeded by the operating system.

    Raises:
        InputError: The address has another form. Nothing is connected yet.
    """

    def __init__(
        self,
        address: str,
        settings: ClientSettings | None = None,
        *,
        clock: Clock = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.address = checked_address(address)
        self.settings = settings or ClientSettings()
        self._clock = clock
        self.policy = RetryPolicy.of(
            self.address, self.settings.retries, self.settings.breaker, clock, rng or random.Random()
        )
        self._connections: _Connections | None = None

    async def predict(
        self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None
    ) -> list[LengthPrediction]:
        """Predicted lengths in the order of `requests`.

        Args:
            requests: Any number.
            timeout_s: Deadline of this call; None: that of the settings.

        Raises:
            PredictorError: The service could not be reached in time, or refused or failed one of the requests, or its
                artifact predicts no length distribution.
            InputError: A prompt cannot be sent, or the deadline is none.
        """
        found = await self.responses(requests, timeout_s=timeout_s)
        return [length_prediction(response, self.address) for response in found]

    async def responses(
        self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None, capped: bool = False
    ) -> list[pb.PredictResponse]:
        """All that the service says (urgency, buckets, rank, ...), in the order of `requests`; raises as `predict`.

        Args:
            requests: Any number.
            timeout_s: Deadline of this call; None: that of the settings.
            capped: Also ask for the numbers of the length cut at each request's max_tokens.
        """
        seconds = self.settings.timeout_s if timeout_s is None else checked_timeout(timeout_s)
        messages = [request_message(request, capped=capped) for request in requests]
        connections = self._connected()
        if self.settings.coalesce:
            deadline = asyncio.get_running_loop().time() + seconds
            pending = [connections.coalescer.submit(message, deadline) for message in messages]
            return succeeded(await _gathered(pending))
        calls = [self._deliver(connections, chunk, seconds) for chunk in chunks(messages, self.settings)]
        return succeeded([result for results in await _gathered(calls) for result in results])

    @property
    def num_calls(self) -> tuple[int, ...]:
        """Calls under way on each connection; empty before the first call."""
        return () if self._connections is None else self._connections.pool.num_calls

    async def metadata(self) -> pb.GetMetadataResponse:
        """What the service serves: artifact, limits, provider."""
        with self._connected().pool.lease() as connection:
            try:
                response: pb.GetMetadataResponse = await connection.stub.GetMetadata(
                    pb.GetMetadataRequest(),
                    timeout=self.settings.timeout_s,
                    metadata=call_metadata(self.settings),
                )
            except grpc.aio.AioRpcError as error:
                text = f"predictor {self.address}: {error.code().name}: {error.details()}"
                raise PredictorError(text, error.code().name) from error
        return response

    async def close(self) -> None:
        """Ends the connections; the client can be used again and then opens new ones."""
        connections, self._connections = self._connections, None
        if connections is not None:
            await connections.close()

    async def __aenter__(self) -> GrpcPredictor:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _connected(self) -> _Connections:
        """The connections of this event loop: they cannot move from one loop to another."""
        loop = asyncio.get_running_loop()
        if self._connections is None or self._connections.loop is not loop:
            self._connections = _Connections(self, loop)
        return self._connections

    async def _deliver(
        self, connections: _Connections, messages: Sequence[pb.PredictRequest], seconds: float
    ) -> Sequence[Result]:
        """One call with all its tries."""
        steps = self.policy.attempts(messages, self._clock() + seconds)
        try:
            step = next(steps)
            while True:
                if isinstance(step, Send):
                    step = steps.send(await self._send(connections, step))
                else:
                    await asyncio.sleep(step.seconds)
                    step = next(steps)
        except StopIteration as done:
            found: list[Result] = done.value
            return found
        finally:
            steps.close()

    async def _send(self, connections: _Connections, step: Send) -> Sequence[Result]:
        """One try, and its hedge if there is to be one."""
        first = asyncio.ensure_future(self._call(connections, step))
        hedge_s = self.settings.hedge_after_s
        if hedge_s is None or hedge_s >= step.timeout_s:
            return await first
        calls = {first}
        try:
            await asyncio.wait(calls, timeout=hedge_s)
            if not first.done() and self.policy.budget.take():
                rest = Send(step.messages, step.timeout_s - hedge_s)
                calls.add(asyncio.ensure_future(self._call(connections, rest)))
            running = calls
            while True:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                results = [call.result() for call in done]
                best = next((found for found in results if not all_failed(found)), None)
                if best is not None or not running:
                    return results[0] if best is None else best
        finally:
            for call in calls:
                call.cancel()

    async def _call(self, connections: _Connections, step: Send) -> Sequence[Result]:
        with connections.pool.lease() as connection:
            if self.settings.transport == "stream":
                return await connection.stream.send(step.messages, step.timeout_s)
            stub, metadata = connection.stub, call_metadata(self.settings)
            try:
                if len(step.messages) == 1:
                    return [await stub.Predict(step.messages[0], timeout=step.timeout_s, metadata=metadata)]
                batch = pb.PredictBatchRequest(requests=step.messages)
                response = await stub.PredictBatch(batch, timeout=step.timeout_s, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                return call_failed(error, step.messages, self.address)
        return batch_results(response, step.messages, self.address)


class _Connection:
    def __init__(self, address: str, settings: ClientSettings) -> None:
        self.channel = _channel(address, settings)
        self.stub: Any = predictor_v1_pb2_grpc.PredictorStub(self.channel)  # type: ignore[no-untyped-call]
        self.stream = PredictionStream(self.stub, call_metadata(settings), address)

    async def close(self) -> None:
        await self.stream.close()
        await self.channel.close(None)


class _Connections:
    """What belongs to one event loop."""

    def __init__(self, client: GrpcPredictor, loop: asyncio.AbstractEventLoop) -> None:
        settings = client.settings
        self.loop = loop
        self._all = [_Connection(client.address, settings) for _ in range(settings.num_connections)]
        self.pool = LeastBusy(self._all)

        def deliver(messages: Sequence[pb.PredictRequest], deadline: float) -> Any:
            return client._deliver(self, messages, deadline - loop.time())

        streams = settings.transport == "stream"
        self.coalescer = Coalescer(
            deliver,
            settings,
            client.address,
            max_calls=None if streams else settings.max_calls,
            small_batch=1 if streams else SMALL_BATCH,
        )

    async def close(self) -> None:
        if asyncio.get_running_loop() is not self.loop:
            return  # their loop has ended, and with it all that could be waited for
        await self.coalescer.close()
        for connection in self._all:
            await connection.close()


def _channel(address: str, settings: ClientSettings) -> Channel:
    options = channel_options(settings)
    if settings.tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, channel_credentials(settings.tls), options=options)


async def _gathered(awaitables: Sequence[Any]) -> list[Any]:
    """All results; when this is cancelled or one fails, the others are cancelled too."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
