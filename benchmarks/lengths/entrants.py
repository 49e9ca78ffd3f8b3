"""Entrants of the benchmark: predictors of output length, each in a few lines.

A new one is a class with `predict` and `observe` (see `scores.Entrant`), and a line in `ENTRANTS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial

import numpy as np
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits

from benchmarks.lengths.features import Features
from benchmarks.lengths.scores import LEVELS, Entrant, FloatArray, Forecast
from benchmarks.lengths.streams import Request
from benchmarks.lengths.trained import (
    Trained,
    bucket_quantiles,
    lexical_buckets,
    linear_ranker,
    pooled_buckets,
)
from predictors.pretrained import PRETRAINED, TINY
from scheduler_core.prediction.correction import Correction, RequestContext
from scheduler_core.prediction.outcome import Outcome
from scheduler_core.prediction.predictions import LengthPrediction

#: A prediction without any knowledge, for the memory alone.
CONSTANT = LengthPrediction(6.0, 1.0, 3.5)


class Mode(Enum):
    """What of tailcast's online calibration is used."""

    RAW = "raw"
    CALIBRATION = "calibration"
    MEMORY = "memory"


class Tailcast:
    """A predictor of this project; None: the same prediction for every request."""

    def __init__(self, features: Features, artifact: str | None, mode: Mode) -> None:
        self._features, self._artifact, self._mode = features, artifact, mode
        self._correction = Correction()

    def predict(self, request: Request) -> Forecast:
        length = self._length(request)
        if self._mode is not Mode.RAW:
            length = self._correction.correct(self._context(request), length)
        return length.mu, length.sigma, length.nu

    def observe(self, request: Request, tokens: int) -> None:
        if self._mode is not Mode.RAW:
            outcome = Outcome(output_tokens=tokens, finished=True, prediction=self._length(request))
            self._correction.observe(self._context(request), outcome)

    def _length(self, request: Request) -> LengthPrediction:
        return CONSTANT if self._artifact is None else self._features.length(self._artifact, request.prompt)

    def _context(self, request: Request) -> RequestContext:
        return RequestContext(
            served_model=request.served_model,
            tenant=request.tenant,
            prompt_tokens=self._features.num_tokens(request.prompt),
            embedding=self._features.embedding(request.prompt) if self._mode is Mode.MEMORY else None,
        )


class OutlenBucket:
    """llm-d's plugin `outlen-bucket` (llm-d-router #2309): tokens by the flags of a request."""

    def predict(self, request: Request) -> Forecast:
        limit = request.max_tokens or math.inf
        tokens = 4096 if request.thinks and limit >= 2000 else 100 if limit < 500 else 1000
        return np.full(len(LEVELS), math.log(min(tokens, limit)))

    def observe(self, request: Request, tokens: int) -> None:
        """Learns nothing."""


class Histogram:
    """Counts of output lengths in bins, each divided by two after `half_life` further outputs."""

    def __init__(self, half_life: float, edges: FloatArray) -> None:
        self._decay, self._edges = 0.5 ** (1 / half_life), edges
        self._counts = np.zeros(len(edges) - 1)

    @property
    def total(self) -> float:
        """Sum of the counts."""
        return float(self._counts.sum())

    def quantiles(self) -> FloatArray:
        """Quantiles of ln tokens at `LEVELS`, uniform within a bin."""
        return bucket_quantiles(self._counts, self._edges)

    def add(self, tokens: int) -> None:
        """Adds an output."""
        self._counts *= self._decay
        row = int(np.searchsorted(self._edges, math.log(tokens), side="right")) - 1
        self._counts[min(max(row, 0), len(self._counts) - 1)] += 1


#: Edges of the bins in ln tokens: eight for each doubling; those of llm-d's sketch.
FINE = np.linspace(0.0, 16 * math.log(2), 129)
COARSE = np.log([1, 500, 2_000, 7_000, 20_000, 65_536])
#: Of the sketch: clusters, prompts for a fit, and outputs for a forecast.
NUM_CLUSTERS, BATCH, MIN_OUTPUTS = 64, 500, 5
#: Forecast before any output.
FIRST = np.full(len(LEVELS), math.log(1000))


class PromptHistogram:
    """AIBrix's output predictor: a histogram of lengths for each rounded log2 of the prompt's length."""

    def __init__(self, features: Features) -> None:
        self._features = features
        self._histograms: dict[int, Histogram] = {}

    def predict(self, request: Request) -> Forecast:
        histogram = self._histograms.get(self._bin(request))
        return FIRST if histogram is None else histogram.quantiles()

    def observe(self, request: Request, tokens: int) -> None:
        self._histograms.setdefault(self._bin(request), Histogram(1_000, FINE)).add(tokens)

    def _bin(self, request: Request) -> int:
        return round(math.log2(max(self._features.num_tokens(request.prompt), 1)))


