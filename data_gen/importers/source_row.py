"""Values of a source row by path, whatever the format nests them in.

A path is the name of a column, or the names of nested members joined by dots. A name may itself have dots, as in the
attributes of OpenTelemetry: the longest name that matches is used. A number selects an element of a list.

| value on the way | read as |
|---|---|
| text that is a JSON object or list, such as a cell of a CSV file | that object or list |
| list of `{"key": ..., "value": {"stringValue": ...}}` (OTLP) | object of plain values |
| names with a common beginning, such as `gen_ai.prompt.0.role` for `gen_ai.prompt` | nested objects and lists |
| several paths joined by `+` | the sum of the present ones |
| several paths joined by `/` | the texts of the present ones, joined by `/` |
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from scheduler_core.shell.json_text import from_json

#: Members of an OTLP value (AnyValue) that hold a plain value.
_OTLP_VALUES = ("stringValue", "intValue", "doubleValue", "boolValue", "bytesValue")
#: Objects and lists without content, also as JSON texts: what logs write if they do not store prompts.
_EMPTY: tuple[Any, ...] = ({}, [], "{}", "[]")


class SourceRow:
    """One row of a source. Each JSON text in it is parsed once."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self.columns = columns
        self._opened: dict[int, tuple[Any, Any]] = {}

    def first(self, paths: Sequence[str]) -> tuple[str, Any]:
        """The first path with a value that is not an empty object or list, else the first with a value, and its value; the
        first path and None without one."""
        empty: tuple[str, Any] = (paths[0], None)
        for path in paths:
            value = self.get(path)
            if value is not None and value not in _EMPTY:
                return path, value
            if empty[1] is None:
                empty = (path, value)
        return empty if empty[1] is not None else (paths[0], None)

    def get(self, path: str) -> Any:
        """The value at a path; None if it is missing, null, an empty text, or NaN, which data frames write for null."""
        values = self._find(path)
        is_missing = not values or values[0] == "" or (isinstance(values[0], float) and math.isnan(values[0]))
        return None if is_missing else values[0]

    def has(self, path: str) -> bool:
        """Whether the row has a value at this path, which may be null."""
        return bool(self._find(path))

    def _find(self, path: str) -> tuple[Any, ...]:
        """The value at a path, or nothing."""
        if path in self.columns:
            return (self.columns[path],)
        if values := self._member(self.columns, path):
            return values
        for operator in ("+", "/"):
            if operator in path:
                parts = [value for part in path.split(operator) if (value := self.get(part)) is not None]
                total = _total(parts) if operator == "+" else "/".join(map(str, parts))
                return (total,) if parts else ()
        return ()

    def _member(self, source: Any, path: str) -> tuple[Any, ...]:
        source = self._open(source)
        if isinstance(source, list):
            name, _, rest = path.partition(".")
            if not (name.isascii() and name.isdigit()) or int(name) >= len(source):
                return ()
            return self._member(source[int(name)], rest) if rest else (source[int(name)],)
        if not isinstance(source, Mapping):
            return ()
        if path in source:
            return (source[path],)
        end = path.rfind(".")
        while end > 0:
            if path[:end] in source and (values := self._member(source[path[:end]], path[end + 1 :])):
                return values
            end = path.rfind(".", 0, end)
        inner = {
            name[len(path) + 1 :]: value for name, value in source.items() if name.startswith(f"{path}.")
        }
        return (_nested(inner),) if inner else ()

    def _open(self, source: Any) -> Any:
        """The container that a JSON text or a list of OTLP attributes stands for; other values unchanged."""
        if not isinstance(source, str | list):
            return source
        if id(source) not in self._opened:
            opened = from_json(source) if isinstance(source, str) else _attributes(source)
            self._opened[id(source)] = (source, opened)
        return self._opened[id(source)][1]


def records_at(columns: Mapping[str, Any], path: str) -> Iterator[Mapping[str, Any]]:
    """The objects at the end of a path through lists, such as `resourceSpans.scopeSpans.spans`."""
    values: Iterable[Any] = (columns,)
    for name in path.split("."):
        values = [item for value in values if isinstance(value, Mapping) for item in _items(value.get(name))]
    return (value for value in values if isinstance(value, Mapping))


def _items(value: Any) -> list[Any]:
    value = from_json(value)
    return value if isinstance(value, list) else [] if value is None else [value]


def _attributes(items: list[Any]) -> Any:
    """The object of a list of OTLP attributes; other lists unchanged."""
    if items and all(isinstance(item, Mapping) and {"key", "value"} <= item.keys() for item in items):
        return {str(item["key"]): _otlp_value(item["value"]) for item in items}
    return items


def _otlp_value(value: Any) -> Any:
    """The plain value of an OTLP value."""
    if not isinstance(value, Mapping):
        return value
    for name in _OTLP_VALUES:
        if name in value:
            return value[name]
    if isinstance(array := value.get("arrayValue"), Mapping):
        return [_otlp_value(item) for item in _items(array.get("values"))]
    if isinstance(pairs := value.get("kvlistValue"), Mapping):
        return _attributes(_items(pairs.get("values")))
    return None


def _nested(members: Mapping[str, Any]) -> Any:
    """Objects, and lists for numbers as names, from names with dots."""
    groups: dict[str, dict[str, Any]] = {}
    values: dict[str, Any] = {}
    for name, value in members.items():
        first, _, rest = name.partition(".")
        if rest:
            groups.setdefault(first, {})[rest] = value
        else:
            values[first] = value
    values |= {name: _nested(inner) for name, inner in groups.items()}
    if values and all(name.isascii() and name.isdigit() for name in values):
        return [values[name] for name in sorted(values, key=int)]
    return values


def _total(values: list[Any]) -> Any:
    """The sum of numbers, of their texts, and of lists of them; the first value if they cannot be added."""
    flat = [each for value in values for each in (value if isinstance(value, list) else (value,))]
    numbers = [
        int(each) if isinstance(each, str) and each.isascii() and each.isdecimal() else each for each in flat
    ]
    if all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
        return sum(numbers)
    return values[0]
