"""Prometheus metrics of the scheduler inside an engine, in the registry of the process.

vLLM's scheduler runs in a process of its own, and vLLM's /metrics shows that process only in Prometheus' multi-process
mode: PROMETHEUS_MULTIPROC_DIR must name an empty folder before vLLM starts.
"""

import math
from functools import cache
from typing import Any

from scheduler_core.adapters.live_calibration import CalibrationGauges
from scheduler_core.lengths.student_t import student_t_cdf
from scheduler_core.predictor import PredictionEvent, PredictionStatus
from scheduler_core.request import RequestState

LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
QUANTILE_BUCKETS = tuple(step / 10 for step in range(1, 11))


class EngineMetrics:
    """Counters and histograms of one engine process, by default in the default registry."""

    def __init__(self, registry: Any = None) -> None:
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram  # vLLM brings it

        registry = REGISTRY if registry is None else registry

        def counter(name: str, text: str, *labels: str) -> Any:
            return Counter(f"tailcast_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            return Histogram(f"tailcast_{name}", text, buckets=buckets, registry=registry)

        self.predictions = counter("predictions", "Predictions by outcome.", "status")
        for status in PredictionStatus:
            self.predictions.labels(status.value)
        self.unscored_admissions = counter(
            "unscored_admissions", "Requests admitted for the first time before their prediction had come."
        )
        self.displacements = counter("displacements", "Running requests preempted to admit a waiting one.")
        self.rekeys = counter("rekeys", "Steps before which all keys were recomputed.")
        self.bad_hints = counter("bad_hints", "Hints of requests ignored because of their value.", "hint")
        self._latency = histogram(
            "prediction_latency_seconds", "From the call to its response or failure.", LATENCY_BUCKETS_S
        )
        self._quantile = histogram(
            "length_quantile",
            "Predicted probability of an output at most as long as the true one; uniform for true predictions.",
            QUANTILE_BUCKETS,
        )
        self.calibration = CalibrationGauges("tailcast_", registry, multiprocess_mode="livemostrecent")
        self.info = Gauge(
            "tailcast_scheduler_info",
            "1 for the policy and predictor in use.",
            ["policy", "predictor", "engine_version"],
            registry=registry,
            multiprocess_mode="livemax",
        )

    def observe_prediction(self, event: PredictionEvent) -> None:
        """Counts a prediction that has come or failed."""
        self.predictions.labels(event.status.value).inc()
        if event.status is not PredictionStatus.ABSENT and event.latency_s > 0:
            self._latency.observe(event.latency_s)

    def observe_length(self, state: RequestState, num_output_tokens: int) -> None:
        """Observes the quantile of a complete output's length in its predicted distribution."""
        predicted = state.prediction
        if predicted is not None and num_output_tokens > 0:
            z = (math.log(num_output_tokens) - predicted.mu) / predicted.sigma
            self._quantile.observe(student_t_cdf(z, predicted.nu))


@cache
def process_metrics() -> EngineMetrics:
    """Those of this process: a registry takes a name once, however many engines a process makes in turn."""
    return EngineMetrics()
