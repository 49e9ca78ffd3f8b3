"""The prompts of a data file, parted: some calibrate, the others judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.files import existing_file

#: At most this share of the prompts calibrates.
SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class Row:
    """What a prediction is asked for."""

    prompt: str
    served_model: str | None
    temperature: float | None


@dataclass(frozen=True, slots=True)
class PartedPrompts:
    """Prompts of a file.

    Attributes:
        calibration: Different prompts that calibrate.
        judging: Rows with other prompts, one per prompt.
        file: The rows of the data file with those other prompts, all answers, as written for `evaluate`.
    """

    calibration: tuple[str, ...]
    judging: tuple[Row, ...]
    file: Path


def part_prompts(path: str, target: Path, num_calibration: int, rng: np.random.Generator) -> PartedPrompts:
    """Parts a data file by prompt.

    Args:
        path: Parquet file with a column prompt.
        target: Where the rows that judge are written.
        num_calibration: Most prompts that calibrate.
        rng: Draws them.

    Raises:
        InputError: The file has no prompts, or fewer than three.
        MissingExtraError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("pyarrow", "train") from error
    try:
        table = pq.read_table(existing_file(path, "data"))
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError("data", path, f"a Parquet file ({error})") from error
    if "prompt" not in table.column_names or table["prompt"].null_count == len(table):
        raise InputError("data, columns", table.column_names, "also prompt, with text")
    prompts = sorted(set(table["prompt"].drop_null().to_pylist()))
    if len(prompts) < 3:
        raise InputError(
            "data", f"{len(prompts)} different prompts", "at least 3, some to calibrate, some to judge"
        )
    count = max(1, min(num_calibration, int(len(prompts) * SHARE)))
    chosen = [prompts[number] for number in rng.choice(len(prompts), count, replace=False)]
    judged = table.filter(pc.invert(pc.is_in(table["prompt"], pa.array(chosen))))
    pq.write_table(judged, target)
    return PartedPrompts(tuple(chosen), tuple(_one_per_prompt(judged)), target)


def _one_per_prompt(table: Any) -> Sequence[Row]:
    columns = [
        table[name].to_pylist() if name in table.column_names else [None] * len(table)
        for name in ("prompt", "model", "temperature")
    ]
    rows: dict[str, list[Row]] = {}
    for prompt, model, temperature in zip(*columns, strict=True):
        if prompt is not None:
            rows.setdefault(prompt, []).append(Row(prompt, model, _known(temperature)))
    # Another served model from prompt to prompt, so that all of them take part.
    return [found[number % len(found)] for number, found in enumerate(rows.values())]


def _known(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else float(value)
