"""OpenTelemetry spans with W3C trace context, exported over OTLP.

opentelemetry-instrumentation-grpc is not used: it is beta, makes one span per stream, and only supports gRPC. That of
aiohttp's client and server would not know what a request waits for.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from scheduler_core.errors import InputError, MissingExtraError

TRACE_KEYS = ("traceparent", "tracestate")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class Tracing:
    """Spans of the global tracer provider. MissingExtraError without OpenTelemetry."""

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
        self._context.attach(self._extracted(headers))

    def start(self, method: str) -> Any:
        """Starts a span as a child of the current one."""
        return self._tracer.start_span(method, kind=self._trace.SpanKind.SERVER)

    @contextmanager
    def span(
        self,
        name: str,
        kind: Literal["SERVER", "CLIENT", "INTERNAL"] = "INTERNAL",
        caller: Mapping[str, object] | None = None,
    ) -> Iterator[Any]:
        """A span that is the current one of the task during the block: a child of the one before, or of the caller's in the
        headers `caller`. Exceptions are not recorded, because their texts can quote a request."""
        with self._tracer.start_as_current_span(
            name,
            context=None if caller is None else self._extracted(caller),
            kind=self._trace.SpanKind[kind],
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            yield span

    def fail(self, span: Any, reason: str) -> None:
        """Sets the status of a span to an error."""
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, reason))

    def _extracted(self, headers: Mapping[str, object]) -> Any:
        values = {key: headers.get(key) for key in TRACE_KEYS}
        carrier = {key: value for key, value in values.items() if isinstance(value, str) and value.isascii()}
        return self._propagator.extract(carrier)


def trace_headers() -> dict[str, str]:
    """The headers (W3C trace context) that make spans of another process children of the current one; none without one."""
    headers: dict[str, str] = {}
    if "opentelemetry.trace" in sys.modules:  # otherwise there can be no span, and the import would cost time
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        TraceContextTextMapPropagator().inject(headers)
    return headers


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
