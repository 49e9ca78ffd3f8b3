"""Urgency labels: texts with a level, read from files and split by text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from data_gen.splits import split_of
from data_gen.tables import read_parquet, readable, require_columns
from data_gen.urgency.labels import level_number
from scheduler_core.errors import InputError
from scheduler_core.files import existing_file
from training.config import TrainConfig

#: Text -> its level, 0 the most urgent, and its weight in the loss, above 0.
UrgencyLabels = dict[str, tuple[int, float]]


def read_labels(path: str, levels: Sequence[str], field: str = "urgency_data") -> UrgencyLabels:
    """A file of labels: Parquet, or CSV or JSON lines by the end of its name; of several labels of a text the first.

    Args:
        path: The file, with columns text, level (a name out of `levels` or its number), optional weight.
        levels: Names, the most urgent first.
        field: Name of the option that gave the path, for messages.

    Raises:
        InputError: The file or a column is missing, or a value is not allowed; names the row.
    """
    table, name = _table(path, field), Path(path).name
    require_columns(table, ["text", "level"], f"{name}, columns")
    if table.num_rows == 0:
        raise InputError(f"{name}, rows", 0, "at least one labelled text")
    labels: UrgencyLabels = {}
    for number, row in enumerate(table.to_pylist()):
        text, weight = row["text"], row.get("weight", 1.0)
        level = level_number(row["level"], f"{name}, row {number}, column level", levels)
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"{name}, row {number}, column text", text, "text that is not empty")
        if not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise InputError(f"{name}, row {number}, column weight", weight, "finite numbers > 0")
        labels.setdefault(text, (level, float(weight)))
    return labels


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


def read_split_labels(config: TrainConfig) -> tuple[UrgencyLabels, UrgencyLabels]:
    """Labels of the training and of the validation split; both empty without an urgency head.

    Raises:
        InputError: A file cannot be used, or a split is empty.
    """
    if config.urgency is None:
        return {}, {}
    labels: dict[str, UrgencyLabels] = {"urgency_data": {}, "urgency_validation": {}}
    for field, joined in labels.items():
        for path in config.files[field]:
            joined |= read_labels(path, config.urgency.levels, field) | joined
    train, validation = labels.values()
    if config.files["urgency_validation"]:
        train = {text: label for text, label in train.items() if text not in validation}
    else:
        split = {text: split_of(text, config.split_seed, config.fractions) for text in train}
        train, validation = (
            {text: label for text, label in train.items() if split[text] == name}
            for name in ("train", "validation")
        )
    for name, part in (("train", train), ("validation", validation)):
        if not part:
            allowed = "at least one; other fractions or split_seed may help"
            raise InputError(f"labelled texts in the {name} split", 0, allowed)
    return train, validation
