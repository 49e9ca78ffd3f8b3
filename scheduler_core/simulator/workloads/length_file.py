"""Lengths in a file: rows of a trace, or fitted log-t distributions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.files import existing_file
from scheduler_core.simulator.row_file import parquet_file, text_rows
from scheduler_core.simulator.trace import MAX_TIME_S, MAX_TOKENS

_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "mu", "sigma", "nu")


@dataclass(frozen=True, slots=True, eq=False)
class LengthRows:
    """Columns of a file of lengths.

    Attributes:
        source: The file.
        prompt_tokens: Prompts; [N], or None if the file has no such column.
        output_tokens: Answers; [N], or None.
        laws: mu, sigma, nu of the answers' log-t laws; [3, N], or None.
        arrival_s: Arrivals in seconds; [N], or None.
    """

    source: str
    prompt_tokens: NDArray[np.int64] | None
    output_tokens: NDArray[np.int64] | None
    laws: NDArray[np.float64] | None
    arrival_s: NDArray[np.float64] | None

    def __len__(self) -> int:
        column = self.output_tokens if self.output_tokens is not None else self.laws
        assert column is not None
        return int(column.shape[-1])

    def arrivals(self) -> NDArray[np.float64]:
        """Arrival times from 0, ascending.

        Raises:
            InputError: The file has none, or they do not ascend.
        """
        if self.arrival_s is None:
            raise InputError("lengths.file", self.source, "a file with arrival_s in all rows")
        times = self.arrival_s - self.arrival_s[0]
        if np.any(np.diff(times) < 0):
            raise InputError("lengths.file", self.source, "a file in the order of arrival")
        return np.asarray(times)


def read_lengths(path: str) -> LengthRows:
    """Reads a file of lengths: .parquet, .csv or .jsonl with a column output_tokens, or with mu and sigma (and nu, else
    3.5); optional prompt_tokens and arrival_s. A file that has not changed is read once.

    Raises:
        InputError: The file is missing, or a column is missing, empty somewhere or not above 0.
    """
    file = existing_file(path, "lengths.file")
    return _read(str(file), file.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _read(path: str, _changed: int) -> LengthRows:
    table = _columns(Path(path))
    prompt, output = (_tokens(path, table, name) for name in ("prompt_tokens", "output_tokens"))
    laws = None
    if output is None:
        laws = _laws(path, table)
    arrival = table.get("arrival_s")
    if arrival is not None and not np.all(np.abs(arrival) <= MAX_TIME_S):
        bad = arrival[~(np.abs(arrival) <= MAX_TIME_S)]
        if not np.all(np.isnan(bad)):
            raise InputError("lengths.file", path, f"arrival_s up to {MAX_TIME_S:g} in all rows")
        arrival = None
    return LengthRows(path, prompt, output, laws, arrival)


def _laws(path: str, table: dict[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    if "mu" not in table or "sigma" not in table:
        raise InputError("lengths.file", path, "a file with a column output_tokens, or with mu and sigma")
    nu = table.get("nu", np.full_like(table["mu"], 3.5))
    laws = np.stack([table["mu"], table["sigma"], nu])
    if not np.all(np.isfinite(laws)) or np.any(laws[1:] <= 0):
        raise InputError("lengths.file", path, "finite mu, sigma and nu above 0 in all rows")
    return laws


def _tokens(path: str, table: dict[str, NDArray[np.float64]], name: str) -> NDArray[np.int64] | None:
    column = table.get(name)
    if column is None or np.all(np.isnan(column)):
        return None
    bad = np.flatnonzero(~((column >= 1) & (column <= MAX_TOKENS)) | (column != np.floor(column)))
    if len(bad):
        where = f"{Path(path).name} row {bad[0] + 1} column {name}"
        raise InputError(where, float(column[bad[0]]), f"integers from 1 to {MAX_TOKENS}")
    return column.astype(np.int64)


def _columns(file: Path) -> dict[str, NDArray[np.float64]]:
    """The columns of interest as numbers, what is empty as NaN."""
    if file.suffix == ".parquet":
        columns = _parquet(file)
    elif file.suffix in (".csv", ".jsonl"):
        columns = _numbers(file)
    else:
        raise InputError("lengths.file", file.name, "a name that ends in .parquet, .csv or .jsonl")
    if not columns or not len(next(iter(columns.values()))):
        raise InputError("lengths.file", str(file), "a file with at least one row and a column of lengths")
    return columns


def _numbers(file: Path) -> dict[str, NDArray[np.float64]]:
    rows = list(text_rows(file, "lengths.file"))
    names = [name for name in _COLUMNS if rows and name in rows[0]]
    try:
        return {
            name: np.array([math.nan if row[name] in (None, "") else float(row[name]) for row in rows])
            for name in names
        }
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError("lengths.file", str(file), f"numbers in all rows ({error})") from error


def _parquet(file: Path) -> dict[str, NDArray[np.float64]]:
    with parquet_file(file, "lengths.file") as parquet:
        names = [name for name in parquet.schema_arrow.names if name in _COLUMNS]
        table = parquet.read(columns=names)
        return {name: np.asarray(table[name].cast("float64").to_numpy(), float) for name in names}
