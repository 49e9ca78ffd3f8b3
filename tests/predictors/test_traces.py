"""`serve-predictor --traces` against a collector: the spans that the OpenTelemetry exporter really sends."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest

from predictors.cli import main
from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto.predictor_v1_pb2_grpc import PredictorStub
from predictors.service import tracing
from scheduler_core.errors import MissingExtraError
from tests.predictors.fakes import write_artifact
from tests.predictors.test_cli import PATIENCE_S, get, running

service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Address of an OTLP collector over HTTP, and the requests that it gets."""
    requests: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            requests.append(service.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", requests
    server.shutdown()
    thread.join()
    server.server_close()


def test_spans_reach_the_collector_with_their_parents_and_none_is_lost_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collector: tuple[str, list[Any]]
) -> None:
    endpoint, requests = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "lengths")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")  # nothing is sent before the end
    with running(tmp_path, write_artifact(tmp_path / "tiny"), "--traces=true") as server:
        port, http_port = server.ports()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = PredictorStub(channel)  # type: ignore[no-untyped-call]
            context = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
            stub.Predict(pb.PredictRequest(prompt="sea"), timeout=PATIENCE_S, metadata=context)
            with pytest.raises(grpc.RpcError):
                stub.Predict(pb.PredictRequest(prompt=" "), timeout=PATIENCE_S)
            batch = pb.PredictBatchRequest(requests=[pb.PredictRequest(prompt="sea")] * 3)
            stub.PredictBatch(batch, timeout=PATIENCE_S, metadata=context)
        assert get(http_port, "/v1/metadata")[0] == 200  # no prediction, no span
        assert requests == []
        assert server.stop() == 0
    resources = [one for request in requests for one in request.resource_spans]
    names = {
        one.key: one.value.string_value for resource in resources for one in resource.resource.attributes
    }
    assert names["service.name"] == "lengths"
    spans = [span for one in resources for scope in one.scope_spans for span in scope.spans]
    assert sorted(span.name for span in spans) == ["Predict", "Predict", *["PredictBatch"] * 3]
    of_caller = [span for span in spans if span.trace_id.hex() == TRACE]
    assert [span.parent_span_id.hex() for span in of_caller] == [PARENT] * 4
    [refused] = [span for span in spans if span.trace_id.hex() != TRACE]
    assert (refused.parent_span_id, refused.status.message) == (b"", "INVALID_ARGUMENT")
    for span in of_caller:
        values = {one.key: one.value for one in span.attributes}
        assert values["tailcast.artifact_id"].string_value == "tiny"
        assert values["rpc.status"].string_value == "OK"
        assert values["tailcast.inference_s"].double_value > 0
        assert 0 < span.end_time_unix_nano - span.start_time_unix_nano < PATIENCE_S * 1e9


@pytest.mark.parametrize("name", tracing.PROTOCOL_VARIABLES)
def test_a_protocol_that_cannot_be_had_is_named(
    artifact_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setenv(name, "http/json")
    assert main([str(artifact_folder), "--traces=true", "--port=0"]) == 2
    assert f"{name}: got 'http/json'; allowed: http/protobuf or grpc" in capsys.readouterr().err


def test_a_missing_exporter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    module = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(MissingExtraError, match="opentelemetry-exporter-otlp-proto-grpc"):
        tracing.set_up_exporting()
