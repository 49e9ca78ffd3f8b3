"""Prometheus metrics of a proxy, in a separate registry."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from predictors.service.metrics import SECONDS
from scheduler_core.adapters.live_calibration import CalibrationGauges

#: Buckets for responses that take minutes.
LONG_SECONDS = (*SECONDS, 25.0, 50.0, 100.0, 250.0, 500.0)
#: Buckets for the overhead of the proxy.
SHORT_SECONDS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1)


class ProxyMetrics:
    """Counters, gauges and histograms with the prefix tailcast_proxy_."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tailcast_proxy_{name}", text, labels, registry=registry)

        def seconds(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"tailcast_proxy_{name}_seconds", text, buckets=buckets, registry=registry)

        self.requests = counter("requests", "Requests, by kind and HTTP status sent.", "kind", "code")
        self.refused = counter("refused", "Requests refused by the proxy.", "code")
        self.predictions = counter("predictions", "Predictions, by outcome.", "outcome")
        self.shadows = counter("shadow_predictions", "Predictions of the second predictor.", "outcome")
        self.hints = counter("hints", "Completions sent to the engine, by hint.", "outcome")
        unread = "Requests without a prompt that could be read, ordered as unknown ones."
        self.unread = counter("unread_requests", unread, "endpoint")
        self.reloads = counter("reloads", "Reloads by SIGHUP, by outcome.", "outcome")
        for outcome in ("applied", "refused"):
            self.reloads.labels(outcome)
        self.ends = counter("ends", "Responses, by the way they ended.", "end")
        self.records = counter("feedback_records", "Records of the feedback log, by outcome.", "outcome")
        self.counts = counter("feedback_counts", "Lengths in the feedback log, by source of the count.", "by")
        unrecorded = "Ended requests without a length for the feedback log and calibration, by reason."
        self.unrecorded = counter("unrecorded", unrecorded, "reason")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts, as reported by the engine.")
        cached = "Tokens of prompts that the engine's prefix cache had: by the engine's report, and by the proxy's model."
        self.cached_tokens = counter("cached_tokens", cached, "by")
        self.calibration = CalibrationGauges("tailcast_proxy_", registry)
        overhead = "Time from arrival to sending to the engine, without prediction and queue."
        self.overhead = seconds("overhead", overhead, SHORT_SECONDS)
        self.prediction = seconds("prediction", "Time waiting for a prediction.", SECONDS)
        self.held = seconds("held", "Time waiting in the queue of the proxy.", LONG_SECONDS)
        held = "Time waiting in the queue of the proxy, of requests of sessions."
        self.session_held = seconds("session_held", held, LONG_SECONDS)
        self.request = seconds("request", "Time from arrival to the last byte.", LONG_SECONDS)
