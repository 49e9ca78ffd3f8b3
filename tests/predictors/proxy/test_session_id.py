"""Sessions of requests: by headers, by members of the body, and by what they begin with."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from predictors.proxy.client_rules import ClientRules
from predictors.proxy.config import ProxyConfig
from predictors.proxy.session_context import SessionContexts
from predictors.proxy.session_id import SESSION_HEADERS, SessionIds, is_final
from scheduler_core.prediction.api_request import read_request

USER = "user_" + "a1" * 32
TURNS = [
    {"role": "system", "content": "You are an agent."},
    {"role": "user", "content": "Fix the bug."},
    {"role": "assistant", "content": "ls"},
    {"role": "tool", "content": "a.py"},
]
TOOLS = [{"type": "function", "function": {"name": "ls"}}]


def name(
    content: dict[str, Any],
    headers: dict[str, str] | None = None,
    tenant: str = "",
    ids: SessionIds | None = None,
) -> str:
    body = {"model": "m", **content}
    return (ids or SessionIds()).session_of(CIMultiDict(headers or {}), body, read_request(body), tenant)


def chat(num: int = 4, **more: Any) -> dict[str, Any]:
    return {"messages": TURNS[:num]} | more


@pytest.mark.parametrize("header", SESSION_HEADERS)
def test_a_header_names_the_session(header: str) -> None:
    first = name(chat(2), {header: "a"})
    assert first == name(chat(4), {header.upper(): " a "}) == name({"prompt": "x"}, {header: "a"})
    assert first != name(chat(2), {header: "b"})
    assert len(first) == 24


def test_headers_precede_bodies_and_sub_agents_are_sessions_of_their_own() -> None:
    claude = {"x-claude-code-session-id": "s"}
    main, sub = name(chat(), claude), name(chat(), claude | {"x-claude-code-agent-id": "1"})
    assert main != sub
    assert sub != name(chat(), claude | {"x-claude-code-agent-id": "2"})
    assert name(chat(prompt_cache_key="k", session_id="t"), claude) == main
    assert name(chat(session_id="s")) == main


def test_responses_continue_the_session_of_the_one_before() -> None:
    ids = SessionIds(max_responses=2)
    first = name({"input": "Fix the bug.", "tools": TOOLS}, ids=ids)
    ids.responded("r1", first, "")
    assert name({"input": "And the other.", "previous_response_id": "r1"}, ids=ids) == first
    assert name({"input": "And the other.", "previous_response_id": "r1"}, tenant="other", ids=ids) != first
    unknown = name({"input": "x", "previous_response_id": "r0"}, ids=ids)
    assert unknown not in ("", first)
    for number in range(2, 4):
        ids.responded(f"r{number}", "later", "")
    assert name({"input": "x", "previous_response_id": "r1"}, ids=ids) != first
    assert name({"input": "x", "conversation": "c"}) == name({"input": "y", "conversation": {"id": "c"}})


def test_a_cache_key_may_be_common_to_conversations() -> None:
    assert name(chat(2, prompt_cache_key="k")) == name(chat(4, prompt_cache_key="k")) != name(chat(4))
    other = {"messages": [{"role": "user", "content": "Write a test."}], "prompt_cache_key": "k"}
    assert name(other) not in ("", name(chat(2, prompt_cache_key="k")))


def test_claude_codes_user_has_a_session() -> None:
    texts = [f"{USER}_account__session_12-3", json.dumps({"device_id": "d", "session_id": "12-3"})]
    first, second = (
        name(chat(num, metadata={"user_id": text})) for num, text in zip((2, 4), texts, strict=True)
    )
    assert first == second
    assert first != name(chat(4, metadata={"user_id": f"{USER}_account__session_4"}))
    for user in (USER, "{", "{}", "[1]", 7, None):
        assert name(chat(4, metadata={"user_id": user})) == name(chat(4))


def test_the_first_message_names_a_session_without_a_key() -> None:
    session = name(chat(4))
    assert session == name(chat(3)) != ""
    assert name(chat(2)) == ""  # one message: no session
    assert name(chat(2, tools=TOOLS)) == session
    assert name({"messages": TURNS[1:]}) != session  # another system prompt
    assert name(chat(4, model="n")) != session
    assert name({"prompt": "x"}) == name({}) == name({"messages": 3, "metadata": [], "tools": TOOLS}) == ""


@pytest.mark.parametrize("content", [chat(), chat(prompt_cache_key="k"), {"input": "x", "conversation": "c"}])
def test_no_tenant_joins_a_session_of_another(content: dict[str, Any]) -> None:
    rules = ClientRules(ProxyConfig(engine_url="http://127.0.0.1:1"))
    keys = [
        {"Authorization": "Bearer a"},
        {"Authorization": "Bearer b"},
        {"x-api-key": "a"},
        {"api-key": "c"},
        {},
    ]
    sessions = {name(content, key, rules.owner(CIMultiDict(key))) for key in keys}
    assert len(sessions) == len({rules.tenant(CIMultiDict(key)) for key in keys}) == 5
    headers = {"x-session-id": "s"}
    assert name(content, headers, "a") != name(content, headers, "b")


@pytest.mark.mend  # a client joined the sessions of any tenant whose name it sent
def test_the_name_of_a_tenant_does_not_open_its_sessions() -> None:
    rules = ClientRules(ProxyConfig(engine_url="http://127.0.0.1:1"))
    team = {"x-tailcast-tenant": "team", "x-session-id": "s"}
    clients = [
        team | {"Authorization": "Bearer a"},
        team | {"Authorization": "Bearer b"},
        team,
        team | {"x-tailcast-tenant": "other", "Authorization": "Bearer a"},
        {"x-session-id": "s", "Authorization": "Bearer a"},
        {"x-session-id": "s", "x-tailcast-tenant": rules.tenant(CIMultiDict({"Authorization": "Bearer a"}))},
    ]
    assert len({name(chat(), headers, rules.owner(CIMultiDict(headers))) for headers in clients}) == 6


def test_responses_are_remembered_over_restarts() -> None:
    ids, restored = SessionIds(), SessionIds()
    session = name({"input": "Fix the bug.", "tools": TOOLS}, ids=ids)
    ids.responded("r1", session, "")
    restored.restore(json.loads(json.dumps(ids.state())))
    assert name({"input": "x", "previous_response_id": "r1"}, ids=restored) == session


@pytest.mark.parametrize(
    ("value", "is_last"), [("true", True), (" True ", True), ("false", False), ("", False)]
)
def test_the_last_request_of_a_session(value: str, is_last: bool) -> None:
    assert is_final(CIMultiDict({"X-Dynamo-Session-Final": value})) == is_last


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["id", "role", "content", "session_id"]), inner)
    ),
    max_leaves=6,
)
MEMBERS = [
    "messages",
    "input",
    "prompt",
    "metadata",
    "conversation",
    "previous_response_id",
    "session_id",
    "tools",
]
BODIES = st.dictionaries(st.sampled_from([*MEMBERS, "prompt_cache_key", "system", "model"]), VALUES)


@settings(max_examples=200, deadline=None)
@given(st.lists(BODIES, min_size=1, max_size=4))
def test_any_body_can_be_read(bodies: list[dict[str, Any]]) -> None:
    """Whatever types its members have, a body has a session or none, and segments of a valid request."""
    ids, contexts = SessionIds(), SessionContexts()
    for content in bodies:
        body = read_request(content)
        session = ids.session_of({}, content, body, "tenant")
        assert len(session) in (0, 24)
        turn = contexts.begin(session, body, continues=bool(content.get("previous_response_id")))
        assert sum(segment.num_tokens for segment in turn.content) == turn.prompt_tokens