class Sketch:
    """The online sketch for llm-d: a histogram for each of 64 clusters of prompts, served model and flags.

    k-means is fitted to the first 500 prompts, and again after 500 further ones until 90 % of the clusters have five; then each
    request moves the nearest centroid. The embedding is that of `tiny` instead of potion-base-8M. Where the sketch abstains
    (no clusters yet, or fewer than five outputs), llm-d uses 1,000 tokens, and this the histogram without the cluster.
    """

    def __init__(self, features: Features, edges: FloatArray) -> None:
        self._features, self._edges = features, edges
        self._histograms: dict[tuple[int, str, bool], Histogram] = {}
        self._prompts: list[FloatArray] = []
        self._centroids = np.zeros((0, 0))
        self._sizes = np.zeros(0)

    def predict(self, request: Request) -> Forecast:
        key = self._key(request)
        histograms = [self._histograms.get(each) for each in (key, (-1, *key[1:]))]
        used = next((each for each in histograms if each and each.total >= MIN_OUTPUTS), None)
        return FIRST if used is None else used.quantiles()

    def observe(self, request: Request, tokens: int) -> None:
        key = self._key(request)
        for each in {key, (-1, *key[1:])}:
            self._histograms.setdefault(each, Histogram(200, self._edges)).add(tokens)
        embedding = np.asarray(self._features.embedding(request.prompt), float)
        if key[0] >= 0:
            self._sizes[key[0]] += 1
            self._centroids[key[0]] += (embedding - self._centroids[key[0]]) / self._sizes[key[0]]
            return
        self._prompts.append(embedding)
        if len(self._prompts) % BATCH == 0:
            with threadpool_limits(1):
                fit = KMeans(NUM_CLUSTERS, n_init=1, max_iter=25, random_state=5).fit(np.array(self._prompts))
            sizes = np.bincount(fit.labels_, minlength=NUM_CLUSTERS)
            if (sizes >= MIN_OUTPUTS).mean() >= 0.9:
                self._centroids, self._sizes = fit.cluster_centers_, sizes.astype(float)

    def _key(self, request: Request) -> tuple[int, str, bool]:
        cluster = -1
        if len(self._centroids):
            distances = (self._centroids**2).sum(1) - 2 * self._centroids @ self._features.embedding(
                request.prompt
            )
            cluster = int(distances.argmin())
        return cluster, request.served_model, request.thinks


class PromptLength:
    """Running linear regression of ln tokens on ln prompt tokens, with the running scale of its residuals."""

    def __init__(self, features: Features) -> None:
        self._features = features
        #: Sums of x x^T and x y with a weak prior, and of squared residuals and their number.
        self._squares, self._products = np.diag([1e-3, 1.0]), np.array([1e-3 * math.log(1000), 0.0])
        self._residuals, self._num = 1.0, 1.0

    def predict(self, request: Request) -> Forecast:
        mu = float(self._x(request) @ np.linalg.solve(self._squares, self._products))
        return mu, math.sqrt(self._residuals / self._num), math.inf

    def observe(self, request: Request, tokens: int) -> None:
        x, y = self._x(request), math.log(tokens)
        self._residuals += (y - float(x @ np.linalg.solve(self._squares, self._products))) ** 2
        self._num += 1
        self._squares += np.outer(x, x)
        self._products += x * y

    def _x(self, request: Request) -> FloatArray:
        return np.array([1.0, math.log1p(self._features.num_tokens(request.prompt)) - 5.0])


@dataclass(frozen=True, slots=True)
class Entry:
    """An entrant: how to make one for a stream, and the features whose time is part of its own."""

    make: Callable[[Features], Entrant]
    features: tuple[str, ...] = ()


def tailcast(name: str, artifact: str) -> dict[str, Entry]:
    """The entrants of one artifact, a folder or the name of a shipped predictor: raw, with calibration, with memory."""
    return {
        f"{name}, {mode.value}": Entry(
            partial(Tailcast, artifact=artifact, mode=mode),
            (artifact, "embedding") if mode is Mode.MEMORY and artifact != TINY else (artifact,),
        )
        for mode in Mode
    }


ENTRANTS: dict[str, Entry] = {
    **tailcast(PRETRAINED, PRETRAINED),
    **tailcast(TINY, TINY),
    "memory alone": Entry(lambda features: Tailcast(features, None, Mode.MEMORY), ("embedding",)),
    "llm-d outlen-bucket": Entry(lambda features: OutlenBucket()),
    "llm-d sketch, fine bins": Entry(lambda features: Sketch(features, FINE), ("embedding",)),
    "llm-d sketch, its 5 bins": Entry(lambda features: Sketch(features, COARSE), ("embedding",)),
    "AIBrix histogram": Entry(PromptHistogram),
    "prompt length": Entry(PromptLength),
    "Clairvoyant's recipe": Entry(lambda features: Trained(features, lexical_buckets)),
    "S3 buckets": Entry(lambda features: Trained(features, pooled_buckets), ("pooled",)),
    "LTR (linear ranker)": Entry(lambda features: Trained(features, linear_ranker), ("pooled",)),
}
