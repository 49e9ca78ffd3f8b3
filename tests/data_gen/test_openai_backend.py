"""The OpenAI backend: what it sends, to whom, and what it makes of responses; servers that fail, for a while or for good."""

import gc
import json
import resource
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from email.utils import formatdate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_gen.backend import SampledOutput, SampleFailure, SamplingSettings, Work, WorkResult, sample_seed
from data_gen.openai import responses
from data_gen.openai.backend import OpenAIBackend
from data_gen.openai.http_client import allow_descriptors, retry_after_s
from data_gen.openai.options import EngineError, OpenAIOptions
from data_gen.prompts import Message, Prompt
from scheduler_core.errors import InputError
from tests.fake_openai import GOOD, Completions, FakeEngine, Fault, error, first, length_of, running

PROMPTS = [Prompt(f"p{i}", f"prompt number {i}") for i in range(5)]
SETTINGS = SamplingSettings(num_samples=4, max_tokens=40, temperature=0.7, top_p=0.9, seed=3)
WORK = [Work(prompt, (0, 1, 2, 3)) for prompt in PROMPTS]

Key = tuple[str, int]
REFUSALS = [error(401), error(404, "gone"), error(429, "insufficient_quota"), error(429, Retry_After="9999")]


def works(count: int) -> list[Work]:
    """Prompts with four samples each."""
    return [Work(Prompt(f"q{i}", f"prompt {i}"), (0, 1, 2, 3)) for i in range(count)]


#: More than can be served before a test that halts the engine gets to it, however busy the machine.
LONG_WORK = works(1000)


@contextmanager
def backend(
    *engines: FakeEngine, environment: dict[str, str] | None = None, **changes: Any
) -> Iterator[OpenAIBackend]:
    """A backend that does not wait long for anything."""
    hasty = {"backoff_s": 0.002, "max_backoff_s": 0.02, "start_wait_s": 0.0, "timeout_s": 20.0}
    options = OpenAIOptions(base_urls=tuple(f"{engine.url}/v1" for engine in engines), **{**hasty, **changes})
    with closing(OpenAIBackend(options, environment or {})) as client:
        yield client


def gathered(results: Iterable[WorkResult]) -> tuple[dict[Key, SampledOutput], dict[Key, SampleFailure]]:
    """Outputs and failures by (prompt id, sample index); each may come once only."""
    outputs: dict[Key, SampledOutput] = {}
    failures: dict[Key, SampleFailure] = {}
    for result in results:
        assert result.outputs or result.failures
        for output in result.outputs:
            assert outputs.setdefault((result.prompt.prompt_id, output.sample_index), output) is output
        for failure in result.failures:
            assert failures.setdefault((result.prompt.prompt_id, failure.sample_index), failure) is failure
    assert not outputs.keys() & failures.keys()
    return outputs, failures


def sampled(
    script: Completions, work: Iterable[Work] = WORK, **changes: Any
) -> tuple[dict[Key, SampledOutput], dict[Key, SampleFailure], dict[str, int]]:
    """Outputs, failures and counters of one run against one engine."""
    with running(script) as (engine,), backend(engine, **changes) as client:
        outputs, failures = gathered(client.sample(work, SETTINGS))
        return outputs, failures, client.counters


def assert_complete(outputs: dict[Key, SampledOutput], work: Iterable[Work] = WORK) -> None:
    """Every output is there and has the length and end that its seed gives."""
    expected = {
        (item.prompt.prompt_id, i): length_of(item.prompt.text, sample_seed(3, item.prompt.prompt_id, i))
        for item in work
        for i in item.indices
    }
    assert {key: output.output_tokens for key, output in outputs.items()} == {
        key: min(length, 40) for key, length in expected.items()
    }
    for key, output in outputs.items():
        assert output.finish_reason == ("length" if expected[key] > 40 else "stop")


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_every_index_is_sampled_once_with_its_own_seed(api: str) -> None:
    with running() as (engine,), backend(engine, api=api) as client:
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
            assert output.queue_s is not None
            assert (output.total_s or 0) > 0


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
    with running() as (engine,), backend(engine) as client:
        list(client.sample([talk], SETTINGS))
        assert engine.bodies[0]["messages"] == [{"role": m.role, "content": m.text} for m in turns]
    with pytest.raises(InputError, match="talk"):
        sampled(Completions(), [talk], api="completions")


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
    environment = {"MY_KEY": key, "TEAM": "team-secret"}
    changes = {"api_key_env": "MY_KEY", "headers": {"X-Team": "env:TEAM", "X-Kind": "test"}}
    with running(Completions(key=key, behave=first(4, refusal))) as (engine,):
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
        with pytest.raises(InputError, match="TEAM"), backend(engine, headers={"X-Team": "env:TEAM"}):
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


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": formatdate(1030, usegmt=True)}, 30.0),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "nan"}, None),
        ({"retry-after-ms": "1500", "Retry-After": "9"}, 1.5),
    ],
)
def test_retry_after_is_read_in_all_its_forms(headers: dict[str, str], expected: float | None) -> None:
    assert retry_after_s(headers, 1000.0) == expected


