"""Predictors that there are not: how late a prediction comes, and how wrong it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.predictions import LengthPrediction, Prediction, UrgencyPrediction
from scheduler_core.simulator.fetch import Predictions
from scheduler_core.simulator.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorService:
    """A predictor that works on one batch at a time.

    "immediate": whenever it is idle it takes whoever waits, up to `batch_size`. "full": it waits for a whole batch; what is
    left at the end of the trace goes together (Semantic Scheduling, tables 1 and 2).

    Attributes:
        latency_s: Time of one batch, >= 0.
        batch_size: Most requests in it, > 0.
        batching: See above.

    Raises:
        InputError: A value is outside its range.
    """

    latency_s: float
    batch_size: int = 1
    batching: Literal["immediate", "full"] = "immediate"

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf:
            raise InputError("latency_s", self.latency_s, "seconds >= 0")
        if self.batch_size <= 0:
            raise InputError("batch_size", self.batch_size, "integers > 0")
        if self.batching not in ("immediate", "full"):
            raise InputError("batching", self.batching, "immediate, full")

    def delays_s(self, trace: Trace) -> dict[str, float]:
        """By request id: seconds from arrival to prediction, for arrivals at the trace's own times."""
        rows = sorted(trace.requests, key=lambda row: row.arrival_s)
        delays: dict[str, float] = {}
        free_s, first = -math.inf, 0
        while first < len(rows):
            if self.batching == "full":
                last = min(first + self.batch_size, len(rows))
                start_s = max(free_s, rows[last - 1].arrival_s)
            else:
                start_s = max(free_s, rows[first].arrival_s)
                last = first
                while last < min(first + self.batch_size, len(rows)) and rows[last].arrival_s <= start_s:
                    last += 1
            free_s = start_s + self.latency_s
            for row in rows[first:last]:
                delays[row.request_id] = free_s - row.arrival_s
            first = last
        return delays


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorErrors:
    """Makes predictions wrong.

    Attributes:
        length_sigma: Standard deviation of a normal error of mu, the location of the logarithm of the length.
        urgency_error_rate: Share of the urgency predictions replaced by another level, drawn evenly (Semantic Scheduling,
            figure 3; its code clamps ranks to 1 and above although levels begin at 0, which this does not).
        failure_rate: Share of the requests for which the predictor fails.

    Raises:
        InputError: A value is outside its range.
    """

    length_sigma: float = 0.0
    urgency_error_rate: float = 0.0
    failure_rate: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.length_sigma < math.inf:
            raise InputError("length_sigma", self.length_sigma, "numbers >= 0")
        for name in ("urgency_error_rate", "failure_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(name, getattr(self, name), "numbers in [0, 1]")

    def applied(self, predictions: Predictions, rng: np.random.Generator) -> Predictions:
        """The same predictions with errors; the draws of a request depend on its place alone, not on its prediction."""
        answers: dict[str, Prediction | LengthPrediction | None] = {}
        errors = dict(predictions.errors)
        for name, answer in predictions.answers.items():
            noise, fails, wrong, level = rng.normal(), rng.random(), rng.random(), rng.random()
            if answer is None or fails < self.failure_rate:
                answers[name] = None
                errors.setdefault(name, "the simulated predictor failed")
                continue
            bundle = answer if isinstance(answer, Prediction) else Prediction(length=answer)
            if bundle.length is not None and self.length_sigma > 0:
                length = replace(bundle.length, mu=bundle.length.mu + self.length_sigma * noise)
                bundle = replace(bundle, length=length)
            if bundle.urgency is not None and wrong < self.urgency_error_rate:
                bundle = replace(bundle, urgency=_other_level(bundle.urgency, level))
            answers[name] = bundle
        return replace(predictions, answers=answers, errors=errors)


def _other_level(urgency: UrgencyPrediction, draw: float) -> UrgencyPrediction:
    """The probabilities of the most likely level and of another one, drawn evenly, exchanged."""
    seen = list(urgency.probabilities)
    top = max(range(len(seen)), key=seen.__getitem__)
    others = [level for level in range(len(seen)) if level != top]
    other = others[int(draw * len(others))]
    seen[top], seen[other] = seen[other], seen[top]
    return UrgencyPrediction(tuple(seen))


def constant_delays(trace: Trace, delay_s: float) -> Mapping[str, float]:
    """Every prediction comes so many seconds after its request."""
    if not 0 <= delay_s < math.inf:
        raise InputError("delay_s", delay_s, "seconds >= 0")
    return dict.fromkeys((row.request_id for row in trace.requests), delay_s)
