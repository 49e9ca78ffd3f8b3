from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from data_gen.backend import Answer, Failure, SamplingSettings, Work, WorkResult
from data_gen.draws import answer_seed
from data_gen.openai import EngineError, OpenAIBackend, OpenAIOptions
from data_gen.prompts import Message, Prompt
from scheduler_core.errors import InputError
from tests.data_gen.fake_server import GOOD, Fault, Script, error, first, length_of, running

PROMPTS = [Prompt(f"p{i}", f"prompt number {i}") for i in range(5)]
SETTINGS = SamplingSettings(num_samples=4, max_tokens=40, temperature=0.7, top_p=0.9, seed=3)
WORK = [Work(prompt, (0, 1, 2, 3)) for prompt in PROMPTS]
#: More than can be answered before a test that halts the server gets to it, however busy the machine.
LONG_WORK = [Work(Prompt(f"long{i}", f"long {i}"), (0, 1, 2, 3)) for i in range(1000)]


def backend(*urls: str, environment: dict[str, str] | None = None, **changed: Any) -> OpenAIBackend:
    """A backend that does not wait long for anything."""
    hasty: dict[str, Any] = {
        "backoff_s": 0.002,
        "max_backoff_s": 0.02,
        "start_wait_s": 0.0,
        "timeout_s": 20.0,
    }
    return OpenAIBackend(OpenAIOptions(base_urls=urls, **{**hasty, **changed}), environment or {})


def gathered(
    results: Iterable[WorkResult],
) -> tuple[dict[tuple[str, int], Answer], dict[tuple[str, int], Failure]]:
    """Answers and failures by (prompt id, sample index); each may come once only."""
    answers: dict[tuple[str, int], Answer] = {}
    failures: dict[tuple[str, int], Failure] = {}
    for result in results:
        assert result.answers or result.failures
        for item in (*result.answers, *result.failures):
            key = (result.prompt.prompt_id, item.sample_index)
            assert key not in answers
            assert key not in failures
            if isinstance(item, Answer):
                answers[key] = item
            else:
                failures[key] = item
    return answers, failures


def sampled(script: Script, work: Iterable[Work] = WORK, **changed: Any) -> tuple[Any, Any, dict[str, int]]:
    """Answers, failures and counters of one run against one server."""
    with running(script) as (server,), backend(server.url, **changed) as engine:
        answers, failures = gathered(engine.sample(work, SETTINGS))
        return answers, failures, engine.counters


EXPECTED = {
    (prompt.prompt_id, index): length_of(prompt.text, answer_seed(3, prompt.prompt_id, index))
    for prompt in PROMPTS
    for index in range(4)
}


def assert_complete(answers: dict[tuple[str, int], Answer]) -> None:
    """Every answer is there and has the length and end that its seed gives."""
    assert {key: answer.output_tokens for key, answer in answers.items()} == {
        key: min(length, 40) for key, length in EXPECTED.items()
    }
    for key, answer in answers.items():
        assert answer.finish_reason == ("length" if EXPECTED[key] > 40 else "stop")


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


