"""The parts of the OpenAI backend that need neither clock nor socket."""

from __future__ import annotations

import asyncio
import json
import resource
from collections import Counter
from email.utils import formatdate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_gen.backend import SamplingSettings
from data_gen.openai.backend import _Server
from data_gen.openai.http_client import allow_descriptors, retry_after_s
from data_gen.openai.options import OpenAIOptions
from data_gen.openai.responses import (
    MAX_LINE_BYTES,
    EventStreamParser,
    RequestBodies,
    ResponseChoice,
    ResponseError,
    ServerResponse,
    read_error_response,
    read_response,
)
from data_gen.openai.token_counts import TokenCounter
from data_gen.prompts import Message, Prompt
from scheduler_core.errors import InputError

SETTINGS = SamplingSettings(num_samples=4, max_tokens=40, temperature=0.7, top_p=0.9, seed=3)


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


def test_an_overload_halves_the_limit_once_and_successes_raise_it_again() -> None:
    server = _Server("u", 100, 100)
    server.on_overload(sent_at=0.0, now=1.0)
    for number in range(99):
        server.on_overload(sent_at=0.5, now=1.0 + number)
    assert server.limit == 50, "the others were sent before it was halved"
    server.on_overload(sent_at=2.0, now=3.0)
    assert server.limit == 25
    rounds = 0
    while server.limit < 100:
        for _ in range(server.limit):
            server.on_success()
        rounds += 1
    assert 30 <= rounds <= 45, "2 more in each round of successes"


@given(st.lists(st.sampled_from(["success", "overload"]), max_size=300))
def test_the_limit_stays_within_its_bounds(events: list[str]) -> None:
    server = _Server("u", 20, 20)
    for now, event in enumerate(events):
        if event == "success":
            server.on_success()
        else:
            server.on_overload(float(now), float(now))
        assert 1 <= server.limit <= 20


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
    reader, position = EventStreamParser(), 0
    for size in [*sizes, len(data)]:
        reader.feed(data[position : position + size], 1.0)
        position += size
    reply = reader.finish()
    assert [choice.text for choice in reply.choices] == [text + "é", "a" + text + "z"]
    assert [choice.finish_reason for choice in reply.choices] == ["length", "stop"]
    assert [choice.listed_tokens for choice in reply.choices] == [None, 3]
    assert (reply.prompt_tokens, reply.completion_tokens) == (3, 9)


def test_the_first_token_is_not_the_role() -> None:
    reader = EventStreamParser()
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
        pytest.param(b"data: " + b"[" * 100_000, "malformed", id="deep"),
        (b'data: {"choices": [{"index": 1e999}]}', "malformed"),
        (b'data: {"usage": {"prompt_tokens": 2147483648}}', "malformed"),
        (b'data: {"error": {"message": "engine died"}}', "server_error"),
        (b'data: {"choices": [{"index": 0, "delta": {"content": "x"}}]}', "truncated"),
        pytest.param(b"x" * (MAX_LINE_BYTES + 1), "malformed", id="endless line"),
        (b"", "empty"),
        (b": only a comment", "empty"),
    ],
)
def test_a_broken_stream_is_named(data: bytes, kind: str) -> None:
    reader = EventStreamParser()
    with pytest.raises(ResponseError) as raised:
        reader.feed(data, 0.0)
        reader.feed(b"\n\n", 0.0)
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
        kinds = [
            choice.problem.kind if choice.problem else "good" for choice in read_response(payload).choices
        ]
    except ResponseError as error:
        kinds = [error.kind]
    assert kinds
    assert set(kinds) <= {"malformed", "empty", "server_error", "truncated", "finish_reason", "good"}
    assert read_error_response(500, payload).kind == "http_500"


@pytest.mark.parametrize(
    ("reason", "kind"),
    [("eos_token", "stop"), ("stop_sequence", "stop"), ("length", "length"), ("stop", "stop")],
)
def test_names_of_ends_differ_between_engines(reason: str, kind: str) -> None:
    payload = json.dumps({"choices": [{"text": "a", "finish_reason": reason}]}).encode()
    (choice,) = read_response(payload).choices
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
    with pytest.raises(ResponseError, match="malformed"):
        read_response(json.dumps({"choices": [entry]}).encode())


def test_surrogates_are_joined_over_events_and_lone_ones_replaced() -> None:
    reader = EventStreamParser()
    for text in ("a\ud83d", "\ude00b\ud800"):
        event = json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]})
        reader.feed(f"data: {event}\n\n".encode(), 1.0)
    reader.feed(chunks_of([{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]), 2.0)
    (choice,) = reader.finish().choices
    assert choice.text == "a\U0001f600b\ufffd"


def test_choices_are_put_in_order() -> None:
    entries = [{"index": i, "text": str(i), "finish_reason": "stop"} for i in (2, 0, 1)]
    assert [c.text for c in read_response(json.dumps({"choices": entries}).encode()).choices] == [
        "0",
        "1",
        "2",
    ]


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
    found = read_error_response(status, json.dumps({"error": {"message": message}}).encode())
    assert (found.kind, found.retry) == (kind, retry)


def made(prompt: Prompt, indices: tuple[int, ...], **changed: Any) -> dict[str, Any]:
    maker = RequestBodies(OpenAIOptions(**changed), SETTINGS, "m")
    return dict(json.loads(maker.body(maker.prefix(prompt), prompt, indices)))


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
    choices = [ResponseChoice("a b", end, count) for end, count in zip(ends, listed, strict=True)]
    try:
        return asyncio.run(counter.count(ServerResponse(choices, 3, total)))
    except ResponseError as error:
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
