"""Arguments in, results out: what the length distributions accept and how they refuse the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scheduler_core.errors import InputError

FloatArray = NDArray[np.float64]
#: Which rows of a column.
Rows = slice | NDArray[np.intp]


def unwrap(array: Any) -> FloatArray:
    """A numpy scalar for a result without dimensions, the array otherwise."""
    result: FloatArray = np.asarray(array)[()]
    return result


def parameter(name: str, value: ArrayLike, *, positive: bool, finite: bool = True) -> FloatArray:
    """A read-only copy of a distribution's parameter.

    Raises:
        InputError: An element is NaN, infinite where `finite`, or not above 0 where `positive`.
    """
    array = np.array(value, dtype=np.float64)
    wrong = np.isnan(array) | (np.isinf(array) & (finite | (array < 0)))
    if positive:
        wrong |= array <= 0
    if wrong.any():
        kind = "finite numbers" if finite else "numbers or inf,"
        raise InputError(name, float(array[wrong].flat[0]), f"{kind} > 0" if positive else kind)
    array.setflags(write=False)
    return array


def tokens(name: str, value: ArrayLike, *, positive: bool = False) -> FloatArray:
    """Numbers of tokens, >= 0, or > 0 where `positive`.

    Raises:
        InputError: An element is not.
    """
    array = np.asarray(value, dtype=np.float64)
    wrong = ~(np.isfinite(array) & ((array > 0) if positive else (array >= 0)))
    if wrong.any():
        allowed = f"finite numbers {'>' if positive else '>='} 0, in tokens"
        raise InputError(name, float(array[wrong].flat[0]), allowed)
    return array


def probability(name: str, value: ArrayLike, *, below_one: bool = False) -> FloatArray:
    """Numbers in [0, 1], or in [0, 1) where `below_one`.

    Raises:
        InputError: An element is not.
    """
    array = np.asarray(value, dtype=np.float64)
    wrong = ~((array >= 0) & ((array < 1) if below_one else (array <= 1)))
    if wrong.any():
        raise InputError(
            name, float(array[wrong].flat[0]), "numbers in [0, 1)" if below_one else "numbers in [0, 1]"
        )
    return array


def broadcast(named: dict[str, FloatArray]) -> tuple[FloatArray, ...]:
    """The arrays, broadcast against each other.

    Raises:
        InputError: Their shapes do not fit.
    """
    try:
        return tuple(np.broadcast_arrays(*named.values()))
    except ValueError as error:
        shapes = tuple(array.shape for array in named.values())
        raise InputError(", ".join(named), shapes, "shapes that broadcast against each other") from error