KEYS = st.sampled_from(["choices", "usage", "message", "index", "finish_reason", "text", "error"])
JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner),
    max_leaves=12,
)


@given(st.binary(max_size=60) | JSON.map(lambda content: json.dumps(content).encode()))
def test_whatever_a_server_sends_is_a_response_or_a_named_problem(payload: bytes) -> None:
    try:
        problem = responses.read_response(payload, 40).problem
        kind = "good" if problem is None else problem.kind
    except responses.ResponseError as error:
        kind = error.kind
    kinds = {"malformed", "empty", "server_error", "truncated", "finish_reason", "no_token_count", "good"}
    assert kind in kinds
    assert responses.read_error_response(500, payload).kind == "http_500"


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("eos_token", "stop"), ("stop_sequence", "stop"), ("length", "length"), ("stop", "stop")],
)
def test_names_of_ends_differ_between_engines(reason: str, expected: str) -> None:
    choice = {"index": 0, "text": "a\ud83d\ude00b\ud800", "finish_reason": reason}
    usage = {"prompt_tokens": 3, "completion_tokens": 9}
    response = responses.read_response(json.dumps({"choices": [choice], "usage": usage}).encode(), 40)
    assert (response.text, response.finish_reason) == ("a\U0001f600b\ufffd", expected)
    assert (response.prompt_tokens, response.output_tokens, response.problem) == (3, 9, None)


@pytest.mark.parametrize(
    ("status", "message", "kind", "retry"),
    [
        (408, "", "http_408", True),
        (529, "", "http_529", True),
        (429, "insufficient_quota", "no_quota", False),
        (422, "`inputs` tokens + `max_new_tokens` must be <= 2048", "too_long", False),
        (400, "the request exceeds the available context size", "too_long", False),
        (400, "max_tokens=600 cannot be greater than max_model_len=512", "too_long", False),
    ],
)
def test_statuses_are_sorted(status: int, message: str, kind: str, retry: bool) -> None:
    problem = responses.read_error_response(status, json.dumps({"error": {"message": message}}).encode())
    assert (problem.kind, problem.retry) == (kind, retry)


def body_of(prompt: Prompt, index: int, **changed: Any) -> dict[str, Any]:
    bodies = responses.RequestBodies(OpenAIOptions(**changed), SETTINGS, "m")
    return dict(json.loads(bodies.body(bodies.prefix(prompt), prompt, index)))


@given(st.text(), st.lists(st.text(), max_size=3))
def test_bodies_hold_any_text_and_what_is_asked(text: str, contents: list[str]) -> None:
    prompt = Prompt("p", text, messages=tuple(Message("user", content) for content in contents))
    body = body_of(prompt, 1, body={"priority": 1}, max_tokens_field="max_completion_tokens")
    assert [message["content"] for message in body["messages"]] == (contents or [text])
    assert (body["max_completion_tokens"], body["priority"]) == (40, 1)
    assert "max_tokens" not in body
    assert body_of(prompt, 1)["seed"] == body["seed"] != body_of(prompt, 2)["seed"]
    assert "seed" not in body_of(prompt, 1, send_seed=False)
    assert body_of(prompt, 1, api="completions")["prompt"] == text


def test_the_limit_of_open_files_is_raised_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: limits.append(pair))
    allow_descriptors(500)
    assert limits == []
    allow_descriptors(2000)
    assert limits == [(2128, 4096)]
    with pytest.raises(InputError, match="at most 3968"):
        allow_descriptors(5000)


