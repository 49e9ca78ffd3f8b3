"""Parsing of untrusted JSON, lenient or strict. All errors are ValueErrors; all strings are valid Unicode."""

import json
import math
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.shell.files import existing_file

#: Maximum nesting in `read_json_object`: code that copies or writes the content recurses as deeply.
MAX_DEPTH = 100
#: Characters that separate values: a text has fewer values than twice their number.
_SEPARATORS = b",:[{"
_IS_SEPARATOR = np.isin(np.arange(256), list(_SEPARATORS))
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class RepeatedKeyError(ValueError):
    """An object has a key twice."""


def valid_unicode(text: str) -> str:
    """`text` with U+FFFD instead of each lone surrogate, which JSON can represent and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def parse_json(
    text: str | bytes,
    *,
    finite: bool = False,
    unique_keys: bool = False,
    lone_surrogates: Literal["replace", "refuse"] = "replace",
) -> Any:
    """The value of a JSON text in UTF-8. `ValueError` if it is not JSON, not UTF-8, nested too deeply, has a
    number with more than 4300 digits, or violates an argument; `RepeatedKeyError` for a repeated key.

    `finite`: reject NaN, Infinity and numbers that overflow to it. `unique_keys`: reject objects with a repeated key;
    otherwise its last value is used. `lone_surrogates`: treatment of escaped lone surrogates (see `valid_unicode`).
    """
    if isinstance(text, bytes):
        text = text.decode()
    number = _finite if finite else None
    hook = _unique_keys if unique_keys else None
    try:
        value = json.loads(text, object_pairs_hook=hook, parse_float=number, parse_constant=number)
        if lone_surrogates == "replace":
            return replace_lone_surrogates(value, text)
        if _ESCAPED_SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except UnicodeEncodeError as error:
        raise ValueError("half of a surrogate pair") from error
    return value


def from_json(value: Any) -> Any:
    """The object or list that a text is the JSON of; other values unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return parse_json(value)
        except ValueError:
            return value
    return value


def num_separators(text: bytes) -> tuple[int, int]:
    """(commas, colons and opening brackets) outside the strings of a JSON text: bounds of its parsing time and memory,
    counted at 150 MB/s without blocking other threads. The C parser blocks them for up to 0.1 us for each value
    in a list of numbers, and 0.5 us for each list, object or member."""
    codes = np.frombuffer(text.replace(b"\\\\", b"").replace(b'\\"', b""), dtype=np.uint8)
    inside = np.logical_xor.accumulate(codes == ord('"'))
    separators = codes[_IS_SEPARATOR[codes] & ~inside]
    num_commas = int(np.count_nonzero(separators == ord(",")))
    return num_commas, len(separators) - num_commas


def check_num_values(text: bytes, maximum: int) -> None:
    """Raises `ValueError` if a JSON text has more than `maximum` commas, or more than a quarter as many colons and
    opening brackets, outside strings. To call before the text of a client is parsed; see `num_separators`."""
    # Without strings a text has fewer; most texts have so few that counting bytes is enough.
    if sum(map(text.count, _SEPARATORS)) <= maximum // 4:
        return
    num_commas, num_others = num_separators(text)
    if num_commas > maximum or num_others > maximum // 4:
        raise ValueError(f"more than {maximum} values, or {maximum // 4} lists, objects and members")


def replace_lone_surrogates(value: Any, text: str) -> Any:
    """`value`, parsed from the JSON `text`, with valid Unicode; unchanged without escaped surrogates."""
    if not _ESCAPED_SURROGATE.search(text):
        return value
    return json.loads(valid_unicode(json.dumps(value, ensure_ascii=False)))


def read_json_object(path: Path, field: str) -> dict[str, Any]:
    """Content of a file with one JSON object, parsed strictly. `InputError`, naming `field`, if the file is
    missing, empty, not UTF-8 or not valid JSON, has a repeated key, NaN or infinity, is nested deeper than
    `MAX_DEPTH`, or contains something other than an object."""
    existing_file(path, field)
    try:
        content = parse_json(path.read_bytes(), finite=True, unique_keys=True)
        if _depth(content) > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    except (ValueError, RecursionError) as error:
        raise InputError(field, str(path), f"a file with valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise InputError(field, str(path), "a file with a JSON object")
    return content


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names: set[str] = set()
        for name, _ in pairs:
            if name in names:
                raise RepeatedKeyError(f"the key {name[:80]!r} occurs twice in one object")
            names.add(name)
    return content


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


def _depth(content: object) -> int:
    values = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    return 1 + max(map(_depth, values), default=-1)
