"""Servers that fail, for a while or for good: what is tried again, what is given up, what ends the run."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from data_gen.backend import Work
from data_gen.openai.options import EngineError
from data_gen.prompts import Prompt
from tests.data_gen.openai_helpers import (
    LONG_WORK,
    SETTINGS,
    WORK,
    assert_complete,
    backend,
    gathered,
    sampled,
    works,
)
from tests.fake_openai import GOOD, Completions, Fault, error, first, running

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
    ("truncated", Fault(cut="middle"), {"stream": True}),
    ("truncated", Fault(cut="ended"), {"stream": True}),
    ("timeout", Fault(cut="quiet"), {"stream": True, "chunk_timeout_s": 0.6}),
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
    ("finish_reason", Fault(change=lambda content: content["choices"][0].update(finish_reason="tool_calls")), {}),
    ("too_long", error(400, "This model's maximum context length is 512 tokens"), {}),
    ("too_long", error(413), {}),
    ("refused", error(400, "unknown field"), {}),
    ("too_many_tokens", Fault(change=lambda content: content["usage"].update(completion_tokens=41)), {}),
    ("no_token_count", Fault(change=lambda content: content.pop("usage")), {}),
    ("no_token_count", Fault(change=lambda content: content["usage"].update(completion_tokens=0)), {}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fault", "changed"), [*FAULTS, *PERMANENT])
def test_lasting_trouble_becomes_a_failure_of_its_kind_at_once_where_no_retry_can_help(
    kind: str, fault: Fault, changed: dict[str, Any]
) -> None:
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


def test_one_bad_choice_does_not_cost_the_others() -> None:
    fault = Fault(change=lambda content: content["choices"][1].update(finish_reason="content_filter"))
    options = {"samples_per_request": 4, "count_by": "token_ids"}
    outputs, failures, _ = sampled(Completions(behave=first(1, fault)), WORK[:1], **options)
    assert set(outputs) == {("p0", 0), ("p0", 2), ("p0", 3)}
    assert failures[("p0", 1)].kind == "content_filter"


def test_a_run_in_which_everything_is_refused_stops_early() -> None:
    many = [Work(Prompt(f"q{i}", "q"), (0, 1)) for i in range(100)]
    with running(Completions(behave=lambda number, body: error(400, "bad field"))) as (server,):
        with backend(server, concurrency=2) as engine, pytest.raises(EngineError, match="bad field"):
            list(engine.sample(many, SETTINGS))
        assert len(server.bodies) < 30


@pytest.mark.parametrize(
    "fault",
    [error(401), error(404, "gone"), error(429, "insufficient_quota"), error(429, Retry_After="9999")],
)
def test_trouble_with_the_account_or_model_stops_the_run(fault: Fault) -> None:
    with pytest.raises(EngineError):
        sampled(Completions(behave=lambda number, body: fault))


def test_retry_after_holds_back_all_requests() -> None:
    with (
        running(Completions(behave=first(1, error(429, Retry_After="0.2")))) as (server,),
        backend(server, concurrency=1) as engine,
    ):
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
    many = LONG_WORK[:150]
    with running(Completions(delay_s=0.005)) as (server,), backend(server, concurrency=8) as engine:
        results = engine.sample(many, SETTINGS)
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
    ("version", "message"), [(None, "no server"), ("10.0", "vllm 10.0 now and was vllm 9.9")]
)
def test_a_server_that_stays_away_or_is_replaced_ends_the_run(version: str | None, message: str) -> None:
    script = Completions(delay_s=0.02)
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
    with (
        running(Completions(delay_s=0.002), Completions(delay_s=0.002)) as (one, two),
        backend(one, two, concurrency=3) as engine,
    ):
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
    many = works(100)
    broken = Completions(behave=lambda number, body: error(500))
    with (
        running(Completions(delay_s=0.001), broken) as (good, bad),
        backend(good, bad, concurrency=16, max_attempts=50) as engine,
    ):
        outputs, failures = gathered(engine.sample(many, SETTINGS))
        assert (len(outputs), failures) == (400, {})
        assert len(bad.bodies) < len(good.bodies)
