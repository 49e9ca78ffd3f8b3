"""OpenTelemetry spans of a proxy: their parents, their attributes, what the engine gets."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from predictors.artifact import open_artifact
from predictors.client import SyncPredictor
from predictors.proxy.config import ProxyConfig
from predictors.proxy.server import ProxyServer
from predictors.runtime import open_runtime
from scheduler_core.errors import MissingExtraError
from scheduler_core.prediction.predictor import PredictionRequest
from tests.predictors.fakes import running_server
from tests.predictors.proxy.fake_engine import (
    CHAT,
    break_off,
    chat,
    gated,
    running_engine,
    running_proxy,
    until,
)
from tests.predictors.proxy.test_tls import running_process

pytest.importorskip("opentelemetry.sdk")
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import (
    error_attributes,
    http_attributes,
    server_attributes,
    url_attributes,
)
from opentelemetry.trace import SpanKind, StatusCode

ROOT = Path(__file__).parents[3]
TRACE, PARENT = "1" * 32, "2" * 16
CALLER = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=7"}
PROMPT = "name three rivers"


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """Gets the spans of this process: there can be only one tracer provider."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> InMemorySpanExporter:
    exporter.clear()
    return exporter


def by_name(exporter: InMemorySpanExporter) -> dict[str, Any]:
    return {span.name: span for span in exporter.get_finished_spans()}


async def test_a_request_has_a_span_with_its_parts(
    spans: InMemorySpanExporter, artifact_folder: Path
) -> None:
    options: dict[str, Any] = {"predictor": str(artifact_folder), "traces": True, "engine": "vllm"}
    async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
        body = chat(PROMPT, stream=True, temperature=0.5)
        assert (await proxy.post(body, CALLER | {"x-tailcast-tier": "1"}))[0] == 200
        sent = {name.lower(): value for name, value in fake.requests[-1][2].items()}
        port = int(fake.url.rpartition(":")[2])
        await until(lambda: len(spans.get_finished_spans()) == 3)
    named = by_name(spans)
    request, predict, engine = (named[name] for name in ("chat tiny-llm", "predict", "engine"))
    assert f"{request.context.trace_id:032x}" == TRACE
    assert f"{request.parent.span_id:016x}" == PARENT
    assert [span.parent.span_id for span in (predict, engine)] == [request.context.span_id] * 2
    assert [span.kind for span in (request, predict, engine)] == [
        SpanKind.SERVER,
        SpanKind.INTERNAL,
        SpanKind.CLIENT,
    ]
    assert sent["traceparent"] == f"00-{TRACE}-{engine.context.span_id:016x}-01"
    assert sent["tracestate"] == "vendor=7"
    assert dict(engine.attributes) == {
        "server.address": "127.0.0.1",
        "server.port": port,
        "http.response.status_code": 200,
    }
    values = dict(request.attributes)
    quantiles = [values.pop(f"tailcast.predicted_tokens.p{level}") for level in (10, 50, 90)]
    assert 0 < quantiles[0] < quantiles[1] < quantiles[2]
    assert 0 < values.pop("tailcast.waited_s") < values.pop("gen_ai.response.time_to_first_chunk") < 60
    assert values == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "tiny-llm",
        "gen_ai.request.max_tokens": 500,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.stream": True,
        "gen_ai.request.choice.count": 1,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 7,
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
        "tailcast.prediction.outcome": "answered",
        "tailcast.tier": 1,
        "tailcast.level": -1,
        "tailcast.end": "complete",
    }
    assert request.status.status_code is StatusCode.UNSET
    assert PROMPT not in str([(span.name, span.attributes, span.events) for span in named.values()])


