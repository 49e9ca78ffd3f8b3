"""Counts and shapes are checked before anything is made of a request, and reading one lets others get their turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from predictors.proto import open_inference_pb2 as oip
from predictors.proto import predictor_v1_pb2 as pb
from predictors.service import gateway
from predictors.service.errors import MAX_MESSAGE_BYTES, ErrorStatus, UnparsableError, trailing_metadata
from predictors.service.gateway import MAX_JSON_VALUES, json_object, request_message
from predictors.service.messages import MAX_ELEMENTS, parse
from scheduler_core.errors import InputError


async def turns_during(call: Callable[[], Any]) -> tuple[Any, int]:
    """The result of a coroutine, and how often others got a turn on the event loop meanwhile."""
    num_turns = 0

    async def others() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    try:
        return await call(), num_turns
    finally:
        task.cancel()


@pytest.mark.parametrize("unit", ["{}", "1", '""', "[", '{"a":', "[1]"])
async def test_json_of_too_many_values_is_not_parse(monkeypatch: pytest.MonkeyPatch, unit: str) -> None:
    monkeypatch.delattr(gateway.json, "loads")
    separator = "" if unit.endswith(("[", ":")) else ","
    body = ("[" + separator.join([unit] * (MAX_JSON_VALUES + 1)) + "]").encode()
    with pytest.raises(UnparsableError, match="more than 100000 values"):
        await json_object(body)


async def test_what_stands_in_a_text_is_no_value_and_reading_it_lets_others_in() -> None:
    prompt = '[{,:\\"' * (4 * MAX_JSON_VALUES)
    content, num_turns = await turns_during(lambda: json_object(json.dumps({"prompt": prompt}).encode()))
    assert content == {"prompt": prompt}
    assert num_turns > 20


async def test_integers_of_many_digits_are_not_converted() -> None:
    with pytest.raises(UnparsableError, match="value has 5000 digits"):
        await json_object(b'{"max_tokens": -%s}' % (b"7" * 5000))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"maxTokens": "5", "cvarLevel": "0.5"}, pb.PredictRequest(max_tokens=5, cvar_level=0.5)),
        ({"prompt": None, "max_tokens": None}, pb.PredictRequest()),
        ({"token_ids": {"ids": ["1", 2]}}, pb.PredictRequest(token_ids=pb.TokenIds(ids=[1, 2]))),
        ({"quantileLevels": [0.5, "0.9"]}, pb.PredictRequest(quantile_levels=[0.5, 0.9])),
    ],
)
def test_json_may_be_that_of_protobuf(content: dict[str, Any], expected: pb.PredictRequest) -> None:
    assert request_message(content) == expected


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"prompt": "sea", "token_ids": [1]}, "prompt and token_ids exclude each other"),
        ({"prompt": "sea", "messages": []}, "messages and prompt exclude each other"),
        ({"max_tokens": 2**63}, "out of range: 9223372036854775808"),
        ({"max_tokens": 1.5}, "parse integer: 1.5"),
        ({"prompt": ["sea"]}, "prompt.*list"),
        ({"quantile_levels": [0.5] * 20_001}, "a list of more than 20000 values"),
        ({"messages": [{"role": "user"}] * 4097}, "4097 messages; at most 4096"),
        ({"messages": {}}, "messages is a list, not dict"),
        ({"messages": [{"role": "user", "name": "x"}]}, "an object with role and content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content: got "),
        ({"promt": "sea"}, 'has no field named "promt"'),
    ],
)
def test_wrong_json_is_named(content: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnparsableError, match=reason):
        request_message(content)


class Unparsed:
    """A kind of message whose parser must not be called."""

    def __init__(self, kind: Any) -> None:
        self.DESCRIPTOR, self.__name__ = kind.DESCRIPTOR, "Unparsed"


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (pb.PredictBatchRequest, b"\x0a\0"),
        (pb.PredictRequest, b"\x22" + b"\xc0\xf0\x04" + b"\x0a\0" * 40_000),
        (pb.PredictBatchRequest, b"\x0b\x0c" + b"\x0a\0" * 40_000),
        (oip.ModelInferRequest, b"\x2a\0"),
        (oip.ModelInferRequest, b"\x2a\xc4\xf0\x04\x2a\xc0\xf0\x04" + b"\x42\0" * 40_000),
    ],
    ids=["requests", "messages", "behind a group", "inputs", "texts"],
)
def test_messages_of_too_many_elements_are_not_parse(kind: Any, data: bytes) -> None:
    if len(data) < 10:
        data *= 40_000
    kind.FromString(data)  # it is one, and too large just for us
    with pytest.raises(UnparsableError, match=f"more than {MAX_ELEMENTS} elements"):
        parse(Unparsed(kind), data)


def test_large_messages_of_few_elements_are_parse() -> None:
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="sea" * 20)] * 50)
    batch = pb.PredictBatchRequest(requests=[pb.PredictRequest(messages=chat)] * 256)
    assert parse(pb.PredictBatchRequest, batch.SerializeToString()) == batch
    ids = pb.PredictRequest(token_ids=pb.TokenIds(ids=range(100_000)))
    assert parse(pb.PredictRequest, ids.SerializeToString()) == ids


@pytest.mark.parametrize("text", ["x" * 10**6, "\U0001f600" * 10**5, "\ud800" * 10**5])
def test_messages_of_errors_are_short_and_can_be_encoded(text: str) -> None:
    status = ErrorStatus.of(InputError("served_model", "other", f"one of {text}"))
    assert status.message.startswith("served_model: got ")
    assert status.message.endswith("...")
    assert len(status.message.encode()) <= MAX_MESSAGE_BYTES + 3
    # Of a header, gRPC takes 8 KiB without complaint: percent-encoded, and twice in base64.
    assert 3 * MAX_MESSAGE_BYTES + len(trailing_metadata(status)[0][1]) * 4 / 3 < 8192