FAULTS: list[tuple[str, Fault, dict[str, Any]]] = [
    ("http_500", error(500), {}),
    ("http_429", error(429), {}),
    ("malformed", Fault(payload=b"<html>"), {}),
    ("malformed", Fault(change=lambda content: content["choices"].append(content["choices"][0])), {}),
    ("malformed", Fault(change=lambda content: content["usage"].update(completion_tokens="9")), {}),
    ("server_error", Fault(payload=b'{"error": {"message": "out of memory"}}'), {}),
    ("empty", Fault(change=lambda content: content["choices"].clear()), {}),
    ("truncated", Fault(cut="middle"), {}),
    ("truncated", Fault(change=lambda content: content["choices"][0].update(finish_reason=None)), {}),
    ("aborted", Fault(change=lambda content: content["choices"][0].update(finish_reason="abort")), {}),
    ("disconnected", Fault(cut="early"), {}),
    ("timeout", Fault(hang=True), {"timeout_s": 0.6}),
]


@pytest.mark.parametrize(("kind", "fault", "changed"), FAULTS)
def test_passing_trouble_is_retried_and_counted(kind: str, fault: Fault, changed: dict[str, Any]) -> None:
    outputs, failures, counters = sampled(Completions(behave=first(3, fault)), **changed)
    assert not failures
    assert_complete(outputs)
    assert counters[kind] == 3
    assert counters["retries"] == 3


def hits(fault: Fault, text: str = "1") -> Callable[[int, dict[str, Any]], Fault]:
    """All requests for one prompt."""
    return lambda number, body: fault if body["messages"][-1]["content"].endswith(text) else GOOD


