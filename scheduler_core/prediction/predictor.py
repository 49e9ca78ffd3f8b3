"""The way to a prediction: predictors by address, and their use by schedulers that never wait.

A `Predictor` is opened from its address by `open_predictor`, which looks up installed packages (entry point
group "tailcast.predictors"), so that this package imports none of them. `AsyncPredictor` submits requests to
it with bounded concurrency and returns one event per request.

Until the event arrives, the scheduler uses the policy's key for unknown lengths. With a predictor that never
responds, a policy therefore acts as it does without predictions.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Self

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.prediction.joint import Parts, merged
from scheduler_core.prediction.predictions import MissingPart, Prediction
from scheduler_core.prediction.prompt_text import Message, PromptForm
from scheduler_core.prediction.service_access import NO_FILES, ServiceAccess

ENTRY_POINT_GROUP = "tailcast.predictors"
#: Schemes of services: without and with TLS.
SERVICES = ("grpc", "grpcs")
#: The predictors that come with tailcast.
SHIPPED = ("pretrained", "tiny", "urgency")
#: Accepted addresses of predictors, for help texts and error messages.
PREDICTORS = "pretrained, tiny, an artifact folder, or grpc://HOST:PORT (grpcs:// with TLS); joined by + for further heads, as in pretrained+urgency"


@dataclass(frozen=True, slots=True)
class PredictionRequest:
    """Input of a prediction. `prompt` is the text sent to the served model, of a conversation the last one of the user,
    and `messages` the conversation, empty if unknown; predictors read either (`text`). `served_model` is empty if there
    is only one, `temperature` is the sampling temperature (>= 0), None if unknown. `tenant` (empty if unknown) and
    `system_prompt`, the key of the system prompt (see `prompt_text.prompt_key`), are for services that learn."""

    request_id: str
    prompt: str
    max_tokens: int
    served_model: str = ""
    temperature: float | None = None
    tenant: str = ""
    system_prompt: int = 0
    messages: tuple[Message, ...] = ()

    def text(self, form: PromptForm) -> str:
        """The text that a predictor of this form reads."""
        return form.text(self.messages) if self.messages else self.prompt


class Predictor(ABC):
    """Predicts lengths and urgency of requests; an instance belongs to one event loop."""

    @abstractmethod
    async def predict(
        self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None
    ) -> Sequence[Prediction]:
        """One prediction per request, in the same order; raises `TailcastError` if that is not possible.

        `timeout_s` is the deadline of a call to a service; None: the predictor's own."""

    async def load(self) -> str:
        """Loads the artifact or connects to the service, as the first call would, and returns the artifact's
        version, "" if there is none. Raises `TailcastError` if that is not possible."""
        return ""

    @property
    def is_connected(self) -> bool:
        """False if the service has no open connection, so that a late prediction is due to its absence."""
        return True

    async def close(self) -> None:  # noqa: B027  # not abstract: most predictors in this process need no cleanup
        """Closes connections."""


class PredictorAddress(NamedTuple):
    """An address in parts. `scheme` is "local" for an artifact (`target`: a name in `SHIPPED` or a folder), "grpc" or
    "grpcs" (TLS) for a service (HOST:PORT), "joint" for several addresses, or the name of an entry point of another package."""

    scheme: str
    target: str

    @classmethod
    def of(cls, predictor: str, field: str = "predictor", *, others: str = "") -> Self:
        """The parts of a name in `SHIPPED`, the path of a folder, SCHEME://TARGET, or several of these joined by "+".

        InputError about `field` if the target is empty, or there is no such folder; `others` are further values
        of the field, for its message.
        """
        if len(addresses(predictor)) > 1:
            return cls("joint", predictor)
        scheme, separator, target = predictor.partition("://")
        if not separator:
            scheme, target = "local", predictor
        is_missing = scheme == "local" and target not in SHIPPED and not Path(target).is_dir()
        if not target or is_missing:
            raise InputError(field, predictor, others + PREDICTORS)
        return cls(scheme, target)

    @property
    def is_service(self) -> bool:
        """Whether it is a service."""
        return self.scheme in SERVICES


def addresses(predictor: str) -> list[str]:
    """The addresses of "A+B", or the single one of a predictor: an existing folder may have a "+" in its name."""
    parts = predictor.split("+")
    if len(parts) == 1 or Path(predictor).is_dir():
        return [predictor]
    is_address = ["://" in part or part in SHIPPED or Path(part).is_dir() for part in parts]
    return parts if all(is_address) else [predictor]


