"""The columns of a samples file that a data card needs: lengths, and texts as integer codes; no prompts and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data_gen.tables import open_parquet, readable
from scheduler_core.errors import InputError

GROUP_COLUMNS = ("prompt_id", "model", "run_id", "temperature", "top_p")
SETTING_COLUMNS = ("engine", "engine_version", "model", "temperature", "top_p", "max_tokens")
_CODED = tuple(
    dict.fromkeys((*GROUP_COLUMNS, *SETTING_COLUMNS, "category", "dataset", "finish_reason", "error"))
)
_OF_OUTPUT = ("output_tokens", "finish_reason", "finished", "error", "ttft_s", "total_s")


@dataclass(frozen=True, slots=True)
class CodedColumn:
    """A column of texts: `codes` [rows] are indices of `names`; null is the empty text."""

    codes: NDArray[np.int64]
    names: Sequence[str]

    def filter(self, mask: NDArray[np.bool_]) -> CodedColumn:
        """The rows where `mask` is true."""
        return CodedColumn(self.codes[mask], self.names)


@dataclass(frozen=True, slots=True)
class CardRows:
    """Rows of a samples file.

    Attributes:
        columns: Coded columns; all of `GROUP_COLUMNS`, `SETTING_COLUMNS`, category, dataset, finish_reason and error.
        length: Tokens, [rows]; of a truncated output the length that is known.
        prompt_tokens: [rows], -1 where unknown.
        timings: (sum, count) of ttft_s and total_s.
        metadata: The file's own, e.g. its schema and the unit of its tokens.
    """

    columns: Mapping[str, CodedColumn]
    length: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    timings: Mapping[str, tuple[float, int]]
    metadata: Mapping[str, str]

    def has_reason(self, reason: str) -> NDArray[np.bool_]:
        """Whether each row has this finish_reason."""
        column = self.columns["finish_reason"]
        code = column.names.index(reason) if reason in column.names else -1
        return np.asarray(column.codes == code)

    def combined(self, names: Sequence[str]) -> NDArray[np.int64]:
        """One code [rows] for the values of several columns."""
        combined = np.zeros(len(self.length), np.int64)
        for name in names:
            column = self.columns[name]
            _, combined = np.unique(combined * len(column.names) + column.codes, return_inverse=True)
        return combined

    def outputs(self) -> CardRows:
        """The rows that are no failures."""
        mask = ~self.has_reason("error")
        columns = {name: column.filter(mask) for name, column in self.columns.items()}
        return CardRows(columns, self.length[mask], self.prompt_tokens[mask], self.timings, self.metadata)


def read_card_rows(path: str | Path) -> CardRows:
    """Reads a samples file: `samples/1`, `samples/2`, or lists of output_tokens with one row for each prompt.

    Raises:
        InputError: The file cannot be read, lacks a column, or holds no output.
    """
    file = open_parquet(path, "samples")
    name, names = Path(path).name, file.schema_arrow.names
    for column in ("prompt_id", "output_tokens"):
        if column not in names:
            raise InputError(f"{name}: columns", names, f"also {column}")
    used = [column for column in dict.fromkeys((*_CODED, *_OF_OUTPUT, "prompt_tokens")) if column in names]
    with file, readable(path, "samples", "Parquet"):
        table = file.read(columns=used)
    columns = _one_row_each({column: table.column(column).combine_chunks() for column in used}, name)
    num_rows = len(columns["output_tokens"])
    timings: dict[str, tuple[float, int]] = {}
    for timing in ("ttft_s", "total_s"):
        if timing in columns and columns[timing].null_count < num_rows:
            column = columns[timing]
            timings[timing] = (float(pc.sum(column).as_py()), num_rows - column.null_count)
    rows = CardRows(
        columns={column: _coded(columns.get(column), num_rows) for column in _CODED},
        length=_integers(columns["output_tokens"]),
        prompt_tokens=_integers(columns.get("prompt_tokens", pa.nulls(num_rows, pa.int64()))),
        timings=timings,
        metadata={
            key.decode().removeprefix("tailcast."): value.decode()
            for key, value in (file.schema_arrow.metadata or {}).items()
            if key.startswith(b"tailcast.")
        },
    )
    if rows.has_reason("error").all():
        raise InputError(name, f"{num_rows} failed rows", "at least one output")
    return rows


def _one_row_each(columns: dict[str, pa.Array], name: str) -> dict[str, pa.Array]:
    """Rows of lists expanded to one row for each output; in both forms with finish_reason."""
    lengths = columns["output_tokens"]
    if pa.types.is_list(lengths.type) or pa.types.is_large_list(lengths.type):
        parents = pc.list_parent_indices(lengths)
        expanded = {key: column.take(parents) for key, column in columns.items() if key not in _OF_OUTPUT}
        reasons = pa.nulls(len(parents), pa.string())
        if "finished" in columns:
            flags = pc.list_flatten(columns["finished"])
            if len(flags) != len(parents):
                allowed = f"one for each of {len(parents)} outputs"
                raise InputError(f"{name}: column finished", len(flags), allowed)
            reasons = pc.if_else(flags, "stop", "length")
        expanded["output_tokens"] = pc.list_flatten(lengths)
        return expanded | {"finish_reason": pc.fill_null(reasons, "unknown")}
    if "finish_reason" not in columns:
        raise InputError(f"{name}: columns", sorted(columns), "also finish_reason, or output_tokens as lists")
    return columns | {"finish_reason": pc.fill_null(columns["finish_reason"].cast(pa.string()), "unknown")}


def _coded(column: pa.Array | None, num_rows: int) -> CodedColumn:
    if column is None:
        return CodedColumn(np.zeros(num_rows, np.int64), [""])
    encoded = column.dictionary_encode()
    names = [*encoded.dictionary.cast(pa.string()).to_pylist(), ""]
    codes = pc.fill_null(encoded.indices, len(names) - 1).to_numpy(zero_copy_only=False)
    return CodedColumn(codes.astype(np.int64), names)


def _integers(column: pa.Array) -> NDArray[np.int64]:
    return np.asarray(pc.fill_null(column.cast(pa.int64()), -1).to_numpy(zero_copy_only=False))
