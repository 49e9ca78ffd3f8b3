"""Where imported rows go: a `samples/2` or a `trace/1` file, written batch by batch."""

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
from data_gen.importers.batch import ERROR, LENGTH, STOP, UNKNOWN, Batch
from data_gen.prompts import Message, Prompt
from data_gen.sources.digests import DigestSet, digest64
from scheduler_core.errors import InputError

Unknown = Literal["keep", "stop", "length", "drop"]


@dataclass(slots=True)
class Counts:
    """What became of the rows."""

    num_rows: int = 0
    num_written: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)

    def add_source(self, batch: Batch) -> None:
        """Counts the rows of the source that a batch stands for."""
        self.num_rows += len(batch) + sum(batch.left_out.values())
        self.left_out.update(batch.left_out)


@dataclass(frozen=True, slots=True)
class Given:
    """What the user says of the whole source, and where it comes from; None and "" leave it to the source."""

    name: str
    kind: str
    unit: str
    run_id: str
    model: str = ""
    dataset: str = ""
    max_tokens: int | None = None
    unknown: Unknown = "keep"


class Ends:
    """Decides how answers ended, from what the source says, the caps, and the user's word on unknown ones."""

    def __init__(self, given: Given, counts: Counts) -> None:
        self._given = given
        self._counts = counts

    def decided(self, batch: Batch) -> Batch:
        """The batch with max_tokens and finish_reason in every row.

        Where the end is unknown but the cap is known in the same unit, an answer as long as its cap was cut.
        """
        given = self._given
        columns = dict(batch.columns)
        reasons = columns.get("finish_reason", batch.constant("finish_reason", UNKNOWN))
        reasons = pc.fill_null(reasons, UNKNOWN)
        caps = columns.get("max_tokens", batch.constant("max_tokens", None))
        if given.max_tokens is not None:
            caps = pc.fill_null(caps, given.max_tokens)
        lengths = pc.fill_null(columns["output_tokens"], -1)
        self._check(batch, lengths, caps, reasons)
        by_cap = pc.if_else(pc.greater_equal(lengths, caps), LENGTH, STOP)
        reasons = pc.if_else(
            pc.and_(pc.equal(reasons, UNKNOWN), pc.is_valid(caps)), pc.fill_null(by_cap, UNKNOWN), reasons
        )
        unknown = pc.equal(reasons, UNKNOWN)
        if given.unknown in (STOP, LENGTH):
            reasons = pc.if_else(unknown, given.unknown, reasons)
        decided = Batch(columns | {"finish_reason": reasons, "max_tokens": caps}, batch.rows)
        if given.unknown == "drop" and pc.any(unknown).as_py():
            self._counts.left_out["end unknown"] += pc.sum(unknown).as_py()
            decided = decided.filter(~np.asarray(unknown.to_numpy(zero_copy_only=False)))
        return decided

    def _check(self, batch: Batch, lengths: pa.Array, caps: pa.Array, reasons: pa.Array) -> None:
        name = self._given.name
        missing = pc.index(pc.and_(pc.equal(lengths, -1), pc.not_equal(reasons, ERROR)), True).as_py()
        if missing >= 0:
            raise InputError(batch.where(missing, "output_tokens", name), None, "a whole number")
        beyond = pc.index(pc.fill_null(pc.greater(lengths, caps), False), True).as_py()
        if beyond >= 0:
            raise InputError(
                batch.where(beyond, "output_tokens", name),
                lengths[beyond].as_py(),
                f"at most max_tokens = {caps[beyond]}",
            )
        below = pc.index(pc.fill_null(pc.less(caps, 1), False), True).as_py()
        if below >= 0:
            raise InputError(batch.where(below, "max_tokens", name), 0, "a whole number of at least 1")


