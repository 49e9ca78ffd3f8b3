"""Writers of imported rows: a `samples/2` or a `trace/1` file, batch by batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_gen import samples, trace
from data_gen.importers.rows import ERROR, LENGTH, STOP, UNKNOWN, ImportedRows
from data_gen.prompts import Message, Prompt
from data_gen.splits import digest64
from scheduler_core.errors import InputError

Unknown = Literal["keep", "stop", "length", "drop"]


@dataclass(slots=True)
class ImportCounts:
    """Rows of the source by what became of them."""

    num_rows: int = 0
    num_written: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class ImportDefaults:
    """Values for what the source does not hold, and where it comes from; None and "" leave it to the source."""

    name: str
    kind: str
    unit: str
    run_id: str
    model: str = ""
    dataset: str = ""
    max_tokens: int | None = None
    unknown: Unknown = "keep"


def resolve_finish_reasons(
    batch: ImportedRows, defaults: ImportDefaults, skipped: Counter[str]
) -> ImportedRows:
    """The rows with max_tokens and finish_reason.

    Where the reason is unknown but max_tokens is known in the same unit, an output of that length was truncated.

    Args:
        batch: Typed rows.
        defaults: max_tokens, and the treatment of unknown finish reasons.
        skipped: Counts dropped rows.

    Raises:
        InputError: A length is missing or beyond max_tokens.
    """
    reasons = pc.fill_null(batch.column("finish_reason"), UNKNOWN)
    limits = batch.column("max_tokens")
    if defaults.max_tokens is not None:
        limits = pc.fill_null(limits, defaults.max_tokens)
    lengths = pc.fill_null(batch.columns["output_tokens"], -1)
    checks = (
        (pc.and_(pc.equal(lengths, -1), pc.not_equal(reasons, ERROR)), "output_tokens", "an integer"),
        (pc.greater(lengths, limits), "output_tokens", "at most max_tokens = {limit}"),
        (pc.less(limits, 1), "max_tokens", "integers > 0"),
    )
    for test, name, allowed in checks:
        row = pc.index(pc.fill_null(test, False), True).as_py()
        if row >= 0:
            location = batch.location(row, name, defaults.name)
            raise InputError(location, batch.column(name)[row].as_py(), allowed.format(limit=limits[row]))
    by_limit = pc.if_else(pc.greater_equal(lengths, limits), LENGTH, STOP)
    reasons = pc.if_else(pc.equal(reasons, UNKNOWN), pc.fill_null(by_limit, UNKNOWN), reasons)
    unknown = pc.equal(reasons, UNKNOWN)
    if defaults.unknown in (STOP, LENGTH):
        reasons = pc.if_else(unknown, defaults.unknown, reasons)
    columns = batch.columns | {"finish_reason": reasons, "max_tokens": limits}
    resolved = ImportedRows(columns, batch.numbers)
    if defaults.unknown == "drop" and pc.any(unknown).as_py():
        skipped["end unknown"] += pc.sum(unknown).as_py()
        resolved = resolved.filter(~np.asarray(unknown.to_numpy(zero_copy_only=False)))
    return resolved


class RowsWriter:
    """What both writers do: the file, the counts, and ids that must not repeat."""

    def __init__(self, path: Path, schema: pa.Schema, defaults: ImportDefaults, counts: ImportCounts) -> None:
        self._defaults = defaults
        self._counts = counts
        self._digests: set[int] = set()
        origin = {
            b"tailcast.tokens": defaults.unit.encode(),
            b"tailcast.source": f"{defaults.kind}: {defaults.name}".encode(),
        }
        self._schema = schema.with_metadata({**schema.metadata, **origin})
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")

    def close(self) -> None:
        """Ends the file."""
        self._writer.close()

    def write(self, batch: ImportedRows) -> None:
        """Writes a batch.

        Raises:
            InputError: A row is there twice or lacks what the schema needs.
        """
        self._counts.num_rows += len(batch) + sum(batch.skipped.values())
        self._counts.skipped.update(batch.skipped)
        batch = self._prepare(batch.typed(self._defaults.name))
        batch = resolve_finish_reasons(batch, self._defaults, self._counts.skipped)
        if len(batch):
            self._writer.write_table(self._table(batch))
            self._counts.num_written += len(batch)
            self._counts.finish_reasons.update(batch.columns["finish_reason"].to_pylist())

    def _prepare(self, batch: ImportedRows) -> ImportedRows:
        """The batch before its finish reasons are resolved."""
        raise NotImplementedError

    def _table(self, batch: ImportedRows) -> pa.Table:
        """The rows of the schema."""
        raise NotImplementedError

    def _is_new(self, key: str) -> bool:
        digest = digest64(key)
        if digest in self._digests:
            return False
        self._digests.add(digest)
        return True


class SamplesWriter(RowsWriter):
    """Writes `samples/2`; empty outputs become error rows, missing indices are counted up in each prompt and model."""

    def __init__(self, path: Path, defaults: ImportDefaults, counts: ImportCounts) -> None:
        super().__init__(path, samples.SCHEMA, defaults, counts)
        self._next_index: dict[int, int] = {}

    def _prepare(self, batch: ImportedRows) -> ImportedRows:
        reasons = batch.column("finish_reason")
        has_error = pc.equal(pc.fill_null(reasons, UNKNOWN), ERROR)
        is_empty = pc.fill_null(pc.equal(batch.columns["output_tokens"], 0), False)
        empty = pc.and_(is_empty, pc.invert(has_error))
        columns = {
            "error": pc.if_else(empty, "empty: the output has no tokens", batch.column("error")),
            "finish_reason": pc.if_else(empty, ERROR, reasons),
        }
        return ImportedRows(batch.columns | columns, batch.numbers)

    def _table(self, batch: ImportedRows) -> pa.Table:
        defaults, columns = self._defaults, dict(batch.columns)
        # A prompt of no more than one token is real; one of no tokens was not counted.
        if "prompt_tokens" in columns:
            tokens = columns["prompt_tokens"]
            columns["prompt_tokens"] = pc.if_else(pc.equal(tokens, 0), pa.scalar(None, tokens.type), tokens)
        columns["prompt_id"] = self._required(
            batch, "prompt_id", None, "a prompt or its id: this source fits trace only"
        )
        columns["model"] = self._required(
            batch, "model", defaults.model or None, "the model's name; give it as model"
        )
        for name, value in (("category", ""), ("dataset", defaults.dataset), ("run_id", defaults.run_id)):
            columns[name] = pc.fill_null(batch.column(name), value)
        columns["sample_index"] = self._indices(batch, columns)
        columns["output_tokens"] = pc.fill_null(columns["output_tokens"], 0)
        columns["prompt_sha256"] = _hashes(batch)
        columns["engine"] = pa.repeat(f"imported:{defaults.kind}", len(batch))
        columns["engine_version"] = pa.repeat("", len(batch))
        arrays = [
            columns[item.name].cast(item.type) if item.name in columns else pa.nulls(len(batch), item.type)
            for item in self._schema
        ]
        return pa.table(arrays, schema=self._schema)

    def _required(self, batch: ImportedRows, name: str, default: str | None, allowed: str) -> pa.Array:
        column = batch.column(name)
        if default is not None:
            column = pc.fill_null(column, default)
        row = pc.index(pc.or_kleene(pc.is_null(column), pc.equal(column, "")), True).as_py()
        if row >= 0:
            raise InputError(batch.location(row, name, self._defaults.name), column[row].as_py(), allowed)
        return column

    def _indices(self, batch: ImportedRows, columns: Mapping[str, pa.Array]) -> pa.Array:
        pairs = zip(columns["prompt_id"].to_pylist(), columns["model"].to_pylist(), strict=True)
        keys = [f"{prompt_id}\x00{model}" for prompt_id, model in pairs]
        if "sample_index" not in batch.columns:
            return pa.array([self._count(key) for key in keys], pa.int64())
        for row, (key, index) in enumerate(zip(keys, batch.columns["sample_index"].to_pylist(), strict=True)):
            if not self._is_new(f"{key}\x00{index}"):
                location = batch.location(row, "prompt_id, model", self._defaults.name)
                raise InputError(location, key.replace("\x00", ", "), "each prompt once for each model")
        return batch.columns["sample_index"]

    def _count(self, key: str) -> int:
        digest = digest64(key)
        index = self._next_index.get(digest, 0)
        self._next_index[digest] = index + 1
        return index


def _hashes(batch: ImportedRows) -> pa.Array:
    texts, chats = batch.column("prompt").to_pylist(), batch.column("messages").to_pylist()
    digests = [
        None
        if text is None
        else samples.prompt_sha256(
            Prompt("", text, messages=tuple(Message(item["role"], item["content"]) for item in chat or ()))
        )
        for text, chat in zip(texts, chats, strict=True)
    ]
    return pa.array(digests, pa.string())


class TraceWriter(RowsWriter):
    """Writes `trace/1`; requests without an output or a prompt's tokens are skipped and counted."""

    def __init__(self, path: Path, defaults: ImportDefaults, counts: ImportCounts) -> None:
        super().__init__(path, trace.TRACE_SCHEMA, defaults, counts)
        self._last: float | None = None
        self.num_out_of_order = 0
        self.num_without_max_tokens = 0
        self.num_without_arrival = 0

    def _prepare(self, batch: ImportedRows) -> ImportedRows:
        mask = np.ones(len(batch), dtype=bool)
        tests = {
            "failed": pc.equal(batch.column("finish_reason"), ERROR),
            "no output: 0 output tokens": pc.equal(batch.columns["output_tokens"], 0),
            "no prompt: 0 prompt tokens": pc.equal(batch.column("prompt_tokens"), 0),
        }
        for reason, test in tests.items():
            bad = mask & np.asarray(pc.fill_null(test, False).to_numpy(zero_copy_only=False))
            if bad.any():
                self._counts.skipped[reason] += int(bad.sum())
                mask &= ~bad
        return batch if mask.all() else batch.filter(mask)

    def _table(self, batch: ImportedRows) -> pa.Table:
        columns = dict(batch.columns)
        if self._defaults.model and "model" not in columns:
            columns["model"] = pa.repeat(self._defaults.model, len(batch))
        columns["request_id"] = self._ids(batch)
        table = trace.as_trace(columns, len(batch)).cast(self._schema)
        self._count_unknown(table)
        return table

    def _ids(self, batch: ImportedRows) -> pa.Array:
        numbers = pa.array([f"r{number}" for number in batch.numbers], pa.string())
        if "request_id" not in batch.columns:
            return numbers
        ids = pc.coalesce(batch.columns["request_id"], numbers)
        for row, identifier in enumerate(ids.to_pylist()):
            if not self._is_new(identifier):
                raise InputError(
                    batch.location(row, "request_id", self._defaults.name),
                    identifier,
                    "an id not used before",
                )
        return ids

    def _count_unknown(self, table: pa.Table) -> None:
        self.num_without_max_tokens += table.column("max_tokens").null_count
        arrivals = table.column("arrival_s")
        self.num_without_arrival += arrivals.null_count
        times = np.asarray(arrivals.drop_null().to_numpy(), dtype=np.float64)
        if len(times):
            before = times[0] if self._last is None else self._last
            self.num_out_of_order += int((np.diff(times, prepend=before) < 0).sum())
            self._last = float(times[-1])
