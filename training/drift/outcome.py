"""One line of a stream: a prediction and what came of it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from scheduler_core.errors import InputError

UNNAMED = "(unnamed)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A prediction with its answer.

    Attributes:
        mu, sigma, nu: Predicted parameters of the log-t distribution, log tokens.
        output_tokens: Length of the answer; of a cut one the length it was cut at.
        finished: False: cut.
        served_model: Who answered.
        max_tokens: Cap on the answer, None if there is none.
        time: When, in whatever unit the stream uses; None if it does not say.
    """

    mu: float
    sigma: float
    output_tokens: int
    finished: bool
    nu: float = 3.5
    served_model: str = UNNAMED
    max_tokens: int | None = None
    time: float | str | None = None


def parse_outcome(line: str) -> Outcome:
    """Reads a JSON line.

    | key | value |
    |---|---|
    | mu, sigma | finite numbers, sigma above 0 |
    | nu | a number above 0; 3.5 if missing |
    | output_tokens | a whole number of at least 1 |
    | finished | true or false; if missing: whether output_tokens is below max_tokens (true without one) |
    | served_model | text; may be missing |
    | max_tokens | a whole number of at least output_tokens, or null; may be missing |
    | time | a number or text; may be missing |

    Raises:
        InputError: The line is not such an object; names the key.
    """
    try:
        content = json.loads(line, parse_constant=lambda name: math.nan)
    except (ValueError, RecursionError) as error:
        raise InputError("line", line[:80], f"a JSON object ({_first_line(error)})") from error
    if not isinstance(content, dict):
        raise InputError("line", line[:80], "a JSON object")
    tokens = _whole(content, "output_tokens", 1)
    assert tokens is not None
    cap = _whole(content, "max_tokens", tokens, optional=True)
    finished = content.get("finished")
    if finished is None:
        finished = cap is None or tokens < cap
    if not isinstance(finished, bool):
        raise InputError("finished", finished, "true or false")
    served = content.get("served_model")
    if served is not None and (not isinstance(served, str) or not served):
        raise InputError("served_model", served, "text that is not empty, or nothing")
    when = content.get("time")
    if when is not None and not isinstance(when, str | int | float):
        raise InputError("time", when, "a number or text")
    return Outcome(
        mu=_number(content, "mu"),
        sigma=_number(content, "sigma", positive=True),
        nu=_number({"nu": 3.5} | content, "nu", positive=True),
        output_tokens=tokens,
        finished=finished,
        served_model=served or UNNAMED,
        max_tokens=cap,
        time=None if isinstance(when, float) and not math.isfinite(when) else when,
    )


def _number(content: dict[str, Any], name: str, *, positive: bool = False) -> float:
    value = content.get(name)
    allowed = "a finite number above 0" if positive else "a finite number"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(name, value, allowed)
    try:
        number = float(value)
    except OverflowError as error:
        raise InputError(name, "a number of hundreds of digits", allowed) from error
    if not math.isfinite(number) or (positive and number <= 0):
        raise InputError(name, value, allowed)
    return number


def _whole(content: dict[str, Any], name: str, least: int, *, optional: bool = False) -> int | None:
    value = content.get(name)
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**53:
        raise InputError(name, value, f"a whole number of at least {least}")
    return value


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
