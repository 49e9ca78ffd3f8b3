"""Adding members to a JSON object and leaving all of its other bytes as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from scheduler_core.errors import InputError

_OPEN = re.compile(rb"\s*\{\s*")


def with_members(body: bytes, content: Mapping[str, Any], added: Mapping[str, Any]) -> bytes:
    """The body with these members of its outermost object.

    Where none of them is there yet, they are put right behind the opening brace and every other byte stays. Otherwise
    the object is written anew, with the same values.

    Args:
        body: A JSON object.
        content: What it parses to.
        added: Members to add or replace.

    Raises:
        InputError: The body is in an encoding that cannot be added to (not UTF-8), or has numbers no JSON can hold.
    """
    if not added:
        return body
    if any(name in content for name in added):
        try:
            return json.dumps({**content, **added}, allow_nan=False, separators=(",", ":")).encode()
        except ValueError as error:
            raise InputError("body", "a number without a JSON form", "JSON") from error
    opening = _OPEN.match(body)
    if opening is None:
        raise InputError("body", body[:4], "a JSON object in UTF-8 without byte order mark")
    text = json.dumps(dict(added), allow_nan=False, separators=(",", ":"))[1:-1].encode()
    comma = b"," if content else b""
    return body[: opening.end()] + text + comma + body[opening.end() :]
