"""Prequential scores: each request is predicted before its output, and learned after it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.lengths.streams import Request, Stream
from scheduler_core.lengths import LogT
from scheduler_core.statistics import kendall_tau

FloatArray = NDArray[np.float64]

#: The CRPS is twice the mean loss of the quantiles at these levels.
NUM_LEVELS = 32
PINBALL, COVERAGE = (0.5, 0.85, 0.9), (0.5, 0.9, 0.99)
#: Levels of a forecast by quantiles.
LEVELS = (*((number + 0.5) / NUM_LEVELS for number in range(NUM_LEVELS)), 0.5, 0.85, 0.9, 0.99)
#: First request of each window.
WINDOWS = (0, 50, 200, 1_000, 3_000)
#: Fewest requests of a window that is scored.
MIN_REQUESTS = 30

#: Forecast of ln output tokens: quantiles [36] at `LEVELS`; or (mu, sigma, nu) of a log-t; or a number that only orders requests.
Forecast = FloatArray | tuple[float, float, float] | float


class Entrant(Protocol):
    """An output-length predictor."""

    def predict(self, request: Request) -> Forecast:
        """The forecast before the output."""

    def observe(self, request: Request, tokens: int) -> None:
        """Learns the output, directly after the forecast."""


@dataclass(frozen=True, slots=True)
class Run:
    """Forecasts and outcomes of a stream of N requests.

    Attributes:
        order: Predicted order [N]; the mean of ln X where a distribution is predicted.
        quantiles: Quantiles of ln X [N, 36] at `LEVELS`; None for an entrant that only orders requests.
        log_lengths: True ln X [N].
        predict_us, observe_us: Mean microseconds of one core.
    """

    order: FloatArray
    quantiles: FloatArray | None
    log_lengths: FloatArray
    predict_us: float
    observe_us: float

    def scores(self, rows: NDArray[np.intp]) -> dict[str, float | None]:
        """Scores of some requests by name; None if they do not exist."""
        order, truth = self.order[rows], self.log_lengths[rows]
        scores: dict[str, float | None] = {
            "tau": kendall_tau(order, truth),
            "pairs": pair_accuracy(order, truth),
        }
        names = [
            "crps",
            *(f"pinball_{level}" for level in PINBALL),
            *(f"coverage_{level}" for level in COVERAGE),
        ]
        if self.quantiles is None:
            return scores | dict.fromkeys(names)
        quantiles = self.quantiles[rows]
        gaps = truth[:, None] - quantiles
        losses = (np.array(LEVELS) * gaps - np.minimum(gaps, 0.0)).mean(0)
        scores["crps"] = 2.0 * float(losses[:NUM_LEVELS].mean())
        for level in PINBALL:
            scores[f"pinball_{level}"] = float(losses[LEVELS.index(level, NUM_LEVELS)])
        for level in COVERAGE:
            covered = truth <= quantiles[:, LEVELS.index(level, NUM_LEVELS)]
            scores[f"coverage_{level}"] = float(covered.mean())
        return scores

    def windows(self) -> dict[str, dict[str, float | None]]:
        """Scores of each window, by its first request."""
        ends = (*WINDOWS[1:], len(self.order))
        slices = [(start, min(end, len(self.order))) for start, end in zip(WINDOWS, ends, strict=True)]
        return {
            str(start): self.scores(np.arange(start, end))
            for start, end in slices
            if end - start >= MIN_REQUESTS
        }

    def crps(self, rows: NDArray[np.intp]) -> float:
        """CRPS of some requests."""
        crps = self.scores(rows)["crps"]
        assert crps is not None
        return crps


def run(entrant: Entrant, stream: Stream) -> Run:
    """Runs an entrant over a stream."""
    forecasts: list[Forecast] = []
    predict_s = observe_s = 0.0
    for request, tokens in stream:
        start = time.process_time()
        forecast = entrant.predict(request)
        middle = time.process_time()
        entrant.observe(request, tokens)
        observe_s += time.process_time() - middle
        predict_s += middle - start
        forecasts.append(forecast)
    quantiles = None if np.isscalar(forecasts[0]) else _quantiles(forecasts)
    return Run(
        order=np.array(forecasts, float) if quantiles is None else quantiles[:, :NUM_LEVELS].mean(1),
        quantiles=quantiles,
        log_lengths=np.log([tokens for _, tokens in stream]),
        predict_us=1e6 * predict_s / len(stream),
        observe_us=1e6 * observe_s / len(stream),
    )


def pair_accuracy(order: FloatArray, truth: FloatArray) -> float | None:
    """Fraction of pairs of different length that are in the right order, pairs without an order counting half."""
    signs = np.sign(truth[:, None] - truth)
    num_pairs = np.count_nonzero(signs)
    if not num_pairs:
        return None
    return float(0.5 + 0.5 * (signs * np.sign(order[:, None] - order)).sum() / num_pairs)


def mean_scores(runs: Sequence[dict[str, dict[str, float | None]]]) -> dict[str, dict[str, float | None]]:
    """Mean over seeds of the scores of each window; None where a seed has none."""
    means: dict[str, dict[str, float | None]] = {}
    for window in runs[0]:
        of_seeds = [scores[window] for scores in runs if window in scores]
        means[window] = {}
        for name in of_seeds[0]:
            values = [scores[name] for scores in of_seeds]
            numbers = [value for value in values if value is not None]
            means[window][name] = float(np.mean(numbers)) if len(numbers) == len(values) else None
    return means


def _quantiles(forecasts: Sequence[Forecast]) -> FloatArray:
    """Quantiles [N, 36] of forecasts, which are all of the same kind."""
    if isinstance(forecasts[0], tuple):
        mu, sigma, nu = np.array(forecasts, float).T
        values, row = np.unique(nu, return_inverse=True)
        standard = np.array([LogT(0.0, 1.0, value).logppf(LEVELS) for value in values])
        return np.asarray(mu[:, None] + sigma[:, None] * standard[row])
    return np.array(forecasts, float)
