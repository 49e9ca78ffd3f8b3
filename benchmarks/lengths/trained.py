"""Entrants that are trained on CASTILLO's training part, without the name of the served model, and then stay as they are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.lengths.features import Features, lexical
from benchmarks.lengths.scores import LEVELS, FloatArray, Forecast
from benchmarks.lengths.streams import Request

#: Edges of Clairvoyant's classes in tokens, and number of S3's classes (percentiles of the training lengths).
CLAIRVOYANT_EDGES, NUM_BUCKETS = (1, 200, 800, 65_536), 10

Fit = Callable[[Features], Callable[[str], Forecast]]


class Trained:
    """An entrant without state: a function of the prompt, which `fit` returns."""

    def __init__(self, features: Features, fit: Fit) -> None:
        self._forecast = features.trained(fit.__name__, lambda: fit(features))

    def predict(self, request: Request) -> Forecast:
        forecast: Forecast = self._forecast(request.prompt)
        return forecast

    def observe(self, request: Request, tokens: int) -> None:
        """Learns nothing."""


def lexical_buckets(features: Features) -> Callable[[str], Forecast]:
    """Boosted trees for three classes on 19 lexical features: Clairvoyant's recipe (arXiv 2606.07248), not its model."""
    prompts, lengths = features.training()
    edges = np.log(CLAIRVOYANT_EDGES)
    model = HistGradientBoostingClassifier(random_state=0)
    model.fit(np.array([lexical(prompt) for prompt in prompts]), np.digitize(lengths[:, 0], edges[1:-1]))
    return lambda prompt: bucket_quantiles(model.predict_proba([lexical(prompt)])[0], edges)


def pooled_buckets(features: Features) -> Callable[[str], Forecast]:
    """Logistic regression for S3's 10 classes, on frozen MiniLM features instead of a fine-tuned DistilBERT."""
    prompts, lengths = features.training()
    sample = lengths[:, 0]
    edges = np.quantile(sample, np.linspace(0, 1, NUM_BUCKETS + 1))
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=500, tol=1e-3))
    model.fit(np.array([features.pooled(prompt) for prompt in prompts]), np.digitize(sample, edges[1:-1]))
    return lambda prompt: bucket_quantiles(model.predict_proba([features.pooled(prompt)])[0], edges)


def linear_ranker(features: Features) -> Callable[[str], Forecast]:
    """Ridge regression on frozen MiniLM features, of which only the order is used, instead of LTR's fine-tuned OPT."""
    prompts, lengths = features.training()
    model = make_pipeline(StandardScaler(), Ridge(alpha=100.0))
    model.fit(np.array([features.pooled(prompt) for prompt in prompts]), lengths.mean(1))
    return lambda prompt: float(model.predict([features.pooled(prompt)])[0])


def bucket_quantiles(probabilities: FloatArray, edges: FloatArray) -> FloatArray:
    """Quantiles at `LEVELS` from probabilities of classes [K] with edges [K+1] in ln tokens, uniform within a class."""
    cumulative = np.concatenate(([0.0], np.cumsum(probabilities + 1e-9)))
    return np.interp(LEVELS, cumulative / cumulative[-1], edges)
