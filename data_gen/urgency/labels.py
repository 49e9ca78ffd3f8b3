"""Labelled texts and the Parquet file that carries them (schema urgency/1), which `train --urgency-data` reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_gen.splits import SPLITS, Split, split_of
from data_gen.tables import read_parquet, require_columns
from scheduler_core.errors import InputError
from scheduler_core.files import atomic_file, writable_target
from scheduler_core.urgency import LEVELS

SCHEMA_NAME = "urgency/1"
# A text's split never changes: it is decided by the text alone.
SPLIT_SEED = 0

SCHEMA = pa.schema(
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledText:
    """A text and how urgent it is.

    Attributes:
        text: What the model is sent.
        level: 0 (most urgent) to 4, an index of `scheduler_core.urgency.LEVELS`.
        source: Where the label comes from.
        split: train, validation or test.
        weight: In a loss, above 0; below 1 for labels that were not made by the rubric.
        language: ISO 639-1 code; None if unknown.
        claimed: A claim of urgency was added to the text; the label is that of the text without it.
    """

    text: str
    level: int
    source: str
    split: Split
    weight: float = 1.0
    language: str | None = None
    claimed: bool = False

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise InputError("text", self.text, "text that is not empty")
        if isinstance(self.level, bool) or not 0 <= self.level < len(LEVELS):
            raise InputError("level", self.level, f"0 to {len(LEVELS) - 1}")
        if not 0 < self.weight < float("inf"):
            raise InputError("weight", self.weight, "a finite number above 0")
        if self.split not in SPLITS:
            raise InputError("split", self.split, ", ".join(SPLITS))


def text_split(text: str) -> Split:
    """The split of a text: 60 % train, 20 % validation, 20 % test, by a stable hash of the text alone."""
    return split_of(text, SPLIT_SEED)


def level_number(value: object, where: str) -> int:
    """The level that a name or a number stands for.

    Raises:
        InputError: It is none; names `where`.
    """
    if isinstance(value, str) and value in LEVELS:
        return LEVELS.index(value)
    if isinstance(value, str) and value.strip().isdigit():
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(LEVELS):
        raise InputError(where, value, f"0 to {len(LEVELS) - 1}, or {', '.join(LEVELS)}")
    return value


def write_labels(path: str | Path, texts: Sequence[LabelledText]) -> None:
    """Writes the texts as a Parquet file of schema urgency/1, atomically.

    Raises:
        InputError: There are none, or the path cannot be written.
    """
    if not texts:
        raise InputError("labelled texts", 0, "at least one; other sources or splits may help")
    target = writable_target(path, "out")
    columns = {field.name: [getattr(text, field.name) for text in texts] for field in SCHEMA}
    with atomic_file(target) as temporary:
        pq.write_table(pa.table(columns, schema=SCHEMA), temporary, compression="zstd")


def read_labels(path: str | Path, field: str = "data") -> list[LabelledText]:
    """Reads a Parquet file with columns text and level, and of the others of urgency/1 those it has.

    A row without a split gets the one of its text, a row without a source the file's name.

    Raises:
        InputError: The file, a column or a value cannot be used; names the row.
    """
    table = read_parquet(path, field)
    name = Path(path).name
    require_columns(table, ["text", "level"], f"{name}, columns")
    if table.num_rows == 0:
        raise InputError(f"{name}, rows", 0, "at least one labelled text")
    wanted = [column.name for column in SCHEMA if column.name in table.column_names]
    return [
        _row(values, f"{name}, row {row}", name)
        for row, values in enumerate(table.select(wanted).to_pylist())
    ]


def _row(values: dict[str, Any], where: str, file_name: str) -> LabelledText:
    found = {name: value for name, value in values.items() if value is not None}
    text, weight = found.get("text"), found.get("weight", 1.0)
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{where}, column text", text, "text that is not empty")
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise InputError(f"{where}, column weight", weight, "a finite number above 0")
    level = level_number(found.get("level"), f"{where}, column level")
    try:
        return LabelledText(
            text=text,
            level=level,
            source=str(found.get("source", file_name)),
            split=found.get("split", text_split(text)),
            weight=float(weight),
            language=found.get("language"),
            claimed=bool(found.get("claimed", False)),
        )
    except InputError as error:
        raise InputError(f"{where}, column {error.field}", error.value, error.allowed) from error
