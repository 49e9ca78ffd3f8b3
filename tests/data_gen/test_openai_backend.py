"""What the OpenAI backend sends, to whom, and what it makes of good responses."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from data_gen.backend import Work
from data_gen.openai.options import OpenAIOptions
from data_gen.prompts import Message, Prompt
from scheduler_core.errors import InputError
from tests.data_gen.openai_helpers import (
    LONG_WORK,
    PROMPTS,
    SETTINGS,
    WORK,
    assert_complete,
    backend,
    gathered,
    sampled,
    works,
)
from tests.fake_openai import Completions, Fault, error, first, running


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_every_index_is_sampled_once_with_its_own_seed(api: str, stream: bool) -> None:
    with running() as (engine,), backend(engine, api=api, stream=stream) as client:
        assert (client.name, client.version, client.served_model) == ("vllm", "9.9", "fake-model")
        assert client.seeded
        results = list(client.sample(WORK, SETTINGS))
        outputs, failures = gathered(results)
        assert not failures
        assert_complete(outputs)
        assert {result.prompt_tokens for result in results} == {3}
        body = engine.bodies[0]
        assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.7, 0.9, 40)
        assert ("messages" in body) == (api == "chat")
        for output in outputs.values():
            assert len(output.text.split()) == output.output_tokens - (output.finish_reason == "stop")
            assert output.total_s is not None
            assert output.queue_s is not None
            assert (output.ttft_s is not None) == stream
            assert output.ttft_s is None or 0 < output.ttft_s <= output.total_s


def test_only_missing_indices_are_requested() -> None:
    with running() as (engine,), backend(engine) as client:
        outputs, _ = gathered(client.sample([Work(PROMPTS[0], (1, 3)), Work(PROMPTS[2], (0,))], SETTINGS))
        assert set(outputs) == {("p0", 1), ("p0", 3), ("p2", 0)}
        assert len(engine.bodies) == 3
        assert gathered(client.sample([], SETTINGS)) == ({}, {})


def test_conversations_keep_their_messages() -> None:
    roles = ("system", "user", "assistant", "user")
    turns = tuple(Message(role, text) for role, text in zip(roles, ("be short", "a", "é", "c"), strict=True))
    talk = Work(Prompt("talk", "c", messages=turns), (0,))
    with running() as (engine,):
        with backend(engine) as client:
            list(client.sample([talk], SETTINGS))
        assert engine.bodies[0]["messages"] == [{"role": m.role, "content": m.content} for m in turns]
        with backend(engine, api="completions") as client, pytest.raises(InputError, match="talk"):
            list(client.sample([talk], SETTINGS))


def test_an_output_truncated_before_max_tokens_is_counted() -> None:
    def shorter(content: dict[str, Any]) -> None:
        content["choices"][0]["finish_reason"] = "length"
        content["usage"]["completion_tokens"] = 7

    outputs, _, counters = sampled(Completions(behave=first(1, Fault(change=shorter))), WORK[:1])
    assert [output.finish_reason for output in outputs.values() if output.output_tokens == 7] == ["length"]
    assert counters == {"truncated_early": 1}


def test_requests_in_flight_and_look_ahead_are_bounded() -> None:
    taken: list[Work] = []

    def source() -> Iterator[Work]:
        for work in works(100):
            taken.append(work)
            yield work

    with running(Completions(delay_s=0.01)) as (engine,), backend(engine, concurrency=4) as client:
        results = client.sample(source(), SETTINGS)
        next(results)
        assert len(taken) <= 5
        assert len(list(results)) == 399
        assert engine.max_in_flight == 4


def test_a_thousand_requests_are_in_flight_at_once() -> None:
    before = gc.get_threshold()
    with running(Completions(gate=1000)) as (engine,), backend(engine, concurrency=1000) as client:
        engine.remembers = False
        outputs, failures = gathered(client.sample(works(500), SETTINGS))
        assert_complete(outputs, works(500))
        assert (failures, client.counters) == ({}, {})
        assert engine.max_in_flight == 1000
    assert gc.get_threshold() == before


@pytest.mark.parametrize(
    ("owner", "expected", "seeded"),
    [
        ("vllm", ("vllm", "9.9"), True),
        ("sglang", ("sglang", "9.9"), False),
        ("org/fake-model", ("tgi", "9.9"), True),
        ("llamacpp", ("llama.cpp", "9.9"), True),
        ("library", ("ollama", "9.9"), True),
        ("someone", ("openai-compatible", "unknown"), False),
    ],
)
def test_engines_are_recognized(owner: str, expected: tuple[str, str], seeded: bool) -> None:
    with running(Completions(owner=owner)) as (engine,), backend(engine) as client:
        assert (client.name, client.version) == expected
        assert client.seeded == seeded


def test_wrong_servers_and_models_are_named() -> None:
    scripts = Completions(), Completions(model="other"), Completions(version="8")
    with running(*scripts) as (one, two, three):
        with backend(one, model="fake") as client, pytest.raises(InputError, match="fake-model"):
            _ = client.name
        for other in (two, three):
            with backend(one, other) as client, pytest.raises(InputError, match="the same engine"):
                list(client.sample(WORK, SETTINGS))
        one.halt()
        with backend(one) as client, pytest.raises(InputError, match="base_urls"):
            _ = client.version
        one.resume()


def test_the_key_is_sent_and_shown_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    key = "sk-very-secret"
    refusal = error(400, f"key {key} is not allowed to do this, context length")
    script = Completions(key=key, behave=first(4, refusal))
    environment = {"MY_KEY": key, "TEAM": "team-secret"}
    changes = {"api_key_env": "MY_KEY", "headers": {"X-Team": "env:TEAM", "X-Kind": "test"}}
    with running(script) as (engine,):
        with backend(engine) as client, pytest.raises(InputError, match="api_key_env"):
            _ = client.name
        with backend(engine, environment=environment, body={"priority": 2}, **changes) as client:
            _, failures = gathered(client.sample(WORK, SETTINGS))
            _, _, headers, _ = engine.requests[-1]
            assert (headers["Authorization"], headers["X-Team"]) == (f"Bearer {key}", "team-secret")
            assert engine.bodies[0]["priority"] == 2
            shown = repr([failures, client.counters, client, caplog.text])
            assert len(failures) == 4
            assert "not allowed" in shown
            assert key not in shown
            assert "team-secret" not in shown
        unset = {"X-Team": "env:TEAM"}
        with pytest.raises(InputError, match="TEAM"), backend(engine, headers=unset):
            pass


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("base_urls", {"base_urls": ("http://user:hunter2@localhost/v1",)}),
        ("base_urls", {"base_urls": ("http://a/v1", "http://a/v1/")}),
        ("concurrency", {"concurrency": 0}),
        ("server_wait_s", {"server_wait_s": float("inf")}),
        ("body", {"body": {"seed": 1}}),
    ],
)
def test_bad_options_are_named(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(InputError) as raised:
        OpenAIOptions(**options)
    assert raised.value.field == name
    assert "hunter2" not in str(raised.value)


def test_a_closed_iterator_stops_everything() -> None:
    before = threading.active_count()
    with running(Completions(delay_s=0.005)) as (engine,):
        with backend(engine, concurrency=4) as client:
            results = client.sample(LONG_WORK, SETTINGS)
            next(results)
            results.close()
            num_sent = len(engine.bodies)
            assert num_sent < 4 * len(LONG_WORK)
            assert_complete(gathered(client.sample(WORK, SETTINGS))[0])
            # Four were under way, and may reach the server after it was looked at.
            assert len(engine.bodies) <= num_sent + 4 + 20
        client.close()
    assert threading.active_count() == before


def test_an_error_of_the_source_reaches_the_caller() -> None:
    def source() -> Iterator[Work]:
        yield WORK[0]
        raise OSError("disk")

    with running() as (engine,), backend(engine, concurrency=1) as client:
        with pytest.raises(OSError, match="disk"):
            list(client.sample(source(), SETTINGS))
        assert_complete(gathered(client.sample(WORK, SETTINGS))[0])
