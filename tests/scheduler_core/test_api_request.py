"""Requests of all generation APIs: prompt, limits and outputs, whatever shape a client sends."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_core.prediction.api_request import ApiRequest, integer, read_request
from scheduler_core.prediction.predictions import LengthPrediction, PointPrediction, Prediction
from scheduler_core.prediction.prompt_text import (
    Message,
    content_text,
    conversation_text,
    messages_of,
    user_text,
)

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"q": 1}'}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

#: Body -> text to predict from, and roles of its messages.
CONVERSATIONS: dict[str, tuple[dict[str, Any], str, str]] = {
    "tools": (
        {"messages": [
            {"role": "user", "content": "Find it."}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
        ]},
        "Find it.", "user assistant tool",
    ),
    "function": (
        {"messages": [
            {"role": "user", "content": "Now?"}, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "noon"},
        ]},
        "Now?", "user assistant tool",
    ),
    "image": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, IMAGE]}]}, "What?", "user"),
    "image alone": ({"messages": [{"role": "user", "content": [IMAGE]}]}, "[image]", "user"),
    "image after a text": (
        {"messages": [{"role": "user", "content": "See this:"}, {"role": "user", "content": [IMAGE]}]},
        "See this:", "user user",
    ),
    "audio": (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]}]},
        "[audio]", "user",
    ),
    "developer": (
        {"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}, "Hi", "system user",
    ),
    "empty system": ({"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}]}, "Hi", "system user"),
    "no user": ({"messages": [{"role": "system", "content": "Write a poem."}]}, "Write a poem.", "system"),
    "responses": ({"input": "Say yes.", "instructions": "Be brief."}, "Say yes.", "system user"),
    "gemini": (
        {"contents": [{"role": "user", "parts": [{"text": "Say yes."}]}, {"role": "model", "parts": [{"functionCall": {"name": "f"}}]}],
         "systemInstruction": {"parts": [{"text": "Be brief."}]}},
        "Say yes.", "system user assistant",
    ),
    "responses items": (
        {"input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Find"}, {"type": "input_image", "image_url": "x"}]},
            {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"},
            {"type": "function_call_output", "call_id": "1", "output": "42"},
        ]},
        "Find", "user assistant tool",
    ),
    "anthropic": (
        {"system": [{"type": "text", "text": "Be brief."}], "messages": [
            {"role": "user", "content": "Find it."},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {"q": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "42"}]}]},
        ]},
        "Find it.", "system user assistant tool",
    ),
    "opentelemetry": (
        {"messages": [
            {"role": "user", "parts": [{"type": "text", "content": "Find it."}]},
            {"role": "assistant", "parts": [{"type": "tool_call", "id": "t", "name": "look", "arguments": {"q": 1}}]},
            {"role": "tool", "parts": [{"type": "tool_call_response", "id": "t", "response": "42"}]},
        ]},
        "Find it.", "user assistant tool",
    ),
    "ollama": ({"prompt": "Why?", "system": "Be brief."}, "Why?", "system user"),
    "completion": ({"prompt": "Once"}, "Once", ""),
    "one text in a list": ({"prompt": ["Once"]}, "Once", ""),
    "token ids": ({"prompt": [1, 2, 3]}, "", ""),
    "sglang": ({"text": "Once", "sampling_params": {}}, "Once", ""),
    "tgi": ({"inputs": "Once"}, "Once", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_text_of_the_user_is_found(name: str) -> None:
    body, text, roles = CONVERSATIONS[name]
    request = read_request(body)
    assert request.text() == text
    assert " ".join(message.role for message in request.messages) == roles
    assert request.has_prompt


def test_calls_and_results_of_tools_are_text() -> None:
    for name in ("tools", "anthropic", "opentelemetry"):
        texts = [message.text for message in read_request(CONVERSATIONS[name][0]).messages]
        assert texts[-2:] == ['look({"q": 1})', "42"]


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        ({"max_tokens": 16}, 16), ({"max_completion_tokens": 7, "max_tokens": 9}, 7), ({"max_output_tokens": 16}, 16),
        ({"max_tokens": -1}, None), ({"max_tokens": 0}, None), ({"max_tokens": None}, None), ({"max_tokens": "16"}, 16),
        ({"max_tokens": 16.0}, 16), ({"max_tokens": True}, None), ({"max_tokens": 10**400}, None), ({"max_tokens": "1_6"}, None),
        ({"options": {"num_predict": 5}}, 5), ({"options": {"num_predict": -1}}, None), ({"n_predict": 6}, 6),
        ({"sampling_params": {"max_new_tokens": 8}}, 8), ({"parameters": {"max_new_tokens": 8}}, 8),
    ],
)  # fmt: skip
def test_the_limit_of_every_api(body: dict[str, Any], limit: int | None) -> None:
    assert read_request(body).max_tokens == limit


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({}, 1), ({"n": 3}, 3), ({"n": "3"}, 3), ({"n": 2, "best_of": 5}, 5), ({"n": "x"}, None), ({"n": 0}, None),
        ({"prompt": ["a", "b"], "n": 2}, 4), ({"prompt": [[1], [2], [3]]}, 3), ({"prompt": [1, 2, 3]}, 1),
        ({"sampling_params": {"n": 2}}, 2), ({"n": [2]}, None),
    ],
)  # fmt: skip
def test_the_number_of_outputs(body: dict[str, Any], count: int | None) -> None:
    assert read_request(body).num_outputs == count


def test_prompt_tokens_are_token_ids_or_a_quarter_of_the_characters() -> None:
    assert read_request({"prompt": [7] * 4000}).prompt_tokens() == 4000
    assert read_request({"prompt": [[7] * 3000, [7] * 1000]}).prompt_tokens() == 4000
    assert read_request({"prompt": "x" * 40}).prompt_tokens() == 11
    tools = [{"type": "function", "function": {"name": "f", "description": "x" * 4000}}]
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    assert read_request(body | {"tools": tools}).prompt_tokens() > 1000 > read_request(body).prompt_tokens()


def test_a_known_length_needs_no_prediction() -> None:
    forced = read_request({"prompt": "x", "max_tokens": 500, "ignore_eos": True}).prediction(None, 500)
    assert forced is not None
    assert forced.length is not None
    assert forced.length.expected_and_cvar(500)[0] == pytest.approx(500, rel=0.01)
    assert ApiRequest().prediction(None, 500) is None


def test_min_tokens_is_a_lower_bound_and_several_outputs_are_a_total() -> None:
    prediction = Prediction(length=LengthPrediction(4.6, 0.8, 4.0), point=PointPrediction(90.0))
    plain, _ = prediction.length.expected_and_cvar(2000)  # type: ignore[union-attr]
    for request, low, point in (
        (ApiRequest(min_tokens=200), 200, 200),
        (ApiRequest(num_outputs=4), 4 * 0.9 * plain, 360),
        (ApiRequest(min_tokens=3000), 1999, 2000),
    ):
        changed = request.prediction(prediction, 2000)
        assert changed is not None
        assert changed.length is not None
        assert changed.point is not None
        mean, tail = changed.length.expected_and_cvar(2000 * (request.num_outputs or 1))
        assert mean > low
        assert tail >= mean * (1 - 1e-9)
        assert changed.point.tokens == point
    assert ApiRequest(min_tokens=2).prediction(prediction, 2000) is prediction
    assert math.isclose(ApiRequest(min_tokens=2000).prediction(prediction, 2000).length.mu, math.log(2000))  # type: ignore[union-attr]


def test_a_conversation_without_other_parts_keeps_its_trained_text() -> None:
    turns = (
        Message("system", "Be brief."),
        Message("user", "Hi"),
        Message("assistant", "Yes?"),
        Message("user", "Go"),
    )
    assert conversation_text(turns) == "system: Be brief.\n\nuser: Hi\n\nassistant: Yes?\n\nuser: Go"
    assert conversation_text((Message("user", "Hi"),)) == "Hi"


def test_integers_are_decimal() -> None:
    assert [integer(value) for value in (3, 3.0, "3", " 3 ", "-3", "+3")] == [3, 3, 3, 3, -3, 3]
    bad = (True, None, 3.5, "3.0", "1_000", "\u0663", "", "x", float("nan"), float("inf"), [3], "9" * 30)
    assert [integer(value) for value in bad] == [None] * len(bad)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "role",
                    "content",
                    "type",
                    "text",
                    "messages",
                    "input",
                    "prompt",
                    "tools",
                    "tool_calls",
                    "function",
                    "n",
                    "max_tokens",
                    "options",
                    "output",
                    "system",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@given(JSON)
def test_any_body_is_read(body: object) -> None:
    request = read_request(body)
    assert request.prompt_tokens() >= 1
    assert isinstance(request.text(), str)
    assert request.max_tokens is None or request.max_tokens >= 1
    assert isinstance(content_text(body), str)
    assert isinstance(user_text(messages_of(body)), str)
