"""What our scheduler counts inside an engine, in the process's Prometheus registry.

vLLM's scheduler runs in a process of its own, and vLLM's /metrics shows that process only in Prometheus' multi-process
mode: PROMETHEUS_MULTIPROC_DIR must name an empty folder before vLLM starts.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from scheduler_core.errors import MissingExtraError
from scheduler_core.predictor import PredictionEvent, PredictionStatus
from scheduler_core.request import RequestState

LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
QUANTILE_BUCKETS = tuple(step / 10 for step in range(1, 11))


class EngineMetrics:
    """Counters and histograms of one engine process.

    Args:
        registry: Where they are shown; None: the default registry.

    Raises:
        MissingExtraError: There is no prometheus_client.
    """

    def __init__(self, registry: Any = None) -> None:
        try:
            from prometheus_client import REGISTRY, Counter, Gauge, Histogram
        except ModuleNotFoundError as error:
            raise MissingExtraError("prometheus_client", "vllm") from error
        registry = REGISTRY if registry is None else registry
        self._predictions = Counter(
            "tailcast_predictions", "Predictions by what became of them.", ["status"], registry=registry
        )
        for status in PredictionStatus:
            self._predictions.labels(status.value)
        self._latency = Histogram(
            "tailcast_prediction_latency_seconds",
            "From the call to its answer or failure.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._quantile = Histogram(
            "tailcast_length_quantile",
            "Predicted probability of an answer at most as long as the true one; uniform if predictions are right.",
            buckets=QUANTILE_BUCKETS,
            registry=registry,
        )
        self._late = Counter(
            "tailcast_unscored_admissions",
            "Requests admitted for the first time before their prediction was there.",
            registry=registry,
        )
        self._displaced = Counter(
            "tailcast_displacements",
            "Running requests that lost their place to a waiting one.",
            registry=registry,
        )
        self._rekeys = Counter(
            "tailcast_rekeys", "Steps before which all keys were computed anew.", registry=registry
        )
        self._hints = Counter(
            "tailcast_bad_hints",
            "Hints of requests that were ignored because of their value.",
            ["hint"],
            registry=registry,
        )
        self._info = Gauge(
            "tailcast_scheduler_info",
            "1 for the policy and predictor in use.",
            ["policy", "predictor", "engine_version"],
            registry=registry,
            multiprocess_mode="livemax",
        )

    def started(self, policy: str, predictor: str | None, engine_version: str) -> None:
        """The scheduler is there."""
        self._info.labels(policy, predictor or "none", engine_version).set(1)

    def predicted(self, event: PredictionEvent) -> None:
        """A prediction has come or failed."""
        self._predictions.labels(event.status.value).inc()
        if event.status is not PredictionStatus.ABSENT and event.latency_s > 0:
            self._latency.observe(event.latency_s)

    def absent(self) -> None:
        """A request has nobody to ask."""
        self._predictions.labels(PredictionStatus.ABSENT.value).inc()

    def admitted_unscored(self) -> None:
        """A request is admitted without its prediction."""
        self._late.inc()

    def finished(self, state: RequestState, num_output_tokens: int) -> None:
        """A request has ended by itself: where its true length lies in the predicted distribution."""
        if state.prediction is not None and num_output_tokens > 0:
            self._quantile.observe(float(state.prediction.distribution().cdf(num_output_tokens)))

    def displaced(self) -> None:
        """A running request has lost its place."""
        self._displaced.inc()

    def rekeyed(self) -> None:
        """All keys were computed anew."""
        self._rekeys.inc()

    def bad_hint(self, hint: str) -> None:
        """A hint was ignored."""
        self._hints.labels(hint).inc()


@cache
def process_metrics() -> EngineMetrics:
    """Those of this process: a registry takes a name once, however many engines a process makes after each other."""
    return EngineMetrics()
