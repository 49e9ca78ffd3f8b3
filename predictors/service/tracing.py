"""Traces with OpenTelemetry, where they are wanted: one span a prediction, a child of the caller's.

`Tracing` itself records nothing. `OpenTelemetryTracing` uses the tracer provider that the process has set up; with
`serve-predictor --traces` that is one configured by the usual OTEL_* environment variables.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from predictors.service.pipeline import Prediction
from scheduler_core.errors import InputError, MissingExtraError

TRACE_KEYS = ("traceparent", "tracestate")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class Span:
    """Records nothing."""

    def end(self, artifact: str, version: str, code: str, prediction: Prediction | None) -> None:
        """The prediction is made, or has failed."""


class Tracing:
    """Records nothing."""

    is_on = False

    def start(self, method: str, trace: Mapping[str, str] | None) -> Span:
        """Starts a prediction's span, as a child of the one that `trace` (W3C trace context) tells."""
        return _NOTHING


_NOTHING = Span()


class OpenTelemetryTracing(Tracing):
    """Spans named as the method, with the artifact, the status code, and the times of the parts as attributes."""

    is_on = True

    def __init__(self) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise MissingExtraError("opentelemetry-api", "traces") from error
        self._tracer = trace.get_tracer("tailcast")
        self._propagator = TraceContextTextMapPropagator()

    def start(self, method: str, trace: Mapping[str, str] | None) -> Span:
        """Starts a prediction's span."""
        from opentelemetry.trace import SpanKind

        context = self._propagator.extract(trace) if trace else None
        return _OpenTelemetrySpan(self._tracer.start_span(method, context=context, kind=SpanKind.SERVER))


class _OpenTelemetrySpan(Span):
    def __init__(self, span: Any) -> None:
        self._span = span

    def end(self, artifact: str, version: str, code: str, prediction: Prediction | None) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes(
            {"tailcast.artifact_id": artifact, "tailcast.artifact_version": version, "rpc.status": code}
        )
        if prediction is not None:
            self._span.set_attributes(
                {
                    "tailcast.tokenise_s": prediction.tokenise_s,
                    "tailcast.queue_s": prediction.queue_s,
                    "tailcast.inference_s": prediction.inference_s,
                    "tailcast.batch_size": prediction.batch_size,
                    "tailcast.cached": prediction.cached,
                }
            )
        if code != "OK":
            self._span.set_status(Status(StatusCode.ERROR, code))
        self._span.end()


def set_up_exporting() -> None:
    """Makes the process's tracer provider export spans over OTLP as the OTEL_* environment variables say.

    Raises:
        InputError: The protocol that they name is none of OTLP's binary ones.
        MissingExtraError: The SDK or the protocol's exporter is not installed.
    """
    exporter = _exporter()
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise MissingExtraError("opentelemetry-sdk", "traces") from error
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


def _exporter() -> Any:
    name = next(name for name in PROTOCOL_VARIABLES if name in os.environ or name == PROTOCOL_VARIABLES[-1])
    protocol = os.environ.get(name, "http/protobuf")
    packages = {"http/protobuf": "http", "grpc": "grpc"}
    if protocol not in packages:
        raise InputError(name, protocol, " or ".join(packages))
    package = packages[protocol]
    try:
        module = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{package}.trace_exporter")
    except ImportError as error:
        raise MissingExtraError(f"opentelemetry-exporter-otlp-proto-{package}", "traces") from error
    return module.OTLPSpanExporter()
