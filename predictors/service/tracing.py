"""OpenTelemetry traces: one span per prediction, a child of the caller's span.

opentelemetry-instrumentation-grpc is not used: it is beta, makes one span per stream, and only supports gRPC.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from predictors.service.messages import PipelineResult
from scheduler_core.errors import InputError, MissingExtraError

TRACE_KEYS = ("traceparent", "tracestate")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class Tracing:
    """Spans of the global tracer provider, named after the method."""

    def __init__(self) -> None:
        try:
            from opentelemetry import context, trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise MissingExtraError("opentelemetry-api", "traces") from error
        self._context, self._trace = context, trace
        self._tracer = trace.get_tracer("tailcast")
        self._propagator = TraceContextTextMapPropagator()

    def receive(self, headers: Mapping[str, object]) -> None:
        """Makes the caller's span in `headers` (W3C trace context) the current one of the running task. Values that are not
        ASCII are left out."""
        values = {key: headers.get(key) for key in TRACE_KEYS}
        carrier = {key: value for key, value in values.items() if isinstance(value, str) and value.isascii()}
        self._context.attach(self._propagator.extract(carrier))

    def start(self, method: str) -> Any:
        """Starts a span as a child of the current one."""
        return self._tracer.start_span(method, kind=self._trace.SpanKind.SERVER)

    def end(self, span: Any, artifact: str, version: str, code: str, result: PipelineResult | None) -> None:
        """Ends a span; its attributes are the artifact, the status code and the durations of the parts."""
        span.set_attributes(
            {"tailcast.artifact_id": artifact, "tailcast.artifact_version": version, "rpc.status": code}
        )
        if result is not None:
            for name in ("tokenize_s", "queue_s", "inference_s", "batch_size", "cached"):
                span.set_attribute(f"tailcast.{name}", getattr(result, name))
        if code != "OK":
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, code))
        span.end()


def set_up_exporting() -> None:
    """Sets a global tracer provider that exports over OTLP, configured by OTEL_* environment variables."""
    name = next((name for name in PROTOCOL_VARIABLES if name in os.environ), PROTOCOL_VARIABLES[-1])
    protocol = os.environ.get(name, "http/protobuf")
    package = {"http/protobuf": "http", "grpc": "grpc"}.get(protocol)
    if package is None:
        raise InputError(name, protocol, "http/protobuf or grpc")
    try:
        module = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{package}.trace_exporter")
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:  # the exporter needs the SDK
        raise MissingExtraError(f"opentelemetry-exporter-otlp-proto-{package}", "traces") from error
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(module.OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