class SamplesSink:
    """Writes `samples/2`; empty answers become error rows, missing indices are counted up in each prompt and model."""

    def __init__(self, path: Path, given: Given, counts: Counts) -> None:
        self._given = given
        self._counts = counts
        self._ends = Ends(given, counts)
        self._next: dict[int, int] = {}
        self._seen = DigestSet()
        metadata = {**samples.SCHEMA.metadata, **_origin(given)}
        self._schema = samples.SCHEMA.with_metadata(metadata)
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")

    def write(self, batch: Batch) -> None:
        """Writes a batch.

        Raises:
            InputError: A row has no prompt id or model, or is there twice.
        """
        self._counts.add_source(batch)
        batch = batch.typed(self._given.name)
        columns = dict(batch.columns)
        empty = pc.equal(columns["output_tokens"], 0)
        reasons = columns.get("finish_reason", batch.constant("finish_reason", UNKNOWN))
        failed = pc.equal(pc.fill_null(reasons, UNKNOWN), ERROR)
        errors = columns.get("error", batch.constant("error", None))
        none = pc.and_(pc.fill_null(empty, False), pc.invert(failed))
        columns["error"] = pc.if_else(none, "empty: the answer has no tokens", errors)
        columns["finish_reason"] = pc.if_else(none, ERROR, reasons)
        decided = self._ends.decided(Batch(columns, batch.rows))
        if len(decided):
            table = self._table(decided)
            self._counts.num_written += table.num_rows
            self._counts.finish_reasons.update(table.column("finish_reason").to_pylist())
            self._writer.write_table(table)

    def close(self) -> None:
        """Ends the file."""
        self._writer.close()

    def _table(self, batch: Batch) -> pa.Table:
        given, columns = self._given, dict(batch.columns)
        # A prompt of no more than one token is real; one of no tokens was not counted.
        if "prompt_tokens" in columns:
            tokens = columns["prompt_tokens"]
            columns["prompt_tokens"] = pc.if_else(pc.equal(tokens, 0), pa.scalar(None, tokens.type), tokens)
        columns["prompt_id"] = self._known(
            batch, "prompt_id", None, "a prompt or its id: this source fits trace only"
        )
        columns["model"] = self._known(
            batch, "model", given.model or None, "the model's name, given as model"
        )
        for name, value in (("category", ""), ("dataset", given.dataset), ("run_id", given.run_id)):
            columns[name] = pc.fill_null(columns.get(name, batch.constant(name, None)), value)
        columns["sample_index"] = self._indices(batch, columns)
        columns["output_tokens"] = pc.fill_null(columns["output_tokens"], 0)
        columns["prompt_sha256"] = _hashes(columns, len(batch))
        columns["engine"] = pa.repeat(f"imported:{given.kind}", len(batch))
        columns["engine_version"] = pa.repeat("", len(batch))
        arrays = [
            columns[item.name].cast(item.type) if item.name in columns else pa.nulls(len(batch), item.type)
            for item in self._schema
        ]
        return pa.table(arrays, schema=self._schema)

    def _known(self, batch: Batch, name: str, default: str | None, allowed: str) -> pa.Array:
        column = batch.columns.get(name, batch.constant(name, None))
        if default is not None:
            column = pc.fill_null(column, default)
        row = pc.index(pc.or_kleene(pc.is_null(column), pc.equal(column, "")), True).as_py()
        if row >= 0:
            raise InputError(batch.where(row, name, self._given.name), column[row].as_py(), allowed)
        return column

    def _indices(self, batch: Batch, columns: Mapping[str, pa.Array]) -> pa.Array:
        pairs = zip(columns["prompt_id"].to_pylist(), columns["model"].to_pylist(), strict=True)
        keys = [f"{prompt_id}\x00{model}" for prompt_id, model in pairs]
        if "sample_index" not in batch.columns:
            return pa.array([self._count(key) for key in keys], pa.int64())
        for row, (key, index) in enumerate(zip(keys, batch.columns["sample_index"].to_pylist(), strict=True)):
            if not self._seen.add(f"{key}\x00{index}"):
                where = batch.where(row, "prompt_id, model", self._given.name)
                raise InputError(where, key.replace("\x00", ", "), "each prompt once for each model")
        return batch.columns["sample_index"]

    def _count(self, key: str) -> int:
        digest = digest64(key)
        index = self._next.get(digest, 0)
        self._next[digest] = index + 1
        return index


