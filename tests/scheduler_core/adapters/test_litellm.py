"""The callback that estimates outputs for LiteLLM's token quota, alone and before LiteLLM's own limiter."""

import asyncio
import json
import math
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest

from benchmarks.shared.processes import free_port, listens, running
from scheduler_core.adapters import litellm as adapter
from scheduler_core.adapters.litellm import ESTIMATES, QuotaCallback, QuotaSettings, callback_class
from scheduler_core.errors import TailcastError
from scheduler_core.prediction.predictions import LengthPrediction, Prediction
from scheduler_core.prediction.predictor import PredictionRequest, Predictor
from tests.fake_openai import Completions, running_engine

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
pytestmark = [
    pytest.mark.filterwarnings(*(f"ignore::{kind}Warning" for kind in ("User", "Deprecation", "Resource"))),
    pytest.mark.asyncio,
]
PROMPT, TOKENS, LIMIT = 400 * "x", 50, 10_000_000
AUTH = """
from litellm.proxy._types import UserAPIKeyAuth

async def auth(request, api_key):
    return UserAPIKeyAuth(api_key=api_key, tpm_limit=10_000_000)
"""


class Fixed(Predictor):
    """Predicts `TOKENS` for every prompt, unless it has an error or never answers."""

    error: Exception | None = None
    is_stuck = False

    async def predict(
        self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None
    ) -> Sequence[Prediction]:
        if self.error is not None:
            raise self.error
        if self.is_stuck:
            await asyncio.Event().wait()
        length = LengthPrediction(math.log(TOKENS), 1e-3, 3.5)
        return [Prediction(length=length, embedding=np.array([1, 0], np.float32)) for _ in requests]


@pytest.fixture
def predictor() -> Fixed:
    return Fixed()


@pytest.fixture
def callback(predictor: Fixed) -> QuotaCallback:
    return QuotaCallback(QuotaSettings(timeout_s=0.05), predictor)


async def estimate(
    callback: QuotaCallback, data: dict[str, Any], call_type: str = "acompletion"
) -> int | None:
    """Output tokens that the callback declares for a request; None: those of LiteLLM."""
    declared = {"team": "t"}
    key = SimpleNamespace(team_id=None, api_key="k", metadata=declared)
    before = json.dumps(data)
    await callback.async_pre_call_hook(key, None, data, call_type)
    assert (json.dumps(data), declared) == (
        before,
        {"team": "t"},
    )  # neither the request nor the stored key is changed
    estimates: dict[str, int] = key.metadata.get(ESTIMATES, {})
    return estimates.get("m")


async def end(callback: QuotaCallback, number: int, tokens: int, reason: str = "stop") -> None:
    response = SimpleNamespace(
        usage=SimpleNamespace(completion_tokens=tokens), choices=[SimpleNamespace(finish_reason=reason)]
    )
    await callback.async_log_success_event({"litellm_call_id": str(number)}, response, None, None)


async def test_the_predicted_mean_is_declared(callback: QuotaCallback, predictor: Fixed) -> None:
    assert await estimate(callback, body()) == TOKENS
    assert await estimate(callback, body(max_tokens=300)) is None
    assert await estimate(callback, body(), "aembedding") is None
    assert await estimate(callback, body(model=None)) is None
    assert await estimate(callback, {"model": "m", "prompt": [1, 2]}) is None
    predictor.error = TailcastError("gone")
    assert await estimate(callback, body()) is None
    predictor.error, predictor.is_stuck = None, True
    assert await estimate(callback, body()) is None


async def test_lengths_of_ended_requests_are_learned(callback: QuotaCallback) -> None:
    for number in range(300):
        assert await estimate(callback, body(number)) is not None
        await end(callback, number, 700)
        await end(callback, number, 7)  # an event twice
    assert await estimate(callback, body()) == pytest.approx(700, rel=0.2)


async def test_only_whole_outputs_of_one_prediction_are_learned(callback: QuotaCallback) -> None:
    for number in range(300):
        kind = ({"n": 2}, {"min_tokens": 700}, {})[number % 3]
        await estimate(callback, body(number, **kind))
        if not kind:
            call = {"litellm_call_id": str(number)}
            await callback.async_log_failure_event(call, None, None, None)
        await end(callback, number, 700)
    assert await estimate(callback, body()) == TOKENS


@pytest.mark.mend
@pytest.mark.parametrize("reason", ["content_filter", ""])
async def test_outputs_that_a_filter_ended_are_not_learned(callback: QuotaCallback, reason: str) -> None:
    """They were learned as complete outputs."""
    for number in range(150):
        await estimate(callback, body(number))
        await end(callback, number, 700, reason)
    assert await estimate(callback, body()) == TOKENS


