"""What engines are told, against what their interfaces accept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scheduler_core.lengths import LogT
from tests.predictors.fakes import NU, expected, write_rich_artifact
from tests.predictors.proxy.fake_engine import chat, running_engine, running_proxy

SHORT, LONG = "name name name", "sea sea sea"


@pytest.mark.parametrize(("engine", "lower_first"), [("vllm", True), ("sglang", False), ("dynamo", False)])
async def test_a_shorter_answer_gets_the_sooner_priority(
    engine: str, lower_first: bool, artifact_folder: Path
) -> None:
    options: dict[str, Any] = {"predictor": str(artifact_folder), "engine": engine, "policy": "sept"}
    async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
        for text in (SHORT, LONG):
            status, _ = await proxy.post(chat(text))
            assert status == 200
        found = [body["nvext"]["agent_hints"] if engine == "dynamo" else body for body in fake.bodies]
        priorities = [hints["priority"] for hints in found]
        assert all(type(number) is int for number in priorities)
        assert (priorities[0] < priorities[1]) is lower_first
        assert expected(SHORT)[0] < expected(LONG)[0]
        if engine == "dynamo":
            for text, hints in zip((SHORT, LONG), found, strict=True):
                mean = float(LogT(*expected(text), NU).expected(500))
                assert set(hints) == {"priority", "osl"}
                assert hints["osl"] == pytest.approx(mean, abs=0.51 + 1e-3 * mean)
                assert 0 < hints["osl"] < 2**32
                assert -(2**31) <= hints["priority"] < 2**31
        assert await proxy.metric('tailcast_proxy_hints_total{outcome="policy"}') == 2
        assert await proxy.metric('tailcast_proxy_predictions_total{outcome="answered"}') == 2


async def test_the_rest_of_the_body_keeps_its_bytes(artifact_folder: Path) -> None:
    body = b' {"seed": 1e2, "messages":[{"role":"user","content":"name \\u0041"}] ,"big":123456789012345678901}\n'
    async with (
        running_engine() as fake,
        running_proxy(fake.url, engine="vllm", predictor=str(artifact_folder)) as proxy,
    ):
        await proxy.post(body)
        [(_, path, _, sent)] = fake.requests
    assert path == "/v1/chat/completions"
    number = json.loads(sent)["priority"]
    assert sent == body.replace(b"{", b'{"priority":%d,' % number, 1)


LEVELS: dict[str, Any] = {
    "slo_ttft_ms": [100, 200, 300, 400, 500],
    "slo_tpot_ms": [10, 20, 30, 40, 50],
    "objectives": ["now", "soon", "chat", "batch", "free"],
}


async def test_llm_d_gets_headers_of_the_declared_tier(artifact_folder: Path) -> None:
    options = LEVELS | {"engine": "llm-d", "predictor": str(artifact_folder)}
    async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
        await proxy.post(chat(SHORT), {"x-tailcast-tier": "1", "x-tailcast-tenant": "lab"})
        await proxy.post(chat(SHORT), {"x-llm-d-slo-ttft-ms": "7"})
        first, second = (headers for _, _, headers, _ in fake.requests)
        assert fake.bodies[0] == chat(SHORT)
    prefix = "x-llm-d-"
    names = ("slo-ttft-ms", "slo-tpot-ms", "inference-objective", "inference-fairness-id")
    assert [first.get(prefix + name) for name in names] == ["200", "20", "soon", "lab"]
    assert [second.get(prefix + name) for name in names] == ["7", "30", "chat", None]


@pytest.mark.parametrize(
    ("threshold", "objective"), [(None, "soon"), (0.9, "soon"), (0.999, "chat"), (1.0, "chat")]
)
async def test_a_text_raises_its_request_by_one_level_above_the_artifacts_threshold(
    threshold: float | None, objective: str, tmp_path: Path
) -> None:
    """The artifact is 98 % sure of its most urgent level."""
    artifact = write_rich_artifact(tmp_path / "artifact", abstain_threshold=threshold)
    options = LEVELS | {"engine": "llm-d", "predictor": str(artifact), "served_model": "tiny-llm"}
    async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
        await proxy.post(chat(SHORT), {"x-tailcast-tier": "2"})
    assert fake.requests[0][2]["x-llm-d-inference-objective"] == objective


async def test_prompts_are_counted_by_the_artifacts_tokenizer(artifact_folder: Path) -> None:
    """Words and two special tokens; of the last message, whose tokens per character hold for all."""
    messages = [{"role": "system", "content": SHORT}, {"role": "user", "content": SHORT}]
    for predictor, expected_tokens in ((str(artifact_folder), [5, 3, 10]), (None, [4, 11, 8])):
        options: dict[str, Any] = {"engine": "vllm", "policy": "spf", "predictor": predictor}
        async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
            for body in (chat(SHORT), chat("x" * 40), chat("") | {"messages": messages}):
                assert (await proxy.post(body))[0] == 200
            assert [body["priority"] for body in fake.bodies] == [1000 * count for count in expected_tokens]


async def test_members_of_dynamos_client_stay(artifact_folder: Path) -> None:
    given_hints = {"annotations": ["x"], "agent_hints": {"osl": 3, "speculative_prefill": True}}
    async with (
        running_engine() as fake,
        running_proxy(fake.url, engine="dynamo", predictor=str(artifact_folder)) as proxy,
    ):
        await proxy.post(chat(SHORT, nvext=given_hints))
        await proxy.post(chat(SHORT, nvext="no object"))
        first, second = fake.bodies
    assert first["nvext"]["annotations"] == ["x"]
    assert first["nvext"]["agent_hints"]["osl"] == 3
    assert first["nvext"]["agent_hints"]["speculative_prefill"] is True
    assert "priority" in first["nvext"]["agent_hints"]
    assert second["nvext"] == "no object"


@pytest.mark.parametrize("tier", ["1", "5", "x", ""])
async def test_a_tier_that_may_not_be_declared_is_refused(tier: str) -> None:
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm", most_urgent_tier=2) as proxy:
        status, body = await proxy.post(chat(SHORT), {"x-tailcast-tier": tier})
        error = json.loads(body)["error"]
        assert (status, error["param"]) == (400, "x-tailcast-tier")
        assert "from 2 to 4" in error["message"]
        assert not fake.requests


async def test_a_key_beyond_the_range_costs_the_hint_and_not_the_request(artifact_folder: Path) -> None:
    options: dict[str, Any] = {"engine": "dynamo", "resolution": 1e12, "predictor": str(artifact_folder)}
    async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
        status, _ = await proxy.post(chat(SHORT))
        assert (status, fake.bodies) == (200, [chat(SHORT)])
        assert await proxy.metric('tailcast_proxy_hints_total{outcome="impossible"}') == 1
