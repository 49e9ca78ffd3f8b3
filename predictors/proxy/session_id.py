"""Which agent or chat session a request is a turn of.

The first of these that a request has, besides its owner (`ClientRules.owner`), identifies its session:

| where | sent by |
|---|---|
| header `x-session-id` | OpenCode; read by vLLM since 0.32 and by Dynamo |
| header `x-dynamo-session-id` | clients of NVIDIA Dynamo |
| headers `x-claude-code-session-id`, `x-claude-code-agent-id` | Claude Code; each of its sub-agents is a session |
| headers `thread-id`, `session-id`, `session_id` | Codex |
| header `x-session-affinity` | OpenCode |
| header `x-deepseek-harness-session-id` | DeepSeek's harness |
| body `session_id` | clients of vLLM since 0.32 |
| body `previous_response_id`, `conversation` | OpenAI Responses: the session of that response, or the conversation |
| body `prompt_cache_key` | OpenAI |
| body `metadata.user_id` with a session | Claude Code, in both of its formats |
| the first message of the user | any other agent or chat |

A `prompt_cache_key` or `user_id` counts together with the served model and the first message, because several conversations
may have it; a first message together with the served model and the system prompt. Without a key, a request with one message
and without tools has no session.

`x-dynamo-session-final: true` marks the last request of a session.

Sources: headers as in Dynamo (lib/llm/src/protocols/agents.rs and "Identify Agent Sessions" in its documentation, which also has the last request), llm-d
(llm-d-router, plugin agent-identity) and vLLM 0.32 (entrypoints/generate/base/serving.py). llm-d's `x-session-token` is the
name of a replica and no session.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scheduler_core.prediction.api_request import ApiRequest
from scheduler_core.prediction.prompt_text import SYSTEM, USER, member
from scheduler_core.shell.json_text import parse_json

SESSION_HEADER = "x-session-id"
#: Headers with a session, in order, and those that tell its sub-agents apart.
SESSION_HEADERS: Mapping[str, str | None] = {
    SESSION_HEADER: None,
    "x-dynamo-session-id": None,
    "x-claude-code-session-id": "x-claude-code-agent-id",
    **dict.fromkeys(("thread-id", "session-id", "session_id", "x-session-affinity")),
    "x-deepseek-harness-session-id": None,
}
#: Header of the last request of a session.
FINAL_HEADER = "x-dynamo-session-final"
#: Responses whose sessions are remembered.
MAX_RESPONSES = 65_536
_USER_SESSION = re.compile(r"_session_([0-9A-Za-z-]+)\Z")


class SessionIds:
    """Names of sessions, hashes that differ between owners; remembers the sessions of the latest responses."""

    def __init__(self, max_responses: int = MAX_RESPONSES) -> None:
        self._max_responses = max_responses
        self._responses: OrderedDict[str, str] = OrderedDict()

    def session_of(
        self, headers: Mapping[str, str], content: Mapping[str, Any], body: ApiRequest, owner: str
    ) -> str:
        """The session of a request with this body, as JSON and as its fields; empty if it has none."""
        if name := _of_headers(headers):
            return _hash(owner, "id", name)
        if name := _text(content.get("session_id")):
            return _hash(owner, "id", name)
        if name := _text(content.get("previous_response_id")):
            # A response of before a restart, or of another proxy, begins a session.
            return self._responses.get(_hash(owner, "response", name)) or _hash(owner, "response", name)
        conversation = content.get("conversation")
        if name := _text(conversation) or _text(member(conversation, "id")):
            return _hash(owner, "id", name)
        key = _text(content.get("prompt_cache_key")) or _of_user(member(content.get("metadata"), "user_id"))
        messages = [message for message in body.messages if message.role != SYSTEM]
        if not key and len(messages) < 2 and not (content.get("tools") or content.get("functions")):
            return ""
        first = next((message.text for message in messages if message.role == USER), "")
        if key:
            return _hash(owner, "key", key, body.model, first)
        systems = [message.text for message in body.messages if message.role == SYSTEM]
        return _hash(owner, "conversation", body.model, *systems, first) if first else ""

    def responded(self, response_id: str, session: str, owner: str) -> None:
        """Remembers the session of a response, for requests that continue it."""
        self._responses[_hash(owner, "response", response_id)] = session
        if len(self._responses) > self._max_responses:
            self._responses.popitem(last=False)

    def state(self) -> list[tuple[str, str]]:
        """The remembered responses and their sessions, the latest last."""
        return list(self._responses.items())

    def restore(self, state: Iterable[Sequence[str]]) -> None:
        """Restores a `state`; raises an error if it is none."""
        self._responses = OrderedDict((str(response), str(session)) for response, session in state)


def is_final(headers: Mapping[str, str]) -> bool:
    """Whether a request is the last one of its session."""
    return headers.get(FINAL_HEADER, "").strip().lower() == "true"


def _of_headers(headers: Mapping[str, str]) -> str:
    for name, part in SESSION_HEADERS.items():
        if session := headers.get(name, "").strip():
            agent = "" if part is None else headers.get(part, "").strip()
            return f"{session}/{agent}" if agent else session
    return ""


def _of_user(user: object) -> str:
    """The session in the name of a user: user_HASH_account_ID_session_ID, or an object with `session_id` as a text."""
    if not isinstance(user, str):
        return ""
    if match := _USER_SESSION.search(user):
        return match[1]
    if not user.lstrip().startswith("{"):
        return ""
    try:
        return _text(member(parse_json(user.encode("utf-8", "surrogatepass")), "session_id"))
    except ValueError:
        return ""


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _hash(*parts: str) -> str:
    """Hash of a sequence of texts; the first one is the owner."""
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
