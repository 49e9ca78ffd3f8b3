"""Many requests over one call: `PredictStream`, on one connection of one event loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from predictors.client.messages import PredictorError, Result, failure, outcome_result
from predictors.proto import predictor_v1_pb2 as pb


@dataclass(slots=True, eq=False)
class _InFlight:
    """A request in flight and the future of its result."""

    message: pb.PredictRequest
    future: asyncio.Future[Result]


class PredictionStream:
    """Opens a stream at the first request, and another one when it has ended.

    Args:
        stub: Of a connection.
        metadata: What the call carries.
        address: Named in errors.
    """

    def __init__(self, stub: Any, metadata: tuple[tuple[str, str], ...], address: str) -> None:
        self._stub = stub
        self._metadata = metadata
        self._address = address
        self._open: _OpenStream | None = None

    async def send(self, messages: Sequence[pb.PredictRequest], timeout_s: float) -> list[Result]:
        """One result per message. Cancelling it forgets the requests; the service answers them all the same."""
        if self._open is None or self._open.ended:
            self._open = _OpenStream(self._stub.PredictStream(metadata=self._metadata), self._address)
        return await self._open.send(messages, timeout_s)

    async def close(self) -> None:
        """Ends the stream; requests on their way fail with code "CANCELLED"."""
        if self._open is not None:
            await self._open.close("CANCELLED", "the client was closed")


class _OpenStream:
    def __init__(self, call: Any, address: str) -> None:
        self._call = call
        self._address = address
        self._numbers = itertools.count(1)
        self._in_flight: dict[str, _InFlight] = {}
        self._to_write: asyncio.Queue[pb.PredictRequest] = asyncio.Queue()
        self.ended = False
        self._tasks = [asyncio.ensure_future(self._write()), asyncio.ensure_future(self._read())]

    async def send(self, messages: Sequence[pb.PredictRequest], timeout_s: float) -> list[Result]:
        sent = {}
        loop = asyncio.get_running_loop()
        for message in messages:
            number = str(next(self._numbers))
            sent[number] = _InFlight(message, loop.create_future())
            numbered = pb.PredictRequest()
            numbered.CopyFrom(message)
            numbered.request_id = number
            numbered.timeout_s = timeout_s
            self._to_write.put_nowait(numbered)
        self._in_flight |= sent
        try:
            await asyncio.wait([one.future for one in sent.values()], timeout=timeout_s)
        finally:  # also when the caller gives up, which at the deadline may happen first
            for number in sent:
                self._in_flight.pop(number, None)
        return [self._result(one) for one in sent.values()]

    async def close(self, code: str, details: str) -> None:
        """Ends the stream; requests in flight fail."""
        self._end(code, details)
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _result(self, one: _InFlight) -> Result:
        if one.future.done():
            return one.future.result()
        return failure(one.message, "DEADLINE_EXCEEDED", "no answer in time", self._address)

    async def _write(self) -> None:
        try:
            while True:
                message = await self._to_write.get()
                if message.request_id in self._in_flight:  # else given up in the meantime
                    await self._call.write(message)
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError, grpc.aio.UsageError):
            return  # the stream has ended; `_read` knows why

    async def _read(self) -> None:
        code, details = "UNAVAILABLE", "the stream ended"
        try:
            while (outcome := await self._call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                self._answer(outcome)
            code, details = (await self._call.code()).name, await self._call.details() or ""
        except grpc.aio.AioRpcError as error:
            code, details = error.code().name, error.details() or ""
        except asyncio.CancelledError:
            code, details = "CANCELLED", "the call was cancelled"
            raise
        finally:
            # "OK" without an answer to what was asked: a server that ended in between. And where a write met the end of
            # a stream, the library hides the true status behind one of its own.
            hidden = code == "INTERNAL" and details.startswith("Internal error from Core")
            self._end("UNAVAILABLE" if code == "OK" or hidden else code, details)
            self._call.cancel()
            self._tasks[0].cancel()

    def _answer(self, outcome: pb.Outcome) -> None:
        number = outcome.prediction.request_id or outcome.error.request_id
        request = self._in_flight.get(number)
        if request is None or request.future.done():
            return
        result = outcome_result(outcome, request.message, self._address)
        if not isinstance(result, PredictorError):
            result.request_id = request.message.request_id
        request.future.set_result(result)

    def _end(self, code: str, details: str) -> None:
        self.ended = True
        for request in self._in_flight.values():
            if not request.future.done():
                request.future.set_result(failure(request.message, code, details, self._address))
