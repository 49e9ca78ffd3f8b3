"""Lengths of a samples file of any form, gathered without prompts and texts: 29 bytes for each answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data_gen.sources.digests import digest64
from data_gen.tables import open_parquet, readable
from scheduler_core.errors import InputError

_BATCH_ROWS = 1 << 14
GROUP_COLUMNS = ("prompt_id", "model", "run_id", "temperature", "top_p")
SETTING_COLUMNS = ("engine", "engine_version", "model", "temperature", "top_p", "max_tokens")
_READ = (*dict.fromkeys((*GROUP_COLUMNS, *SETTING_COLUMNS)), "category", "dataset", "prompt_tokens")
_ANSWERS = ("output_tokens", "finish_reason", "finished", "error", "ttft_s", "total_s")


@dataclass(slots=True)
class Labels:
    """Numbers for texts, in the order of first appearance."""

    numbers: dict[str, int] = field(default_factory=dict)

    def codes(self, column: pa.Array) -> NDArray[np.int32]:
        """Number of each text of a column, null as the empty text."""
        encoded = pc.fill_null(column.cast(pa.string()), "").dictionary_encode()
        codes = [self.numbers.setdefault(text, len(self.numbers)) for text in encoded.dictionary.to_pylist()]
        return np.asarray(np.array(codes, dtype=np.int32)[encoded.indices.to_numpy()])


@dataclass(frozen=True, slots=True)
class Lengths:
    """All answers that are no failures, and counts of everything.

    Attributes:
        group: Number of the (prompt, model, run, temperature, top_p) that each answer belongs to, [answers].
        length: Tokens, [answers]; of a cut answer the length it was cut at.
        cut: Whether it was cut, [answers]; answers of unknown end are taken as finished.
        category, dataset: Numbers of `categories` and `datasets`, [answers].
        prompt_tokens: -1 where unknown, [answers].
        num_groups: How many groups there are.
        categories, datasets: Names by number.
        finish_reasons: All rows by how they ended.
        failures: Failed rows by kind, and one reason of each kind.
        settings: Rows by (engine, version, model, temperature, top_p, cap).
        cut_by_setting: Cut answers by the same.
        caps: (answers, cut ones) by cap, None if unknown.
        timings: (sum, count) of ttft_s and total_s.
        metadata: The file's own, e.g. its schema and the unit of its tokens.
        num_prompts: Different prompt ids.
    """

    group: NDArray[np.int64]
    length: NDArray[np.int32]
    cut: NDArray[np.bool_]
    category: NDArray[np.int32]
    dataset: NDArray[np.int32]
    prompt_tokens: NDArray[np.int32]
    num_groups: int
    categories: tuple[str, ...]
    datasets: tuple[str, ...]
    finish_reasons: Counter[str]
    failures: Mapping[str, tuple[int, str]]
    settings: Counter[tuple[str, ...]]
    cut_by_setting: Counter[tuple[str, ...]]
    caps: Mapping[str, tuple[int, int]]
    timings: Mapping[str, tuple[float, int]]
    metadata: Mapping[str, str]
    num_prompts: int


def read_lengths(path: str | Path) -> Lengths:
    """Reads a samples file: `samples/1`, `samples/2`, or lists of output_tokens with one row for each prompt.

    Raises:
        InputError: The file cannot be read, lacks a column, or holds no answer.
    """
    file = open_parquet(path, "samples")
    names = file.schema_arrow.names
    name = Path(path).name
    for column in ("prompt_id", "output_tokens"):
        if column not in names:
            raise InputError(f"{name}: columns", names, f"also {column}")
    gathered = _Gathered()
    wanted = [column for column in (*_READ, *_ANSWERS) if column in names]
    with file, readable(path, "samples", "Parquet"):
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=wanted):
            gathered.add({column: batch.column(column) for column in wanted}, name)
    raw = file.schema_arrow.metadata or {}
    metadata = {
        key.decode().removeprefix("tailcast."): value.decode()
        for key, value in raw.items()
        if key.startswith(b"tailcast.")
    }
    return gathered.result(name, metadata)


class _Gathered:
    """What has been read so far."""

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[np.generic], ...]] = []
        self._categories, self._datasets = Labels(), Labels()
        self._prompts: set[int] = set()
        self._reasons: Counter[str] = Counter()
        self._failures: dict[str, tuple[int, str]] = {}
        self._counts: Counter[tuple[str, ...]] = Counter()
        self._cuts: Counter[tuple[str, ...]] = Counter()
        self._timings: dict[str, tuple[float, int]] = {}

    def add(self, columns: dict[str, pa.Array], name: str) -> None:
        columns = _one_row_each(columns, name)
        num_rows = len(columns["output_tokens"])
        if not num_rows:
            return
        self._reasons.update(columns["finish_reason"].to_pylist())
        self._note_failures(columns)
        for timing in ("ttft_s", "total_s"):
            if timing in columns and columns[timing].null_count < num_rows:
                total, count = self._timings.get(timing, (0.0, 0))
                column = columns[timing]
                self._timings[timing] = (
                    total + pc.sum(column).as_py(),
                    count + len(column) - column.null_count,
                )
        settings = [_texts(columns, column, num_rows) for column in SETTING_COLUMNS]
        joined = pc.binary_join_element_wise(*settings, "\x00")
        cut = pc.equal(columns["finish_reason"], "length")
        for text, count in Counter(joined.to_pylist()).items():
            self._counts[tuple(text.split("\x00"))] += count
        for text, count in Counter(joined.filter(cut).to_pylist()).items():
            self._cuts[tuple(text.split("\x00"))] += count
        self._prompts.update(
            digest64(text) for text in pc.unique(columns["prompt_id"].cast(pa.string())).to_pylist()
        )
        keys = pc.binary_join_element_wise(
            *(_texts(columns, column, num_rows) for column in GROUP_COLUMNS), "\x00"
        )
        answered = pc.not_equal(columns["finish_reason"], "error").to_numpy(zero_copy_only=False)
        part = (
            _digests(keys),
            np.asarray(columns["output_tokens"].cast(pa.int32()).to_numpy(zero_copy_only=False)),
            np.asarray(cut.to_numpy(zero_copy_only=False)),
            self._categories.codes(_texts(columns, "category", num_rows)),
            self._datasets.codes(_texts(columns, "dataset", num_rows)),
            _or_minus_one(columns, "prompt_tokens", num_rows),
        )
        self._parts.append(tuple(array[answered] for array in part))

    def _note_failures(self, columns: dict[str, pa.Array]) -> None:
        if "error" not in columns:
            return
        failed = pc.equal(columns["finish_reason"], "error")
        for reason, count in Counter(columns["error"].filter(failed).to_pylist()).items():
            kind = "not said" if reason is None else reason.partition(":")[0].strip()
            before, example = self._failures.get(kind, (0, reason or ""))
            self._failures[kind] = (before + count, example)

    def result(self, name: str, metadata: Mapping[str, str]) -> Lengths:
        if not sum(len(part[0]) for part in self._parts):
            raise InputError(name, f"{sum(self._reasons.values())} failed rows", "at least one answer")
        keys, length, cut, category, dataset, prompt_tokens = (
            np.concatenate([part[number] for part in self._parts]) for number in range(6)
        )
        unique, group = np.unique(keys, return_inverse=True)
        caps: dict[str, tuple[int, int]] = {}
        for setting, count in self._counts.items():
            cap = setting[SETTING_COLUMNS.index("max_tokens")]
            before = caps.get(cap, (0, 0))
            caps[cap] = (before[0] + count, before[1] + self._cuts[setting])
        return Lengths(
            group=group.astype(np.int64),
            length=length.astype(np.int32),
            cut=cut.astype(np.bool_),
            category=category.astype(np.int32),
            dataset=dataset.astype(np.int32),
            prompt_tokens=prompt_tokens.astype(np.int32),
            num_groups=len(unique),
            categories=tuple(self._categories.numbers),
            datasets=tuple(self._datasets.numbers),
            finish_reasons=self._reasons,
            failures=self._failures,
            settings=self._counts,
            cut_by_setting=self._cuts,
            caps=caps,
            timings=self._timings,
            metadata=metadata,
            num_prompts=len(self._prompts),
        )


def _one_row_each(columns: dict[str, pa.Array], name: str) -> dict[str, pa.Array]:
    """Rows of lists spread to one row for each answer; in both forms finish_reason is there and checked."""
    lengths = columns["output_tokens"]
    if pa.types.is_list(lengths.type) or pa.types.is_large_list(lengths.type):
        parents = pc.list_parent_indices(lengths)
        spread = {key: column.take(parents) for key, column in columns.items() if key not in _ANSWERS}
        spread["output_tokens"] = pc.list_flatten(lengths)
        if "finished" in columns:
            flags = pc.list_flatten(columns["finished"])
            if len(flags) != len(parents):
                raise InputError(
                    f"{name}: column finished", len(flags), f"one for each of {len(parents)} answers"
                )
            reasons = pc.if_else(pc.is_null(flags), "unknown", pc.if_else(flags, "stop", "length"))
        else:
            reasons = pa.repeat("unknown", len(parents))
        return spread | {"finish_reason": reasons}
    if "finish_reason" not in columns:
        raise InputError(f"{name}: columns", sorted(columns), "also finish_reason, or output_tokens as lists")
    return columns | {"finish_reason": pc.fill_null(columns["finish_reason"].cast(pa.string()), "unknown")}


def _texts(columns: Mapping[str, pa.Array], name: str, num_rows: int) -> pa.Array:
    if name not in columns:
        return pa.repeat("", num_rows)
    return pc.fill_null(columns[name].cast(pa.string()), "")


def _digests(keys: pa.Array) -> NDArray[np.uint64]:
    encoded = keys.dictionary_encode()
    digests = np.array([digest64(text) for text in encoded.dictionary.to_pylist()], dtype=np.uint64)
    return np.asarray(digests[encoded.indices.to_numpy()])


def _or_minus_one(columns: Mapping[str, pa.Array], name: str, num_rows: int) -> NDArray[np.int32]:
    if name not in columns:
        return np.full(num_rows, -1, dtype=np.int32)
    return np.asarray(pc.fill_null(columns[name].cast(pa.int32()), -1).to_numpy(zero_copy_only=False))