async def test_requests_that_never_end_are_forgotten(
    callback: QuotaCallback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "MAX_PENDING", 3)
    for number in range(300):
        for _ in range(4):
            await estimate(callback, body(number))
            number += 1000
        await end(callback, number - 4000, 700)  # the oldest of four
    assert await estimate(callback, body()) == TOKENS


# LiteLLM's own limiter.


@pytest.fixture
def litellm() -> Any:
    pytest.importorskip("apscheduler", reason="needs litellm[proxy]")
    return pytest.importorskip("litellm")


@pytest.fixture
def proxy(litellm: Any, predictor: Fixed, monkeypatch: pytest.MonkeyPatch) -> Any:
    """LiteLLM's hooks; the callback is registered as its configuration does, before the proxy adds its own."""
    monkeypatch.setattr(litellm, "callbacks", [callback_class()(QuotaSettings(timeout_s=0.05), predictor)])
    from litellm.caching.caching import DualCache
    from litellm.proxy.utils import ProxyLogging

    logging = ProxyLogging(user_api_key_cache=DualCache())
    logging._init_litellm_callbacks()
    return logging


def body(number: int = 0, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": PROMPT}]
    return {"model": "m", "messages": messages, "litellm_call_id": str(number), "metadata": {}, **more}


async def reserved(proxy: Any, data: dict[str, Any]) -> int:
    """Tokens that the limiter reserves for a request, beyond its input."""
    from litellm.proxy._types import UserAPIKeyAuth
    from litellm.proxy.hooks.parallel_request_limiter_v3 import get_request_stash

    async def admit() -> int:
        declared = {"team": "t"}
        key = UserAPIKeyAuth(api_key="k", tpm_limit=LIMIT, metadata=declared)
        before = json.dumps(data)
        await proxy.pre_call_hook(user_api_key_dict=key, data=data, call_type="acompletion")
        sent = {name: value for name, value in data.items() if name in json.loads(before)}
        assert json.loads(before) == sent  # what the engine gets
        assert "max_tokens" not in data or "max_tokens" in before
        assert ESTIMATES not in declared
        return int(get_request_stash().reserved_tokens) - len(PROMPT) // 4

    return await asyncio.create_task(admit())  # a context of its own, as each request of the proxy


async def test_predicted_tokens_are_reserved(proxy: Any) -> None:
    assert await reserved(proxy, body()) == TOKENS
    assert await reserved(proxy, body(n=2)) == 2 * TOKENS
    assert await reserved(proxy, body(max_tokens=300)) == 300


async def test_litellm_estimates_where_there_is_no_prediction(proxy: Any, predictor: Fixed) -> None:
    predictor.error = TailcastError("gone")
    assert await reserved(proxy, body()) == 1024


@pytest.fixture
async def server(litellm: Any, tmp_path: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """LiteLLM's proxy in a process of its own, in front of an engine."""
    async with running_engine(Completions()) as engine:
        deployment = {"model": "hosted_vllm/m", "api_base": f"{engine.url}/v1", "max_tokens": 64}
        config = {
            "model_list": [{"model_name": "m", "litellm_params": deployment}],
            "litellm_settings": {"callbacks": ["scheduler_core.adapters.litellm.callback"]},
            "general_settings": {"custom_auth": "own_auth.auth", "master_key": "sk-" + 8 * "test"},
        }
        (tmp_path / "own_auth.py").write_text(AUTH)
        (tmp_path / "config.yaml").write_text(json.dumps(config))
        (tmp_path / "quota.yaml").write_text(json.dumps({"predictor": "tiny"}))
        port = free_port()
        command = [str(Path(sys.executable).with_name("litellm")), "--config", str(tmp_path / "config.yaml")]
        environment = {"TAILCAST_QUOTA_CONFIG": str(tmp_path / "quota.yaml"), "PYTHONPATH": os.getcwd()}
        command += ["--host", "127.0.0.1", "--port", str(port)]
        with running(command, lambda: listens(port), environment=environment, timeout_s=600):
            headers = {"Authorization": "Bearer sk-own"}
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers=headers) as session:
                yield session


@pytest.mark.slow
async def test_the_callback_runs_before_the_limiter(server: aiohttp.ClientSession) -> None:
    async def remaining(content: str) -> int:
        messages = [{"role": "user", "content": content}]
        async with server.post("/v1/chat/completions", json={"model": "m", "messages": messages}) as response:
            assert response.status == 200, await response.text()
            return int(response.headers["x-ratelimit-api_key-remaining-tokens"])

    assert LIMIT - 1024 < await remaining("What is 2 + 2? Answer with one number.") < LIMIT
