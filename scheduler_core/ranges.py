"""Validation of settings: ranges of numbers, choices of names, and parameters by name."""

import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from scheduler_core.errors import InputError, unknown_name

#: Lower bound of positive numbers, and upper bound of finite numbers.
POSITIVE, FINITE = 5e-324, sys.float_info.max
#: Largest number below 1, the upper bound of fractions.
BELOW_ONE = math.nextafter(1.0, 0.0)
#: Upper bound of integers without a limit.
INTEGERS = sys.maxsize

_NUMBER = re.compile(
    r"\s*[+-]?(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?|inf(?:inity)?|nan)\s*",
    re.ASCII | re.IGNORECASE,
)

K = TypeVar("K")


def parse_number(text: str) -> float:
    """The decimal number in a text, also inf and nan. `ValueError` for other notations that `float` reads: "1_000", digits
    of other scripts."""
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is not a decimal number")
    return float(text)


def check_ranges(config: object, prefix: str = "", /, **ranges: tuple[float, float]) -> None:
    """Checks the fields of a configuration against (minimum, maximum), by field name. None is allowed, NaN is
    not. `InputError` with the field (after `prefix`), its value and the range."""
    for name, (low, high) in ranges.items():
        value = getattr(config, name)
        if value is None or low <= value <= high:
            continue
        kind = "integers" if isinstance(low, int) and isinstance(high, int) else "numbers"
        kind = "seconds" if name.endswith("_s") else kind
        bounds = "> 0" if low == POSITIVE else f">= {low}"
        if high == BELOW_ONE:
            bounds += " and < 1"
        elif high < (INTEGERS if isinstance(high, int) else FINITE):
            end = high if isinstance(high, int) else f"{high:g}"
            bounds = f"> 0, at most {end}" if low == POSITIVE else f"from {low} to {end}"
        raise InputError(prefix + name, value, f"{kind} {bounds}")


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raises `InputError` if the value is none of the names."""
    if value not in (names := [*choices]):
        raise unknown_name(name, value, names)


def construct(registry: str, name: str, kind: type[K], parameters: Mapping[str, Any] | None) -> K:
    """An object of the dataclass `kind`, which is registered as `name`. `parameters` override defaults of its
    fields. `InputError` if a parameter is unknown, or a value is outside its range."""
    names = sorted(field.name for field in fields(kind) if field.init)  # type: ignore[arg-type]
    for parameter in parameters or {}:
        if parameter not in names:
            raise unknown_name(f"parameter of {registry} {name}", parameter, names or ["none"])
    return kind(**(parameters or {}))
