"""Bodies that clients may send.

A body of a restricted client is a JSON object, whose hints are removed; a form without hints; or data that no parser
reads as JSON. Others are refused, because an engine may find hints in them that the proxy cannot remove.
"""

from __future__ import annotations

import re
from urllib.parse import parse_qsl

from aiohttp import web
from multidict import CIMultiDictProxy

from predictors.proxy.engines import ClientRules
from predictors.proxy.errors import Refusal
from predictors.proxy.parsing import CHAT, TEXT, JsonBody, endpoint_of, json_body
from scheduler_core.errors import InputError
from scheduler_core.prediction.correction import MAX_NAME_CHARS

#: Names of form fields, or parts of them, that are hints.
_HINTS = frozenset({"priority", "agent_hints", "nvext"})
_CHARSET = re.compile(r"charset[^=;,]*=([^;,]*)", re.IGNORECASE)
_CHARSETS = frozenset({"utf-8", "utf8", "us-ascii", "ascii"})
_DISPOSITION = re.compile(rb"content-disposition[ \t]*:((?:[^\r\n]|\r?\n[ \t])*)", re.IGNORECASE)
_FIELD = re.compile(rb";\s*name(\*?)[^=;]*=\s*(?:\"((?:[^\"\\]|\\.)*)\"|([^;\s]*))", re.IGNORECASE)
_JSON_PART = re.compile(rb"[\r\n]content-type[ \t]*:[^\r\n]*json", re.IGNORECASE)
_PLAIN = re.compile(r"[\w.\[\] -]*", re.ASCII)
# What lenient parsers skip (spaces of any encoding, byte order marks, NULs), then an object, a list or a comment.
_JSON_START = re.compile(rb"[^0-9A-Za-z\"{\[/#]*[{\[/#]")


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
