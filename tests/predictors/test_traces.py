"""`serve-predictor --traces` against a collector: the spans that the OpenTelemetry exporters really send."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest

from predictors.cli import main
from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto.predictor_v1_pb2_grpc import PredictorStub
from predictors.service import tracing
from scheduler_core.errors import InputError, MissingExtraError
from tests.predictors.fakes import write_artifact
from tests.predictors.test_workers import PATIENCE_S, get, running

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
trace_service_grpc = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc")

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


class Collector:
    """Keeps the requests that an exporter sent."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def Export(self, request: Any, context: grpc.ServicerContext | None) -> Any:
        self.requests.append(request)
        return trace_service.ExportTraceServiceResponse()

    def resources(self) -> list[Any]:
        return [one for request in self.requests for one in request.resource_spans]

    def spans(self) -> list[Any]:
        return [span for one in self.resources() for scope in one.scope_spans for span in scope.spans]


@contextlib.contextmanager
def grpc_collector(collector: Collector) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}"
    server.stop(None).wait()


@contextlib.contextmanager
def http_collector(collector: Collector) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            answer = collector.Export(trace_service.ExportTraceServiceRequest.FromString(body), None)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(answer.SerializeToString())

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_spans_reach_the_collector_with_their_parents_and_none_is_lost_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    package = protocol.partition("/")[0]
    pytest.importorskip(f"opentelemetry.exporter.otlp.proto.{package}.trace_exporter")
    collector = Collector()
    listening = grpc_collector if protocol == "grpc" else http_collector
    with listening(collector) as endpoint:
        for name, value in (
            ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", protocol),
            ("OTEL_SERVICE_NAME", "lengths"),
            ("OTEL_BSP_SCHEDULE_DELAY", "600000"),  # nothing is sent before the end
        ):
            monkeypatch.setenv(name, value)
        with running(tmp_path, write_artifact(tmp_path / "tiny"), "--traces=true") as server:
            port, http_port = server.ports()
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub: Any = PredictorStub(channel)  # type: ignore[no-untyped-call]
                told = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
                stub.Predict(pb.PredictRequest(prompt="sea"), timeout=PATIENCE_S, metadata=told)
                with pytest.raises(grpc.RpcError):
                    stub.Predict(pb.PredictRequest(prompt=" "), timeout=PATIENCE_S)
                batch = pb.PredictBatchRequest(requests=[pb.PredictRequest(prompt="sea")] * 3)
                stub.PredictBatch(batch, timeout=PATIENCE_S, metadata=told)
            assert get(http_port, "/v1/metadata")[0] == 200  # no prediction, no span
            assert collector.spans() == []
            assert server.stop() == 0
    attributes = {
        one.key: one.value.string_value
        for found in collector.resources()
        for one in found.resource.attributes
    }
    assert attributes["service.name"] == "lengths"
    spans = collector.spans()
    assert sorted(span.name for span in spans) == ["Predict", "Predict", *["PredictBatch"] * 3]
    of_caller = [span for span in spans if span.trace_id.hex() == TRACE]
    assert {span.parent_span_id.hex() for span in of_caller} == {PARENT}
    assert len(of_caller) == 4
    [refused] = [span for span in spans if span.trace_id.hex() != TRACE]
    assert refused.parent_span_id == b""
    assert refused.status.message == "INVALID_ARGUMENT"
    for span in of_caller:
        values = {one.key: one.value for one in span.attributes}
        assert values["tailcast.artifact_id"].string_value == "tiny"
        assert values["rpc.status"].string_value == "OK"
        assert values["tailcast.inference_s"].double_value > 0
        assert 0 < span.end_time_unix_nano - span.start_time_unix_nano < PATIENCE_S * 1e9


def test_a_collector_that_is_not_there_disturbs_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    with running(tmp_path, write_artifact(tmp_path / "tiny"), "--traces=true") as server:
        port, _ = server.ports()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = PredictorStub(channel)  # type: ignore[no-untyped-call]
            for _ in range(20):
                assert stub.Predict(pb.PredictRequest(prompt="sea"), timeout=PATIENCE_S).prompt_tokens == 3
        assert server.stop() == 0


@pytest.mark.parametrize("name", tracing.PROTOCOL_VARIABLES)
def test_a_protocol_that_cannot_be_had_is_named(
    artifact_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setenv(name, "http/json")
    assert main([str(artifact_folder), "--traces=true", "--port=0"]) == 2
    assert f"{name}: got 'http/json'; allowed: http/protobuf or grpc" in capsys.readouterr().err
    with pytest.raises(InputError):
        tracing.set_up_exporting()


def test_a_missing_exporter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setitem(
        __import__("sys").modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None
    )
    with pytest.raises(MissingExtraError, match="opentelemetry-exporter-otlp-proto-grpc"):
        tracing.set_up_exporting()
