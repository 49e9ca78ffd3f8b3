"""Servers that fail, for a while or for good: what is tried again, what is given up, what ends the run."""

from __future__ import annotations

import gc
import threading
import warnings
from collections import Counter
from typing import Any

import pytest

from data_gen.backend import Work, sample_seed
from data_gen.openai.options import EngineError
from data_gen.prompts import Prompt
from tests.data_gen.fake_script import GOOD, Fault, Script, error, first, length_of
from tests.data_gen.fake_server import running
from tests.data_gen.openai_helpers import (
    LONG_WORK,
    SETTINGS,
    WORK,
    assert_complete,
    backend,
    gathered,
    sampled,
)

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
    ("timeout", Fault(hang=True), {"timeout_s": 0.6}),
    ("truncated", Fault(cut="middle"), {"stream": True}),
    ("truncated", Fault(cut="ended"), {"stream": True}),
    ("timeout", Fault(cut="quiet"), {"stream": True, "chunk_timeout_s": 0.6}),
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
    assert all(failure.reason.startswith("2 attempts") for failure in failures.values())
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


def test_a_huge_body_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_gen.openai.http_client.MAX_BODY_BYTES", 2000)
    huge = Fault(payload=b'{"choices": "' + b"x" * 5000 + b'"}')
    outputs, failures, counters = sampled(Script(behave=first(3, huge)))
    assert not failures
    assert_complete(outputs)
    assert counters == {"malformed": 3, "retries": 3}


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
        assert engine.counters["server_down"] >= 1


def test_a_server_that_stays_away_ends_the_run() -> None:
    with running(Script(delay_s=0.005)) as (server,), backend(server.url, server_wait_s=0.05) as engine:
        results = engine.sample(LONG_WORK, SETTINGS)
        next(results)
        server.halt()
        with pytest.raises(EngineError, match="no server"):
            list(results)


@pytest.mark.parametrize("is_abrupt", [True, False])
def test_a_server_that_is_replaced_by_another_one_is_not_used(is_abrupt: bool) -> None:
    """Whether its connections break or not."""
    with warnings.catch_warnings():
        # A connection that is just being made when the fake server goes away is nobody's to close.
        warnings.simplefilter("ignore", ResourceWarning)
        _replace_and_expect_the_end(is_abrupt)
        gc.collect()


def _replace_and_expect_the_end(is_abrupt: bool) -> None:
    with (
        running(Script(delay_s=0.02)) as (server,),
        backend(server.url, server_wait_s=0.3, identity_check_s=0.05, concurrency=8) as engine,
    ):
        results = engine.sample(LONG_WORK, SETTINGS)
        next(results)
        if is_abrupt:
            server.halt()
        server.script.version = "10.0"
        before = len(server.bodies)
        if is_abrupt:
            server.resume()
        with pytest.raises(EngineError, match="vllm 10.0 now and was vllm 9.9"):
            list(results)
        # It is asked every 0.05 s and answers at most 400 requests a second; 4000 answers were wanted.
        assert len(server.bodies) - before <= 1000


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
        assert engine.counters["server_down"] == 1


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
        min(40, length_of(work.prompt.text, sample_seed(3, work.prompt.prompt_id, i)))
        for work in many
        for i in range(4)
    )
    assert lengths == expected
    assert counters["retries"] >= 100