PERMANENT: list[tuple[str, Fault, dict[str, Any]]] = [
    ("content_filter", Fault(change=lambda content: content["choices"][0].update(finish_reason="content_filter")), {}),
    ("content_filter", error(400, "blocked by content_filter"), {}),
    ("finish_reason", Fault(change=lambda content: content["choices"][0].update(finish_reason="somehow")), {}),
    ("too_long", error(400, "This model's maximum context length is 512 tokens"), {}),
    ("too_long", error(413), {}),
    ("refused", error(400, "unknown field"), {}),
    ("too_many_tokens", Fault(change=lambda content: content["usage"].update(completion_tokens=41)), {}),
    ("no_token_count", Fault(change=lambda content: content.pop("usage")), {}),
    ("no_token_count", Fault(change=lambda content: content["usage"].update(completion_tokens=0)), {}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fault", "changed"), [*FAULTS, *PERMANENT])
def test_lasting_trouble_is_a_failure_of_its_kind(kind: str, fault: Fault, changed: dict[str, Any]) -> None:
    outputs, failures, counters = sampled(Completions(behave=hits(fault)), max_attempts=2, **changed)
    assert {key: failure.kind for key, failure in failures.items()} == {("p1", i): kind for i in range(4)}
    is_retried = any(fault is other for _, other, _ in FAULTS)
    assert {failure.reason.startswith("2 attempts") for failure in failures.values()} == {is_retried}
    assert (len(outputs), counters.get("retries", 0)) == (16, 4 * is_retried)


def test_a_huge_body_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_gen.openai.http_client.MAX_BODY_BYTES", 2000)
    huge = Fault(payload=b'{"choices": "' + b"x" * 5000 + b'"}')
    outputs, failures, counters = sampled(Completions(behave=first(3, huge)))
    assert not failures
    assert_complete(outputs)
    assert counters == {"malformed": 3, "retries": 3}


def test_a_run_in_which_everything_is_refused_stops_early() -> None:
    with running(Completions(behave=lambda number, body: error(400, "bad field"))) as (server,):
        with backend(server, concurrency=2) as engine, pytest.raises(EngineError, match="bad field"):
            list(engine.sample([Work(Prompt(f"q{i}", "q"), (0, 1)) for i in range(100)], SETTINGS))
        assert len(server.bodies) < 30


@pytest.mark.parametrize("fault", REFUSALS)
def test_trouble_with_the_account_or_model_stops_the_run(fault: Fault) -> None:
    with pytest.raises(EngineError):
        sampled(Completions(behave=lambda number, body: fault))


def test_retry_after_holds_back_all_requests() -> None:
    script = Completions(behave=first(1, error(429, Retry_After="0.2")))
    with running(script) as (server,), backend(server, concurrency=1) as engine:
        outputs, _ = gathered(engine.sample(WORK, SETTINGS))
        assert_complete(outputs)
        first_at, second_at, *_ = server.arrivals[2:]  # after the models and the version
        assert second_at - first_at >= 0.2


def test_a_server_that_takes_few_is_not_hammered() -> None:
    """600 requests, 64 at a time, to a server that takes 4: almost all are sent when there is room for them."""
    script = Completions(delay_s=0.002)
    with running(script) as (server,), backend(server, concurrency=64) as engine:
        script.behave = lambda number, body: error(429) if server.num_in_flight > 4 else GOOD
        outputs, failures = gathered(engine.sample(works(150), SETTINGS))
        assert (len(outputs), failures) == (600, {})
        assert engine.counters["http_429"] < 400


def test_a_restarted_server_is_waited_for_and_nothing_is_lost() -> None:
    with running(Completions(delay_s=0.005)) as (server,), backend(server, concurrency=8) as engine:
        results = engine.sample(LONG_WORK[:150], SETTINGS)
        seen = [next(results) for _ in range(20)]
        server.halt()
        timer = threading.Timer(0.2, server.resume)
        timer.start()
        outputs, failures = gathered([*seen, *results])
        timer.join()
        assert (len(outputs), failures) == (600, {})
        assert engine.counters["server_down"] >= 1


# A connection that is just being made when the fake engine goes away is nobody's to close.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("version", "message"), [(None, "no server"), ("10.0", "now vllm 10.0, but was vllm 9.9")]
)
def test_a_server_that_stays_away_or_is_replaced_ends_the_run(version: str | None, message: str) -> None:
    script = Completions(delay_s=0.2)  # so long that requests are under way when it goes
    with running(script) as (server,), backend(server, server_wait_s=0.3) as engine:
        results = engine.sample(LONG_WORK, SETTINGS)
        next(results)
        server.halt()
        if version is not None:
            script.version = version
            server.resume()
        with pytest.raises(EngineError, match=message):
            list(results)


def test_servers_share_the_requests_and_stand_in_for_each_other() -> None:
    scripts = Completions(delay_s=0.002), Completions(delay_s=0.002)
    with running(*scripts) as (one, two), backend(one, two, concurrency=3) as engine:
        assert_complete(gathered(engine.sample(WORK, SETTINGS))[0])
        assert 6 <= len(one.bodies) <= 14
        one.halt()
        outputs, failures = gathered(engine.sample(WORK, SETTINGS))
        assert_complete(outputs)
        assert not failures
        assert engine.counters["server_down"] == 1


def test_a_server_missing_at_the_start_joins_later() -> None:
    many = works(100)
    with running(Completions(delay_s=0.005), Completions()) as (one, two):
        two.halt()
        with backend(one, two, concurrency=4) as engine:
            results = engine.sample(many, SETTINGS)
            seen = [next(results)]
            two.resume()
            outputs, failures = gathered([*seen, *results])
            assert (len(outputs), failures) == (400, {})
            assert two.bodies


def test_a_broken_server_is_put_aside_when_its_retry_budget_is_spent() -> None:
    scripts = Completions(delay_s=0.001), Completions(behave=lambda number, body: error(500))
    options = {"concurrency": 16, "max_attempts": 50}
    with running(*scripts) as (good, bad), backend(good, bad, **options) as engine:
        outputs, failures = gathered(engine.sample(works(100), SETTINGS))
        assert (len(outputs), failures) == (400, {})
        assert len(bad.bodies) < len(good.bodies)


def test_requests_take_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """In company networks, hosted models are reached through a proxy alone."""
    with running(Completions()) as (proxy,):
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        options = OpenAIOptions(base_urls=("http://models.invalid/v1",), trust_env=True, start_wait_s=0.0)
        with closing(OpenAIBackend(options, {})) as client:
            outputs, failures = gathered(client.sample(WORK, SETTINGS))
    assert outputs
    assert not failures
