"""JSON from outside: a parser with one kind of error, and strings that UTF-8 can carry."""

from __future__ import annotations

import json
from typing import Any


def valid_unicode(text: str) -> str:
    """`text` with U+FFFD in place of each lone surrogate, which JSON can carry and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text in UTF-8; its strings are valid Unicode (`valid_unicode`).

    Raises:
        ValueError: It is not JSON, not UTF-8, nested too deeply, or has a number of more than 4300 digits.
    """
    if isinstance(text, bytes):
        text = text.decode()
    try:
        return replace_lone_surrogates(json.loads(text), text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def replace_lone_surrogates(value: Any, text: str) -> Any:
    """`value`, parsed from the JSON `text`, with valid Unicode; untouched where the text escapes no surrogate."""
    if "\\ud" not in text and "\\uD" not in text:
        return value
    return json.loads(valid_unicode(json.dumps(value, ensure_ascii=False)))
