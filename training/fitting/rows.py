"""Rows (prompt, served model, temperature) with their sampled lengths, as training and baselines use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.shell.table_files import convertible
from training.fitting.samples import GroupedLengths

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
SCHEMA = pa.schema(
    [
        ("prompt", pa.large_string()),
        ("prompt_id", pa.large_string()),
        ("model", pa.dictionary(pa.int32(), pa.large_string())),
        *((name, pa.float64()) for name in ("temperature", "weight", "max_tokens", "mu", "sigma")),
        ("lengths", pa.large_list(pa.int32())),
        ("finished", pa.large_list(pa.bool_())),
    ]
)


class Rows:
    """N rows of P distinct prompts, with S samples in total; rows of the same prompt are adjacent.

    Built from a table of `SCHEMA` with at least one sample in each row; rows with equal text share a prompt. temperature
    [N] is NaN if unknown; weight [N] is the weight in the loss; max_tokens [N] is the length at which samples of the row
    are truncated, infinite if unknown; mu and sigma [N] are fitted parameters, NaN if not fitted.
    """

    def __init__(self, table: pa.Table) -> None:
        prompts = table["prompt"].combine_chunks().dictionary_encode()
        codes = np.asarray(prompts.indices)
        order = np.argsort(codes, kind="stable")
        self.table = table = table.take(order)  # sorted by prompt in order of first appearance
        self.prompts: list[str] = prompts.dictionary.to_pylist()  # texts, all different [P]
        self.prompt: IntArray = codes[order].astype(np.int64)  # number of each row's prompt, ascending [N]
        first = np.searchsorted(self.prompt, np.arange(len(self.prompts)))
        self.prompt_ids: list[str] = table["prompt_id"].take(first).to_pylist()
        models = table["model"].combine_chunks()
        self.models: tuple[str, ...] = tuple(models.dictionary.to_pylist())  # names of served models [M]
        # Index of each row's served model in `models` + 1; 0 if unnamed [N].
        self.model: IntArray = np.asarray(models.indices.fill_null(-1)).astype(np.int64) + 1
        self.temperature, self.weight, self.max_tokens, self.mu, self.sigma = (
            table[name].to_numpy() for name in ("temperature", "weight", "max_tokens", "mu", "sigma")
        )
        lengths = table["lengths"].combine_chunks()
        # Samples of row r are lengths[offsets[r]:offsets[r + 1]]; the truncated length for censored samples.
        self.counts: IntArray = np.asarray(lengths.value_lengths()).astype(np.int64)
        self.offsets: IntArray = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self.counts)])
        self.lengths: NDArray[np.int32] = np.asarray(lengths.flatten())
        self.finished: NDArray[np.bool_] = np.asarray(table["finished"].combine_chunks().flatten())

    def __len__(self) -> int:
        return len(self.prompt)

    def row_means(self, values: NDArray[Any]) -> FloatArray:
        """Mean of values [S] over the samples of each row [N]."""
        return np.asarray(np.add.reduceat(values.astype(np.float64), self.offsets[:-1]) / self.counts)

    def take(self, rows: IntArray) -> Rows:
        """The rows at these positions; prompts without rows are dropped, but `models` is unchanged."""
        return Rows(self.table.take(rows))

    def weighted(self, weight: float) -> Rows:
        """The rows with this weight in the loss."""
        column = pa.array(np.full(len(self), weight))
        return Rows(self.table.set_column(self.table.schema.get_field_index("weight"), "weight", column))

    def where(self, mask: NDArray[np.bool_]) -> Rows:
        """The rows of the prompts for which the mask is true [P]."""
        return self.take(np.flatnonzero(mask[self.prompt]))


def join(parts: Sequence[Rows]) -> Rows:
    """Concatenates the rows of several files; rows with equal text share a prompt."""
    return Rows(pa.concat_tables([part.table for part in parts]).unify_dictionaries())


def rows_of(
    groups: GroupedLengths,
    mu: FloatArray | None = None,
    sigma: FloatArray | None = None,
    *,
    weight: float = 1.0,
) -> Rows:
    """Converts G groups with at least one sample each, and their fitted parameters [G] (NaN if not fitted), to rows.

    InputError, with the name of the group, if a prompt or a name is missing, or a temperature is not allowed.
    """
    missing = np.full(len(groups), np.nan)
    finished = groups.flat_finished
    columns = {
        "prompt": texts(groups, "prompt"),
        "prompt_id": texts(groups, "prompt_id"),
        "model": pa.nulls(len(groups), pa.large_string()),
        "temperature": _temperature(groups),
        "weight": np.full(len(groups), float(weight)),
        "max_tokens": shortest_limits(groups, finished),
        "mu": missing if mu is None else mu,
        "sigma": missing if sigma is None else sigma,
        "lengths": pa.LargeListArray.from_arrays(groups.offsets, groups.flat_lengths.astype(np.int32)),
        "finished": pa.LargeListArray.from_arrays(groups.offsets, finished),
    }
    if "model" in groups.rows.column_names:
        columns["model"] = texts(groups, "model")
    return Rows(pa.table(columns).cast(SCHEMA))


def texts(groups: GroupedLengths, name: str) -> pa.Array:
    """Values of a column as text; InputError if there is no such column, or a value is missing."""
    if name not in groups.rows.column_names:
        raise InputError(f"{groups.path.name}, columns", groups.rows.column_names, f"also {name}")
    values = groups.rows.column(name).combine_chunks()
    if values.null_count:
        row = groups.name(values.is_null().index(True).as_py())
        raise InputError(f"{groups.path.name}, group {row}, column {name}", None, "text")
    with convertible(groups.path.name):
        return values.cast(pa.large_string())


def _temperature(groups: GroupedLengths) -> FloatArray:
    if "temperature" not in groups.rows.column_names:
        return np.full(len(groups), np.nan)
    column, where = groups.rows.column("temperature"), f"{groups.path.name}, column temperature"
    kind = column.type
    if not (pa.types.is_null(kind) or pa.types.is_floating(kind) or pa.types.is_integer(kind)):
        raise InputError(where, str(kind), "numbers")
    values: FloatArray = column.cast(pa.float64()).fill_null(np.nan).to_numpy()
    wrong = np.flatnonzero((values < 0) | np.isinf(values))
    if len(wrong):
        row, value = groups.name(wrong[0]), float(values[wrong[0]])
        raise InputError(f"{where}, group {row}", value, "finite numbers >= 0, or null")
    return values


def shortest_limits(groups: GroupedLengths, finished: NDArray[np.bool_]) -> FloatArray:
    """Limit of each group's lengths in tokens [G]: the shortest censored length, else max_tokens, else infinite."""
    declared = np.array([np.inf if limit is None else limit for limit in groups.max_tokens], dtype=np.float64)
    censored = np.where(finished, np.inf, groups.flat_lengths.astype(np.float64))
    shortest = np.minimum.reduceat(censored, groups.offsets[:-1])
    return np.asarray(np.where(np.isfinite(shortest), shortest, declared), dtype=np.float64)
