"""Predictions for a trace, fetched once for any number of simulated policies."""

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.prediction.predictions import LengthPrediction, Prediction
from scheduler_core.prediction.predictor import (
    AsyncPredictor,
    PredictionEvent,
    PredictionRequest,
    Predictor,
    open_predictor,
)
from scheduler_core.prediction.service_access import NO_FILES, ServiceAccess
from scheduler_core.simulator.trace import Trace

#: Scale of an oracle's distribution, so small that all quantiles equal the true length up to a relative 1e-4.
ORACLE_SIGMA = 1e-6
ORACLE_NU = 3.5
#: Timeout of a call of a live predictor in seconds.
TIMEOUT_S = 60.0

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions for the requests of a trace.

    `by_id` has the predictions of all heads by request id: None if the predictor failed, missing if it was not called.
    `latency_s` is the time of the call in seconds (missing: 0); `errors` has the reasons of failures and of missing parts.
    `source` is "none", "trace", "oracle", or the URL or class of the predictor. `num_without_prompt` is the number of
    requests for which a live predictor was not called; their lengths are unknown.
    """

    source: str = "none"
    by_id: Mapping[str, Prediction | None] = field(default_factory=dict)
    latency_s: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    num_without_prompt: int = 0

    @property
    def num_failed(self) -> int:
        """Number of requests for which the predictor failed."""
        return sum(prediction is None for prediction in self.by_id.values())

    @property
    def num_partial(self) -> int:
        """Number of predictions that lack a part of a joined predictor."""
        return sum(prediction is not None and bool(prediction.missing) for prediction in self.by_id.values())


def trace_predictions(trace: Trace) -> Predictions:
    """The predictions in the trace; rows without one count as failed. `InputError` if there is none."""
    by_id = {
        row.request_id: Prediction(length=row.prediction) if row.prediction else None
        for row in trace.requests
    }
    if not any(by_id.values()):
        raise InputError("predictor", "trace", "a trace with columns mu, sigma and nu, or another predictor")
    return Predictions("trace", by_id)


def oracle_predictions(
    trace: Trace, noise: float = 0.0, rng: np.random.Generator | None = None
) -> Predictions:
    """The true lengths with noise: mu = ln X + N(0, noise^2), with `noise` as sigma."""
    errors = [0.0] * len(trace) if rng is None else rng.normal(0.0, noise, len(trace)).tolist()
    sigma = max(noise, ORACLE_SIGMA)
    by_id = {}
    for row, error in zip(trace.requests, errors, strict=True):
        length = LengthPrediction(math.log(row.output_tokens) + error, sigma, ORACLE_NU)
        by_id[row.request_id] = Prediction(length=length)
    return Predictions("oracle", by_id)


def fetch_predictions(
    trace: Trace,
    predictor: str | Predictor,
    *,
    access: ServiceAccess = NO_FILES,
    served_model: str = "",
    max_in_flight: int = 16,
    progress: Progress | None = None,
) -> Predictions:
    """Queries a live predictor (or one opened by name with `access`, see `open_predictor`) with one call per request with a prompt, and
    closes it. `InputError` if the predictor is unknown, or no row has a prompt; `TailcastError` if all of the
    first `max_in_flight` calls failed.

    Must not be called from a running event loop. If `served_model` is empty, `model` of each row is used.
    `progress` is called with 1 after each call.
    """
    rows = [row for row in trace.requests if row.prompt is not None]
    if not rows:
        first = trace.requests[0].request_id
        raise InputError(f"prompt of request {first}", None, "a trace with prompts for a live predictor")
    opened = open_predictor(predictor, access=access) if isinstance(predictor, str) else predictor
    name = predictor if isinstance(predictor, str) else type(predictor).__name__
    num_probes = min(max_in_flight, len(rows))

    async def fetch() -> list[PredictionEvent]:
        collector = AsyncPredictor(opened, max_in_flight=max_in_flight, timeout_s=TIMEOUT_S)
        events: list[PredictionEvent] = []
        try:
            for row in rows:
                model = served_model or row.model
                collector.submit(PredictionRequest(row.request_id, row.prompt or "", row.max_tokens, model))
            while collector.num_open:
                events.append(await collector.next_event())
                if progress is not None:
                    progress(1)
                if len(events) == num_probes and all(event.prediction is None for event in events):
                    problem = f"the first {num_probes} predictions failed: {events[0].error}"
                    raise TailcastError(f"predictor {name}: {problem}")
        finally:
            await collector.close()
        return events

    events = asyncio.run(fetch())
    return Predictions(
        name,
        {event.request_id: event.prediction for event in events},
        {event.request_id: event.latency_s for event in events},
        {event.request_id: event.error for event in events if event.error is not None},
        num_without_prompt=len(trace) - len(rows),
    )
