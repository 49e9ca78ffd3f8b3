"""Checks of settings: numbers in a range, names among the known ones."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable

from scheduler_core.errors import InputError, unknown_name

#: Bounds of numbers that are positive, and of numbers that are finite.
POSITIVE, FINITE = 5e-324, sys.float_info.max
#: Largest number below 1, the upper bound of fractions.
BELOW_ONE = math.nextafter(1.0, 0.0)
#: Upper bound of integers that have none.
INTEGERS = sys.maxsize


def check_ranges(config: object, prefix: str = "", /, **ranges: tuple[float, float]) -> None:
    """Checks the fields of a configuration; None is allowed, NaN never.

    Args:
        config: Has the fields as attributes.
        prefix: Of the fields' names in an error.
        ranges: By field: the smallest and the largest value.

    Raises:
        InputError: Names the field, its value and the range.
    """
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
