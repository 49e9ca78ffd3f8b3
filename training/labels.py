"""Urgency labels: texts with a level, read from files and split by text."""

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
class UrgencyLabels:
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
    def none(cls) -> UrgencyLabels:
        """No labels."""
        return cls([], np.empty(0, dtype=np.int64), np.empty(0))

    def take(self, index: Sequence[int]) -> UrgencyLabels:
        """The labels at these positions."""
        positions = np.asarray(index, dtype=np.int64)
        return UrgencyLabels([self.texts[at] for at in index], self.level[positions], self.weight[positions])


def read_labels(path: str, levels: Sequence[str], field: str = "urgency_data") -> UrgencyLabels:
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
    numbers = [
        _level(value, levels, f"{name}, row {row}")
        for row, value in enumerate(table.column("level").to_pylist())
    ]
    weights = table.column("weight").to_pylist() if "weight" in table.column_names else [1.0] * len(texts)
    for row, (text, weight) in enumerate(zip(texts, weights, strict=True)):
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"{name}, row {row}, column text", text, "text that is not empty")
        if not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise InputError(f"{name}, row {row}, column weight", weight, "finite numbers > 0")
    return UrgencyLabels(texts, np.array(numbers, dtype=np.int64), np.array(weights, dtype=np.float64))


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


def join_labels(parts: Sequence[UrgencyLabels]) -> UrgencyLabels:
    """All labels; of several for one text the first."""
    texts = [text for part in parts for text in part.texts]
    first: dict[str, int] = {}
    for at, text in enumerate(texts):
        first.setdefault(text, at)
    level, weight = (np.concatenate([getattr(part, name) for part in parts]) for name in ("level", "weight"))
    return UrgencyLabels(texts, level, weight).take(list(first.values()))


def read_split_labels(config: TrainConfig) -> tuple[UrgencyLabels, UrgencyLabels]:
    """Labels of the training and of the validation split; both empty without an urgency head.

    Raises:
        InputError: A file cannot be used, or a split is empty.
    """
    if config.urgency is None:
        return UrgencyLabels.none(), UrgencyLabels.none()
    levels = config.urgency.levels
    train = join_labels([read_labels(path, levels) for path in config.files["urgency_data"]])
    if files := config.files["urgency_validation"]:
        validation = join_labels([read_labels(path, levels, "urgency_validation") for path in files])
        held_out = set(validation.texts)
        train = train.take([at for at, text in enumerate(train.texts) if text not in held_out])
    else:
        parts: dict[str, list[int]] = {name: [] for name in SPLITS}
        for at, text in enumerate(train.texts):
            parts[split_of(text, config.split_seed, config.fractions)].append(at)
        train, validation = train.take(parts["train"]), train.take(parts["validation"])
    for name, part in (("train", train), ("validation", validation)):
        if len(part) == 0:
            raise InputError(
                f"labelled texts in the {name} split",
                0,
                "at least one; other fractions or split_seed may help",
            )
    return train, validation
