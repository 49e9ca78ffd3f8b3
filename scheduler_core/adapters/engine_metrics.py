"""Prometheus metrics of the scheduler inside an engine, in the registry of the process.

vLLM's scheduler runs in a separate process. vLLM's /metrics includes that process only in the multi-process
mode of Prometheus: set PROMETHEUS_MULTIPROC_DIR to an empty folder before vLLM starts.
"""

from functools import cache
from typing import Any

from scheduler_core.adapters.live_calibration import CalibrationGauges
from scheduler_core.prediction.predictor import PredictionEvent, PredictionStatus
from scheduler_core.request import RequestState

LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
QUANTILE_BUCKETS = tuple(step / 10 for step in range(1, 11))


class EngineMetrics:
    """Counters and histograms of one engine process, by default in the default registry."""

    def __init__(self, registry: Any = None) -> None:
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram  # a dependency of vLLM

        registry = REGISTRY if registry is None else registry

        def counter(name: str, text: str, *labels: str) -> Any:
            return Counter(f"tailcast_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            return Histogram(f"tailcast_{name}", text, buckets=buckets, registry=registry)

        self.predictions = counter("predictions", "Predictions by outcome.", "status")
        for status in PredictionStatus:
            self.predictions.labels(status.value)
        self.urgency_levels = counter(
            "urgency_levels",
            "Predicted urgency levels, 0 the most urgent; abstained: too uncertain.",
            "level",
        )
        self.unscored_admissions = counter(
            "unscored_admissions", "Requests first admitted before their prediction arrived."
        )
        self.displacements = counter(
            "displacements", "Running requests preempted by the policy or the batch former."
        )
        self.rekeys = counter("rekeys", "Steps at whose start all keys were recomputed.")
        self.failures = counter(
            "failures", "Exceptions after which a part of tailcast was switched off, by part.", "part"
        )
        self.bad_hints = counter("bad_hints", "Request hints ignored because of an invalid value.", "hint")
        self._latency = histogram(
            "prediction_latency_seconds", "Time from the call to its response or failure.", LATENCY_BUCKETS_S
        )
        self._quantile = histogram(
            "length_quantile",
            "Quantile level of the true output length in its prediction; uniform for calibrated predictions.",
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
        """Counts a prediction that arrived or failed."""
        self.predictions.labels(event.status.value).inc()
        urgency = None if event.prediction is None else event.prediction.urgency
        if urgency is not None:
            self.urgency_levels.labels("abstained" if urgency.abstains else str(urgency.level)).inc()
        if event.status is not PredictionStatus.ABSENT and event.latency_s > 0:
            self._latency.observe(event.latency_s)

    def observe_length(self, state: RequestState, num_output_tokens: int) -> None:
        """Observes the quantile level of the length of a complete output in its predicted distribution."""
        predicted = state.prediction
        if predicted is not None and num_output_tokens > 0:
            self._quantile.observe(predicted.cdf(num_output_tokens))


@cache
def process_metrics() -> EngineMetrics:
    """The metrics of this process. Shared by all its engines, because a registry rejects repeated names."""
    return EngineMetrics()
