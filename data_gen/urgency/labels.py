"""Labeled texts and their Parquet schema urgency/1, the input of `train --urgency_data`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_gen.splits import SPLITS, Split, split_of
from scheduler_core.errors import InputError
from scheduler_core.prediction.urgency import LEVELS
from scheduler_core.ranges import parse_number
from scheduler_core.shell.files import atomic_file, writable_target
from scheduler_core.shell.table_files import file_rows

SCHEMA_NAME = "urgency/1"
_DIGITS = re.compile(r"\s*[0-9]+\s*")
# Fixed, so that the split of a text depends only on the text.
SPLIT_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LabeledText:
    """A text and its urgency level."""

    text: str  # the input of the model
    level: int  # 0 (most urgent) to 4, an index of `scheduler_core.prediction.urgency.LEVELS`
    source: str  # origin of the label
    split: Split  # train, validation or test
    weight: float = 1.0  # weight in a loss, above 0; below 1 for labels that do not follow the rubric
    language: str | None = None  # ISO 639-1 code; None if unknown
    # Whether a claim of urgency was added to the text; the label is that of the text without the claim.
    claimed: bool = False


def text_split(text: str) -> Split:
    """The split of a text (60 % train, 20 % validation, 20 % test), by a stable hash of the text."""
    return split_of(text, SPLIT_SEED)


def level_number(value: object, location: str, levels: Sequence[str] = LEVELS) -> int:
    """Converts a number or a name in `levels` to a level; InputError with `location` for any other value."""
    if isinstance(value, str):
        value = (
            (*levels,).index(value) if value in levels else int(value) if _DIGITS.fullmatch(value) else value
        )
    if isinstance(value, bool) or not isinstance(value, int | float) or value not in range(len(levels)):
        raise InputError(location, value, f"0 to {len(levels) - 1}, or {', '.join(levels)}")
    return int(value)


def write_labels(path: str | Path, texts: Sequence[LabeledText]) -> None:
    """Writes at least one text to a Parquet file of schema urgency/1, atomically."""
    if not texts:
        raise InputError("labeled texts", 0, "at least one; try other sources or splits")
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [
            pa.field("text", pa.large_string(), nullable=False),
            pa.field("level", pa.int64(), nullable=False),
            pa.field("weight", pa.float64(), nullable=False),
            pa.field("source", pa.string(), nullable=False),
            pa.field("language", pa.string()),
            pa.field("split", pa.string(), nullable=False),
            pa.field("claimed", pa.bool_(), nullable=False),
        ],
        metadata={"schema": SCHEMA_NAME},
    )
    target = writable_target(path, "out")
    columns = {name: [getattr(text, name) for text in texts] for name in schema.names}
    with atomic_file(target) as temporary:
        pq.write_table(pa.table(columns, schema=schema), temporary, compression="zstd")


def read_labels(
    path: str | Path,
    field: str = "data",
    mapping: Mapping[str, str] | None = None,
    levels: Sequence[str] = LEVELS,
) -> list[LabeledText]:
    """Reads a table with columns text and level; the other columns of urgency/1 are optional.

    The default split of a row is that of its text (`text_split`), and the default source is the name of the file.

    Args:
        path: Parquet, CSV, JSON lines or a JSON array.
        field: Name of the option with the path, for error messages.
        mapping: Value of the column label -> level, for a file without a column level.
        levels: Names of the levels, the most urgent first.

    Raises:
        InputError: The file, a column or a value is invalid; the message names the row.
    """
    name = Path(path).name
    texts: list[LabeledText] = []
    for number, row in file_rows(path, field):
        if not texts:
            has_label = bool(mapping) and "level" not in row
            names = {"text", "label" if has_label else "level"}
            if missing := names - set(row):
                raise InputError(f"{name}, columns", list(row), f"also {', '.join(sorted(missing))}")
        location = f"{name}, row {number}, column"
        values = {column: value for column, value in row.items() if value not in (None, "")}
        if has_label:
            assert mapping is not None
            if values.get("label") not in mapping:
                raise InputError(f"{location} label", values.get("label"), ", ".join(mapping))
            values["level"] = mapping[values["label"]]
        texts.append(_labeled_text(values, location, name, levels))
    if not texts:
        raise InputError(f"{name}, rows", 0, "at least one labeled text")
    return texts


def _labeled_text(
    values: Mapping[str, Any], location: str, file_name: str, levels: Sequence[str]
) -> LabeledText:
    text, weight = values.get("text"), values.get("weight", 1.0)
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{location} text", text, "text that is not empty")
    try:
        weight = parse_number(weight) if isinstance(weight, str) else weight
        number = math.nan if isinstance(weight, bool) else float(weight)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise InputError(f"{location} weight", weight, "a finite number above 0")
    split = values.get("split", text_split(text))
    if split not in SPLITS:
        raise InputError(f"{location} split", split, ", ".join(SPLITS))
    return LabeledText(
        text=text,
        level=level_number(values.get("level"), f"{location} level", levels),
        source=str(values.get("source", file_name)),
        split=split,
        weight=number,
        language=values.get("language"),
        claimed=bool(values.get("claimed", False)),
    )
