"""Asynchronous client side of predictors: the scheduler never waits for them, and every request gets an event.

A `Predictor` is any object with an asynchronous `predict`. `open_predictor` looks a predictor up by name among
the installed packages (entry point group "tailcast.predictors"), so that this package does not import any
client. `AsyncPredictor` submits requests to it with bounded concurrency and returns one event per request.

Until the event arrives, the scheduler uses the policy's key for unknown lengths. With a predictor that never
responds, a policy therefore acts as it does without predictions.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from itertools import islice
from typing import Protocol, runtime_checkable

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.prediction.predictions import Prediction

ENTRY_POINT_GROUP = "tailcast.predictors"
#: The predictors that come with tailcast.
SHIPPED = ("pretrained", "tiny")
#: Accepted names of predictors, for help texts and error messages.
PREDICTORS = "pretrained, tiny, an artifact folder, or grpc://HOST:PORT"


@dataclass(frozen=True, slots=True)
class PredictionRequest:
    """Input of a prediction. `prompt` is the text sent to the served model, `served_model` is empty if there
    is only one, `temperature` is the sampling temperature (>= 0), None if unknown."""

    request_id: str
    prompt: str
    max_tokens: int
    served_model: str = ""
    temperature: float | None = None


@runtime_checkable
class Predictor(Protocol):
    """Predicts lengths and urgency of requests; an instance belongs to one event loop."""

    async def predict(self, requests: Sequence[PredictionRequest]) -> Sequence[Prediction]:
        """One prediction per request, in the same order; raises `TailcastError` if that is not possible."""
        ...

    async def close(self) -> None:
        """Closes connections."""
        ...


def open_predictor(predictor: str) -> Predictor:
    """Creates a predictor by name, without connecting or loading: "pretrained" or "tiny" (artifacts that ship
    with tailcast), an artifact folder, or scheme://address, such as grpc://127.0.0.1:50051. `InputError` if
    there is no such folder, or no installed package provides the scheme.

    Calls the entry point of the group "tailcast.predictors" that is named like the scheme, with the address.
    Other names are passed to the entry point `local`, unless a shipped predictor has its own entry point.
    """
    points = {point.name: point for point in metadata.entry_points(group=ENTRY_POINT_GROUP)}
    scheme, separator, address = predictor.partition("://")
    if not separator:
        scheme = predictor if predictor in SHIPPED and predictor in points else "local"
        address = predictor
    if not address or scheme not in points:
        raise InputError("predictor", predictor, PREDICTORS)
    factory: Callable[[str], Predictor] = points[scheme].load()
    return factory(address)


class PredictionStatus(Enum):
    """Outcome of a request. LATE: after `withdraw`; ABSENT: there is no predictor, so there was no call."""

    ANSWERED = "answered"
    LATE = "late"
    FAILED = "failed"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class PredictionEvent:
    """Outcome of one submitted request: the prediction (also a late one) or an error message. `latency_s` is
    the duration of the call in seconds; 0 if there was no call, or it was cancelled."""

    request_id: str
    prediction: Prediction | None
    error: str | None
    latency_s: float
    status: PredictionStatus


class AsyncPredictor:
    """Submits requests without blocking and returns exactly one event for each of them.

    Queued requests are sent in batches of up to `max_batch` (1 if the service does the batching), without
    waiting for a batch to fill. If a call for several requests fails, each is sent again individually, so
    that an invalid prompt does not affect other requests. At most `max_in_flight` calls run at the same time.
    A call fails after `timeout_s` seconds; None: no timeout. `InputError` if a limit is not above 0.
    """

    def __init__(
        self,
        predictor: Predictor,
        *,
        max_in_flight: int = 64,
        max_batch: int = 1,
        timeout_s: float | None = None,
    ) -> None:
        if min(max_in_flight, max_batch) <= 0:
            raise InputError("max_in_flight, max_batch", (max_in_flight, max_batch), "integers > 0")
        if timeout_s is not None and not timeout_s > 0:
            raise InputError("timeout_s", timeout_s, "seconds > 0, or None")
        self._predictor = predictor
        self._max_in_flight = max_in_flight
        self._max_batch = max_batch
        self._timeout_s = timeout_s
        #: Ids of submitted requests whose event has not been taken.
        self._open: set[str] = set()
        #: Requests without an event, by id: queued ones, and those in a call (True: withdrawn).
        self._unsent: dict[str, PredictionRequest] = {}
        self._sent: dict[str, bool] = {}
        self._events: asyncio.Queue[PredictionEvent] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pump_is_due = False
        self._closed = False

    @property
    def num_open(self) -> int:
        """Submitted requests whose event has not been taken yet."""
        return len(self._open)

    def submit(self, request: PredictionRequest) -> None:
        """Queues a request and returns at once; needs a running event loop. `InputError` if a request with
        this id is already open; `TailcastError` after `close`."""
        if self._closed:
            raise TailcastError(f"request {request.request_id} was submitted to a closed AsyncPredictor")
        if request.request_id in self._open:
            raise InputError("request_id", request.request_id, "an id that is not open already")
        loop = asyncio.get_running_loop()
        self._open.add(request.request_id)
        self._unsent[request.request_id] = request
        if not self._pump_is_due:  # runs after this turn of the event loop, to send its requests in one batch
            self._pump_is_due = True
            loop.call_soon(self._pump)

    def withdraw(self, request_id: str) -> bool:
        """Marks a request that has finished or was aborted. A queued one is not sent and its event is FAILED;
        the event of one in a call is LATE. Returns whether the request was open without an event."""
        if self._unsent.pop(request_id, None) is not None:
            self._end(request_id, error="withdrawn before it was sent")
            return True
        is_withdrawn = self._sent.get(request_id, True)
        if not is_withdrawn:
            self._sent[request_id] = True
        return not is_withdrawn

    async def next_event(self) -> PredictionEvent:
        """Waits for the next event."""
        event = await self._events.get()
        self._open.remove(event.request_id)
        return event

    def ready_events(self) -> list[PredictionEvent]:
        """All available events, without waiting."""
        events = [self._events.get_nowait() for _ in range(self._events.qsize())]
        self._open -= {event.request_id for event in events}
        return events

    async def close(self) -> None:
        """Cancels calls in flight and closes the predictor; open requests fail, with events."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for request_id in (*self._sent, *self._unsent):
            self._end(request_id, error="closed")
        self._unsent.clear()
        await self._predictor.close()

    def _pump(self) -> None:
        """Starts calls for queued requests, up to `max_in_flight`."""
        self._pump_is_due = False
        while self._unsent and len(self._tasks) < self._max_in_flight and not self._closed:
            batch = list(islice(self._unsent.values(), self._max_batch))
            for request in batch:
                del self._unsent[request.request_id]
                self._sent[request.request_id] = False
            task = asyncio.get_running_loop().create_task(self._call(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _: self._pump())

    async def _call(self, batch: list[PredictionRequest]) -> None:
        """Sends a batch. If it fails, except by a timeout, sends each of its requests individually."""
        start = time.perf_counter()
        predictions: Sequence[Prediction | None] = [None] * len(batch)
        error, retry = None, len(batch) > 1
        try:
            async with asyncio.timeout(self._timeout_s):
                returned = await self._predictor.predict(batch)
            if len(returned) == len(batch):
                predictions, retry = returned, False
            else:
                error = f"{len(returned)} predictions for {len(batch)} request(s)"
        except TimeoutError:
            error, retry = f"no prediction within {self._timeout_s} s", False
        except TailcastError as failure:
            error = str(failure)
        except Exception as failure:  # any exception of a predictor becomes an event; the scheduler continues
            error = f"{type(failure).__name__}: {failure}"
        if retry:
            for request in batch:
                await self._call([request])
            return
        latency_s = time.perf_counter() - start
        for request, prediction in zip(batch, predictions, strict=True):
            self._end(request.request_id, prediction, error, latency_s)

    def _end(
        self,
        request_id: str,
        prediction: Prediction | None = None,
        error: str | None = None,
        latency_s: float = 0.0,
    ) -> None:
        """Puts the event of a request into the queue."""
        is_withdrawn = self._sent.pop(request_id, False)
        status = PredictionStatus.LATE if is_withdrawn else PredictionStatus.ANSWERED
        if prediction is None:
            status = PredictionStatus.FAILED
        self._events.put_nowait(PredictionEvent(request_id, prediction, error, latency_s, status))