class JointPredictor(Predictor):
    """Queries several predictors at the same time and merges their heads, such as length and urgency (see `joint`). A part
    that fails or is late is left out; it fails if all of them do. `names` are those of the parts in `Prediction.missing`."""

    def __init__(self, predictors: Sequence[Predictor], names: Sequence[str]) -> None:
        self.predictors = tuple(predictors)
        self._parts = Parts(names)

    async def predict(
        self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None
    ) -> Sequence[Prediction]:
        calls = [partial(self._call, number, requests, timeout_s) for number in range(len(self.predictors))]
        columns = [
            [column] * len(requests) if isinstance(column, MissingPart) else column
            for column in await self._parts.ask(calls, timeout_s)
        ]
        return [merged(row) for row in zip(*columns, strict=True)]

    async def _call(
        self, number: int, requests: Sequence[PredictionRequest], timeout_s: float | None
    ) -> Sequence[Prediction | MissingPart]:
        """The predictions of one part. If it fails for several requests, each is sent again by itself, so that an invalid
        prompt does not affect the others."""
        try:
            predictions = await self.predictors[number].predict(requests, timeout_s=timeout_s)
            if len(predictions) != len(requests):
                raise TailcastError(f"{len(predictions)} predictions for {len(requests)} request(s)")
            return predictions
        except Exception:
            if len(requests) == 1:
                raise
        calls = (self._call(number, [request], timeout_s) for request in requests)
        results = await asyncio.gather(*calls, return_exceptions=True)
        errors = [each for each in results if isinstance(each, BaseException)]
        if len(errors) == len(results):
            raise errors[0]
        return [
            self._parts.missing(number, each) if isinstance(each, BaseException) else each[0]
            for each in results
        ]

    async def load(self) -> str:
        return "+".join([await each.load() for each in self.predictors])

    @property
    def is_connected(self) -> bool:
        return any(each.is_connected for each in self.predictors)

    async def close(self) -> None:
        for each in self.predictors:
            await each.close()


def open_predictor(predictor: str, field: str = "predictor", access: ServiceAccess = NO_FILES) -> Predictor:
    """Creates a predictor from its address (see `PredictorAddress.of`), without connecting or loading a graph.

    Calls the entry point of the group "tailcast.predictors" that is named like the scheme (or like the shipped
    predictor, if it has its own), with the target; that of "grpc" for services, with `access`. InputError if there is none, or
    a file of `access` is invalid; raises as `PredictorAddress.of`.
    """
    if len(parts := addresses(predictor)) > 1:
        return JointPredictor([open_predictor(part, field, access) for part in parts], parts)
    points = {point.name: point for point in metadata.entry_points(group=ENTRY_POINT_GROUP)}
    address = PredictorAddress.of(predictor, field)
    scheme, target = address
    if address.is_service and "grpc" in points:
        service: Predictor = points["grpc"].load().of(address, access)
        return service
    point = points.get(target if target in SHIPPED and target in points else scheme)
    if point is None:
        raise InputError(field, predictor, PREDICTORS)
    factory: Callable[[str], Predictor] = point.load()
    return factory(target)


class PredictionStatus(Enum):
    """Outcome of a request. PARTIAL: a part of a joined predictor is missing; LATE: after `withdraw`; ABSENT: there is no
    predictor, so there was no call."""

    ANSWERED = "answered"
    PARTIAL = "partial"
    LATE = "late"
    FAILED = "failed"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class PredictionEvent:
    """Outcome of one submitted request: the prediction (also a late one) or an error message, or both if a part is missing.
    `latency_s` is the duration of the call in seconds; 0 if there was no call, or it was cancelled."""

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
                returned = await self._predictor.predict(batch, timeout_s=self._timeout_s)
            if len(returned) == len(batch):
                predictions, retry = returned, False
            else:
                error = f"{len(returned)} predictions for {len(batch)} request(s)"
        except TimeoutError:
            error, retry = f"no prediction within {self._timeout_s} s", False
        except TailcastError as failure:
            error = str(failure)
            retry = retry and getattr(failure, "code", None) != "DEADLINE_EXCEEDED"
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
        status = PredictionStatus.ANSWERED
        if prediction is None:
            status = PredictionStatus.FAILED
        elif is_withdrawn:
            status = PredictionStatus.LATE
        elif prediction.missing:
            status, error = PredictionStatus.PARTIAL, "; ".join(map(str, prediction.missing))
        self._events.put_nowait(PredictionEvent(request_id, prediction, error, latency_s, status))
