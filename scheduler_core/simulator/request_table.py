"""The table of requests of a run: one row per finished request and seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_core.simulator.column_file import Columns, read_columns, stacked, write_columns
from scheduler_core.simulator.records import LATENCIES, RequestRecord
from scheduler_core.simulator.request_columns import RequestColumns

SCHEMA = "tailcast.simulated_requests/3"
_KINDS: dict[str, Any] = {"int": np.int64, "float": np.float64, "str": object}
#: What a comparison by request reads.
COMPARED = ("seed", "request_id", "arrival_s", "prompt_tokens", "output_tokens", "tier", "tenant", *LATENCIES)


def request_columns(records: Sequence[RequestRecord], seed: int) -> Columns:
    """Columns [n]: the seed, all fields of `RequestRecord`, and its latencies; in the order of the records."""
    columns: Columns = {"seed": np.full(len(records), seed, np.int64)}
    for item in fields(RequestRecord):
        kind = _KINDS[str(item.type).removesuffix(" | None")]
        columns[item.name] = np.array([*map(attrgetter(item.name), records)], kind)
    latencies = RequestColumns.of(records)
    return columns | {name: getattr(latencies, name) for name in LATENCIES}


def write_table(parts: Sequence[Columns], path: str | Path) -> None:
    """Writes the tables of one or several seeds as one, as Parquet, CSV or JSON lines by the name's ending.

    Raises:
        InputError: See `check_table_path`.
    """
    write_columns(stacked(parts), path, SCHEMA, "requests")


def read_table(path: str | Path, field: str) -> Columns:
    """Reads the columns `COMPARED` of a Parquet table of requests.

    Raises:
        InputError: See `read_columns`.
    """
    return read_columns(path, COMPARED, SCHEMA, field)
