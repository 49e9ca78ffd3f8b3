"""What clients may send: tenant, tier, hints to the engine, and bodies.

A body of a restricted client is a JSON object, whose hints are removed; a form without hints; or data that no parser
reads as JSON. Others are refused, because an engine may find hints in them that the proxy cannot remove.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import web
from multidict import CIMultiDictProxy

from predictors.proxy.config import ProxyConfig
from predictors.proxy.errors import Refusal
from predictors.proxy.parsing import CHAT, TEXT, JsonBody, endpoint_of, json_body
from scheduler_core.errors import InputError
from scheduler_core.prediction.correction import MAX_NAME_CHARS
from scheduler_core.prediction.urgency import LEVELS
from scheduler_core.request import DEFAULT_TIER

#: Hints that let a client set its own priority, for all engines, because a gateway can forward to other
#: engines: paths of body members, and prefixes of header names in lower case.
CLIENT_MEMBERS: tuple[tuple[str, ...], ...] = (
    ("priority",),
    ("parameters", "priority"),
    ("nvext", "agent_hints"),
)
CLIENT_HEADERS = (
    "x-vllm-priority",
    *("x-smg-priority", "x-smg-tenant-id"),  # SGLang's gateway
    *("x-dynamo-request-priority", "x-dynamo-request-strict-priority"),
    *("x-llm-d-", "x-gateway-inference-", "x-slo-"),  # llm-d's router, including older names
)
#: Header with the declared urgency, 0 (most urgent) to 4.
TIER_HEADER = "x-tailcast-tier"
#: Headers with API keys: of OpenAI, Azure and Anthropic.
KEY_HEADERS = ("Authorization", "api-key", "x-api-key")
#: Names of form fields, or parts of them, that are hints.
_HINTS = frozenset(name for path in CLIENT_MEMBERS for name in path)
_CHARSET = re.compile(r"charset[^=;,]*=([^;,]*)", re.IGNORECASE)
_CHARSETS = frozenset({"utf-8", "utf8", "us-ascii", "ascii"})
_DISPOSITION = re.compile(rb"content-disposition[ \t]*:((?:[^\r\n]|\r?\n[ \t])*)", re.IGNORECASE)
_FIELD = re.compile(rb";\s*name(\*?)[^=;]*=\s*(?:\"((?:[^\"\\]|\\.)*)\"|([^;\s]*))", re.IGNORECASE)
_JSON_PART = re.compile(rb"[\r\n]content-type[ \t]*:[^\r\n]*json", re.IGNORECASE)
_PLAIN = re.compile(r"[\w.\[\] -]*", re.ASCII)
# What lenient parsers skip (spaces of any encoding, byte order marks, NULs), then an object, a list or a comment.
_JSON_START = re.compile(rb"[^0-9A-Za-z\"{\[/#]*[{\[/#]")


class ClientRules:
    """Rules for what clients may declare; `restricts` is true if their own hints are replaced."""

    def __init__(self, config: ProxyConfig) -> None:
        self._config = config
        self.restricts = config.client_priority == "replace" or config.most_urgent_tier > 0

    def tenant(self, headers: Mapping[str, str]) -> str:
        """The value of the tenant header, or a hash of the API key (keys are never logged), or ""."""
        return headers.get(self._config.tenant_header, "").strip() or _hash_of_key(headers)

    def owner(self, headers: Mapping[str, str]) -> str:
        """Whose sessions a request may be of: those with the same API key and the same tenant header, which any client may send."""
        return f"{_hash_of_key(headers)}\n{self.tenant(headers)}"

    def tier(self, headers: Mapping[str, str]) -> int:
        """The declared urgency tier, or the default; InputError if clients may not declare it."""
        text = headers.get(TIER_HEADER)
        if text is None:
            return max(DEFAULT_TIER, self._config.most_urgent_tier)
        levels = range(self._config.most_urgent_tier, len(LEVELS))
        if text not in map(str, levels):
            raise InputError(TIER_HEADER, text, f"integers from {levels[0]} to {levels[-1]}")
        return int(text)

    def check_headers(self, headers: CIMultiDictProxy[str]) -> None:
        """Raises InputError for a value that is not UTF-8, which cannot be forwarded unchanged, for a
        repeated tenant or tier header, which is ambiguous, and for a long name of a tenant."""
        for name, value in headers.items():
            if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
                raise InputError(name, "other bytes", "UTF-8")
        for name in (self._config.tenant_header, TIER_HEADER):
            if (count := len(headers.getall(name, ()))) > 1:
                raise InputError(name, f"{count} times", "once")
        tenant = self._config.tenant_header
        if (length := len(headers.get(tenant, ""))) > MAX_NAME_CHARS:
            raise InputError(tenant, f"a name of {length} characters", f"at most {MAX_NAME_CHARS}")

    def allowed_content(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """The body without the client's hints; `content` itself if it has none."""
        allowed = functools.reduce(_without, CLIENT_MEMBERS, content)
        return content if allowed == content else allowed