async def test_a_service_that_predicts_continues_the_trace(
    spans: InMemorySpanExporter, artifact_folder: Path
) -> None:
    named: dict[str, Any] = {"served_model": None}  # the predictor gets that of the request
    async with (
        running_server(open_runtime(artifact_folder), traces=True) as (_, address),
        running_engine() as fake,
        running_proxy(fake.url, predictor=f"grpc://{address}", traces=True, engine="vllm", **named) as proxy,
    ):
        traces = [f"{number:032x}" for number in range(1, 5)]
        states = ["vendor=7", "", f"vendor={'7' * 250},other={'8' * 250}", "vendor=7"]
        models = ["tiny-llm"] * 3 + ["unknown"]
        posts = (
            proxy.post(
                chat(PROMPT, model=model), {"traceparent": f"00-{trace_id}-{PARENT}-01", "tracestate": state}
            )
            for trace_id, state, model in zip(traces, states, models, strict=True)
        )
        assert [status for status, _ in await asyncio.gather(*posts)] == [200] * 4
        await until(lambda: len(spans.get_finished_spans()) == 16)
    finished = spans.get_finished_spans()
    for trace_id, state, model in zip(traces, states, models, strict=True):
        of_trace = {one.name: one for one in finished if f"{one.context.trace_id:032x}" == trace_id}
        request, predict, served, engine = (
            of_trace[name] for name in (f"chat {model}", "predict", "Predict", "engine")
        )
        assert f"{request.parent.span_id:016x}" == PARENT
        assert [predict.parent.span_id, engine.parent.span_id] == [request.context.span_id] * 2
        assert served.parent.span_id == predict.context.span_id
        assert served.parent.is_remote
        assert (predict.kind, served.kind) == (SpanKind.CLIENT, SpanKind.SERVER)
        assert predict.start_time <= served.start_time <= served.end_time <= predict.end_time
        # More than W3C has systems pass on would take what gRPC allows for all metadata.
        assert served.context.trace_state.to_header() == (state if len(state) <= 512 else "")
        values = dict(served.attributes)
        assert values["tailcast.artifact_version"] == open_artifact(artifact_folder).manifest.artifact_version
        if model == "unknown":
            assert predict.attributes["error.type"] == "refused"
            assert values["error.type"] == "INVALID_ARGUMENT"
            continue
        assert "error.type" not in predict.attributes
        assert values["tailcast.batch_size"] >= 1
        assert 0 <= values["tailcast.queue_s"] <= (served.end_time - served.start_time) / 1e9
    assert PROMPT not in str([(one.name, one.attributes, one.events) for one in finished])


async def test_clients_send_the_span_of_their_caller(
    spans: InMemorySpanExporter, artifact_folder: Path
) -> None:
    requests = [PredictionRequest(f"r{number}", PROMPT, 100) for number in range(3)]
    async with running_server(open_runtime(artifact_folder), traces=True) as (_, address):
        with SyncPredictor(address) as blocking:
            with trace.get_tracer("test").start_as_current_span("caller"):
                await asyncio.to_thread(blocking.predict, requests)
            await asyncio.to_thread(blocking.predict, requests[:1])
        await until(lambda: len(spans.get_finished_spans()) == 5)
    finished = spans.get_finished_spans()
    [caller] = [one for one in finished if one.name == "caller"]
    parents = [one.parent and one.parent.span_id for one in finished if one.name == "PredictBatch"]
    assert parents == [caller.context.span_id] * 3 + [None]


