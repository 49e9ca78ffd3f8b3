"""The parts of the OpenAI backend that need neither clock nor socket."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import resource
from collections import Counter
from email.utils import formatdate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_gen.backend import SamplingSettings
from data_gen.openai.client import allow_descriptors
from data_gen.openai.garbage import MANY, rare_full_collections
from data_gen.openai.options import OpenAIOptions
from data_gen.openai.pace import MAX_CREDIT, Pool, Server, backoff_s, retry_after_s
from data_gen.openai.tokens import TokenCounter
from data_gen.openai.wire import BodyMaker, Choice, Reply, ReplyError, StreamReader, read_refusal, read_reply
from data_gen.prompts import Message, Prompt
from scheduler_core.errors import InputError

SETTINGS = SamplingSettings(num_samples=4, max_tokens=40, temperature=0.7, top_p=0.9, seed=3)


@given(attempt=st.integers(1, 2000), base=st.floats(0.001, 10), cap=st.floats(0.001, 100), seed=st.integers())
def test_backoff_is_within_its_bounds(attempt: int, base: float, cap: float, seed: int) -> None:
    wait = backoff_s(attempt, base, cap, random.Random(seed))
    assert 0 <= wait <= min(cap, base * 2.0 ** min(attempt - 1, 60))


def test_backoff_has_full_jitter() -> None:
    rng = random.Random(0)
    waits = [backoff_s(4, 1.0, 60.0, rng) for _ in range(4000)]
    assert min(waits) < 0.1
    assert max(waits) > 7.9
    # Uniform on [0, 8): the mean is 4, its standard error 8 / sqrt(12 * 4000) = 0.037.
    assert abs(sum(waits) / len(waits) - 4) < 0.15


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": "0.25"}, 0.25),
        ({"Retry-After": "-3"}, 0.0),
        ({"Retry-After": formatdate(1030, usegmt=True)}, 30.0),
        ({"Retry-After": formatdate(900, usegmt=True)}, 0.0),
        ({"Retry-After": "Thu, 01 Jan 1970 00:17:10 -0000"}, 30.0),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "nan"}, None),
        ({"Retry-After": "inf"}, None),
        ({"retry-after-ms": "1500", "Retry-After": "9"}, 1.5),
    ],
)
def test_retry_after_is_read_in_all_its_forms(headers: dict[str, str], expected: float | None) -> None:
    assert retry_after_s(headers, 1000.0) == expected


def test_a_storm_cuts_the_limit_once_and_answers_raise_it_again() -> None:
    server = Server("u", 100)
    server.in_flight = 100
    assert server.overloaded(sent_at=0.0, now=1.0)
    assert server.limit == 50
    assert not any(server.overloaded(sent_at=0.5, now=1.0 + i) for i in range(99)), "sent before the cut"
    assert server.limit == 50
    server.in_flight = 50
    assert server.overloaded(sent_at=2.0, now=3.0)
    assert (server.limit, server.strikes) == (25, 2)
    rounds = 0
    while server.limit < 100:
        for _ in range(int(server.limit)):
            server.succeeded()
        rounds += 1
    assert 30 <= rounds <= 45, "2 more in each round of answers"
    assert (server.limit, server.strikes) == (100, 0)


@given(st.lists(st.sampled_from(["good", "overload", "fail", "aside", "back"]), max_size=300))
def test_limit_and_credit_stay_within_their_bounds(events: list[str]) -> None:
    server = Server("u", 20)
    for now, event in enumerate(events):
        server.in_flight = min(20, int(server.limit))
        if event == "good":
            server.succeeded()
        elif event == "overload":
            server.overloaded(float(now), float(now))
        elif event == "fail":
            server.failed()
        elif event == "aside":
            server.put_aside(float(now))
        else:
            server.bring_back()
        assert 1 <= server.limit <= 20
        assert 0 <= server.credit <= MAX_CREDIT
        server.in_flight = 0
        assert server.has_room(float(now)) == (server.aside_since is None)


def test_the_retry_budget_runs_out_only_without_answers() -> None:
    server = Server("u", 10)
    assert not any(server.failed() for _ in range(int(MAX_CREDIT) - 1))
    assert server.failed()
    for _ in range(8):
        server.succeeded()
    assert not server.failed()


def test_the_least_busy_server_with_room_is_picked() -> None:
    one, two, three = Server("1", 4), Server("2", 4), Server("3", 4)
    pool = Pool([one, two, three])
    one.in_flight, two.in_flight, three.in_flight = 3, 1, 2
    assert pool.pick(0.0) is two
    two.pause(5.0)
    assert pool.pick(0.0) is three
    assert pool.next_wake(0.0) == 5.0
    three.put_aside(1.0)
    assert pool.pick(0.0) is one
    one.in_flight = 4
    assert pool.pick(0.0) is None
    assert pool.pick(5.0) is two
    assert pool.all_aside_since() is None
    one.put_aside(2.0)
    two.put_aside(3.0)
    assert pool.all_aside_since() == 3.0
    one.bring_back()
    assert pool.all_aside_since() is None


def test_equal_servers_take_turns() -> None:
    pool = Pool([Server(str(i), 4) for i in range(3)])
    picked = [pool.pick(0.0) for _ in range(6)]
    assert Counter(server.url for server in picked if server) == {"0": 2, "1": 2, "2": 2}


def chunks_of(found: list[dict[str, Any]]) -> bytes:
    return b"".join(b"data: " + json.dumps(one, ensure_ascii=False).encode() + b"\r\n\r\n" for one in found)


@given(st.lists(st.integers(1, 60), max_size=40), st.text(max_size=20))
def test_a_stream_means_the_same_in_pieces_of_any_size(sizes: list[int], text: str) -> None:
    data = b": a comment\n\n" + chunks_of(
        [
            {"choices": [{"index": 1, "delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"index": 1, "delta": {"content": "a" + text}, "token_ids": [4, 5]}]},
            {"choices": [{"index": 0, "delta": {"content": text + "é"}}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]},
            {"choices": [{"index": 1, "delta": {"content": "z"}, "finish_reason": "stop", "token_ids": [6]}]},
            {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}},
        ]
    )
    data += b"data: [DONE]\n\n"
    reader, position = StreamReader(), 0
    for size in [*sizes, len(data)]:
        reader.feed(data[position : position + size], 1.0)
        position += size
    reply = reader.finish()
    assert [choice.text for choice in reply.choices] == [text + "é", "a" + text + "z"]
    assert [choice.finish_reason for choice in reply.choices] == ["length", "stop"]
    assert [choice.counted for choice in reply.choices] == [None, 3]
    assert (reply.prompt_tokens, reply.completion_tokens) == (3, 9)


def test_the_first_token_is_not_the_role() -> None:
    reader = StreamReader()
    reader.feed(chunks_of([{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}]), 1.0)
    reader.feed(chunks_of([{"choices": [{"index": 0, "delta": {"reasoning": "hm"}}]}]), 2.0)
    reader.feed(
        chunks_of([{"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]}]), 3.0
    )
    (choice,) = reader.finish().choices
    assert (choice.first_at, choice.last_at, choice.text) == (2.0, 3.0, "x")


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"data: {", "malformed"),
        (b"data: [1]", "malformed"),
        (b"data: " + b"[" * 100_000, "malformed"),
        (b'data: {"choices": [{"index": 1e999}]}', "malformed"),
        (b'data: {"usage": {"prompt_tokens": 2147483648}}', "malformed"),
        (b'data: {"error": {"message": "engine died"}}', "server_error"),
        (b'data: {"choices": [{"index": 0, "delta": {"content": "x"}}]}', "truncated"),
        (b"", "empty"),
        (b": only a comment", "empty"),
    ],
)
def test_a_broken_stream_is_named(data: bytes, kind: str) -> None:
    reader = StreamReader()
    with pytest.raises(ReplyError) as raised:
        reader.feed(data + b"\n\n", 0.0)
        reader.finish()
    assert raised.value.kind == kind
    assert raised.value.retry


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["choices", "usage", "message", "index", "finish_reason", "text", "error"]),
                inner,
            )
        ),
        max_leaves=12,
    ).map(lambda found: json.dumps(found).encode())
)
def test_whatever_a_server_sends_is_an_answer_or_a_named_trouble(payload: bytes) -> None:
    try:
        kinds = [choice.problem.kind if choice.problem else "good" for choice in read_reply(payload).choices]
    except ReplyError as error:
        kinds = [error.kind]
    assert kinds
    assert set(kinds) <= {"malformed", "empty", "server_error", "truncated", "finish_reason", "good"}
    assert read_refusal(500, payload).kind == "http_500"


@pytest.mark.parametrize(
    ("reason", "kind"),
    [("eos_token", "stop"), ("stop_sequence", "stop"), ("length", "length"), ("stop", "stop")],
)
def test_names_of_ends_differ_between_engines(reason: str, kind: str) -> None:
    payload = json.dumps({"choices": [{"text": "a", "finish_reason": reason}]}).encode()
    (choice,) = read_reply(payload).choices
    assert choice.finish_reason == kind
    assert choice.problem is None


@pytest.mark.parametrize(
    "entry",
    [
        {"text": ["a"], "finish_reason": "stop"},
        {"text": "a", "finish_reason": ["stop"]},
        {"text": "a"},
        {"message": {"content": {"a": 1}}, "finish_reason": "stop"},
        {"text": "a", "finish_reason": "stop", "index": "x"},
        {"text": "a", "finish_reason": "stop", "index": float("inf")},
        7,
    ],
)
def test_values_of_other_types_are_malformed(entry: object) -> None:
    with pytest.raises(ReplyError, match="malformed"):
        read_reply(json.dumps({"choices": [entry]}).encode())


def test_surrogates_are_joined_over_events_and_lone_ones_replaced() -> None:
    reader = StreamReader()
    for text in ("a\ud83d", "\ude00b\ud800"):
        event = json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]})
        reader.feed(f"data: {event}\n\n".encode(), 1.0)
    reader.feed(chunks_of([{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]), 2.0)
    (choice,) = reader.finish().choices
    assert choice.text == "a\U0001f600b\ufffd"


def test_choices_are_put_in_order() -> None:
    entries = [{"index": i, "text": str(i), "finish_reason": "stop"} for i in (2, 0, 1)]
    assert [c.text for c in read_reply(json.dumps({"choices": entries}).encode()).choices] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("status", "message", "kind", "retry"),
    [
        (408, "", "http_408", True),
        (429, "slow down", "http_429", True),
        (429, "insufficient_quota", "no_quota", False),
        (529, "", "http_529", True),
        (401, "", "unauthorized", False),
        (404, "", "http_404", False),
        (422, "`inputs` tokens + `max_new_tokens` must be <= 2048", "too_long", False),
        (400, "the request exceeds the available context size", "too_long", False),
        (400, "bad", "refused", False),
    ],
)
def test_statuses_are_sorted(status: int, message: str, kind: str, retry: bool) -> None:
    found = read_refusal(status, json.dumps({"error": {"message": message}}).encode())
    assert (found.kind, found.retry) == (kind, retry)


def made(prompt: Prompt, indices: tuple[int, ...], **changed: Any) -> dict[str, Any]:
    maker = BodyMaker(OpenAIOptions(**changed), SETTINGS, "m")
    return dict(json.loads(maker.body(maker.start(prompt), prompt, indices)))


@given(st.text(), st.lists(st.text(), max_size=3))
def test_bodies_hold_any_text(text: str, contents: list[str]) -> None:
    messages = tuple(Message("user", content) for content in contents)
    body = made(Prompt("p", text, messages=messages), (0,))
    assert [one["content"] for one in body["messages"]] == (contents or [text])
    assert made(Prompt("p", text), (0,), api="completions")["prompt"] == text


def test_bodies_say_what_is_asked() -> None:
    prompt = Prompt("p", "x")
    body = made(prompt, (1,), body={"priority": 1}, max_tokens_field="max_completion_tokens", stream=True)
    assert body["max_completion_tokens"] == 40
    assert "max_tokens" not in body
    assert body["priority"] == 1
    assert body["stream_options"] == {"include_usage": True}
    assert made(prompt, (1,))["seed"] == body["seed"] != made(prompt, (2,))["seed"]
    assert "seed" not in made(prompt, (1,), send_seed=False)
    several = made(prompt, (1, 2), samples_per_request=2, count_by="logprobs", api="completions")
    assert (several["n"], several["logprobs"]) == (2, 1)
    assert "seed" not in several


def counted(listed: list[int | None], ends: list[str], total: int | None) -> list[int] | str:
    async def on_server(text: str) -> int:
        return len(text.split())

    options = OpenAIOptions(samples_per_request=2, count_by="token_ids")
    counter = TokenCounter(options, 40, on_server, Counter())
    choices = [Choice("a b", end, count) for end, count in zip(ends, listed, strict=True)]
    try:
        return asyncio.run(counter.count(Reply(choices, 3, total)))
    except ReplyError as error:
        return error.kind


@pytest.mark.parametrize(
    ("listed", "ends", "total", "expected"),
    [
        ([5, 7], ["stop", "stop"], 12, [5, 7]),
        ([5, 7], ["stop", "length"], 13, [6, 7]),
        ([5, 7], ["stop", "stop"], None, [5, 7]),
        ([5, 7], ["stop", "stop"], 13, "no_token_count"),
        ([5, None], ["stop", "stop"], 13, "no_token_count"),
        ([None, None], ["stop", "stop"], 13, "no_token_count"),
        ([4], ["stop"], 5, [5]),
        ([None], ["stop"], None, "no_token_count"),
        ([None], ["stop"], 0, "no_token_count"),
    ],
)
def test_lengths_are_exact_or_unknown(
    listed: list[int | None], ends: list[str], total: int | None, expected: list[int] | str
) -> None:
    assert counted(listed, ends, total) == expected


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


def test_the_garbage_collector_gets_its_settings_back() -> None:
    before = gc.get_threshold()
    with rare_full_collections(MANY - 1):
        assert gc.get_threshold() == before
    with pytest.raises(ZeroDivisionError), rare_full_collections(MANY):
        assert gc.get_threshold() != before
        raise ZeroDivisionError
    assert gc.get_threshold() == before
