"""Rows of `samples/2` for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from data_gen.samples import SCHEMA

ROW = {
    "prompt_id": "p0", "prompt": "Hi", "category": "", "dataset": "", "model": "m", "temperature": 1.0, "top_p": 1.0,
    "seed": 0, "sample_index": 0, "max_tokens": 100, "prompt_tokens": 5, "output_tokens": 7, "finish_reason": "stop",
    "engine": "e", "engine_version": "1", "run_id": "r",
}  # fmt: skip


def sample_row(**values: Any) -> dict[str, Any]:
    """One sample; columns that are not named are those of a finished output."""
    return ROW | values


def to_table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """Samples as an Arrow table with the documented schema."""
    return pa.Table.from_pylist(list(rows), schema=SCHEMA)
