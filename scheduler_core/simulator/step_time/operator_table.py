"""Step times from profiles: files with the time of every operator of a layer by the size of its input.

Source: Agrawal et al. 2024, "Vidur: A Large-Scale Simulation Framework for LLM Inference", sections 4.2 and 4.3; keys and
rounding as in its code (microsoft/vidur @ 7d47513).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.ranges import FINITE, check_ranges
from scheduler_core.shell.table_files import import_pyarrow
from scheduler_core.simulator.step_time.base import DecodeRun, PiecewiseRun, StepWork, total_of

#: Required operators whose time depends on the number of tokens, rounded up to a multiple of 8.
TOKEN_OPERATORS = (
    "attn_pre_proj", "attn_post_proj", "attn_rope", "mlp_up_proj", "mlp_down_proj", "mlp_act", "input_layernorm",
    "post_attention_layernorm", "add",
)  # fmt: skip
#: Cache sizes and numbers of tokens are rounded up to multiples of these.
KV_STEP, TOKEN_STEP = 64, 8
#: Time of a collective in addition to its profile, as in Vidur.
COLLECTIVE_OVERHEAD_MS = 0.02
SUFFIXES = (".csv", ".csv.gz", ".parquet")

Table = NDArray[np.float64]
#: Description of the indices of a table, and their units.
_Sizes = tuple[str, tuple[int, ...]]
_DECODES: _Sizes = ("decodes, mean context", (1, KV_STEP))
_CHUNKS: _Sizes = ("tokens before the chunks, root of their squared sizes", (KV_STEP, 1))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorTable:
    """t = num_layers * (tokens[N] + decode[D, K] + prefill[K', s]).

    N tokens in the step, D decodes, K the mean of their contexts including the new token, rounded down and then up to a
    multiple of 64; K' the sum over the chunks of the tokens before each, rounded up to multiples of 64; s the root of the
    sum of the squared chunk sizes, rounded. Embedding, output layer and host time are not included, as in the profiles.
    Copies to the host are not profiled and raise an error. In all tables NaN means that a size was not profiled.

    Attributes:
        tokens_s: Operators that only depend on the number of tokens, per layer: element N is the time of N tokens.
        decode_s: Attention of decodes per layer, [decodes, cache size / 64].
        prefill_s: Attention of prompts per layer, [cache size / 64, tokens of a chunk].
        batching_overhead: Relative slowdown of attention with several decodes or several chunks; Vidur uses
            0.1 for grouped-query attention.
    """

    num_layers: int
    tokens_s: Table
    decode_s: Table
    prefill_s: Table
    batching_overhead: float = 0.0
    _tokens_row: list[float] = field(init=False, repr=False)
    #: Cache of table rows as lists.
    _decode_rows: dict[int, list[float]] = field(init=False, repr=False, default_factory=dict)
    _prefill_rows: dict[int, list[float]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        check_ranges(self, num_layers=(1, 2**31), batching_overhead=(0, FINITE))
        object.__setattr__(self, "_tokens_row", self.tokens_s.tolist())

    def step_s(self, work: StepWork) -> float:
        if work.num_swapped_tokens:
            raise InputError(
                "num_swapped_tokens", work.num_swapped_tokens, "0, because copies are not profiled"
            )
        contexts, prefills = work.contexts, work.prefills
        num = len(contexts)
        if len(prefills) == 1:
            chunk = prefills[0]
            num_tokens = chunk.num_tokens
            index = (-(-chunk.start_token // KV_STEP), num_tokens)
        else:
            num_tokens = work.num_prefill_tokens
            row = sum([-(-chunk.start_token // KV_STEP) for chunk in prefills])
            squared = sum([chunk.num_tokens**2 for chunk in prefills])
            index = (row, round(math.sqrt(squared)))
        layer_s = 0.0
        if prefills:
            layer_s = self._attention(self.prefill_s, self._prefill_rows, index, len(prefills), _CHUNKS)
        layer_s += self._tokens(num_tokens + num)
        if num:
            layer_s += self._decode(num, total_of(contexts) // num + 1)
        return self.num_layers * layer_s

    def run(self, contexts: Sequence[int], start_s: float) -> DecodeRun:
        """The mean context grows by one token per step, so up to 64 consecutive steps take equally long."""
        num = len(contexts)
        mean = total_of(contexts) // num + 1
        tokens_s = self._tokens(num)

        def segment(step: int) -> tuple[float, int]:
            column = -(-(mean + step) // KV_STEP)
            each_s = self.num_layers * (tokens_s + self._decode(num, mean + step))
            return each_s, column * KV_STEP - mean + 1

        return PiecewiseRun(start_s, segment)

    def _tokens(self, num_tokens: int) -> float:
        seconds = self._tokens_row[num_tokens] if num_tokens < len(self._tokens_row) else math.nan
        if seconds != seconds:
            raise _not_profiled(self.tokens_s, (num_tokens,), "tokens", (1,))
        return seconds

    def _decode(self, num_decodes: int, mean_context: int) -> float:
        index = (num_decodes, -(-mean_context // KV_STEP))
        return self._attention(self.decode_s, self._decode_rows, index, num_decodes, _DECODES)

    def _attention(
        self, table: Table, rows: dict[int, list[float]], index: tuple[int, int], num: int, what: _Sizes
    ) -> float:
        """An entry of a table of attention, for `num` decodes or chunks."""
        first, second = index
        row = rows.get(first)
        if row is None:  # a list, because access to its items is several times faster
            row = rows[first] = table[first].tolist() if first < len(table) else []
        seconds = row[second] if second < len(row) else math.nan
        if seconds != seconds:
            raise _not_profiled(table, index, *what)
        return seconds * (1.0 + self.batching_overhead) if num > 1 else seconds


def _not_profiled(table: Table, index: tuple[int, ...], what: str, units: tuple[int, ...]) -> InputError:
    largest = tuple((size - 1) * unit for size, unit in zip(table.shape, units, strict=True))
    sizes = tuple(position * unit for position, unit in zip(index, units, strict=True))
    return InputError(what, sizes, f"sizes that were profiled, at most {largest}")


def read_operator_table(
    directory: str | Path, *, num_layers: int, tensor_parallel: int = 1, batching_overhead: float = 0.0
) -> OperatorTable:
    """Reads a profile with one file per operator.

    Columns are num_tokens and prediction for `TOKEN_OPERATORS`, attn_kv_cache_save and, with tensor parallelism,
    all_reduce; batch_size, kv_cache_size and prediction for attn_decode; kv_cache_size, prefill_chunk_size_squared
    and prediction for attn_prefill. `prediction` is the time of one layer in milliseconds; other columns are ignored.

    Args:
        directory: Folder of the files. Missing sizes raise an error when they are needed.
        num_layers: Number of layers of the model, or of one pipeline stage.
        tensor_parallel: Number of devices that share a layer; with more than 1 every layer has two collectives.
        batching_overhead: See `OperatorTable`.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise InputError("directory of a profile", str(directory), "an existing directory")
    if tensor_parallel <= 0:
        raise InputError("tensor_parallel", tensor_parallel, "integers > 0")
    rounded = [_by_tokens(folder, name) for name in TOKEN_OPERATORS]
    exact = _by_tokens(folder, "attn_kv_cache_save")
    collectives = [_by_tokens(folder, "all_reduce")] if tensor_parallel > 1 else []
    size = min(len(column) for column in [*rounded, exact, *collectives]) - 1
    size -= size % TOKEN_STEP  # larger sizes would be rounded up to one beyond the table
    keys = -(-np.arange(size + 1) // TOKEN_STEP) * TOKEN_STEP
    tokens_ms = exact[: size + 1] + np.sum([column[keys] for column in rounded], axis=0)
    for column in collectives:
        tokens_ms = tokens_ms + 2 * (column[keys] + COLLECTIVE_OVERHEAD_MS)
    decode = _read(folder, "attn_decode", ("batch_size", "kv_cache_size", "prediction"))
    prefill = _read(folder, "attn_prefill", ("prefill_chunk_size_squared", "kv_cache_size", "prediction"))
    prefill[:, 0] = np.rint(np.sqrt(prefill[:, 0]))
    return OperatorTable(
        num_layers=num_layers,
        tokens_s=tokens_ms * 1e-3,
        decode_s=_grid(decode, "attn_decode") * 1e-3,
        prefill_s=np.ascontiguousarray(_grid(prefill, "attn_prefill").T) * 1e-3,
        batching_overhead=batching_overhead,
    )


def _by_tokens(folder: Path, operator: str) -> Table:
    """Times of an operator; element n is the time of n tokens."""
    rows = _read(folder, operator, ("num_tokens", "prediction"))
    column = np.full(int(rows[:, 0].max()) + 1, np.nan)
    column[0] = 0.0
    column[rows[:, 0].astype(int)] = rows[:, 1]
    return column


def _grid(rows: Table, operator: str) -> Table:
    """Table [requests or chunk tokens, cache size / 64]; row 0 is 0."""
    sizes = rows[:, 1].astype(int)
    if np.any(sizes % KV_STEP):
        first = int(sizes[sizes % KV_STEP > 0][0])
        raise InputError(f"kv_cache_size of {operator}", first, f"multiples of {KV_STEP}")
    grid = np.full((int(rows[:, 0].max()) + 1, int(sizes.max()) // KV_STEP + 1), np.nan)
    grid[0] = 0.0
    grid[rows[:, 0].astype(int), sizes // KV_STEP] = rows[:, 2]
    return grid


def _read(folder: Path, operator: str, columns: tuple[str, ...]) -> Table:
    """The columns of an operator's file, [rows, columns]."""
    pa, pq = import_pyarrow()
    from pyarrow import csv

    file = next((file for suffix in SUFFIXES if (file := folder / f"{operator}{suffix}").is_file()), None)
    if file is None:
        raise InputError("profile", str(folder / operator), "a file that ends in " + ", ".join(SUFFIXES))
    try:
        is_parquet = file.suffix == ".parquet"
        read = pq.read_table(file, columns=[*columns]) if is_parquet else csv.read_csv(file)
        table = np.column_stack([read[name].to_numpy() for name in columns]).astype(float)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        allowed = f"a table with columns {', '.join(columns)} ({error})"
        raise InputError("profile", str(file), allowed) from error
    if not len(table) or not np.all(np.isfinite(table) & (table >= 0)):
        raise InputError("profile", str(file), "rows of numbers >= 0")
    return table
