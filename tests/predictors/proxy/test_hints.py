"""What engines are told, against what their interfaces accept."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictors.proxy.config import ProxyConfig
from predictors.proxy.engines import PriorityEngine, make_engine
from predictors.proxy.order import SentOrder, aging_policy
from scheduler_core.errors import InputError
from scheduler_core.lengths import LogT
from scheduler_core.policies import POLICIES
from scheduler_core.predictions import LengthPrediction, Prediction
from scheduler_core.request import Request, RequestState
from tests.predictors.fakes import NU, expected
from tests.predictors.proxy.fake_engine import chat, running_engine, running_proxy

SHORT, LONG = "name name name", "sea sea sea"


def state(arrival_s: float = 0.0, **more: Any) -> RequestState:
    fields: dict[str, Any] = {"request_id": "r", "prompt_tokens": 5, "max_tokens": 500}
    return RequestState(Request(arrival_s=arrival_s, **(fields | more)), order=0)


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


async def test_llm_d_gets_headers_of_the_declared_tier(artifact_folder: Path) -> None:
    options: dict[str, Any] = {
        "engine": "llm-d",
        "predictor": str(artifact_folder),
        "slo_ttft_ms": [100, 200, 300, 400, 500],
        "slo_tpot_ms": [10, 20, 30, 40, 50],
        "objectives": ["now", "soon", "chat", "batch", "free"],
    }
    async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
        await proxy.post(chat(SHORT), {"x-tailcast-tier": "1", "x-tailcast-tenant": "lab"})
        await proxy.post(chat(SHORT), {"x-llm-d-slo-ttft-ms": "7"})
        first, second = (headers for _, _, headers, _ in fake.requests)
        assert fake.bodies[0] == chat(SHORT)
    assert first["x-llm-d-slo-ttft-ms"] == "200"
    assert first["x-llm-d-slo-tpot-ms"] == "20"
    assert first["x-llm-d-inference-objective"] == "soon"
    assert first["x-llm-d-inference-fairness-id"] == "lab"
    assert second["x-llm-d-slo-ttft-ms"] == "7"
    assert second["x-llm-d-inference-objective"] == "chat"
    assert "x-llm-d-inference-fairness-id" not in second


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


@pytest.mark.parametrize(("rule", "kept"), [("keep", True), ("replace", False)])
async def test_a_clients_own_priority(rule: str, kept: bool) -> None:
    options: dict[str, Any] = {"engine": "vllm", "client_priority": rule, "lowest_priority": -5}
    async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
        await proxy.post(chat(SHORT, priority=3))
        assert (fake.bodies[0]["priority"] == 3) is kept
        status, body = await proxy.post(chat(SHORT, priority=-6))
        assert status == 400
        error = json.loads(body)["error"]
        assert error["param"] == "priority"
        assert error["message"] == "priority: got -6; allowed: integers of at least -5"
        assert len(fake.requests) == 1


@pytest.mark.parametrize(
    ("tier", "allowed"), [("1", "from 2 to 4"), ("5", "from 2 to 4"), ("x", "from 2 to 4")]
)
async def test_a_tier_that_may_not_be_declared_is_refused(tier: str, allowed: str) -> None:
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm", most_urgent_tier=2) as proxy:
        status, body = await proxy.post(chat(SHORT), {"x-tailcast-tier": tier})
        assert status == 400
        assert json.loads(body)["error"]["param"] == "x-tailcast-tier"
        assert allowed in json.loads(body)["error"]["message"]
        assert not fake.requests


@settings(max_examples=40)
@given(
    st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20),
    st.floats(1e-3, 1e3),
    st.booleans(),
)
def test_a_scale_keeps_the_order_and_refuses_what_it_cannot_say(
    keys: list[float], resolution: float, lower_first: bool
) -> None:
    engine = PriorityEngine(frozenset(), bits=32, lower_first=lower_first, resolution=resolution)
    keys.sort()
    found = [engine.priority(key) for key in keys]
    assert found == sorted(found, reverse=not lower_first)
    for one, two, first, second in zip(keys, keys[1:], found, found[1:], strict=False):
        if (two - one) * resolution > 1.001:
            assert first != second
    with pytest.raises(InputError, match="allowed: integers from -2147483648 to 2147483647"):
        engine.priority(2**33 / resolution)
    for bad in (math.inf, math.nan):
        with pytest.raises(InputError, match="policy key"):
            engine.priority(bad)


def test_a_waiting_request_gains_by_ageing() -> None:
    order = SentOrder("sept", aging_policy("sept", {}, aging_per_s=2.0), max_num_seqs=1)
    length = Prediction(length=LengthPrediction(5.0, 0.5, 3.5))
    old, new = state(0.0), state(100.0, request_id="s")
    keys = []
    for one in (old, new):
        one = order.enter(one.request)
        keys.append(order.key(one, length, one.request.arrival_s))
    assert keys[1] - keys[0] == pytest.approx(200.0)
    order.leave("r")
    order.leave("s")
    assert order.num_in_flight == 0


def test_only_policies_whose_number_stays_true_are_sent() -> None:
    for name, kind in POLICIES.items():
        if kind.key_changes == "with_time":
            with pytest.raises(InputError, match="engine that orders by itself"):
                SentOrder(name, aging_policy(name, {}, 0.0), 8)
            continue
        order = SentOrder(name, aging_policy(name, {}, 0.0), 8)
        one = order.enter(state().request)
        assert math.isfinite(order.key(one, None, 0.0)), name
        order.leave(one.request_id)


def test_a_policy_from_outside_is_named_by_its_class() -> None:
    name = "scheduler_core.policies.tie:Tie"
    order = SentOrder(name, aging_policy(name, {"gamma": 0.5}, 0.0), 8)
    assert math.isfinite(order.key(order.enter(state().request), None, 0.0))
    with pytest.raises(InputError, match="policy: got 'no.such:Policy'"):
        aging_policy("no.such:Policy", {}, 0.0)


def test_what_an_engine_cannot_be_told_is_refused() -> None:
    with pytest.raises(InputError, match="slo_ttft_ms"):
        ProxyConfig(engine_url="http://x", slo_ttft_ms=[1, 2])
    engine = make_engine(ProxyConfig(engine_url="http://x", engine="dynamo"))
    assert engine is not None
    with pytest.raises(InputError, match="lower resolution"):
        engine.hint({}, 1e8, state())


async def test_a_key_beyond_the_range_costs_the_hint_and_not_the_request(artifact_folder: Path) -> None:
    options: dict[str, Any] = {"engine": "dynamo", "resolution": 1e12, "predictor": str(artifact_folder)}
    async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
        status, _ = await proxy.post(chat(SHORT))
        assert (status, fake.bodies) == (200, [chat(SHORT)])
        assert await proxy.metric('tailcast_proxy_hints_total{outcome="impossible"}') == 1
