"""Typical size of the output that a response format allows, in tokens.

Servers constrain outputs by a JSON schema, a regular expression or a list of choices. Their limits change the length of the
output as the request's words do, and a predictor reads no schema; it reads one number, "[size 120]", that grows with every
limit: maxItems, minItems, maxLength, minLength, the number of properties, and the texts of an enum. A limit above what is
usual (`_CHARS` of a text, `_ITEMS` of a list) counts with its geometric mean with that, because models seldom fill it.
"""

from __future__ import annotations

import math
import re
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping
from itertools import islice, pairwise
from typing import Any, Final

from scheduler_core.prediction.prompt_text import is_list, member

#: Numbers in tags; others are rounded to the next of them in logarithms.
_STEPS: Final = (10, 12, 15, 20, 25, 30, 40, 50, 60, 80)
SIZES: Final = (1, 2, 3, 4, 5, 6, 8, *(step * 10**power for power in range(3) for step in _STEPS), 10_000)
_MIDDLES: Final = [(low * high) ** 0.5 for low, high in pairwise(SIZES)]
#: Usual numbers of characters of a text and of items of a list, and characters per token.
_CHARS, _ITEMS, _CHARS_PER_TOKEN = 50, 5, 4
#: Larger numbers are as good as unlimited.
_MOST: Final = 10**6
#: Tokens of values by type, and of texts by format.
_TYPES: Final[Mapping[str, float]] = {"integer": 2, "number": 3, "boolean": 1, "null": 1}
_FORMATS: Final[Mapping[str, float]] = {"date": 6, "time": 6, "date-time": 12, "uuid": 22, "email": 8}
#: Names of members that make an object a JSON schema, where it has no type of JSON values.
_MEMBERS = ("properties", "items", "enum", "const", "anyOf", "oneOf", "allOf", "$ref")
_JSON_TYPES = frozenset((*_TYPES, "object", "array", "string"))
#: Limits of what is read: nesting, values, members of an object or choices, and characters of a regular expression.
_MAX_DEPTH, _MAX_VALUES, _MAX_MEMBERS, _MAX_CHARS = 10, 400, 64, 1_000
#: A class without an end goes to the end of the text: to look for it from each bracket would take quadratic time.
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)|\\.", re.DOTALL)
_COUNT = re.compile(r"\{(\d{1,6})(?:(,)(\d{1,6})?)?\}|[*+]")
#: Signs of regular expressions that match nothing.
_SIGNS = re.compile(r"\(\?(?:[:=!]|P?<[^>]{0,40}>)|[()^$?|]")


def is_schema(value: object) -> bool:
    """Whether a value looks like a JSON schema."""
    kind = member(value, "type")
    if isinstance(kind, str) and kind.lower() in _JSON_TYPES:
        return True
    return isinstance(value, Mapping) and any(name in value for name in _MEMBERS)


def size_of(tokens: float) -> int:
    """The number of `SIZES` next to a number of tokens."""
    return int(SIZES[bisect(_MIDDLES, tokens)])


def choice_tokens(choices: Iterable[object]) -> float:
    """Tokens of one of several choices, the mean of the first."""
    lengths = [len(str(choice)) for choice in islice(choices, _MAX_MEMBERS)]
    return 1 + sum(lengths) / max(len(lengths), 1) / _CHARS_PER_TOKEN


def regex_tokens(pattern: str) -> float:
    """Tokens of a text that matches a regular expression, from its signs and its numbers of repetitions."""
    text = _CLASS.sub("x", pattern[:_MAX_CHARS])
    chars = 0.0
    for match in _COUNT.finditer(text):
        low, comma, high = match.groups()
        most = None if low is None or (comma and not high) else int(high or low)
        chars += _typical(_CHARS / 2, int(low or 0), most) - 1
    return 1 + max(chars + len(_SIGNS.sub("", _COUNT.sub("", text))), 0) / _CHARS_PER_TOKEN


def schema_tokens(schema: object) -> float | None:
    """Tokens of a value of a JSON schema; None if it is no object. References to other parts of the schema are followed;
    what is malformed has the usual size."""
    return min(_Reader(schema).tokens(schema, _MAX_DEPTH), _MOST) if isinstance(schema, Mapping) else None


