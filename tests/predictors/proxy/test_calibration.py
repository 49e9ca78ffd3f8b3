"""Online calibration in the proxy: it learns from usage counts, corrects the hints, and outlasts a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aiohttp import web

from scheduler_core.predictions import LengthPrediction
from tests.predictors.fakes import expected
from tests.predictors.proxy.fake_engine import (
    CHAT,
    chat,
    completion,
    paused,
    plain,
    running_engine,
    running_proxy,
    stream_events,
    until,
)

SHORT = "name three rivers"
OUTPUTS = 'tailcast_proxy_calibration_outputs{served_model="tiny-llm"}'
CENSORED = 'tailcast_proxy_calibration_censored_outputs{served_model="tiny-llm"}'


def options(artifact_folder: Path, **more: Any) -> dict[str, Any]:
    return {"engine": "vllm", "predictor": str(artifact_folder), "policy": "sept", **more}


async def test_hints_follow_the_true_lengths_also_after_a_restart(
    artifact_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "calibration.json"

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        return await plain(request, body, tokens=300)

    settings = options(artifact_folder, calibration_file=str(file), resolution=1.0)
    async with running_engine(script) as fake:
        async with running_proxy(fake.url, **settings) as proxy:
            for _ in range(60):
                assert (await proxy.post(chat(SHORT)))[0] == 200
            assert await proxy.metric(OUTPUTS) == 60
            crps = 'tailcast_proxy_calibration_crps_log_tokens{predictions="%s",served_model="tiny-llm"}'
            raw, corrected = [await proxy.metric(crps % which) for which in ("raw", "corrected")]
            assert 0 < corrected < 0.5 * raw
        async with running_proxy(fake.url, **settings) as proxy:
            await proxy.post(chat(SHORT))
        async with running_proxy(
            fake.url, **options(artifact_folder, resolution=1.0, online_calibration=False)
        ) as proxy:
            await proxy.post(chat(SHORT))
            assert await proxy.metric(OUTPUTS) == 0
    first, last, restarted, off = (fake.bodies[number]["priority"] for number in (0, 59, 60, 61))
    mu, sigma = expected(SHORT)
    assert first == off == round(float(LengthPrediction(mu, sigma, 3.5).distribution().expected(500)))
    assert abs(last - 300) < 60
    assert abs(restarted - last) <= 3
    assert json.loads(file.read_text())["served_models"]["tiny-llm"]["num_outputs"] == 61


async def test_what_counts(artifact_folder: Path) -> None:
    """Complete and truncated outputs with usage, and streams that would have brought it; not counted events, errors, choices."""
    usage = {"stream_options": {"include_usage": True}}
    first = stream_events(["a"], None)[0]

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        match json.loads(body)["messages"][0]["content"]:
            case "fail":
                return web.json_response({"error": {}}, status=500)
            case "truncated":
                return web.json_response(completion(500, "length"))
            case "filtered":
                return web.json_response(completion(5, "content_filter"))
            case "stall":
                return await paused([first], None)(request, body)
        return await plain(request, body)

    async with running_engine(script) as fake, running_proxy(fake.url, **options(artifact_folder)) as proxy:

        async def hang_up(**more: Any) -> None:
            response = await proxy.client.post(proxy.url + CHAT, json=chat("stall", stream=True, **more))
            await response.content.readany()
            response.close()
            await until(lambda: proxy.server.num_in_flight == 0)

        for text, more in (("fail", {}), ("filtered", {}), (SHORT, {"stream": True}), (SHORT, {"n": 2})):
            await proxy.post(chat(text, **more))
        await hang_up()
        assert await proxy.metric(OUTPUTS) == 0
        for number, (text, more) in enumerate(
            ((SHORT, {}), (SHORT, {"stream": True, **usage}), ("truncated", {}))
        ):
            await proxy.post(chat(text, **more))
            assert await proxy.metric(OUTPUTS) == number + 1
        assert await proxy.metric(CENSORED) == 1
        await hang_up(**usage)
        assert (await proxy.metric(OUTPUTS), await proxy.metric(CENSORED)) == (4, 2)
        requested = [body["stream_options"] for body in fake.bodies if "stream_options" in body]
        assert requested == [usage["stream_options"]] * len(requested)


async def test_counts_can_be_requested_for_streams(artifact_folder: Path) -> None:
    async with (
        running_engine() as fake,
        running_proxy(fake.url, feedback_usage=True, **options(artifact_folder)) as proxy,
    ):
        status, body = await proxy.post(chat(SHORT, stream=True))
        assert (status, body) == (200, b"".join(stream_events(["a", "b", "c"], None)))
        assert await proxy.metric(OUTPUTS) == 1
