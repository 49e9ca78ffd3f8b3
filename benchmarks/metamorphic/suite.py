"""The pairs of requests in `pairs.toml`, and their scores."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.prediction.prompt_text import ASSISTANT, SYSTEM, USER

PAIRS = Path(__file__).parent / "pairs.toml"
LANGUAGES = {"en": "English", "de": "German", "ja": "Japanese", "es": "Spanish"}
#: Kinds of this group have no order: none of their predictions should change.
CONTROLS = "controls"
_CHOICE = re.compile(r"\{([^{}|]*)\|([^{}|]*)(?:\|([\d.]+))?\}")
_MESSAGE = re.compile(rf"({SYSTEM}|{USER}|{ASSISTANT}): (.*)", re.DOTALL)
_OPTION = re.compile(r"(\w+) = (.+)", re.DOTALL)
_NUMBER = re.compile(r"\d+(?:[.,]\d{3})*")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two requests that differ in one place.

    Attributes:
        kind, group: What differs, and the row of the summary that it counts for.
        language: A key of `LANGUAGES`.
        short, long: Bodies of chat requests; the output of `long` should be longer, except in `CONTROLS`.
        factor: Larger amount over smaller amount; None without amounts.
    """

    kind: str
    group: str
    language: str
    short: dict[str, Any]
    long: dict[str, Any]
    factor: float | None


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of some pairs.

    Attributes:
        num: Number of pairs.
        right: Fraction of pairs whose longer request has the strictly larger median; None for controls.
        ratio: Median ratio of the medians, long over short; for controls larger over smaller.
        per_ten: Median of ratio ** (ln 10 / ln factor) over the pairs with amounts: the ratio for ten times the amount; None
            without amounts.
    """

    num: int
    right: float | None
    ratio: float
    per_ten: float | None


def read_pairs(file: Path = PAIRS) -> list[Pair]:
    """All pairs of a file, in its order; InputError for a line that is not a pair."""
    kinds = tomllib.loads(file.read_text(encoding="utf-8"))["kinds"]
    return [
        pair_of(line, kind["name"], kind["group"], language)
        for kind in kinds
        for language in LANGUAGES
        for line in kind.get(language, "").strip().splitlines()
    ]


def pair_of(line: str, kind: str, group: str, language: str) -> Pair:
    """The pair of a line of `pairs.toml`, whose head describes the format."""
    matches = [*_CHOICE.finditer(line)]
    if len(matches) != 1:
        raise InputError("line of pairs", line, "one {SHORT|LONG} or {SHORT|LONG|FACTOR}")
    [match] = matches
    short, long, factor = match.groups()
    amounts = _amount(short), _amount(long)
    if not factor and group != CONTROLS and all(amounts):
        factor = amounts[1] / amounts[0]
    before, after = line[: match.start()], line[match.end() :]
    bodies = _body(before + short + after), _body(before + long + after)
    return Pair(kind, group, language, *bodies, float(factor) if factor else None)


def scores_of(pairs: Sequence[Pair], medians: NDArray[np.float64]) -> Scores:
    """Scores of N >= 1 pairs from the medians of their requests, tokens [N, 2]: short, long."""
    logs = np.diff(np.log(medians), axis=1)[:, 0]
    is_control = np.array([pair.group == CONTROLS for pair in pairs])
    factors = np.array([pair.factor or math.nan for pair in pairs])
    per_ten = logs * math.log(10) / np.log(factors)
    has_amount = ~np.isnan(factors)
    ordered = logs[~is_control]
    return Scores(
        num=len(pairs),
        right=float(np.mean(ordered > 0)) if ordered.size else None,
        ratio=float(np.exp(np.median(np.where(is_control, np.abs(logs), logs)))),
        per_ten=float(np.exp(np.median(per_ten[has_amount]))) if has_amount.any() else None,
    )


def _body(line: str) -> dict[str, Any]:
    """The body of a request."""
    messages: list[dict[str, str]] = []
    options: dict[str, Any] = {}
    for part in line.split(" // "):
        if match := _MESSAGE.fullmatch(part):
            messages.append({"role": match[1], "content": match[2]})
        elif match := _OPTION.fullmatch(part):
            options[match[1]] = json.loads(match[2])
        else:
            messages.append({"role": USER, "content": part})
    return {"messages": messages} | options


def _amount(text: str) -> float:
    """The mean of the numbers in a text; 0 without one."""
    numbers = [float(re.sub(r"\D", "", number)) for number in _NUMBER.findall(text)]
    return float(np.mean(numbers)) if numbers else 0.0