def _hashes(columns: Mapping[str, pa.Array], num_rows: int) -> pa.Array:
    if "prompt" not in columns:
        return pa.nulls(num_rows, pa.string())
    texts = columns["prompt"].to_pylist()
    chats = columns["messages"].to_pylist() if "messages" in columns else [None] * num_rows
    known: dict[str, str] = {}
    digests: list[str | None] = []
    for text, chat in zip(texts, chats, strict=True):
        if text is None:
            digests.append(None)
            continue
        messages = tuple(Message(item["role"], item["content"]) for item in chat or ())
        if messages:
            digests.append(samples.prompt_sha256(Prompt("", text, messages=messages)))
            continue
        if text not in known:
            known[text] = samples.prompt_sha256(Prompt("", text))
        digests.append(known[text])
    return pa.array(digests, pa.string())


class TraceSink:
    """Writes `trace/1`; requests without an answer or a prompt's tokens are left out and counted."""

    def __init__(self, path: Path, given: Given, counts: Counts) -> None:
        self._given = given
        self._counts = counts
        self._ends = Ends(given, counts)
        self._seen = DigestSet()
        self._last: float | None = None
        self._schema = trace.TRACE_SCHEMA.with_metadata({**trace.TRACE_SCHEMA.metadata, **_origin(given)})
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")
        self.num_out_of_order = 0
        self.num_without_cap = 0
        self.num_without_arrival = 0

    def write(self, batch: Batch) -> None:
        """Writes a batch.

        Raises:
            InputError: A request id is there twice.
        """
        self._counts.add_source(batch)
        batch = self._answered(batch.typed(self._given.name))
        if not len(batch):
            return
        batch = self._ends.decided(batch)
        columns = dict(batch.columns)
        if self._given.model and "model" not in columns:
            columns["model"] = batch.constant("model", self._given.model)
        columns["request_id"] = self._ids(batch)
        table = trace.as_trace(columns, len(batch)).cast(self._schema)
        self._counts.num_written += table.num_rows
        self._counts.finish_reasons.update(columns["finish_reason"].to_pylist())
        self._note(table)
        self._writer.write_table(table)

    def close(self) -> None:
        """Ends the file."""
        self._writer.close()

    def _answered(self, batch: Batch) -> Batch:
        kept = np.ones(len(batch), dtype=bool)
        reasons = batch.columns.get("finish_reason", batch.constant("finish_reason", UNKNOWN))
        tests = {
            "failed": pc.equal(pc.fill_null(reasons, UNKNOWN), ERROR),
            "no answer: 0 output tokens": pc.equal(batch.columns["output_tokens"], 0),
            "no prompt: 0 prompt tokens": pc.equal(
                batch.columns.get("prompt_tokens", batch.constant("prompt_tokens", None)), 0
            ),
        }
        for reason, test in tests.items():
            bad = kept & np.asarray(pc.fill_null(test, False).to_numpy(zero_copy_only=False))
            if bad.any():
                self._counts.left_out[reason] += int(bad.sum())
                kept &= ~bad
        return batch if kept.all() else batch.filter(kept)

    def _ids(self, batch: Batch) -> pa.Array:
        numbers = pa.array([f"r{number}" for number in batch.rows], pa.string())
        if "request_id" not in batch.columns:
            return numbers
        ids = pc.coalesce(batch.columns["request_id"], numbers)
        for row, identifier in enumerate(ids.to_pylist()):
            if not self._seen.add(identifier):
                raise InputError(
                    batch.where(row, "request_id", self._given.name), identifier, "an id not used before"
                )
        return ids

    def _note(self, table: pa.Table) -> None:
        self.num_without_cap += table.column("max_tokens").null_count
        arrivals = table.column("arrival_s")
        self.num_without_arrival += arrivals.null_count
        times = np.asarray(arrivals.drop_null().to_numpy(), dtype=np.float64)
        if len(times):
            before = times[0] if self._last is None else self._last
            self.num_out_of_order += int((np.diff(times, prepend=before) < 0).sum())
            self._last = float(times[-1])


def _origin(given: Given) -> dict[bytes, bytes]:
    return {
        b"tailcast.tokens": given.unit.encode(),
        b"tailcast.source": f"{given.kind}: {given.name}".encode(),
    }
