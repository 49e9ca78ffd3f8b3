"""Requests: strict parsing of bodies, and the fields for prediction and scheduling."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from predictors.proxy.errors import bad_body
from scheduler_core.prediction.api_request import ApiRequest, read_request
from scheduler_core.prediction.predictions import Prediction
from scheduler_core.shell.json_text import RepeatedKeyError, check_num_values, num_separators, parse_json

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
OLLAMA_CHAT = "/api/chat"
OLLAMA_GENERATE = "/api/generate"
#: Endpoints that generate, longer ones first if one ends with another.
ENDPOINTS = (
    *(CHAT, TEXT, RESPONSES, MESSAGES, OLLAMA_CHAT, OLLAMA_GENERATE),
    *("/v1/chat/completions/batch", "/inference/v1/generate", "/generate", "/completion"),
)
#: Ends of paths without `/v1`, as gateways and Azure have them -> endpoint.
_SHORT_PATHS = {"/chat/completions": CHAT, "/completions": TEXT, "/responses": RESPONSES}
_OPEN = re.compile(rb"\s*\{\s*")
#: Maximum number of values of a body; the parser blocks the event loop for about 0.1 s for that many.
MAX_VALUES = 1_000_000
#: Memory of a parsed body for each of its commas, colons and opening brackets, about.
SEPARATOR_BYTES = 64
#: Memory that need not be estimated better than by a bound.
SMALL_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class JsonBody:
    """A JSON object that all parsers agree on: bytes (None: serialize `content`) and members."""

    data: bytes | None
    content: Mapping[str, Any]

    def with_members(self, added: Mapping[str, Any]) -> bytes:
        """The bytes of the object with members added or replaced. New members are inserted after the opening
        brace, and all other bytes are unchanged; if a member is replaced, the object is serialized again."""
        if self.data is not None and not added:
            return self.data
        if self.data is None or any(name in self.content for name in added):
            return _dump({**self.content, **added})
        opening = _OPEN.match(self.data)
        assert opening is not None
        comma = b"," if self.content else b""
        return self.data[: opening.end()] + _dump(dict(added))[1:-1] + comma + self.data[opening.end() :]


def json_body(data: bytes) -> JsonBody:
    """Parses a body; Refusal if it is not a JSON object, or if parsers differ on it: encodings other than
    UTF-8, byte order marks, NaN, Infinity, numbers out of range, lone surrogates, or more than `MAX_VALUES`
    values. If members have the same name, only the last one is used and sent to the engine."""
    sent: bytes | None = data
    try:
        check_num_values(data, MAX_VALUES)
        try:
            content = parse_json(data, finite=True, unique_keys=True, lone_surrogates="refuse")
        except RepeatedKeyError:
            sent, content = None, parse_json(data, finite=True, lone_surrogates="refuse")
    except UnicodeDecodeError:
        raise bad_body("not UTF-8") from None
    except ValueError as error:
        raise bad_body(f"not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise bad_body("not a JSON object")
    return JsonBody(sent, content)


def parsed_bytes(data: bytes) -> int:
    """Memory of a parsed JSON body in bytes, roughly, without its texts."""
    bound = SEPARATOR_BYTES * sum(map(data.count, (b",", b":", b"[", b"{")))
    if bound <= max(len(data), SMALL_BYTES):
        return bound
    return sum(num_separators(data)) * SEPARATOR_BYTES  # slower, but texts may be full of them


def _dump(content: dict[str, Any]) -> bytes:
    try:
        return json.dumps(content, separators=(",", ":")).encode()
    except RecursionError:
        raise bad_body("nested too deeply") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A request to generate, and its last text.

    Attributes:
        endpoint: The path without the prefix of a gateway, see `ENDPOINTS`; "other" for unknown paths.
        content: The parsed body; empty if it is not a JSON object.
        body: The fields of the body, whatever its API.
        prompt: Last text of the user; empty for token ids, several prompts, and bodies that cannot be read.
    """

    endpoint: str
    content: Mapping[str, Any]
    body: ApiRequest
    prompt: str

    @property
    def is_completion(self) -> bool:
        """Whether it is a chat or text completion of the OpenAI API, whose body must be JSON."""
        return self.endpoint in (CHAT, TEXT)

    @property
    def num_outputs(self) -> int:
        """Number of outputs; 1 if it is malformed, which the engine reports."""
        return self.body.num_outputs or 1

    def prompt_tokens(self, prediction: Prediction | None = None) -> int:
        """Estimated tokens of the prompt, at least 1: by the tokens per character of what the predictor has read, if it
        counted them, otherwise by their characters."""
        if prediction is None or not prediction.prompt_tokens or not self.prompt:
            return self.body.prompt_tokens()
        num_read = prediction.prompt_chars or len(self.prompt)
        return max(1, round(prediction.prompt_tokens * self.body.num_chars / num_read))


def parse_request(content: Mapping[str, Any], path: str) -> ParsedRequest:
    """Parses the fields of a request to a path."""
    body = read_request(content)
    return ParsedRequest(
        endpoint=endpoint_of(path),
        content=content,
        body=body,
        prompt=body.text(),
    )


def endpoint_of(path: str) -> str:
    """The endpoint of a path, also behind the prefix of a gateway or without `/v1`; "other" if it is unknown."""
    path = path.rstrip("/")
    endpoint = next((each for each in ENDPOINTS if path.endswith(each)), None)
    return endpoint or next((each for end, each in _SHORT_PATHS.items() if path.endswith(end)), "other")