@pytest.mark.parametrize("count_by", ["token_ids", "logprobs", "server_tokenizer"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("lists_end", [True, False])
def test_several_answers_per_request_are_counted_one_by_one(
    count_by: str, stream: bool, api: str, lists_end: bool
) -> None:
    with (
        running(Script(lists_end=lists_end)) as (server,),
        backend(server.url, samples_per_request=3, count_by=count_by, stream=stream, api=api) as engine,
    ):
        assert not engine.seeded
        answers, failures = gathered(engine.sample(WORK, SETTINGS))
        assert not failures
        assert len(server.bodies) == 2 * len(WORK)
        assert "seed" not in server.bodies[0]
        for (prompt_id, index), answer in answers.items():
            text = PROMPTS[int(prompt_id[1:])].text
            assert answer.output_tokens == min(40, length_of(text, None, index % 3))


def test_a_server_that_ignores_n_is_asked_again_for_the_rest() -> None:
    script = Script(honours_n=False)
    answers, failures, counters = sampled(script, samples_per_request=4, count_by="token_ids", concurrency=1)
    assert not failures
    assert set(answers) == set(EXPECTED)
    assert counters == {"fewer_choices": 1}, "learned from the first answer"


def test_usage_cannot_count_several_answers() -> None:
    with pytest.raises(InputError, match="count_by"):
        OpenAIOptions(samples_per_request=2)


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


FAULTS: list[tuple[str, Fault, dict[str, Any]]] = [
    ("http_500", error(500), {}),
    ("http_503", error(503), {}),
    ("http_429", error(429), {}),
    ("malformed", Fault(payload=b"<html>"), {}),
    ("malformed", Fault(payload=b"[1]"), {}),
    ("malformed", Fault(payload=b'{"choices": [{"index": 0}]}'), {}),
    ("malformed", Fault(change=lambda answer: answer["choices"].append(answer["choices"][0])), {}),
    ("malformed", Fault(change=lambda answer: answer["usage"].update(completion_tokens="9")), {}),
    ("server_error", Fault(payload=b'{"error": {"message": "out of memory"}}'), {}),
    ("empty", Fault(change=lambda answer: answer["choices"].clear()), {}),
    ("truncated", Fault(cut="middle"), {}),
    ("truncated", Fault(change=lambda answer: answer["choices"][0].update(finish_reason=None)), {}),
    ("aborted", Fault(change=lambda answer: answer["choices"][0].update(finish_reason="abort")), {}),
    ("disconnected", Fault(cut="early"), {}),
    ("timeout", Fault(hang=True), {"timeout_s": 0.1}),
    ("truncated", Fault(cut="middle"), {"stream": True}),
    ("truncated", Fault(cut="ended"), {"stream": True}),
    ("timeout", Fault(cut="quiet"), {"stream": True, "chunk_timeout_s": 0.1}),
    ("http_500", error(500), {"stream": True}),
]


@pytest.mark.parametrize(("kind", "fault", "changed"), FAULTS)
def test_passing_trouble_is_retried_and_counted(kind: str, fault: Fault, changed: dict[str, Any]) -> None:
    answers, failures, counters = sampled(Script(behave=first(3, fault)), **changed)
    assert not failures
    assert_complete(answers)
    assert counters[kind] == 3
    assert counters["retries"] == 3


@pytest.mark.parametrize(("kind", "fault", "changed"), FAULTS)
def test_lasting_trouble_becomes_a_failure_of_its_kind(
    kind: str, fault: Fault, changed: dict[str, Any]
) -> None:
    def behave(number: int, body: dict[str, Any]) -> Fault:
        return fault if body["messages"][-1]["content"].endswith("1") else GOOD

    answers, failures, counters = sampled(Script(behave=behave), max_attempts=2, **changed)
    assert set(failures) == {("p1", index) for index in range(4)}
    assert {failure.kind for failure in failures.values()} == {kind}
    assert all(failure.reason.startswith("2 tries") for failure in failures.values())
    assert len(answers) == 16
    assert counters["retries"] == 4


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (
            "content_filter",
            Fault(change=lambda answer: answer["choices"][0].update(finish_reason="content_filter")),
        ),
        ("content_filter", error(400, "blocked by content_filter")),
        (
            "finish_reason",
            Fault(change=lambda answer: answer["choices"][0].update(finish_reason="tool_calls")),
        ),
        ("too_long", error(400, "This model's maximum context length is 512 tokens")),
        ("too_long", error(400, "max_tokens=600 cannot be greater than max_model_len=512")),
        ("too_long", error(413)),
        ("refused", error(400, "unknown field")),
        ("too_many_tokens", Fault(change=lambda answer: answer["usage"].update(completion_tokens=41))),
        ("no_token_count", Fault(change=lambda answer: answer.pop("usage"))),
        ("no_token_count", Fault(change=lambda answer: answer["usage"].update(completion_tokens=0))),
    ],
)
def test_what_no_retry_can_help_fails_at_once(kind: str, fault: Fault) -> None:
    def behave(number: int, body: dict[str, Any]) -> Fault:
        return fault if body["messages"][-1]["content"].endswith("1") else GOOD

    answers, failures, counters = sampled(Script(behave=behave))
    assert {key: failure.kind for key, failure in failures.items()} == {("p1", i): kind for i in range(4)}
    assert len(answers) == 16
    assert "retries" not in counters


def test_one_bad_choice_does_not_cost_the_others() -> None:
    fault = Fault(change=lambda answer: answer["choices"][1].update(finish_reason="content_filter"))
    answers, failures, _ = sampled(
        Script(behave=first(1, fault)), WORK[:1], samples_per_request=4, count_by="token_ids"
    )
    assert set(answers) == {("p0", 0), ("p0", 2), ("p0", 3)}
    assert failures[("p0", 1)].kind == "content_filter"


def test_a_run_in_which_everything_is_refused_stops_early() -> None:
    many = [Work(Prompt(f"q{i}", "q"), (0, 1)) for i in range(100)]
    with running(Script(behave=lambda number, body: error(400, "bad field"))) as (server,):
        with backend(server.url, concurrency=2) as engine, pytest.raises(EngineError, match="bad field"):
            list(engine.sample(many, SETTINGS))
        assert len(server.bodies) < 30


@pytest.mark.parametrize(
    "fault",
    [
        error(401, "no"),
        error(404, "model gone"),
        error(429, "insufficient_quota"),
        error(429, Retry_After="9999"),
    ],
)
def test_trouble_with_the_account_or_model_stops_the_run(fault: Fault) -> None:
    with (
        running(Script(behave=lambda number, body: fault)) as (server,),
        backend(server.url) as engine,
        pytest.raises(EngineError),
    ):
        list(engine.sample(WORK, SETTINGS))


