"""Typical sizes of the outputs that response formats allow."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_core.prediction.format_size import (
    SIZES,
    choice_tokens,
    is_schema,
    regex_tokens,
    schema_tokens,
    size_of,
)

TEXT = {"type": "string"}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def _facts(**limits: Any) -> dict[str, Any]:
    return _object(facts={"type": "array", "items": TEXT, **limits})


def _text(**limits: Any) -> dict[str, Any]:
    return _object(answer={**TEXT, **limits})


@pytest.mark.parametrize(
    "schemas",
    [
        [_facts(maxItems=number) for number in (1, 2, 5, 10, 100)],
        [_facts(minItems=number) for number in (0, 3, 10, 100)],
        [_facts(minItems=number, maxItems=number) for number in (1, 2, 5, 10, 100)],
        [_text(maxLength=number) for number in (5, 20, 100, 1_000)],
        [_text(minLength=number) for number in (0, 100, 1_000)],
        [_text(enum=["yes", "no"]), _text(), _text(minLength=400)],
        [_text(pattern="[A-Z]{2}"), _text(pattern="[a-z ]{80,200}")],
        [_object(**{f"field{index}": TEXT for index in range(number)}) for number in (1, 2, 4, 8, 100)],
        [_object(one=_object(two=TEXT)), _object(one=_object(two=TEXT, three=TEXT))],
        [
            {**schema, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
            for schema in (_object(a=TEXT, b=TEXT), _object(a=TEXT, b=TEXT, c=TEXT))
        ],
        [{"allOf": [_object(a=TEXT)]}, {**_object(b=TEXT), "allOf": [_object(a=TEXT)]}],
        [{"type": "object", "additionalProperties": TEXT, "maxProperties": number} for number in (1, 4, 20)],
        [{"type": "array", "prefixItems": [TEXT] * number} for number in (1, 2, 9)],
        [{"type": "ARRAY", "items": {"type": "STRING"}, "maxItems": str(number)} for number in (1, 4, 20)],
    ],
)
def test_larger_limits_are_larger_sizes(schemas: list[dict[str, Any]]) -> None:
    sizes = [schema_tokens(schema) for schema in schemas]
    assert all(low < high for low, high in pairwise(sizes))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("schema", "tokens"),
    [
        ({"type": "boolean"}, 1),
        ({"enum": ["abcd", "efgh"]}, 2),
        ({"const": "abcd"}, 2),
        (_object(abcd={"type": "integer"}), 8),
        ({"type": ["null", "boolean"]}, 1),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 2),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3}, 8),
        ({"type": "array", "items": {"type": "boolean"}, "maxItems": 0}, 2),
    ],
)
def test_sizes_count_names_values_and_brackets(schema: dict[str, Any], tokens: float) -> None:
    assert schema_tokens(schema) == pytest.approx(tokens)


def test_references_are_followed() -> None:
    person = _object(name=TEXT, year={"type": "integer"})
    direct = {"type": "array", "items": person, "maxItems": 3}
    referring = {
        "type": "array",
        "items": {"$ref": "#/$defs/Person"},
        "maxItems": 3,
        "$defs": {"Person": person},
    }
    assert schema_tokens(referring) == schema_tokens(direct)


@pytest.mark.parametrize(
    ("pattern", "low", "high"),
    [
        ("(yes|no)", 1, 4),
        (r"\d{4}-\d{2}-\d{2}", 2, 6),
        ("[A-D]", 1, 2),
        (r"[\w ]{200,800}", 50, 200),
        ("a{9}", 3, 4),
    ],
)
def test_regular_expressions(pattern: str, low: float, high: float) -> None:
    assert low <= regex_tokens(pattern) <= high


# Each bracket was searched for its end, up to the end of the text: 18 ms for one of 1,000 characters, in the event loop.
@pytest.mark.mend
@pytest.mark.parametrize("pattern", ["[" * 1_000, "[" * 999 + "\\", "[a-z" * 250, "[\\\n" * 300])
def test_a_class_without_an_end_goes_to_the_end_of_the_text(pattern: str) -> None:
    assert regex_tokens(pattern) == regex_tokens("[a-z]")


def test_choices_and_steps() -> None:
    assert choice_tokens([]) == 1
    assert choice_tokens(["no", "a very long choice of words"]) > choice_tokens(["no", "yes"])
    assert [size_of(number) for number in (0, 1, 7, 11.2, 1e9)] == [1, 1, 8, 12, 10_000]
    assert list(SIZES) == sorted(set(SIZES))


_NAMES = st.sampled_from(
    ("type", "properties", "items", "enum", "anyOf", "allOf", "$ref", "minItems", "maxItems", "pattern", "maxLength", "const")
)  # fmt: skip
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(("array", "object", "string", "#", "#/items", "9", "x{5,}[")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_NAMES, inner, max_size=5),
    max_leaves=30,
)  # fmt: skip


@given(_JSON)
def test_any_value_is_read(value: Any) -> None:
    tokens = schema_tokens(value)
    assert tokens is None or 0 <= tokens < 1e12
    assert is_schema(value) in (True, False)


def test_hostile_schemas_are_read_in_bounded_work() -> None:
    for schema in (
        {"anyOf": [{"$ref": "#"}] * 10_000},
        _object(**{f"f{index}": {"$ref": "#"} for index in range(10_000)}),
        {"pattern": "((((" * 100_000, "type": "string"},
        {"enum": ["x"] * 100_000},
    ):
        assert 0 <= (schema_tokens(schema) or 0) < 1e12
