"""What the OpenAI backend sends, to whom, and what it makes of good answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from data_gen.backend import Work
from data_gen.openai.options import OpenAIOptions
from data_gen.prompts import Message, Prompt
from scheduler_core.errors import InputError
from tests.data_gen.fake_script import Fault, Script, error, first
from tests.data_gen.fake_server import running
from tests.data_gen.openai_helpers import (
    EXPECTED,
    LONG_WORK,
    PROMPTS,
    SETTINGS,
    WORK,
    assert_complete,
    backend,
    gathered,
    sampled,
)


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_every_index_is_answered_once_with_its_own_seed(api: str, stream: bool) -> None:
    with running() as (server,), backend(server.url, api=api, stream=stream) as engine:
        assert (engine.name, engine.version, engine.served_model) == ("vllm", "9.9", "fake-model")
        assert engine.seeded
        results = list(engine.sample(WORK, SETTINGS))
        answers, failures = gathered(results)
        assert not failures
        assert_complete(answers)
        assert {result.prompt_tokens for result in results} == {3}
        assert {a.finish_reason for a in answers.values()} == {"stop", "length"}
        body = server.bodies[0]
        assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.7, 0.9, 40)
        assert ("messages" in body) == (api == "chat")
        for answer in answers.values():
            assert len(answer.text.split()) == answer.output_tokens - (answer.finish_reason == "stop")
            assert answer.total_s is not None
            assert answer.queue_s is not None
            assert (answer.ttft_s is not None) == stream
            if answer.ttft_s is not None:
                assert 0 < answer.ttft_s <= answer.total_s


def test_only_missing_indices_are_asked_for() -> None:
    with running() as (server,), backend(server.url) as engine:
        answers, _ = gathered(engine.sample([Work(PROMPTS[0], (1, 3)), Work(PROMPTS[2], (0,))], SETTINGS))
        assert set(answers) == {("p0", 1), ("p0", 3), ("p2", 0)}
        assert len(server.bodies) == 3
        assert gathered(engine.sample([], SETTINGS)) == ({}, {})


def test_conversations_keep_their_messages() -> None:
    turns = (
        Message("system", "be short"),
        Message("user", "a"),
        Message("assistant", "é"),
        Message("user", "c"),
    )
    talk = Work(Prompt("talk", "c", messages=turns), (0,))
    with running() as (server,):
        with backend(server.url) as engine:
            list(engine.sample([talk], SETTINGS))
        assert server.bodies[0]["messages"] == [{"role": m.role, "content": m.content} for m in turns]
        with backend(server.url, api="completions") as engine, pytest.raises(InputError, match="talk"):
            list(engine.sample([talk], SETTINGS))


def test_a_server_that_ignores_n_is_asked_again_for_the_rest() -> None:
    script = Script(honours_n=False)
    answers, failures, counters = sampled(script, samples_per_request=4, count_by="token_ids", concurrency=1)
    assert not failures
    assert set(answers) == set(EXPECTED)
    assert counters == {"fewer_choices": 1}, "learned from the first answer"


def test_requests_in_flight_and_look_ahead_are_bounded() -> None:
    taken: list[int] = []

    def source() -> Iterator[Work]:
        for number in range(100):
            taken.append(number)
            yield Work(Prompt(f"q{number}", f"q {number}"), (0, 1))

    with running(Script(delay_s=0.01)) as (server,), backend(server.url, concurrency=4) as engine:
        results = engine.sample(source(), SETTINGS)
        next(results)
        assert len(taken) <= 10
        rest = list(results)
        assert len(taken) == 100
        assert len(rest) == 199
        assert server.most_in_flight == 4


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
def test_engines_are_recognised(owner: str, expected: tuple[str, str], seeded: bool) -> None:
    with running(Script(owner=owner)) as (server,), backend(server.url) as engine:
        assert (engine.name, engine.version) == expected
        assert engine.seeded == seeded


def test_wrong_servers_and_models_are_named() -> None:
    with running(Script(), Script(model="other"), Script(version="8")) as (one, two, three):
        with backend(one.url, model="fake") as engine, pytest.raises(InputError, match="fake-model"):
            _ = engine.name
        with backend(one.url, two.url) as engine, pytest.raises(InputError, match="the same engine"):
            _ = engine.name
        with backend(one.url, three.url) as engine, pytest.raises(InputError, match="the same engine"):
            list(engine.sample(WORK, SETTINGS))
        one.halt()
        with backend(one.url) as engine, pytest.raises(InputError, match="base_urls"):
            _ = engine.version


def test_the_key_is_sent_and_told_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    key = "sk-very-secret"
    refusal = error(400, f"key {key} is not allowed to do this, context length")
    with running(Script(key=key)) as (server,):
        with backend(server.url) as engine, pytest.raises(InputError, match="api_key_env"):
            _ = engine.name
        environment = {"MY_KEY": key, "TEAM": "team-secret"}
        changed = {"api_key_env": "MY_KEY", "headers": {"X-Team": "env:TEAM", "X-Kind": "test"}}
        with backend(server.url, environment=environment, body={"priority": 2}, **changed) as engine:
            server.script.behave = first(4, refusal)
            _, failures = gathered(engine.sample(WORK, SETTINGS))
            assert server.headers[0]["Authorization"] == f"Bearer {key}"
            assert server.headers[0]["X-Team"] == "team-secret"
            assert server.bodies[0]["priority"] == 2
            told = repr([failures, engine._options.recorded(), engine.counters, repr(engine), caplog.text])
            assert len(failures) == 4
            assert "not allowed" in told
            assert key not in told
            assert "team-secret" not in told
            assert "X-Team" in told
    with pytest.raises(InputError, match="TEAM"):
        backend("http://localhost:1/v1", headers={"X-Team": "env:TEAM"})


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("base_urls", {"base_urls": ()}),
        ("base_urls", {"base_urls": ("localhost:8000",)}),
        ("base_urls", {"base_urls": ("http://user:hunter2@localhost/v1",)}),
        ("base_urls", {"base_urls": ("http://a/v1", "http://a/v1/")}),
        ("concurrency", {"concurrency": 0}),
        ("timeout_s", {"timeout_s": 0.0}),
        ("server_wait_s", {"server_wait_s": float("inf")}),
        ("tokenizer", {"count_by": "tokenizer"}),
        ("tokenizer", {"approximate_counts": True}),
        ("body", {"body": {"seed": 1}}),
        ("body", {"body": {"top_k": float("nan")}}),
    ],
)
def test_bad_options_are_named(name: str, changed: dict[str, Any]) -> None:
    with pytest.raises(InputError) as raised:
        OpenAIOptions(**changed)
    assert raised.value.field == name
    assert "hunter2" not in str(raised.value)


def test_a_closed_iterator_stops_everything() -> None:
    before = threading.active_count()
    with running(Script(delay_s=0.005)) as (server,):
        with backend(server.url, concurrency=4) as engine:
            results = engine.sample(LONG_WORK, SETTINGS)
            next(results)
            results.close()  # type: ignore[attr-defined]
            asked = len(server.bodies)
            assert asked < 4 * len(LONG_WORK)
            assert_complete(gathered(engine.sample(WORK, SETTINGS))[0])
            # Four were under way, and may reach the server after it was looked at.
            assert len(server.bodies) <= asked + 4 + len(EXPECTED)
        engine.close()
    assert threading.active_count() == before


def test_an_error_of_the_source_reaches_the_caller() -> None:
    def source() -> Iterator[Work]:
        yield WORK[0]
        raise OSError("disk")

    with running() as (server,), backend(server.url, concurrency=1) as engine:
        with pytest.raises(OSError, match="disk"):
            list(engine.sample(source(), SETTINGS))
        assert_complete(gathered(engine.sample(WORK, SETTINGS))[0])


def test_results_arrive_while_others_are_still_being_answered() -> None:
    released = threading.Event()

    def behave(number: int, body: dict[str, Any]) -> Fault:
        return Fault(delay_s=0.0) if number != 1 or released.is_set() else Fault(hang=True)

    with running(Script(behave=behave)) as (server,), backend(server.url, timeout_s=0.5) as engine:
        began = time.perf_counter()
        results = engine.sample(WORK, SETTINGS)
        seen = [next(results) for _ in range(19)]
        early = time.perf_counter() - began
        released.set()
        answers, _ = gathered([*seen, *results])
        assert_complete(answers)
        assert early < time.perf_counter() - began
        assert engine.counters["timeout"] == 1
