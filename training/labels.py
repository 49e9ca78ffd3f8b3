"""Urgency labels: texts with a level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data_gen.splits import SPLITS, split_of
from data_gen.tables import read_parquet, readable
from scheduler_core.errors import InputError
from scheduler_core.files import existing_file
from training.config import TrainConfig


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """L labelled texts.

    Attributes:
        texts: [L].
        level: 0 is the most urgent [L].
        weight: In the loss, above 0 [L].
    """

    texts: list[str]
    level: NDArray[np.int64]
    weight: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.texts)

    @classmethod
    def none(cls) -> Labels:
        """No labels."""
        return cls([], np.empty(0, dtype=np.int64), np.empty(0))

    def take(self, at: Sequence[int] | NDArray[np.intp]) -> Labels:
        """The labels at these positions."""
        chosen = np.asarray(at, dtype=np.int64)
        return Labels([self.texts[i] for i in chosen.tolist()], self.level[chosen], self.weight[chosen])


def read_labels(path: str, levels: Sequence[str], field: str = "urgency_data") -> Labels:
    """A file of labels: Parquet, or CSV or JSON lines by the end of its name.

    Args:
        path: The file, with columns text, level (a name out of `levels` or its number), optional weight.
        levels: Names, the most urgent first.
        field: Name of the option that gave the path, for messages.

    Raises:
        InputError: The file or a column is missing, or a value is not allowed; names the row.
    """
    table, name = _table(path, field), Path(path).name
    missing = [column for column in ("text", "level") if column not in table.column_names]
    if missing:
        raise InputError(f"{name}, columns", table.column_names, f"also {', '.join(missing)}")
    if table.num_rows == 0:
        raise InputError(f"{name}, rows", 0, "at least one labelled text")
    texts = table.column("text").to_pylist()
    found = [
        _level(value, levels, f"{name}, row {row}")
        for row, value in enumerate(table.column("level").to_pylist())
    ]
    weights = table.column("weight").to_pylist() if "weight" in table.column_names else [1.0] * len(texts)
    for row, (text, weight) in enumerate(zip(texts, weights, strict=True)):
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"{name}, row {row}, column text", text, "text that is not empty")
        if not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise InputError(f"{name}, row {row}, column weight", weight, "a finite number above 0")
    return Labels(texts, np.array(found, dtype=np.int64), np.array(weights, dtype=np.float64))


def _table(path: str, field: str) -> pa.Table:
    kind = Path(path).suffix.lower()
    if kind == ".csv":
        from pyarrow import csv

        with readable(existing_file(path, field), field, "CSV"):
            options = csv.ParseOptions(newlines_in_values=True)
            return csv.read_csv(path, parse_options=options)
    if kind in (".jsonl", ".json"):
        from pyarrow import json

        with readable(existing_file(path, field), field, "JSON lines"):
            return json.read_json(path)
    return read_parquet(path, field)


def _level(value: Any, levels: Sequence[str], where: str) -> int:
    if isinstance(value, str) and value in levels:
        return list(levels).index(value)
    if isinstance(value, str) and value.strip().isdigit():
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(levels):
        raise InputError(f"{where}, column level", value, f"0 to {len(levels) - 1}, or {', '.join(levels)}")
    return value


def join_labels(parts: Sequence[Labels]) -> Labels:
    """All labels; of a text that is there more than once, the first stays."""
    texts = [text for part in parts for text in part.texts]
    first: dict[str, int] = {}
    for at, text in enumerate(texts):
        first.setdefault(text, at)
    whole = Labels(
        texts, np.concatenate([part.level for part in parts]), np.concatenate([part.weight for part in parts])
    )
    return whole.take(list(first.values()))


def read_split_labels(config: TrainConfig) -> tuple[Labels, Labels]:
    """Labels of the training and of the validation split; both empty without an urgency head.

    Raises:
        InputError: A file cannot be used, or a split is empty.
    """
    if config.urgency is None:
        return Labels.none(), Labels.none()
    levels = config.urgency.levels
    train = join_labels([read_labels(path, levels) for path in config.urgency_files])
    if config.urgency_validation_files:
        found = [read_labels(path, levels, "urgency_validation") for path in config.urgency_validation_files]
        validation = join_labels(found)
        held_out = set(validation.texts)
        train = train.take([at for at, text in enumerate(train.texts) if text not in held_out])
    else:
        split = [split_of(text, config.split_seed, config.fractions) for text in train.texts]
        parts = {name: [at for at, found in enumerate(split) if found == name] for name in SPLITS}
        train, validation = train.take(parts["train"]), train.take(parts["validation"])
    for name, part in (("train", train), ("validation", validation)):
        if len(part) == 0:
            raise InputError(
                f"labelled texts in the {name} split",
                0,
                "at least one; other fractions or split_seed may help",
            )
    return train, validation