def _typical(usual: float, low: int, high: int | None) -> float:
    """A typical number between two limits, increasing in both."""
    value = usual if high is None else math.sqrt(high * min(high, usual))
    value = math.hypot(value, low)
    return value if high is None else min(value, max(high, low))


class _Reader:
    """Reads the values of one schema, at most `_MAX_VALUES`."""

    def __init__(self, root: object) -> None:
        self._root, self._left = root, _MAX_VALUES

    def tokens(self, schema: object, depth: int) -> float:
        self._left -= 1
        if not isinstance(schema, Mapping) or depth == 0 or self._left < 0:
            return _CHARS / _CHARS_PER_TOKEN
        if (choices := _elements(schema.get("enum"))) is not None:
            return choice_tokens(choices)
        if (constant := schema.get("const")) is not None:
            return choice_tokens([constant])
        if isinstance(reference := schema.get("$ref"), str):
            return self.tokens(self._referenced(reference), depth - 1)
        for name, combine in _COMBINED.items():
            if (parts := _elements(schema.get(name))) is not None:
                own = self._object(schema, depth) if isinstance(schema.get("properties"), Mapping) else 0.0
                return combine([own, *(self.tokens(part, depth - 1) for part in parts)])
        kinds = schema.get("type")
        choices = [kinds] if isinstance(kinds, str) else _elements(kinds) or []
        names = [name.lower() for name in choices if isinstance(name, str)]
        kind = next((name for name in names if name != "null"), names[0] if names else "")
        if kind == "object" or isinstance(schema.get("properties"), Mapping):
            return self._object(schema, depth)
        if kind == "array" or "items" in schema or "prefixItems" in schema:
            return self._array(schema, depth)
        return _TYPES.get(kind) or self._text(schema)

    def _object(self, schema: Mapping[str, Any], depth: int) -> float:
        properties = schema.get("properties")
        fields = properties if isinstance(properties, Mapping) else {}
        named = [
            3 + len(str(name)) / _CHARS_PER_TOKEN + self.tokens(value, depth - 1)
            for name, value in islice(fields.items(), _MAX_MEMBERS)
        ]
        total = sum(named) * len(fields) / max(len(named), 1)
        if not named:
            values = schema.get("additionalProperties")
            each = 5 + self.tokens(values if isinstance(values, Mapping) else {"type": "number"}, depth - 1)
            total = each * _typical(_ITEMS, *_limits(schema, "minProperties", "maxProperties"))
        return 2 + total

    def _array(self, schema: Mapping[str, Any], depth: int) -> float:
        first = _elements(schema.get("prefixItems")) or []
        total = sum(self.tokens(part, depth - 1) + 1 for part in first)
        if not first or _limits(schema, "minItems", "maxItems") != (0, None):
            low, high = _limits(schema, "minItems", "maxItems")
            number = max(_typical(_ITEMS, low, high) - len(first), 0)
            total += number * (self.tokens(schema.get("items"), depth - 1) + 1)
        return 2 + total

    def _text(self, schema: Mapping[str, Any]) -> float:
        if isinstance(pattern := schema.get("pattern"), str):
            return 1 + regex_tokens(pattern)
        low, high = _limits(schema, "minLength", "maxLength")
        name = schema.get("format")
        if isinstance(name, str) and name in _FORMATS and high is None:
            return _FORMATS[name]
        return 1 + _typical(_CHARS, low, high) / _CHARS_PER_TOKEN

    def _referenced(self, reference: str) -> object:
        """The part of the schema that `#/$defs/NAME` names; None if it has none."""
        part: object = self._root
        for name in islice(reference.removeprefix("#").split("/"), 1, _MAX_DEPTH):
            part = member(part, name) if isinstance(part, Mapping) else None
        return part


_COMBINED: Final[Mapping[str, Callable[[list[float]], float]]] = {"anyOf": max, "oneOf": max, "allOf": sum}


def _elements(value: Any) -> list[Any] | None:
    """The first elements of a list; None if it is none."""
    return [*islice(value, _MAX_MEMBERS)] if is_list(value) else None


def _limits(schema: Mapping[str, Any], lowest: str, highest: str) -> tuple[int, int | None]:
    """Two limits, which some APIs write as texts; malformed ones are none."""
    low, high = (_integer(schema.get(name)) for name in (lowest, highest))
    return low or 0, high


def _integer(value: object) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        value = int(value)
    return min(value, _MOST) if type(value) is int and value >= 0 else None
