"""The HTTP side: the same answers as over gRPC, statuses, probes, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp.test_utils import make_mocked_request

from predictors.runtime import open_runtime
from predictors.service.batcher import BatchingSettings
from predictors.service.gateway import _trace
from tests.predictors.fakes import GatedRuntime, expected_rich, running_server, until


@contextlib.asynccontextmanager
async def gateway(runtime: Any, **options: Any) -> AsyncIterator[tuple[Any, aiohttp.ClientSession]]:
    """A server and a session with its HTTP port."""
    async with (
        running_server(runtime, http_port=0, **options) as (server, _),
        aiohttp.ClientSession(base_url=f"http://127.0.0.1:{server.http_port}") as session,
    ):
        yield server, session


@pytest.fixture
async def http(rich_folder: Path) -> AsyncIterator[aiohttp.ClientSession]:
    async with gateway(open_runtime(rich_folder)) as (_, session):
        yield session


async def post(session: aiohttp.ClientSession, path: str, **body: Any) -> tuple[int, Any]:
    async with session.post(path, json=body) as response:
        return response.status, await response.json()


async def get(session: aiohttp.ClientSession, path: str) -> str:
    async with session.get(path) as response:
        assert response.status == 200, path
        return await response.text()


async def test_predict_over_http_gives_the_artifacts_numbers(http: aiohttp.ClientSession) -> None:
    options = {"request_id": "r1", "served_model": "tiny-llm", "max_tokens": 300}
    status, found = await post(http, "/v1/predict", prompt="name three rivers", **options)
    row = expected_rich("name three rivers", 1)
    assert (status, found["request_id"], found["served_model_known"]) == (200, "r1", True)
    for name in ("mu", "sigma", "nu", "rank", "regression_tokens"):
        assert found[name] == pytest.approx(row[name], rel=1e-5)
    np.testing.assert_allclose(found["urgency"]["probabilities"], row["urgency"], rtol=1e-5)
    assert "effective_level" not in found["urgency"]
    assert found["truncated_length"]["max_tokens"] == "300"
    assert found["median_tokens"] == pytest.approx(min(np.exp(row["mu"]), 300), rel=1e-5)
    assert found["median_tokens"] <= found["p90_tokens"] <= 300
    assert found["expected_tokens"] <= 300
    assert found["truncated"] is False


async def test_chat_and_token_ids_are_plain_lists(http: aiohttp.ClientSession) -> None:
    parts = [{"type": "text", "text": "name three "}, {"type": "text", "text": "rivers"}]
    for text, source in (
        ("sea", {"prompt": "sea"}),
        ("sea", {"token_ids": [1, 13, 2]}),
        ("sea", {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "sea"}]}),
        ("name three rivers", {"messages": [{"role": "user", "content": parts}]}),
    ):
        _, response = await post(http, "/v1/predict", **source)
        assert response["mu"] == pytest.approx(expected_rich(text)["mu"], rel=1e-6)
        assert response["prompt_tokens"] == len(text.split()) + 2


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
        ("/v1/predict", b"{", 400, "request"),
        ("/v1/predict", b"\xff\xfe", 400, "request"),
        ("/v1/predict", b"[" * 100_000, 400, "request"),
        ("/v1/predict", b'{"prompt": "\\ud800"}', 400, "request"),
        ("/v1/predict", b'{"prompt": "sea", "max_tokens": "' + b"7" * 5000 + b'"}', 400, "request"),
        ("/v1/predict", b'{"prompt": "sea", "max_tokens": NaN}', 400, "request"),
        ("/v1/predict", b'{"prompt": "sea", "max_tokens": 1, "maxTokens": 2}', 400, "request"),
        ("/v1/predict", b'{"prompt": "sea", "served_model": "\\ud800"}', 400, "request"),
        ("/v1/predict", b'{"prompt": "sea", "quantile_levels": [NaN]}', 400, "request"),
        ("/v1/predict", b'{"messages": [{"role": "user", "content": "\\udc00"}]}', 400, "request"),
        ("/v1/predict-batch", b'{"requests": {}}', 400, "request"),
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
    async with gateway(runtime, batching=batching) as (server, session):
        first = asyncio.create_task(post(session, "/v1/predict", prompt="sea"))
        await until(lambda: server.artifacts.num_in_flight == 1)
        assert (await post(session, "/v1/predict", prompt="sea", timeout_s=0.01))[0] == 504
        second = asyncio.create_task(post(session, "/v1/predict", prompt="sea"))
        await until(lambda: server.artifacts.num_in_flight == 2)
        assert (await post(session, "/v1/predict", prompt="sea"))[0] == 429
        second.cancel()  # hangs up, and so leaves the queue
        await until(lambda: server.artifacts.num_in_flight == 1)
        runtime.gate.set()
        assert (await first)[0] == 200
    assert runtime.batches == [1]


def test_a_trace_context_that_is_not_ascii_is_left_out() -> None:
    headers = {"tracestate": "a=1", "traceparent": "a=\u00fc"}
    assert _trace(make_mocked_request("POST", "/", headers=headers)) == {"tracestate": "a=1"}


async def test_metadata_and_metrics(http: aiohttp.ClientSession) -> None:
    metadata = json.loads(await get(http, "/v1/metadata"))
    assert (metadata["artifact_ids"], metadata["abstain_threshold"]) == (["tiny"], 0.9)
    for prompt in ("sea", ""):
        await post(http, "/v1/predict", prompt=prompt)
    text = await get(http, "/metrics")
    for code in ("OK", "INVALID_ARGUMENT"):
        labels = f'artifact="tiny",code="{code}",method="HTTP Predict"'
        assert f"tailcast_requests_total{{{labels}}} 1.0" in text
    assert f'version="{metadata["artifact_version"]}"' in text