def _hash_of_key(headers: Mapping[str, str]) -> str:
    """Hash of the API key; empty without one."""
    key = next((key for name in KEY_HEADERS if (key := headers.get(name, ""))), "")
    return "key-" + hashlib.sha256(key.encode()).hexdigest()[:12] if key else ""


def _without(node: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The object without the member at `path`; names are case-insensitive."""
    others: dict[str, Any] = {}
    for name, value in node.items():
        if name.casefold() != path[0]:
            others[name] = value
        elif len(path) > 1:
            others[name] = _without(value, path[1:]) if isinstance(value, dict) else value
    return others


def allowed_body(request: web.Request, data: bytes, rules: ClientRules) -> JsonBody | None:
    """The body `data` with the hints that the client may send, or None to forward the data unchanged. Refusal for an
    invalid body that must be parsed, InputError for a compressed one and for a long name of a model."""
    is_completion = endpoint_of(request.path) in (CHAT, TEXT)
    try:
        check_encoding(request.headers)
        if rules.restricts:
            check_restricted(request.headers, data)
        if not is_completion and not may_be_json(data):
            return None
        body = json_body(data)
    except (InputError, Refusal):
        if is_completion or rules.restricts:
            raise
        return None
    model = body.content.get("model")
    if isinstance(model, str) and len(model) > MAX_NAME_CHARS:
        raise InputError("model", f"a name of {len(model)} characters", f"at most {MAX_NAME_CHARS}")
    allowed = rules.allowed_content(body.content) if rules.restricts else body.content
    return body if allowed is body.content else JsonBody(None, allowed)


def may_be_json(data: bytes) -> bool:
    """Whether any parser, however lenient, could parse a body as a JSON object or a list."""
    return _JSON_START.match(data) is not None


def check_encoding(headers: CIMultiDictProxy[str]) -> None:
    """Raises InputError if a body is compressed."""
    for value in headers.getall("Content-Encoding", ()):
        if any(name.strip().lower() not in ("", "identity") for name in value.split(",")):
            raise InputError("Content-Encoding", value, "identity")


def check_restricted(headers: CIMultiDictProxy[str], data: bytes) -> None:
    """Raises InputError for a body in a charset other than UTF-8, and for a form with a hint or with names that parsers
    read in different ways."""
    types = headers.getall("Content-Type", ())
    if len(types) > 1:
        raise InputError("Content-Type", f"{len(types)} times", "once")
    content_type = types[0].strip().lower() if types else ""
    for charset in _CHARSET.findall(content_type):
        if charset.strip(" \t\"'") not in _CHARSETS:
            raise InputError("Content-Type", content_type[:80], "charset utf-8")
    names: list[str] = []
    if content_type.startswith("application/x-www-form-urlencoded"):
        text = data.decode("latin-1").replace(";", "&")
        names = [name for name, _ in parse_qsl(text, keep_blank_values=True)]
    elif content_type.startswith("multipart/"):
        names = _part_names(data)
    for name in names:
        if not _PLAIN.fullmatch(name):
            raise InputError("form field", "a name with other characters", "letters, digits and _-.[]")
        if _HINTS & set(re.split(r"[.\[\] ]+", name.casefold())):
            raise InputError("form field", name, "no hints to the engine: the proxy sets them")


def _part_names(data: bytes) -> list[str]:
    """Names of the parts of a multipart body, whatever its boundary; InputError if parsers differ on them."""
    if _JSON_PART.search(data):
        raise InputError("Content-Type", "JSON in a part of a form", "a JSON body, or parts of other types")
    names = []
    for parameters in _DISPOSITION.findall(data):
        for star, quoted, token in _FIELD.findall(parameters):
            if star:
                raise InputError("form field", "an encoded name", "names without an encoding")
            names.append((quoted or token).decode("latin-1"))
    return names
