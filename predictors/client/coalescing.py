"""Requests that wait at the same time share a call, and identical ones an answer.

Whoever submits first in a turn of the event loop waits for nobody: the call goes out at the end of that turn. Only
when `max_calls` are under way do requests wait, and then go together.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from predictors.client.errors import CircuitOpenError, PredictorError
from predictors.client.messages import chunks, failure
from predictors.client.retrying import Result
from predictors.client.settings import ClientSettings
from predictors.proto import predictor_v1_pb2 as pb

Deliver = Callable[[Sequence[pb.PredictRequest], float], Awaitable[Sequence[Result]]]


@dataclass(slots=True, eq=False)
class _Entry:
    """One question and all who ask it."""

    message: pb.PredictRequest
    deadline: float
    future: asyncio.Future[Result]
    num_waiters: int = 0
    call: _Call | None = None


@dataclass(slots=True, eq=False)
class _Call:
    entries: list[_Entry]
    task: asyncio.Task[None] | None = field(default=None)

    @property
    def wanted(self) -> bool:
        return any(entry.num_waiters for entry in self.entries)


class Coalescer:
    """Belongs to one event loop.

    Args:
        deliver: Makes one call of some messages until a second of the loop's clock: one result per message.
        settings: Limits.
        address: Named in errors.
        max_calls: Calls under way at a time; None: any number.
        small_batch: Requests that go together although calls are left.
    """

    def __init__(
        self,
        deliver: Deliver,
        settings: ClientSettings,
        address: str,
        *,
        max_calls: int | None,
        small_batch: int,
    ) -> None:
        self._deliver = deliver
        self._settings = settings
        self._max_calls = math.inf if max_calls is None else max_calls
        self._small_batch = small_batch
        self._address = address
        self._entries: dict[bytes, _Entry] = {}  # asked and not answered
        self._pending: dict[bytes, _Entry] = {}  # not sent yet, in order of arrival
        self._calls: set[_Call] = set()
        self._flushing: asyncio.Handle | None = None

    async def submit(self, message: pb.PredictRequest, deadline: float) -> Result:
        """The answer to `message`, until `deadline` (second of the loop's clock).

        Cancelling the last caller who waits for an answer takes the question back.
        """
        key = _key(message)
        loop = asyncio.get_running_loop()
        while True:
            result = await self._ask(key, message, deadline)
            # A call that was sent for others, with less time than we have.
            late = isinstance(result, PredictorError) and result.code == "DEADLINE_EXCEEDED"
            if not late or loop.time() >= deadline:
                return _addressed(result, message)

    async def close(self) -> None:
        """Gives up all calls; their callers get an error with code "CANCELLED"."""
        self._give_up(list(self._entries.values()))
        self._entries.clear()
        self._pending.clear()
        tasks = [call.task for call in self._calls if call.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _give_up(self, entries: Sequence[_Entry]) -> None:
        for entry in entries:
            if not entry.future.done():
                text = "the client was closed"
                entry.future.set_result(failure(entry.message, "CANCELLED", text, self._address))

    async def _ask(self, key: bytes, message: pb.PredictRequest, deadline: float) -> Result:
        loop = asyncio.get_running_loop()
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = self._pending[key] = _Entry(message, deadline, loop.create_future())
            if self._flushing is None:
                self._flushing = loop.call_soon(self._flush)
        elif entry.call is None:
            entry.deadline = max(entry.deadline, deadline)
        entry.num_waiters += 1
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.shield(entry.future)
        except TimeoutError:
            return failure(message, "DEADLINE_EXCEEDED", "no answer in time", self._address)
        finally:
            entry.num_waiters -= 1
            if not entry.num_waiters and not entry.future.done():
                self._take_back(key, entry)

    def _take_back(self, key: bytes, entry: _Entry) -> None:
        if self._entries.get(key) is entry:
            del self._entries[key]
        if self._pending.get(key) is entry:
            del self._pending[key]
        call = entry.call
        if call is not None and call.task is not None and not call.wanted:
            call.task.cancel()

    def _flush(self) -> None:
        """Sends what is pending, as far as calls are left: in small batches if that is enough, else in even ones."""
        self._flushing = None
        while self._pending and len(self._calls) < self._max_calls:
            share = math.ceil(len(self._pending) / (self._max_calls - len(self._calls)))
            keys = list(itertools.islice(self._pending, max(self._small_batch, share)))
            first = next(chunks([self._pending[key].message for key in keys], self._settings))
            entries = [self._pending.pop(key) for key in keys[: len(first)]]
            call = _Call(entries)
            for entry in entries:
                entry.call = call
            self._calls.add(call)
            call.task = asyncio.get_running_loop().create_task(self._make(call))

    async def _make(self, call: _Call) -> None:
        try:
            deadline = max(entry.deadline for entry in call.entries)
            results = await self._deliver([entry.message for entry in call.entries], deadline)
            for entry, result in zip(call.entries, results, strict=True):
                if not entry.future.done():
                    entry.future.set_result(result)
        except asyncio.CancelledError:
            self._give_up(call.entries)
            raise
        except Exception as error:
            for entry in call.entries:
                if not entry.future.done():
                    entry.future.set_exception(error)
                    entry.future.exception()  # every caller gets it; none is left to be reported as never retrieved
        finally:
            self._calls.discard(call)
            for entry in call.entries:
                key = _key(entry.message)
                if self._entries.get(key) is entry:
                    del self._entries[key]
            if self._pending and self._flushing is None:
                self._flushing = asyncio.get_running_loop().call_soon(self._flush)


def _key(message: pb.PredictRequest) -> bytes:
    """What two requests must share to share an answer: everything but the id."""
    nameless = pb.PredictRequest()
    nameless.CopyFrom(message)
    nameless.ClearField("request_id")
    serialised: bytes = nameless.SerializeToString(deterministic=True)
    return serialised


def _addressed(result: Result, message: pb.PredictRequest) -> Result:
    """The shared result under the caller's own id."""
    if isinstance(result, PredictorError):
        if result.request_id in (None, message.request_id):
            return result
        text = str(result).replace(f"request {result.request_id!r}:", f"request {message.request_id!r}:", 1)
        kind = CircuitOpenError if isinstance(result, CircuitOpenError) else PredictorError
        return kind(text, result.code, message.request_id)
    if result.request_id == message.request_id:
        return result
    own = pb.PredictResponse()
    own.CopyFrom(result)
    own.request_id = message.request_id
    return own
