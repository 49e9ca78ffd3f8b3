"""JSON bodies of requests: parsed strictly, and extended without a change to their other bytes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from predictors.proxy.problems import bad_body

TOO_DEEP = "nested too deeply"
_OPEN = re.compile(rb"\s*\{\s*")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# JSON in UTF-16 and UTF-32 has zero bytes around its first brace, and some parsers skip a byte order mark.
_BEFORE_OBJECT = b" \t\r\n\v\f\0\xef\xbb\xbf\xff\xfe"


@dataclass(frozen=True, slots=True)
class JsonBody:
    """A JSON object that every parser reads alike.

    Attributes:
        data: Its bytes; None where they are written from `content`.
        content: Its members.
    """

    data: bytes | None
    content: Mapping[str, Any]

    def with_members(self, added: Mapping[str, Any]) -> bytes:
        """The bytes of the object with these members of the outermost level.

        Where none of them is in `content`, they are put right behind the opening brace and every other byte stays.
        Otherwise the object is written from its values.

        Args:
            added: Members to add or replace.

        Raises:
            Refusal: It is nested too deeply to be written.
        """
        if self.data is not None and not added:
            return self.data
        if self.data is None or any(name in self.content for name in added):
            return _dump({**self.content, **added})
        opening = _OPEN.match(self.data)
        assert opening is not None
        comma = b"," if self.content else b""
        return self.data[: opening.end()] + _dump(dict(added))[1:-1] + comma + self.data[opening.end() :]


def json_body(data: bytes) -> JsonBody:
    """Parses a body.

    What parsers read differently is refused: other encodings than UTF-8, byte order marks, NaN and Infinity, numbers
    out of range, lone surrogates. Of members with the same name the last one counts, and the body is then written anew
    with that one only.

    Raises:
        Refusal: It is no JSON object, or one of these.
    """
    has_repeated = False

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal has_repeated
        content = dict(pairs)
        has_repeated |= len(content) != len(pairs)
        return content

    try:
        content = json.loads(
            data.decode("utf-8"), object_pairs_hook=members, parse_float=_finite, parse_constant=_finite
        )
        if _SURROGATE.search(data):
            json.dumps(content, ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        raise bad_body("not UTF-8, or has half of a surrogate pair") from None
    except RecursionError:
        raise bad_body(TOO_DEEP) from None
    except json.JSONDecodeError as error:
        raise bad_body(f"not valid JSON: {error}") from None
    except ValueError:
        raise bad_body("not valid JSON: a number is out of range") from None
    if not isinstance(content, dict):
        raise bad_body("no JSON object")
    return JsonBody(None if has_repeated else data, content)


def may_be_json_object(data: bytes) -> bool:
    """Whether any parser could read a JSON object from a body."""
    return data.lstrip(_BEFORE_OBJECT)[:1] == b"{"


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError
    return number


def _dump(content: dict[str, Any]) -> bytes:
    try:
        return json.dumps(content, separators=(",", ":")).encode()
    except RecursionError:
        raise bad_body(TOO_DEEP) from None
