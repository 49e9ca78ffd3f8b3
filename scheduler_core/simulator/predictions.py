"""Predictions for a trace, fetched once and used by any number of simulated policies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.predictions import LengthPrediction, Prediction
from scheduler_core.simulator.trace import Trace

if TYPE_CHECKING:
    from scheduler_core.predictor import PredictionEvent, Predictor

#: Scale of an oracle's distribution: so tight that every quantile is the true length to 1e-4 relative.
ORACLE_SIGMA = 1e-6
ORACLE_NU = 3.5

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Predictions:
    """A predictor's output for the requests of a trace.

    Attributes:
        source: "none", "trace", "oracle", or the predictor's URL or class.
        by_id: By request id: the predicted length or a bundle of predictions, or None where the predictor failed.
            Requests that are missing here were never sent to it.
        latency_s: By request id: measured time of the call, in seconds; empty if there was no call.
        errors: By request id: the reason of a failure.
    """

    source: str
    by_id: Mapping[str, Prediction | LengthPrediction | None] = field(default_factory=dict)
    latency_s: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_failed(self) -> int:
        """Requests for which the predictor failed."""
        return sum(prediction is None for prediction in self.by_id.values())


def no_predictions() -> Predictions:
    """Nothing is predicted."""
    return Predictions("none")


def trace_predictions(trace: Trace) -> Predictions:
    """The predictions in the trace itself; rows without one count as failed.

    Raises:
        InputError: No row carries a prediction.
    """
    if all(row.prediction is None for row in trace.requests):
        raise InputError("predictor", "trace", "a trace with columns mu, sigma and nu, or another predictor")
    return Predictions("trace", {row.request_id: row.prediction for row in trace.requests})


def oracle_predictions(
    trace: Trace, noise: float = 0.0, rng: np.random.Generator | None = None
) -> Predictions:
    """The true lengths: ln X_predicted = ln X + N(0, noise^2), with a distribution as wide as that.

    Args:
        trace: The requests.
        noise: Standard deviation of the error of ln length; 0: distributions that leave no doubt.
        rng: Source of the noise.
    """
    errors = [0.0] * len(trace) if rng is None else rng.normal(0.0, noise, len(trace)).tolist()
    sigma = max(noise, ORACLE_SIGMA)
    return Predictions(
        "oracle",
        {
            row.request_id: LengthPrediction(math.log(row.output_tokens) + error, sigma, ORACLE_NU)
            for row, error in zip(trace.requests, errors, strict=True)
        },
    )


async def fetch_predictions_async(
    trace: Trace,
    predictor: Predictor,
    *,
    source: str | None = None,
    served_model: str = "",
    max_in_flight: int = 16,
    timeout_s: float | None = None,
    progress: Progress | None = None,
) -> Predictions:
    """Queries a live predictor for every request of the trace, one call each, and closes it.

    Args:
        trace: Requests with prompts.
        predictor: The predictor.
        source: Its name in results; None takes its class name.
        served_model: Name of the model that will serve the requests, for predictors of several.
        max_in_flight: Maximum number of calls in flight.
        timeout_s: Timeout of a call; None: the predictor's own.
        progress: Called with 1 after each call.

    Raises:
        InputError: A row has no prompt.
        TailcastError: All of the first `max_in_flight` calls failed, or all calls.
    """
    # Most simulations have no live predictor, and need not wait until the network has been imported.
    from scheduler_core.predictor import AsyncPredictor, PredictionRequest

    for row in trace.requests:
        if row.prompt is None:
            allowed = "a trace with prompts for a live predictor"
            raise InputError(f"prompt of request {row.request_id}", None, allowed)
    name = source or type(predictor).__name__
    collector = AsyncPredictor(predictor, max_in_flight=max_in_flight, timeout_s=timeout_s)
    events: list[PredictionEvent] = []
    probes = min(max_in_flight, len(trace))
    try:
        for row in trace.requests:
            prompt = row.prompt or ""
            collector.submit(PredictionRequest(row.request_id, prompt, row.max_tokens, served_model))
        while collector.num_open:
            events.append(await collector.next_event())
            if progress is not None:
                progress(1)
            if len(events) == probes and all(event.length is None for event in events):
                raise TailcastError(
                    f"predictor {name}: the first {probes} predictions failed: {events[0].error}"
                )
    finally:
        await collector.close()
    return Predictions(
        name,
        {event.request_id: event.length for event in events},
        {event.request_id: event.latency_s for event in events},
        {event.request_id: event.error for event in events if event.error is not None},
    )


def fetch_predictions(
    trace: Trace,
    predictor: str | Predictor,
    *,
    served_model: str = "",
    max_in_flight: int = 16,
    timeout_s: float | None = None,
    progress: Progress | None = None,
) -> Predictions:
    """Predictions for every request of a trace, from any source.

    Args:
        trace: The requests.
        predictor: "none", "trace" (columns mu, sigma, nu), "oracle" (the true lengths), a URL such as
            grpc://127.0.0.1:50051, or a predictor object. Not to be called from a running event loop for the last two:
            there is `fetch_predictions_async`.
        served_model: See `fetch_predictions_async`, as for the arguments that follow.
        max_in_flight: Maximum number of calls in flight.
        timeout_s: Timeout of a call.
        progress: Called with 1 after each call to a live predictor.

    Raises:
        InputError: The predictor is unknown, or the trace lacks what it needs.
        TailcastError: Calls to the predictor fail.
    """
    if predictor == "none":
        return no_predictions()
    if predictor == "trace":
        return trace_predictions(trace)
    if predictor == "oracle":
        return oracle_predictions(trace)
    source = predictor if isinstance(predictor, str) else None
    if source is not None and "://" not in source:
        raise InputError("predictor", predictor, "none, trace, oracle, or SCHEME://ADDRESS")
    import asyncio

    from scheduler_core.predictor import open_predictor

    opened = open_predictor(predictor) if isinstance(predictor, str) else predictor
    fetching = fetch_predictions_async(
        trace,
        opened,
        source=source,
        served_model=served_model,
        max_in_flight=max_in_flight,
        timeout_s=timeout_s,
        progress=progress,
    )
    return asyncio.run(fetching)
