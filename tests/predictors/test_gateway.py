"""The HTTP side: the same answers as over gRPC, statuses, OpenAPI, probes, metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st

from predictors.proto import predictor_v1_pb2 as pb
from predictors.runtime import open_runtime
from predictors.service.batcher import BatchingSettings
from predictors.service.errors import UnparsableError
from predictors.service.gateway import json_object, request_message
from predictors.service.metrics import ServiceMetrics
from predictors.service.tracing import Tracing
from scheduler_core.lengths import LogT
from tests.predictors.fakes import GatedRuntime, expected_rich, running_server, until
from tests.properties import examples


@pytest.fixture
async def http(rich_folder: Path) -> AsyncIterator[aiohttp.ClientSession]:
    async with (
        running_server(open_runtime(rich_folder), http_port=0, metrics=ServiceMetrics()) as (server, _),
        aiohttp.ClientSession(base_url=f"http://127.0.0.1:{server.http_port}") as session,
    ):
        yield session


async def post(session: aiohttp.ClientSession, path: str, **body: Any) -> tuple[int, Any]:
    async with session.post(path, json=body) as response:
        return response.status, await response.json()


async def test_predict_over_http_gives_the_artifacts_numbers(http: aiohttp.ClientSession) -> None:
    status, found = await post(
        http,
        "/v1/predict",
        request_id="r1",
        prompt="name three rivers",
        served_model="tiny-llm",
        max_tokens=300,
    )
    wanted = expected_rich("name three rivers", 1)
    assert (status, found["request_id"], found["served_model_known"]) == (200, "r1", True)
    for name in ("mu", "sigma", "nu", "rank", "regression_tokens"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-5)
    np.testing.assert_allclose(found["urgency"]["probabilities"], wanted["urgency"], rtol=1e-5)
    assert found["urgency"]["level"] == int(np.argmax(wanted["urgency"]))
    assert found["bucket"] == int(np.argmax(wanted["bucket"]))
    assert "effective_level" not in found["urgency"]
    lengths = LogT(found["mu"], found["sigma"], found["nu"])
    assert found["truncated_length"]["expected_tokens"] == pytest.approx(float(lengths.expected(300)))
    assert found["truncated_length"]["max_tokens"] == "300"
    assert int(found["durations"]["inference_ns"]) > 0
    assert found["truncated"] is False


async def test_chat_and_token_ids_are_plain_lists(http: aiohttp.ClientSession) -> None:
    chat = [{"role": "system", "content": "a"}, {"role": "user", "content": "sea"}]
    _, by_chat = await post(http, "/v1/predict", messages=chat)
    _, by_ids = await post(http, "/v1/predict", token_ids=[1, 12, 2])
    _, by_text = await post(http, "/v1/predict", prompt="sea")
    assert by_chat["mu"] == by_text["mu"] == pytest.approx(expected_rich("sea")["mu"], rel=1e-6)
    assert by_ids["prompt_tokens"] == by_text["prompt_tokens"] == 3


async def test_a_message_may_be_a_list_of_text_parts(http: aiohttp.ClientSession) -> None:
    parts = [{"type": "text", "text": "name three "}, {"type": "text", "text": "rivers"}]
    _, by_parts = await post(http, "/v1/predict", messages=[{"role": "user", "content": parts}])
    _, by_text = await post(http, "/v1/predict", prompt="name three rivers")
    assert by_parts["mu"] == by_text["mu"]


async def test_batch_over_http(http: aiohttp.ClientSession) -> None:
    requests = [{"request_id": "a", "prompt": "sea"}, {"request_id": "b", "prompt": ""}]
    status, found = await post(http, "/v1/predict-batch", requests=requests)
    assert status == 200
    assert found["outcomes"][0]["prediction"]["request_id"] == "a"
    assert found["outcomes"][1]["error"]["field"] == "requests[1].prompt"


@pytest.mark.parametrize(
    ("path", "body", "code", "field"),
    [
        ("/v1/predict", b'{"prompt": ""}', 400, "prompt"),
        ("/v1/predict", b'{"prompt": 5}', 400, "request"),
        ("/v1/predict", b'{"promt": "sea"}', 400, "request"),
        ("/v1/predict", b"[1]", 400, "request"),
        ("/v1/predict", b"{", 400, "request"),
        ("/v1/predict", b"\xff\xfe", 400, "request"),
        ("/v1/predict", b"[" * 100_000, 400, "request"),
        ("/v1/predict", b'{"prompt": "\\ud800"}', 400, "request"),
        ("/v1/predict", b'{"prompt": "sea", "max_tokens": 1e400}', 400, "request"),
        ("/v1/predict", b'{"prompt": "sea", "artifact_id": "other"}', 404, "artifact_id"),
        ("/v1/predict-batch", b'{"requests": []}', 400, "requests"),
        ("/v1/predict-batch", b'{"requests": [3]}', 400, "request"),
    ],
)
async def test_wrong_requests_get_a_status_that_names_the_field(
    http: aiohttp.ClientSession, path: str, body: bytes, code: int, field: str
) -> None:
    async with http.post(path, data=body) as response:
        content = await response.json()
    assert response.status == code, content
    assert content["message"].startswith(f"{field}: got ")
    kinds = {detail["@type"].rpartition(".")[2]: detail for detail in content["details"]}
    assert kinds["BadRequest"]["fieldViolations"][0]["field"] == field


async def test_full_queue_and_time_out_over_http(rich_folder: Path) -> None:
    runtime = GatedRuntime(rich_folder, is_open=False)
    batching = BatchingSettings(max_batch=1, max_wait_s=0.0, max_queue=2)
    async with (
        running_server(runtime, batching=batching, http_port=0) as (server, _),
        aiohttp.ClientSession(base_url=f"http://127.0.0.1:{server.http_port}") as session,
    ):
        first = asyncio.create_task(post(session, "/v1/predict", prompt="sea"))
        await until(lambda: server.pipeline.num_in_flight == 1)
        assert (await post(session, "/v1/predict", prompt="sea", timeout_s=0.01))[0] == 504
        second = asyncio.create_task(post(session, "/v1/predict", prompt="sea"))
        await until(lambda: server.pipeline.num_in_flight == 2)
        assert (await post(session, "/v1/predict", prompt="sea"))[0] == 429
        second.cancel()  # hangs up, and so leaves the queue
        await until(lambda: server.pipeline.num_in_flight == 1)
        runtime.gate.set()
        assert (await first)[0] == 200
    assert runtime.batches == [1]


class TraceHeaders(Tracing):
    """Records the trace contexts of callers."""

    def __init__(self) -> None:
        self.contexts: list[Mapping[str, str] | None] = []

    def start(self, method: str, carrier: Mapping[str, str] | None) -> None:
        self.contexts.append(carrier)

    def end(self, *args: Any) -> None:
        pass


async def test_a_trace_context_that_is_not_ascii_is_none(rich_folder: Path) -> None:
    tracing = TraceHeaders()
    async with (
        running_server(open_runtime(rich_folder), http_port=0, tracing=tracing) as (server, _),
        aiohttp.ClientSession(base_url=f"http://127.0.0.1:{server.http_port}") as session,
    ):
        for value in ("a=1", "a=\u00fc"):
            headers = {"tracestate": value}
            async with session.post("/v1/predict", json={"prompt": "sea"}, headers=headers) as response:
                assert response.status == 200
    assert tracing.contexts == [{"tracestate": "a=1"}, {}]


async def test_body_over_the_limit_is_refused(rich_folder: Path) -> None:
    async with (
        running_server(open_runtime(rich_folder), http_port=0, max_message_bytes=2048) as (server, _),
        aiohttp.ClientSession(base_url=f"http://127.0.0.1:{server.http_port}") as session,
        session.post("/v1/predict", data=b"x" * 5000) as response,
    ):
        assert response.status == 413


async def test_probes_metadata_and_metrics(http: aiohttp.ClientSession) -> None:
    for path in ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"):
        async with http.get(path) as response:
            assert response.status == 200, path
    async with http.get("/v1/metadata") as response:
        metadata = await response.json()
    assert (metadata["artifact_ids"], metadata["abstain_threshold"]) == (["tiny"], 0.9)
    await post(http, "/v1/predict", prompt="sea")
    await post(http, "/v1/predict", prompt="")
    async with http.get("/metrics") as response:
        text = await response.text()
    assert 'tailcast_requests_total{artifact="tiny",code="OK",method="HTTP Predict"} 1.0' in text
    assert (
        'tailcast_requests_total{artifact="tiny",code="INVALID_ARGUMENT",method="HTTP Predict"} 1.0' in text
    )
    assert f'version="{metadata["artifact_version"]}"' in text


async def test_openapi_describes_every_path_and_field(http: aiohttp.ClientSession) -> None:
    async with http.get("/openapi.json") as response:
        document = await response.json()
    assert document["openapi"] == "3.1.0"
    schemas = document["components"]["schemas"]
    assert set(schemas["PredictRequest"]["properties"]) == {
        field.name for field in pb.PredictRequest.DESCRIPTOR.fields
    }
    assert schemas["PredictRequest"]["properties"]["token_ids"]["type"] == "array"
    assert schemas["PredictRequest"]["properties"]["messages"]["items"]["$ref"].endswith("/ChatMessage")
    for match in _references(document):
        assert match.removeprefix("#/components/schemas/") in schemas
    for path, verbs in document["paths"].items():
        for verb in verbs:
            concrete = path.replace("{name}", "tiny").replace("{version}", "0")
            async with http.request(verb, concrete, json={} if verb == "post" else None) as response:
                assert response.status != 405, path
                # 404 only from the handler itself (there is no version 0), never from the router.
                assert response.status != 404 or (await response.json())["error"], path


def _references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if "$ref" in node else []
        return own + [found for value in node.values() for found in _references(value)]
    return [found for value in node for found in _references(value)] if isinstance(node, list) else []


def binary_body(header: dict[str, Any], *tensors: bytes) -> tuple[bytes, dict[str, str]]:
    head = json.dumps(header).encode()
    return head + b"".join(tensors), {"Inference-Header-Content-Length": str(len(head))}


async def test_open_inference_as_json_and_as_binary(http: aiohttp.ClientSession) -> None:
    prompts = {"name": "prompt", "datatype": "BYTES", "shape": [2, 1], "data": [["sea"], ["a long essay"]]}
    status, plain = await post(http, "/v2/models/tiny/infer", id="7", inputs=[prompts])
    assert (status, plain["id"], plain["model_name"]) == (200, "7", "tiny")
    wanted = [expected_rich(text)["mu"] for text in ("sea", "a long essay")]
    found = {one["name"]: one for one in plain["outputs"]}
    np.testing.assert_allclose(found["mu"]["data"], wanted, rtol=1e-5)
    assert found["urgency"]["shape"] == [2, 3]
    raw = b"\x03\x00\x00\x00sea\x0c\x00\x00\x00a long essay"
    header = {
        "inputs": [
            {
                "name": "prompt",
                "datatype": "BYTES",
                "shape": [2],
                "parameters": {"binary_data_size": len(raw)},
            }
        ],
        "outputs": [{"name": "mu", "parameters": {"binary_data": True}}, {"name": "rank"}],
    }
    body, headers = binary_body(header, raw)
    async with http.post("/v2/models/tiny/infer", data=body, headers=headers) as response:
        answered = await response.read()
        length = int(response.headers["Inference-Header-Content-Length"])
    told = json.loads(answered[:length])
    assert told["outputs"][0]["parameters"] == {"binary_data_size": 8}
    np.testing.assert_allclose(np.frombuffer(answered[length:], "<f4"), wanted, rtol=1e-5)
    assert "data" in told["outputs"][1]


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"{}", {}),
        (b'{"inputs": 3}', {}),
        (b'{"inputs": [3]}', {}),
        (b'{"inputs": [{"name": "prompt"}]}', {}),
        (b'{"inputs": [{"name": "prompt", "datatype": "BYTES", "shape": [1], "data": [3]}]}', {}),
        (b'{"inputs": [{"name": "prompt", "datatype": "BYTES", "shape": [true], "data": ["a"]}]}', {}),
        (b'{"inputs": [{"name": "prompt", "datatype": "FP32", "shape": [1], "data": ["a"]}]}', {}),
        (b'{"inputs": [{"name": "prompt", "datatype": "BYTES", "shape": [1], "parameters": 3}]}', {}),
        (b'{"inputs": []}', {"Inference-Header-Content-Length": "500"}),
        (b'{"inputs": []}', {"Inference-Header-Content-Length": "-1"}),
        (b'{"inputs": []}xyz', {"Inference-Header-Content-Length": "14"}),
    ],
)
async def test_wrong_inference_requests_are_400(
    http: aiohttp.ClientSession, body: bytes, headers: dict[str, str]
) -> None:
    async with http.post("/v2/models/tiny/infer", data=body, headers=headers) as response:
        content = await response.json()
    assert response.status == 400, content
    assert content["error"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    content=st.dictionaries(
        st.sampled_from([field.name for field in pb.PredictRequest.DESCRIPTOR.fields] + ["other"]), JSON
    )
)
@examples(40)
async def test_any_json_is_a_request_or_unparsable(content: dict[str, Any]) -> None:
    try:
        message = request_message(await json_object(json.dumps(content).encode()))
    except UnparsableError:
        return
    assert request_message(MessageToDict(message)).SerializeToString() == message.SerializeToString()