def test_retry_after_holds_back_all_requests() -> None:
    with (
        running(Script(behave=first(1, error(429, Retry_After="0.2")))) as (server,),
        backend(server.url, concurrency=1) as engine,
    ):
        answers, _ = gathered(engine.sample(WORK, SETTINGS))
        assert_complete(answers)
        assert server.arrivals[1] - server.arrivals[0] >= 0.2


def test_a_server_that_takes_few_is_not_hammered() -> None:
    """600 requests, 64 at a time, to a server that takes 4: almost all are sent when there is room for them."""
    script = Script(delay_s=0.002)
    many = [Work(Prompt(f"q{i}", f"q {i}"), (0, 1, 2, 3)) for i in range(150)]
    with running(script) as (server,), backend(server.url, concurrency=64) as engine:
        server.script.behave = lambda number, body: error(429) if server.in_flight > 4 else GOOD
        answers, failures = gathered(engine.sample(many, SETTINGS))
        assert len(answers) == 600
        assert not failures
        assert engine.counters["http_429"] < 400


def test_a_restarted_server_is_waited_for_and_nothing_is_lost() -> None:
    many = LONG_WORK[:150]
    with running(Script(delay_s=0.005)) as (server,), backend(server.url, concurrency=8) as engine:
        results = engine.sample(many, SETTINGS)
        seen = [next(results) for _ in range(20)]
        server.halt()
        timer = threading.Timer(0.2, server.resume)
        timer.start()
        answers, failures = gathered([*seen, *results])
        timer.join()
        assert len(answers) == 600
        assert not failures
        assert engine.counters["put_aside"] >= 1


def test_a_server_that_stays_away_ends_the_run() -> None:
    with running(Script(delay_s=0.005)) as (server,), backend(server.url, server_wait_s=0.05) as engine:
        results = engine.sample(LONG_WORK, SETTINGS)
        next(results)
        server.halt()
        with pytest.raises(EngineError, match="no server"):
            list(results)


def test_a_server_that_comes_back_as_another_one_is_not_used() -> None:
    with (
        running(Script(delay_s=0.005)) as (server,),
        backend(server.url, server_wait_s=0.3, concurrency=8) as engine,
    ):
        results = engine.sample(LONG_WORK, SETTINGS)
        next(results)
        server.halt()
        server.script.version = "10.0"
        before = len(server.bodies)
        server.resume()
        with pytest.raises(EngineError, match="vllm 10.0 now and was vllm 9.9"):
            list(results)
        # What was under way may be sent once more before the server is asked who it is; 4000 answers were wanted.
        assert len(server.bodies) - before <= 100


def test_servers_share_the_requests_and_stand_in_for_each_other() -> None:
    with (
        running(Script(delay_s=0.002), Script(delay_s=0.002)) as (one, two),
        backend(one.url, two.url, concurrency=3) as engine,
    ):
        assert_complete(gathered(engine.sample(WORK, SETTINGS))[0])
        assert 6 <= len(one.bodies) <= 14
        one.halt()
        answers, failures = gathered(engine.sample(WORK, SETTINGS))
        assert_complete(answers)
        assert not failures
        assert engine.counters["put_aside"] == 1


def test_a_server_missing_at_the_start_joins_later() -> None:
    many = [Work(Prompt(f"q{i}", f"q {i}"), (0, 1, 2, 3)) for i in range(100)]
    with running(Script(delay_s=0.005), Script()) as (one, two):
        two.halt()
        with backend(one.url, two.url, concurrency=4) as engine:
            results = engine.sample(many, SETTINGS)
            seen = [next(results)]
            two.resume()
            answers, failures = gathered([*seen, *results])
            assert len(answers) == 400
            assert not failures
            assert two.bodies


def test_a_broken_server_is_put_aside_when_its_retry_budget_is_spent() -> None:
    many = [Work(Prompt(f"q{i}", f"q {i}"), (0, 1, 2, 3)) for i in range(100)]
    broken = Script(behave=lambda number, body: error(500))
    with (
        running(Script(delay_s=0.001), broken) as (good, bad),
        backend(good.url, bad.url, concurrency=16, max_attempts=50) as engine,
    ):
        answers, failures = gathered(engine.sample(many, SETTINGS))
        assert len(answers) == 400
        assert not failures
        assert len(bad.bodies) < len(good.bodies)


