"""The parts of the OpenAI backend that need neither clock nor socket."""

from __future__ import annotations

import json
import resource
from email.utils import formatdate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_gen.backend import SamplingSettings
from data_gen.openai.http_client import allow_descriptors, retry_after_s
from data_gen.openai.options import OpenAIOptions
from data_gen.openai.responses import (
    MAX_LINE_BYTES,
    EventStreamParser,
    RequestBodies,
    ResponseChoice,
    ResponseError,
    read_error_response,
    read_response,
)
from data_gen.prompts import Message, Prompt
from scheduler_core.errors import InputError

SETTINGS = SamplingSettings(num_samples=4, max_tokens=40, temperature=0.7, top_p=0.9, seed=3)


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


def chunks_of(events: list[dict[str, Any]]) -> bytes:
    return b"".join(b"data: " + json.dumps(one, ensure_ascii=False).encode() + b"\r\n\r\n" for one in events)


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


def choice_of(*pieces: dict[str, Any]) -> ResponseChoice:
    """The choice of a stream of pieces, which arrive one second after the other."""
    reader = EventStreamParser()
    for second, piece in enumerate((*pieces, {"delta": {}, "finish_reason": "stop"}), start=1):
        event = json.dumps({"choices": [{"index": 0, **piece}]})
        reader.feed(f"data: {event}\n\n".encode(), float(second))
    (choice,) = reader.finish().choices
    return choice


def test_the_first_token_is_not_the_role_and_surrogates_are_joined() -> None:
    role, thought = {"delta": {"role": "assistant", "content": ""}}, {"delta": {"reasoning": "hm"}}
    choice = choice_of(role, thought, {"delta": {"content": "x"}})
    assert (choice.first_at, choice.last_at, choice.text) == (2.0, 4.0, "x")
    halves = ({"delta": {"content": text}} for text in ("a\ud83d", "\ude00b\ud800"))
    assert choice_of(*halves).text == "a\U0001f600b\ufffd", "a lone one is replaced"


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"data: {", "malformed"),
        pytest.param(b"data: " + b"[" * 100_000, "malformed", id="deep"),
        (b'data: {"choices": [{"index": 1e999}]}', "malformed"),
        (b'data: {"usage": {"prompt_tokens": 2147483648}}', "malformed"),
        (b'data: {"error": {"message": "engine died"}}', "server_error"),
        (b'data: {"choices": [{"index": 0, "delta": {"content": "x"}}]}', "truncated"),
        pytest.param(b"x" * (MAX_LINE_BYTES + 1), "malformed", id="endless line"),
        (b"", "empty"),
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
    ).map(lambda content: json.dumps(content).encode())
)
def test_whatever_a_server_sends_is_a_response_or_a_named_problem(payload: bytes) -> None:
    try:
        kinds = [
            choice.problem.kind if choice.problem else "good" for choice in read_response(payload).choices
        ]
    except ResponseError as error:
        kinds = [error.kind]
    assert kinds
    assert set(kinds) <= {"malformed", "empty", "server_error", "truncated", "finish_reason", "good"}
    assert read_error_response(500, payload).kind == "http_500"


def test_choices_are_put_in_order_and_names_of_ends_differ_between_engines() -> None:
    reasons = {2: "eos_token", 0: "stop_sequence", 3: "length", 1: "stop"}
    entries = [{"index": i, "text": str(i), "finish_reason": reason} for i, reason in reasons.items()]
    choices = read_response(json.dumps({"choices": entries}).encode()).choices
    assert [choice.text for choice in choices] == ["0", "1", "2", "3"]
    assert [choice.finish_reason for choice in choices] == ["stop", "stop", "stop", "length"]


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
    problem = read_error_response(status, json.dumps({"error": {"message": message}}).encode())
    assert (problem.kind, problem.retry) == (kind, retry)


def body_of(prompt: Prompt, indices: tuple[int, ...], **changed: Any) -> dict[str, Any]:
    bodies = RequestBodies(OpenAIOptions(**changed), SETTINGS, "m")
    return dict(json.loads(bodies.body(bodies.prefix(prompt), prompt, indices)))


@given(st.text(), st.lists(st.text(), max_size=3))
def test_bodies_hold_any_text_and_what_is_asked(text: str, contents: list[str]) -> None:
    prompt = Prompt("p", text, messages=tuple(Message("user", content) for content in contents))
    body = body_of(prompt, (1,), body={"priority": 1}, max_tokens_field="max_completion_tokens", stream=True)
    assert [message["content"] for message in body["messages"]] == (contents or [text])
    assert (body["max_completion_tokens"], body["priority"]) == (40, 1)
    assert "max_tokens" not in body
    assert body["stream_options"] == {"include_usage": True}
    assert body_of(prompt, (1,))["seed"] == body["seed"] != body_of(prompt, (2,))["seed"]
    assert "seed" not in body_of(prompt, (1,), send_seed=False)
    several = body_of(prompt, (1, 2), samples_per_request=2, count_by="logprobs", api="completions")
    assert (several["prompt"], several["n"], several["logprobs"]) == (text, 2, 1)
    assert "seed" not in several


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
