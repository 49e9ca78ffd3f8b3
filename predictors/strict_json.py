"""JSON files of artifacts and checkpoints, without what Python's parser lets through: NaN, infinity, duplicate keys."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from scheduler_core.errors import InputError
from scheduler_core.files import existing_file

#: Objects and arrays inside each other. Whatever copies or writes the content recurses as deep.
MAX_DEPTH = 100


def read_json_object(path: Path, field: str) -> dict[str, Any]:
    """Content of a file that holds one JSON object.

    Args:
        path: The file.
        field: Its name in an error.

    Raises:
        InputError: The file is missing or empty, is not UTF-8 or not valid JSON, has a key twice in one object, NaN or
            infinity, is nested too deep, or holds something other than an object.
    """
    existing_file(path, field)
    try:
        content = json.loads(
            path.read_text(encoding="utf-8"),
            object_pairs_hook=_unique_keys,
            parse_float=_finite,
            parse_constant=_finite,
        )
        _check_depth(content)
    except ValueError as error:
        raise InputError(field, str(path), f"a file with valid JSON ({error})") from error
    except RecursionError as error:
        raise InputError(field, str(path), f"a file with JSON of at most {MAX_DEPTH} levels") from error
    if not isinstance(content, dict):
        raise InputError(field, str(path), "a file with a JSON object")
    return content


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return content


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no finite number")
    return value


def _check_depth(content: object) -> None:
    values = [content]
    for _ in range(MAX_DEPTH + 1):
        parts = [
            value.values() if isinstance(value, dict) else value
            for value in values
            if isinstance(value, dict | list)
        ]
        values = [value for part in parts for value in part]
        if not parts:
            return
    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
