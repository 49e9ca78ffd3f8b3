"""Where predictions come from, seen from the scheduler's side: never waited for, never lost.

A `Predictor` is anything with an asynchronous `predict`. `open_predictor` finds one by URL among the installed
packages (entry point group "tailcast.predictors"), so that this package imports no client itself.
`AsyncPredictor` submits requests to it with bounded concurrency and hands back one event per request.

| the prediction is | what happens |
| --- | --- |
| pending | the scheduler goes on without it; the policy's key is the one it has for unknown lengths |
| answered | an event carries it; `Scheduler.update` gives the request its new key |
| late | it came after `withdraw`: the event says so, and nobody has to use it |
| failed | an event says why (error, timeout, wrong number of answers, closed); the key stays that of unknown lengths |
| absent | without a predictor every request fails at once, with no call |

So a policy with a predictor that never answers is the policy without predictions, and the scheduler never waits.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from typing import Protocol, runtime_checkable

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.predictions import LengthPrediction, Prediction

ENTRY_POINT_GROUP = "tailcast.predictors"


@dataclass(frozen=True, slots=True)
class PredictionRequest:
    """What a predictor may know.

    Attributes:
        request_id: Id of the request.
        prompt: The text sent to the served model.
        max_tokens: The request's own cap on output tokens.
        served_model: Name of the model that will answer; empty if there is only one.
        temperature: Its sampling temperature, at least 0; None if it is not known.
    """

    request_id: str
    prompt: str
    max_tokens: int
    served_model: str = ""
    temperature: float | None = None


@runtime_checkable
class Predictor(Protocol):
    """Predicts output lengths; an instance belongs to one event loop."""

    async def predict(self, requests: Sequence[PredictionRequest]) -> Sequence[LengthPrediction | Prediction]:
        """One prediction per request, in the same order; raises `TailcastError` if that is not possible."""
        ...

    async def close(self) -> None:
        """Gives up connections."""
        ...


def open_predictor(url: str) -> Predictor:
    """The predictor behind a URL of the form `scheme://address`, such as grpc://127.0.0.1:50051.

    The scheme is looked up in the entry point group "tailcast.predictors"; what stands there is called with the
    address. Nothing is connected yet.

    Raises:
        InputError: Not a URL, or no installed package knows the scheme.
    """
    known = {point.name: point for point in metadata.entry_points(group=ENTRY_POINT_GROUP)}
    scheme, separator, address = url.partition("://")
    if not separator or not address or scheme not in known:
        allowed = ", ".join(f"{name}://ADDRESS" for name in sorted(known)) or "none: no client is installed"
        raise InputError("predictor", url, allowed)
    factory: Callable[[str], Predictor] = known[scheme].load()
    return factory(address)


class PredictionStatus(Enum):
    """What became of a submitted request."""

    ANSWERED = "answered"
    LATE = "late"
    FAILED = "failed"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class PredictionEvent:
    """What became of one submitted request.

    Attributes:
        request_id: Id of the request.
        prediction: The answer, also a late one; None if the predictor failed or is absent.
        error: Why there is none; None if there is one.
        latency_s: Time from the call to its answer or failure, in seconds; 0 if there was no call, or it
            was cancelled.
        status: How it came.
    """

    request_id: str
    prediction: LengthPrediction | Prediction | None
    error: str | None
    latency_s: float
    status: PredictionStatus

    @property
    def length(self) -> LengthPrediction | None:
        """The predicted length; None if there is no answer, or none about the length."""
        return self.prediction.length if isinstance(self.prediction, Prediction) else self.prediction


class _Updated(Protocol):
    """The part of `Scheduler` that events go to."""

    def update(
        self, request_id: str, prediction: Prediction | LengthPrediction | None, now: float
    ) -> None: ...


def deliver(events: Iterable[PredictionEvent], scheduler: _Updated, now: float) -> int:
    """Hands events to the scheduler, which counts failed ones and those for requests that are gone.

    Args:
        events: What `AsyncPredictor.ready_events` gave.
        scheduler: Where the requests are.
        now: Time in seconds.

    Returns:
        How many.
    """
    count = 0
    for event in events:
        scheduler.update(event.request_id, event.prediction, now)
        count += 1
    return count


class AsyncPredictor:
    """Submits without blocking; every submitted request comes back as exactly one event, whatever happens.

    Requests that wait for their turn are sent together, up to `max_batch` in one call; nobody waits for a batch to
    fill. If a call for several fails, each of them is asked about once more alone, so that one bad prompt spoils
    nobody else's prediction.

    Args:
        predictor: Who answers; None: nobody, every request fails at once.
        max_in_flight: Calls under way at the same time, > 0; the others wait their turn.
        max_batch: Most requests in one call, > 0; 1 where grouping is the service's work.
        timeout_s: Give up on a call after this long; None waits as long as the predictor does.
        clock: Monotonic clock in seconds.

    Raises:
        InputError: A limit is not above 0.
    """

    def __init__(
        self,
        predictor: Predictor | None,
        *,
        max_in_flight: int = 64,
        max_batch: int = 1,
        timeout_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if max_in_flight <= 0:
            raise InputError("max_in_flight", max_in_flight, "integers > 0")
        if max_batch <= 0:
            raise InputError("max_batch", max_batch, "integers > 0")
        if timeout_s is not None and not timeout_s > 0:
            raise InputError("timeout_s", timeout_s, "seconds > 0, or None")
        self._predictor = predictor
        self._max_in_flight = max_in_flight
        self._max_batch = max_batch
        self._timeout_s = timeout_s
        self._clock = clock
        self._waiting: deque[PredictionRequest] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._events: asyncio.Queue[PredictionEvent] = asyncio.Queue()
        self._open: set[str] = set()
        self._unanswered: dict[str, PredictionRequest] = {}
        self._withdrawn: set[str] = set()
        self._pump_is_due = False
        self._closed = False

    @property
    def num_open(self) -> int:
        """Submitted requests whose event has not been taken yet."""
        return len(self._open)

    def submit(self, request: PredictionRequest) -> None:
        """Takes a request and returns at once; needs a running event loop.

        Raises:
            InputError: A request of that id is open already.
            TailcastError: `close` was called.
        """
        if self._closed:
            raise TailcastError(f"request {request.request_id} was submitted to a closed AsyncPredictor")
        if request.request_id in self._open:
            raise InputError("request_id", request.request_id, "an id that is not open already")
        loop = asyncio.get_running_loop()
        self._open.add(request.request_id)
        self._unanswered[request.request_id] = request
        if self._predictor is None:
            self._tell(request, None, "there is no predictor", 0.0, PredictionStatus.ABSENT)
            return
        self._waiting.append(request)
        if not self._pump_is_due:  # at the end of this turn, so that what is submitted together goes together
            self._pump_is_due = True
            loop.call_soon(self._pump)

    def withdraw(self, request_id: str) -> bool:
        """Says that the request no longer needs its prediction: it finished, or was aborted.

        One that still waits for its turn is never sent, and fails. An answer under way comes back as late.

        Returns:
            Whether the request was open and its event not there yet.
        """
        request = self._unanswered.get(request_id)
        if request is None or request_id in self._withdrawn:
            return False
        self._withdrawn.add(request_id)
        if request in self._waiting:
            self._waiting.remove(request)
            self._tell(request, None, "withdrawn before it was sent", 0.0, PredictionStatus.FAILED)
        return True

    async def next_event(self) -> PredictionEvent:
        """Waits for the next event."""
        event = await self._events.get()
        self._open.remove(event.request_id)
        return event

    def ready_events(self) -> list[PredictionEvent]:
        """The events that are there already, without waiting."""
        events = []
        while not self._events.empty():
            events.append(self._events.get_nowait())
            self._open.remove(events[-1].request_id)
        return events

    async def close(self) -> None:
        """Cancels calls under way and closes the predictor; requests still open fail, their events can be taken."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._waiting.clear()
        for request in list(self._unanswered.values()):
            self._tell(request, None, "closed", 0.0, PredictionStatus.FAILED)
        if self._predictor is not None:
            await self._predictor.close()

    def _pump(self) -> None:
        """Starts as many calls as may be under way."""
        self._pump_is_due = False
        while self._waiting and len(self._tasks) < self._max_in_flight and not self._closed:
            size = min(self._max_batch, len(self._waiting))
            batch = [self._waiting.popleft() for _ in range(size)]
            task = asyncio.get_running_loop().create_task(self._serve(batch))
            self._tasks.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._pump()

    async def _serve(self, batch: list[PredictionRequest]) -> None:
        """One call; after a failure for several, one for each."""
        start = self._clock()
        answers, error, timed_out = await self._ask(batch)
        if error is None or timed_out or len(batch) == 1:
            latency_s = self._clock() - start
            for number, request in enumerate(batch):
                self._tell_call(request, answers[number] if answers else None, error, latency_s)
            return
        for request in batch:
            start = self._clock()
            answers, error, _ = await self._ask([request])
            self._tell_call(request, answers[0] if answers else None, error, self._clock() - start)

    async def _ask(
        self, batch: list[PredictionRequest]
    ) -> tuple[Sequence[LengthPrediction | Prediction] | None, str | None, bool]:
        """(answers, why there are none, whether because of the timeout)."""
        assert self._predictor is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                answers = await self._predictor.predict(batch)
        except TimeoutError:
            return None, f"no answer within {self._timeout_s} s", True
        except TailcastError as error:
            return None, str(error), False
        except Exception as error:  # any failure of a predictor is an event, never the scheduler's end
            return None, f"{type(error).__name__}: {error}", False
        if len(answers) != len(batch):
            asked = "one request" if len(batch) == 1 else f"{len(batch)} requests"
            return None, f"{len(answers)} answers to {asked}", False
        return answers, None, False

    def _tell_call(
        self,
        request: PredictionRequest,
        answer: LengthPrediction | Prediction | None,
        error: str | None,
        latency_s: float,
    ) -> None:
        status = PredictionStatus.FAILED
        if answer is not None:
            late = request.request_id in self._withdrawn
            status = PredictionStatus.LATE if late else PredictionStatus.ANSWERED
        self._tell(request, answer, error, latency_s, status)

    def _tell(
        self,
        request: PredictionRequest,
        answer: LengthPrediction | Prediction | None,
        error: str | None,
        latency_s: float,
        status: PredictionStatus,
    ) -> None:
        del self._unanswered[request.request_id]
        self._withdrawn.discard(request.request_id)
        self._events.put_nowait(PredictionEvent(request.request_id, answer, error, latency_s, status))
