"""Reads the tables of an `OperatorTable` from files: one per operator, CSV (also gzipped) or Parquet, times in ms."""

from __future__ import annotations

import gzip
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.simulator.operator_table import KV_STEP, TOKEN_OPERATORS, TOKEN_STEP, OperatorTable

SUFFIXES = (".csv", ".csv.gz", ".parquet")

Table = NDArray[np.float64]


def read_operator_table(
    directory: str | Path,
    *,
    num_layers: int,
    tensor_parallel: int = 1,
    batching_overhead: float = 0.0,
    collective_overhead_s: float = 2e-5,
) -> OperatorTable:
    """Reads one file per operator.

    `<operator>` with columns num_tokens, prediction for those of `TOKEN_OPERATORS` and attn_kv_cache_save, and all_reduce
    if there is tensor parallelism; attn_decode with batch_size, kv_cache_size, prediction; attn_prefill with kv_cache_size,
    prefill_chunk_size_squared, prediction. `prediction` is the time of one layer in milliseconds; other columns may
    follow.

    Args:
        directory: Where the files are.
        num_layers: Layers of the model (of one stage, if they are spread over several).
        tensor_parallel: Devices that share a layer; above 1 every layer has two collectives.
        batching_overhead: See `OperatorTable`.
        collective_overhead_s: Time that each collective takes beside its profile; Vidur takes 0.02 ms.

    Raises:
        InputError: A file is missing or cannot be read. Sizes that a table lacks are an error when they are needed.
        MissingExtraError: A file is Parquet, and pyarrow is not installed.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise InputError("directory of a profile", str(directory), "an existing directory")
    if tensor_parallel <= 0:
        raise InputError("tensor_parallel", tensor_parallel, "integers > 0")
    rounded = [_by_tokens(folder, name) for name in TOKEN_OPERATORS]
    exact = _by_tokens(folder, "attn_kv_cache_save")
    collectives = [_by_tokens(folder, "all_reduce")] if tensor_parallel > 1 else []
    most = min(len(column) for column in [*rounded, exact, *collectives]) - 1
    most -= most % TOKEN_STEP  # larger sizes would be rounded up to one beyond the table
    keys = -(-np.arange(most + 1) // TOKEN_STEP) * TOKEN_STEP
    tokens_ms = exact[: most + 1] + np.sum([column[keys] for column in rounded], axis=0)
    for column in collectives:
        tokens_ms = tokens_ms + 2 * (column[keys] + collective_overhead_s * 1e3)
    decode = _grid(_read(folder, "attn_decode", ("batch_size", "kv_cache_size", "prediction")), "attn_decode")
    return OperatorTable(
        num_layers=num_layers,
        tokens_s=tokens_ms * 1e-3,
        decode_s=decode * 1e-3,
        prefill_s=_prefill_grid(folder) * 1e-3,
        batching_overhead=batching_overhead,
    )


def _by_tokens(folder: Path, operator: str) -> Table:
    """Element n is the time of n tokens."""
    rows = _read(folder, operator, ("num_tokens", "prediction"))
    most = int(rows[:, 0].max())
    column = np.full(most + 1, np.nan)
    column[0] = 0.0
    column[rows[:, 0].astype(int)] = rows[:, 1]
    return column


def _grid(rows: Table, operator: str) -> Table:
    """Number of requests by cache size in units of 64; row 0 is no request."""
    sizes = rows[:, 1].astype(int)
    if np.any(sizes % KV_STEP):
        raise InputError(
            f"kv_cache_size of {operator}", int(sizes[sizes % KV_STEP > 0][0]), f"multiples of {KV_STEP}"
        )
    grid = np.full((int(rows[:, 0].max()) + 1, int(sizes.max()) // KV_STEP + 1), np.nan)
    grid[0] = 0.0
    grid[rows[:, 0].astype(int), sizes // KV_STEP] = rows[:, 2]
    return grid


def _prefill_grid(folder: Path) -> Table:
    """Cache size in units of 64 by tokens of the chunk; column 0 is no chunk."""
    columns = ("prefill_chunk_size_squared", "kv_cache_size", "prediction")
    rows = _read(folder, "attn_prefill", columns)
    rows[:, 0] = np.rint(np.sqrt(rows[:, 0]))
    return np.ascontiguousarray(_grid(rows, "attn_prefill").T)


def _read(folder: Path, operator: str, columns: tuple[str, ...]) -> Table:
    """The named columns of an operator's file, [rows, columns]."""
    for suffix in SUFFIXES:
        file = folder / f"{operator}{suffix}"
        if file.is_file():
            try:
                table = _parquet(file, columns) if suffix == ".parquet" else _csv(file, columns)
            except (OSError, ValueError, KeyError, EOFError) as error:
                raise InputError(
                    "profile", str(file), f"a table with columns {', '.join(columns)} ({error})"
                ) from error
            if len(table) and bool(np.isfinite(table).all()) and bool((table >= 0).all()):
                return table
            raise InputError("profile", str(file), "rows of numbers >= 0")
    raise InputError("profile", str(folder / operator), "a file that ends in " + ", ".join(SUFFIXES))


def _csv(file: Path, columns: tuple[str, ...]) -> Table:
    """Plain numbers without quotes, in every column."""
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", encoding="utf-8") as stream:
        names = stream.readline().strip().split(",")
        text = stream.read().rstrip().replace("\n", ",")
    places = [names.index(name) for name in columns]
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)  # how numpy tells of what is no number
        try:
            numbers = np.fromstring(text, sep=",")
        except DeprecationWarning as warning:
            raise ValueError("cells that are not numbers") from warning
    if len(numbers) % len(names):
        raise ValueError(f"rows that are not of {len(names)} columns")
    return numbers.reshape(-1, len(names))[:, places]


def _parquet(file: Path, columns: tuple[str, ...]) -> Table:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("pyarrow", "sim") from error
    table = pq.read_table(file, columns=list(columns))
    return np.column_stack([table[name].to_numpy() for name in columns]).astype(float)