@pytest.mark.parametrize("module", ["opentelemetry", "grpc"])
def test_a_client_without_traces_does_not_load_opentelemetry(module: str) -> None:
    """Its import takes longer than that of the client."""
    code = (
        "import sys; from predictors.client import ClientSettings\n"
        "assert ClientSettings(token='a').predict_options(1.0)['metadata'] == (('authorization', 'Bearer a'),)\n"
        "print([name for name in sys.modules if name.startswith(sys.argv[1])] != [])"
    )
    done = subprocess.run([sys.executable, "-c", code, module], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == str(module == "grpc"), done.stderr


def test_names_are_those_of_the_conventions() -> None:
    """Those of this package, which its developers change: gen_ai is not stable yet."""
    import ast

    modules = (gen_ai_attributes, error_attributes, http_attributes, server_attributes, url_attributes)
    conventional = {value for module in modules for value in vars(module).values() if isinstance(value, str)}
    tree = ast.parse((ROOT / "predictors/proxy/spans.py").read_text(encoding="utf-8"))
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    names = {text for text in texts if "." in text and " " not in text and not text.startswith("tailcast.")}
    assert len(names) > 12
    assert names - conventional == set()


async def test_a_request_that_waits_has_its_position_and_the_time(
    spans: InMemorySpanExporter, artifact_folder: Path
) -> None:
    go = asyncio.Event()
    options: dict[str, Any] = {
        "predictor": str(artifact_folder),
        "traces": True,
        "release": 1,
        "policy": "fcfs",
    }
    async with running_engine(gated(go)) as fake, running_proxy(fake.url, **options) as proxy:
        posts = []
        for number in range(3):
            posts.append(asyncio.create_task(proxy.post(chat(f"{PROMPT} {number}"))))
            await until(lambda number=number: proxy.server.num_in_flight == number + 1)
            await until(
                lambda number=number: (
                    sum(s.name == "predict" for s in spans.get_finished_spans()) == number + 1
                )
            )
        go.set()
        assert [status for status, _ in await asyncio.gather(*posts)] == [200] * 3
        await until(lambda: sum(span.name == "chat tiny-llm" for span in spans.get_finished_spans()) == 3)
    finished = spans.get_finished_spans()
    requests = sorted(
        (one for one in finished if one.name.startswith("chat")), key=lambda one: one.start_time
    )
    assert [one.attributes.get("tailcast.queue.position") for one in requests] == [None, 1, 2]
    assert [one.attributes["tailcast.level"] for one in requests] == [0] * 3
    queues = {one.parent.span_id: one for one in finished if one.name == "queue"}
    for one in requests:
        queue = queues[one.context.span_id]
        seconds = (queue.end_time - queue.start_time) / 1e9
        assert one.attributes["tailcast.waited_s"] == pytest.approx(seconds, abs=0.05)
    assert requests[2].attributes["tailcast.waited_s"] > requests[0].attributes["tailcast.waited_s"]


async def test_what_fails_is_an_error_without_texts(spans: InMemorySpanExporter) -> None:
    async def broken(request: Any, body: bytes) -> Any:
        return await break_off(request, b"data: 1\n\n", {"Content-Type": "text/event-stream"})

    async with running_engine(broken) as fake, running_proxy(fake.url, traces=True) as proxy:
        with pytest.raises(Exception, match="payload|closed|Server disconnected"):
            await proxy.post(chat(PROMPT, stream=True))
        await fake.stop()
        assert (await proxy.post(chat(PROMPT)))[0] == 502
        assert (await proxy.post(b"{", {"traceparent": "nonsense"}))[0] == 400
        async with proxy.client.get(proxy.url + "/v1/models") as response:
            assert response.status == 502
        await until(lambda: sum(one.kind is SpanKind.SERVER for one in spans.get_finished_spans()) == 4)
    servers = [one for one in spans.get_finished_spans() if one.kind is SpanKind.SERVER]
    codes = [(one.name, one.attributes.get("error.type"), one.status.status_code) for one in servers]
    error, ok = StatusCode.ERROR, StatusCode.UNSET
    chats = [("chat tiny-llm", "broken", error), ("chat tiny-llm", "502", error)]
    assert codes == [*chats, ("POST", None, ok), ("GET", "502", error)]
    assert all(one.events == () for one in spans.get_finished_spans())


async def test_numbers_that_cannot_be_exported_are_left_out(spans: InMemorySpanExporter) -> None:
    async with running_engine() as fake, running_proxy(fake.url, traces=True) as proxy:
        assert (await proxy.post(chat(PROMPT, n=10**30, model="")))[0] == 200
        await until(lambda: "chat" in by_name(spans))
    attributes = by_name(spans)["chat"].attributes
    assert "gen_ai.request.choice.count" not in attributes
    assert attributes["gen_ai.request.max_tokens"] == 500


async def test_without_traces_there_are_no_spans_and_headers_pass(spans: InMemorySpanExporter) -> None:
    async with running_engine() as fake, running_proxy(fake.url) as proxy:
        assert (await proxy.post(chat(PROMPT), CALLER))[0] == 200
        assert CALLER.items() <= fake.requests[-1][2].items()
    assert spans.get_finished_spans() == ()


async def test_the_extra_is_needed_only_for_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(MissingExtraError, match="traces"):
        ProxyServer(ProxyConfig(engine_url="http://127.0.0.1:1", predictor="none", traces=True))
    async with running_engine() as fake, running_proxy(fake.url) as proxy:
        assert (await proxy.post(chat(PROMPT)))[0] == 200


async def test_the_command_exports_what_is_left_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    ports, options = tmp_path / "ports", tmp_path / "options.yaml"
    options.write_text(json.dumps({"predictor": "none", "port": 0, "port_file": str(ports), "traces": True}))
    monkeypatch.setenv("OTEL_SERVICE_NAME", "front")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")  # nothing is sent before the end
    async with asyncio.timeout(120), running_engine() as fake:  # the engine is the collector too
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", fake.url)
        async with running_process(options, fake.url), aiohttp.ClientSession() as client:
            url = f"http://127.0.0.1:{int(ports.read_text())}{CHAT}"
            async with client.post(url, json=chat(PROMPT), headers=CALLER) as response:
                assert response.status == 200
        [body] = [body for _, path, _, body in fake.requests if path == "/v1/traces"]
    [resource] = ExportTraceServiceRequest.FromString(body).resource_spans
    names = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert names["service.name"] == "front"
    exported = [span for scope in resource.scope_spans for span in scope.spans]
    assert {span.name for span in exported} == {"chat tiny-llm", "predict", "queue", "engine"}
    assert {span.trace_id.hex() for span in exported} == {TRACE}
    assert PROMPT.encode() not in body
