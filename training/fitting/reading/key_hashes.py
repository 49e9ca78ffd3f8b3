"""64-bit hashes of group keys: which rows may belong together, without holding the keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

_SEED = 20240229
_ONE_WORD = np.uint64(0x9E3779B97F4A7C15)


def key_hashes(columns: Sequence[pa.Array]) -> Hashes:
    """Hashes [N] of rows by the values of key columns [N]; equal rows have equal hashes on every machine.

    Texts are hashed by a multilinear function of their bytes with fixed random 64-bit factors (Carter and Wegman 1981;
    two different texts collide with probability below 2^-56 over the factors), numbers by their text.
    """
    found = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        encoded = column.dictionary_encode(null_encoding="encode")
        values = _text_hashes(encoded.dictionary)
        found = _mixed(found * _ONE_WORD + values[encoded.indices.to_numpy(zero_copy_only=False)])
    return found


def _text_hashes(values: Any) -> Hashes:
    binary = pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type)
    texts = (values if binary else values.cast(pa.large_string())).cast(pa.large_binary())
    texts = pc.fill_null(texts, b"")
    lengths = pc.binary_length(texts).to_numpy(zero_copy_only=False).astype(np.int64)
    if len(texts) == 0:
        return np.empty(0, dtype=np.uint64)
    joined = pa.concat_arrays([texts])
    start = np.frombuffer(joined.buffers()[1], dtype=np.int64)[joined.offset]
    data = joined.buffers()[2]
    size = int(lengths.sum())
    content = np.empty(0, dtype=np.uint8)
    if data is not None:
        content = np.frombuffer(data, dtype=np.uint8)[start : start + size]
    starts = np.cumsum(lengths) - lengths
    factors = np.random.default_rng(_SEED).integers(
        0, 2**64, size=int(lengths.max()) + 1, dtype=np.uint64, endpoint=False
    )
    position = np.arange(size) - np.repeat(starts, lengths)
    products = (content.astype(np.uint64) + np.uint64(1)) * factors[position]
    sums = np.zeros(len(lengths), dtype=np.uint64)
    filled = lengths > 0
    if size:
        sums[filled] = np.add.reduceat(products, starts[filled])
    return _mixed(sums + lengths.astype(np.uint64) * _ONE_WORD)


def _mixed(words: Hashes) -> Hashes:
    """Spreads all bits over all bits (the finaliser of splitmix64, Steele et al. 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class SeenHashes:
    """A growing set of hashes in 8 bytes each, as sorted runs of which the next is at most half as long."""

    def __init__(self) -> None:
        self._runs: list[Hashes] = []

    def __len__(self) -> int:
        return sum(len(run) for run in self._runs)

    def add(self, hashes: Hashes) -> Hashes:
        """Adds hashes and returns those that were there before, or are twice among the new ones."""
        new = np.sort(hashes)
        repeated = [new[1:][new[1:] == new[:-1]]]
        for run in self._runs:
            at = np.minimum(np.searchsorted(run, new), len(run) - 1)
            repeated.append(new[run[at] == new])
        self._runs.append(new)
        while len(self._runs) > 1 and len(self._runs[-2]) < 2 * len(self._runs[-1]):
            last = self._runs.pop()
            merged = np.concatenate([self._runs.pop(), last])
            merged.sort(kind="stable")
            self._runs.append(merged)
        return np.unique(np.concatenate(repeated))


def first_repeat(
    batches: Iterable[pa.RecordBatch], keys: Sequence[str], suspects: Hashes
) -> tuple[int, int, dict[str, Any]] | None:
    """The first two rows with the same keys, none of them null, among rows with a hash of `suspects`, or None.

    Args:
        batches: With the key columns.
        keys: Their names.
        suspects: Hashes that occurred more than once.

    Returns:
        Both rows, and the keys by name.
    """
    seen: dict[tuple[Any, ...], int] = {}
    start = 0
    for batch in batches:
        columns = [batch.column(key) for key in keys]
        for row in np.flatnonzero(np.isin(key_hashes(columns), suspects)).tolist():
            values = tuple(column[row].as_py() for column in columns)
            if any(value is None for value in values):
                continue
            if values in seen:
                return seen[values], start + row, dict(zip(keys, values, strict=True))
            seen[values] = start + row
        start += batch.num_rows
    return None