@pytest.mark.parametrize(
    ("owner", "expected", "seeded"),
    [
        ("vllm", ("vllm", "9.9"), True),
        ("llamacpp", ("llama.cpp", "9.9"), True),
        ("library", ("ollama", "9.9"), True),
        ("someone", ("openai-compatible", "unknown"), False),
    ],
)
def test_engines_are_recognised(owner: str, expected: tuple[str, str], seeded: bool) -> None:
    with running(Script(owner=owner)) as (server,), backend(server.url) as engine:
        assert (engine.name, engine.version) == expected
        assert engine.seeded == seeded


def test_a_llama_cpp_server_counts_the_tokens_of_a_text() -> None:
    changed = {"samples_per_request": 2, "count_by": "server_tokenizer"}
    answers, failures, _ = sampled(Script(owner="llamacpp"), WORK[:1], **changed)
    assert len(answers) == 4
    assert not failures


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
            told = repr([failures, engine.recorded, engine.counters, repr(engine), caplog.text])
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


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    """A tokenizer.json that splits words, as the fake server does."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_another_tokenizer_than_the_servers_is_counted(tokenizer_file: Path) -> None:
    options = {"tokenizer": str(tokenizer_file), "api": "completions", "concurrency": 1}
    answers, failures, counters = sampled(Script(), **options)
    assert counters == {}
    answers, failures, counters = sampled(Script(prompt_tokens=lambda text: 99), **options)
    assert_complete(answers)
    assert counters == {"tokenizer_mismatch": len(PROMPTS)}
    assert not failures


def test_the_chat_template_of_a_tokenizer_folder_is_used(tiny_model: Path) -> None:
    """user w1 w2 assistant: two tokens more than the words."""
    work = [Work(Prompt("a", "w1 w2"), (0,))]
    right = Script(prompt_tokens=lambda text: len(text.split()) + 2)
    assert sampled(right, work, tokenizer=str(tiny_model))[2] == {}
    assert sampled(Script(), work, tokenizer=str(tiny_model))[2] == {"tokenizer_mismatch": 1}


def test_texts_are_counted_by_a_local_tokenizer_only_if_usage_agrees(tokenizer_file: Path) -> None:
    changed = {"samples_per_request": 4, "count_by": "tokenizer", "tokenizer": str(tokenizer_file)}
    answers, failures, _ = sampled(Script(), **changed)
    assert not failures
    assert all(
        a.output_tokens == min(40, length_of(PROMPTS[int(p[1:])].text, None, i))
        for (p, i), a in answers.items()
    )

    def more(answer: dict[str, Any]) -> None:
        answer["usage"]["completion_tokens"] += 1

    answers, failures, counters = sampled(
        Script(behave=first(1, Fault(change=more))), concurrency=1, **changed
    )
    assert {failure.kind for failure in failures.values()} == {"tokenizer_mismatch"}
    assert (len(answers), len(failures)) == (16, 4)
    assert counters["tokenizer_mismatch"] >= 1


def test_lengths_are_only_estimated_when_that_is_allowed_and_then_it_is_counted(tokenizer_file: Path) -> None:
    silent = Script(usage=False, lists_tokens=False)
    _, failures, _ = sampled(silent, WORK[:4], tokenizer=str(tokenizer_file))
    assert {failure.kind for failure in failures.values()} == {"no_token_count"}
    answers, failures, counters = sampled(silent, tokenizer=str(tokenizer_file), approximate_counts=True)
    assert_complete(answers)
    assert counters == {"approximate_counts": 20}
    assert OpenAIOptions(tokenizer="x", approximate_counts=True).recorded()["approximate_counts"] is True


def test_an_answer_cut_before_the_cap_is_counted() -> None:
    def shorter(answer: dict[str, Any]) -> None:
        answer["choices"][0]["finish_reason"] = "length"
        answer["usage"]["completion_tokens"] = 7

    answers, _, counters = sampled(Script(behave=first(1, Fault(change=shorter))), WORK[:1])
    assert [a.finish_reason for a in answers.values() if a.output_tokens == 7] == ["length"]
    assert counters == {"cut_early": 1}


def test_a_storm_of_all_troubles_loses_and_repeats_nothing() -> None:
    """Nine of every twenty requests go wrong, each kind of trouble in its turn; whom it hits is left to chance."""
    faults = [fault for _, fault, changed in FAULTS if not changed]

    def behave(number: int, body: dict[str, Any]) -> Fault:
        turn, place = divmod(number, 20)
        return faults[(turn * 9 + place) % len(faults)] if place < 9 else GOOD

    many = [Work(Prompt(f"q{i}", f"q {i}"), tuple(range(4))) for i in range(100)]
    answers, failures, counters = sampled(Script(behave=behave), many, concurrency=16, max_attempts=100)
    assert not failures
    lengths = Counter(answer.output_tokens for answer in answers.values())
    expected = Counter(
        min(40, length_of(work.prompt.text, answer_seed(3, work.prompt.prompt_id, i)))
        for work in many
        for i in range(4)
    )
    assert lengths == expected
    assert counters["retries"] >= 100


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
