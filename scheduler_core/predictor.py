"""Where predictions come from, seen from the scheduler's side: never waited for, never lost.

A `Predictor` is anything with an asynchronous `predict`. `open_predictor` finds one by URL among the installed
packages (entry point group "tailcast.predictors"), so that this package imports no client itself.
`AsyncPredictor` submits requests to it with bounded concurrency and hands back one event per request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Protocol, runtime_checkable

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.predictions import LengthPrediction

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

    async def predict(self, requests: Sequence[PredictionRequest]) -> list[LengthPrediction]:
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


@dataclass(frozen=True, slots=True)
class PredictionEvent:
    """What became of one submitted request.

    Attributes:
        request_id: Id of the request.
        prediction: The answer; None if the predictor failed.
        error: Why it failed; None if it did not.
        latency_s: Time from the call to its answer or failure, in seconds.
    """

    request_id: str
    prediction: LengthPrediction | None
    error: str | None
    latency_s: float


class AsyncPredictor:
    """Submits without blocking; every submitted request comes back as exactly one event.

    Each request is a call of its own, as in a live system where requests arrive one by one; grouping them is the
    service's work.

    Args:
        predictor: Who answers.
        max_in_flight: Calls under way at the same time, > 0; the others wait their turn.
        timeout_s: Give up on a call after this long; None waits as long as the predictor does.
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self,
        predictor: Predictor,
        *,
        max_in_flight: int = 64,
        timeout_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if max_in_flight <= 0:
            raise InputError("max_in_flight", max_in_flight, "integers > 0")
        if timeout_s is not None and not timeout_s > 0:
            raise InputError("timeout_s", timeout_s, "seconds > 0, or None")
        self._predictor = predictor
        self._slots = asyncio.Semaphore(max_in_flight)
        self._timeout_s = timeout_s
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._events: asyncio.Queue[PredictionEvent] = asyncio.Queue()
        self._num_open = 0

    @property
    def num_open(self) -> int:
        """Submitted requests whose event has not been taken yet."""
        return self._num_open

    def submit(self, request: PredictionRequest) -> None:
        """Starts a call and returns at once; needs a running event loop."""
        task = asyncio.get_running_loop().create_task(self._call(request))
        self._num_open += 1
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def next_event(self) -> PredictionEvent:
        """Waits for the next event."""
        event = await self._events.get()
        self._num_open -= 1
        return event

    def ready_events(self) -> list[PredictionEvent]:
        """The events that are there already, without waiting."""
        events = []
        while not self._events.empty():
            events.append(self._events.get_nowait())
        self._num_open -= len(events)
        return events

    async def close(self) -> None:
        """Cancels calls under way and closes the predictor."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._predictor.close()

    async def _call(self, request: PredictionRequest) -> None:
        async with self._slots:
            start = self._clock()
            prediction, error = await self._answer(request)
            latency_s = self._clock() - start
        self._events.put_nowait(PredictionEvent(request.request_id, prediction, error, latency_s))

    async def _answer(self, request: PredictionRequest) -> tuple[LengthPrediction | None, str | None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                answers = await self._predictor.predict([request])
        except TimeoutError:
            return None, f"no answer within {self._timeout_s} s"
        except TailcastError as error:
            return None, str(error)
        except Exception as error:  # any failure of a predictor is an event, never the scheduler's end
            return None, f"{type(error).__name__}: {error}"
        if len(answers) != 1:
            return None, f"{len(answers)} answers to one request"
        return answers[0], None
