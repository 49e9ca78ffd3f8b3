"""Import of a log, a trace or a public data set as a `samples/2` or `trace/1` file; the registry of importers."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_gen import samples
from data_gen.importers.formats import FORMATS, detect, format_rows, parse_mapping
from data_gen.importers.logs import feedback_rows, openai_rows
from data_gen.importers.public_sets import castillo_rows, sharegpt_rows
from data_gen.importers.values import ERROR, LENGTH, STOP, UNKNOWN, Row, SkippedRows
from data_gen.prompts import Message, Prompt
from data_gen.splits import digest64
from scheduler_core.errors import InputError, unknown_name
from scheduler_core.prediction.outcome import segments_of
from scheduler_core.shell.command import report_left_out
from scheduler_core.shell.files import atomic_file, existing_file, sha256_file, writable_target, write_json
from scheduler_core.shell.table_files import convertible

if TYPE_CHECKING:
    from data_gen.importers.config import ImportLengthsConfig

log = logging.getLogger(__name__)

BATCH_ROWS = 8192
#: Tokens of a block of Mooncake, which `hash_ids` identify.
HASH_BLOCK_TOKENS = 512

#: A reader takes the file, the configuration and the skipped rows, which it updates.
Reader = Callable[[Path, "ImportLengthsConfig", SkippedRows], Iterator[Row]]
#: Kind with a reader of its own -> reader, and the schemas it supports, the default first.
READERS: Mapping[str, tuple[Reader, tuple[str, ...]]] = {
    "openai-log": (
        lambda path, config, skipped: openai_rows(path, config.inputs, skipped),
        ("samples", "trace"),
    ),
    "feedback": (lambda path, config, skipped: feedback_rows(path, skipped.counts), ("samples", "trace")),
    "sharegpt": (
        lambda path, config, skipped: sharegpt_rows(path, config.tokenizer, skipped.counts),
        ("trace",),
    ),
    "castillo": (lambda path, config, skipped: castillo_rows(path, skipped), ("samples",)),
}


def run(config: ImportLengthsConfig) -> int:
    """Runs the command; returns its exit code, see `report_left_out`."""
    content = import_lengths(config)
    return report_left_out(content["skipped"], content["num_rows"])


def import_lengths(config: ImportLengthsConfig) -> dict[str, Any]:
    """Imports a file in batches; memory does not grow with the number of rows, except for hashes of ids and for sessions.

    These take about 80 bytes for each prompt and model with numbered samples, for each id that must be unique, and some
    more for each session. Returns the content of `OUT.run.json`: options, counts, and the hash of the source.

    Raises:
        InputError: An option or a value is invalid; the message names its row and column.
    """
    kind = _kind_of(config)
    schemas = READERS[kind][1] if kind in READERS else FORMATS[kind].schemas
    name = config.schema or schemas[0]
    if name not in schemas:
        raise InputError("schema", name, f"{' or '.join(schemas)} for {kind}")
    _check_options(config, kind, name)
    file = Path(config.file)
    parts = segments_of(file) if kind == "feedback" else [existing_file(file, "file")]
    digests = [sha256_file(part) for part in parts]
    digest = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    target = writable_target(config.out, "out")
    unit = config.tokens or config.tokenizer or "the model's own"
    skipped = SkippedRows(stop=config.on_error == "stop")
    rows = (
        _SampleRows(config, kind, skipped, digest[:12])
        if name == "samples"
        else _TraceRows(config, kind, skipped)
    )
    metadata = {"tailcast.tokens": unit, "tailcast.source": f"{kind}: {file.name}"}
    schema = rows.schema.with_metadata({**rows.schema.metadata, **metadata})
    with atomic_file(target) as temporary, convertible(file.name):
        converted = rows.converted(_source_rows(file, kind, config, skipped))
        with pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
            while batch := list(itertools.islice(converted, BATCH_ROWS)):
                writer.write_table(pa.Table.from_pylist(batch, schema))
        if not rows.finish_reasons:
            allowed = f"at least one usable row (skipped: {dict(skipped.counts)})"
            raise InputError("file", file.name, allowed)
        if isinstance(rows, _TraceRows):
            rows.rewrite_arrivals(temporary)
    content = {
        "path": target.name,
        "kind": kind,
        "schema": "samples/2" if name == "samples" else "trace/1",
        "tokens": unit,
        "options": asdict(config),
        "source": {"name": file.name, "sha256": digest},
        "num_rows": rows.finish_reasons.total() + skipped.counts.total(),
        "num_written": rows.finish_reasons.total(),
        "num_other_rows": skipped.num_other,
        "finish_reasons": dict(rows.finish_reasons),
        "skipped": dict(skipped.counts),
        "bad_rows": skipped.bad,
        **rows.counts,
    }
    write_json(target.with_name(target.name + ".run.json"), content)
    message = "%s: %d of %d rows of kind %s; finish reasons: %s; %s"
    log.info(
        message,
        target.name,
        content["num_written"],
        content["num_rows"],
        kind,
        dict(rows.finish_reasons),
        rows.counts,
    )
    return content


def _kind_of(config: ImportLengthsConfig) -> str:
    """The kind of the source: detected for auto, and for log without columns."""
    kinds = ("auto", *FORMATS, *READERS)
    if config.kind not in kinds:
        raise unknown_name("kind", config.kind, kinds)
    path = Path(config.file)
    if config.kind == "auto" and path.is_dir():
        return "feedback"
    if config.kind == "auto" or (config.kind == "log" and not config.columns and path.is_file()):
        kind = detect(path)
        if kind is not None and (config.kind == "auto" or kind in FORMATS):
            unit = config.time_unit or (FORMATS[kind].time_unit if kind in FORMATS else "s")
            log.info("%s: detected kind %s, times in %s", path.name, kind, unit)
            return kind
    return "log" if config.kind == "auto" else config.kind


def _check_options(config: ImportLengthsConfig, kind: str, schema: str) -> None:
    """Raises InputError for an option that the kind does not support."""
    if bool(config.tokenizer) != (kind == "sharegpt"):
        allowed = "a tokenizer for kind sharegpt, and none for the others"
        raise InputError("tokenizer", config.tokenizer, allowed)
    if config.inputs is not None and kind != "openai-log":
        raise InputError("inputs", config.inputs, "unset: only kind openai-log joins inputs")
    if config.time_unit is not None and kind in READERS:
        raise InputError("time_unit", config.time_unit, f"unset: the unit of {kind} is known")
    if config.arrivals is not None and schema != "trace":
        raise InputError("--arrivals needs --schema trace: samples have no arrival times")


def _source_rows(path: Path, kind: str, config: ImportLengthsConfig, skipped: SkippedRows) -> Iterator[Row]:
    """The rows of a source in canonical columns."""
    if kind in READERS:
        return READERS[kind][0](path, config, skipped)
    mapping = parse_mapping(config.columns)
    source_format = FORMATS[kind]
    if mapping:  # only the position of the records is known from the format
        records = FORMATS.get(detect(path) or kind, source_format)
        source_format = replace(source_format, records=records.records, failed_records=records.failed_records)
    if config.time_unit is not None:
        source_format = replace(source_format, time_unit=config.time_unit)
    return format_rows(path, source_format, skipped, mapping=mapping)


class _Rows:
    """Converts the rows of a source to rows of a schema, and counts the results."""

    schema: pa.Schema
    _row: Callable[[int, dict[str, Any]], dict[str, Any]]

    def __init__(self, config: ImportLengthsConfig, kind: str, skipped: SkippedRows) -> None:
        self._config = config
        self._kind = kind
        self._skipped = skipped
        self._name = Path(config.file).name
        self._digests: set[int] = set()
        self.finish_reasons = Counter[str]()
        self.counts: dict[str, int] = {}

    def converted(self, rows: Iterator[Row]) -> Iterator[dict[str, Any]]:
        """Yields rows of the schema; repeated rows, and rows without a required value, are counted as bad."""
        for number, row in rows:
            try:
                converted = self._converted(number, row)
            except InputError as error:
                self._skipped.add_bad(number, error)
                converted = None
            if converted is not None:
                self.finish_reasons[converted["finish_reason"]] += 1
                yield converted

    def _converted(self, number: int, row: dict[str, Any]) -> dict[str, Any] | None:
        """Converts one row; a skipped row is counted and returns None."""
        identifier = row.get("request_id")
        if identifier is not None and not self._is_new(identifier):
            raise self._error(number, "request_id", identifier, "an id not used before")
        reason = self._skip_reason(row)
        if reason is None and not self._resolve_finish_reason(number, row):
            reason = "finish reason unknown"
        if reason is not None:
            self._skipped.counts[reason] += 1
            return None
        return self._row(number, row)

    def _skip_reason(self, row: dict[str, Any]) -> str | None:
        """The reason to leave out a request without an output; None for others."""
        if row.get("finish_reason") == ERROR and not row["output_tokens"]:
            kind, _, reason = (row.get("error") or "").partition(": ")
            return reason if kind == "shared_count" else "failed"
        return "no output: 0 output tokens" if row["output_tokens"] == 0 else None

    def _error(self, number: int, column: str, value: object, allowed: str) -> InputError:
        return InputError(f"{self._name} row {number} column {column}", value, allowed)

    def _is_new(self, key: str) -> bool:
        digest = digest64(key)
        is_new = digest not in self._digests
        self._digests.add(digest)
        return is_new

    def _resolve_finish_reason(self, number: int, row: dict[str, Any]) -> bool:
        """Sets max_tokens and finish_reason; False for a row that is dropped because its finish reason is unknown.

        Without a reason but with max_tokens, an output of that length has the reason "length", else "stop". Servers may
        count one token more than max_tokens. InputError if a length is missing, or higher.
        """
        limit = self._config.max_tokens if row.get("max_tokens") is None else row["max_tokens"]
        length, reason = row["output_tokens"], row.get("finish_reason")
        if length is None and reason != ERROR:
            raise self._error(number, "output_tokens", length, "an integer")
        if limit is not None and length is not None and length > limit:
            if length > limit + 1:
                raise self._error(number, "output_tokens", length, f"at most max_tokens = {limit}")
            limit = length
        if reason is None and limit is not None:
            reason = LENGTH if length >= limit else STOP
        reason = reason or UNKNOWN
        if reason == UNKNOWN and self._config.unknown != "keep":
            reason = self._config.unknown
        row |= {"max_tokens": limit, "finish_reason": reason}
        return bool(reason != "drop")


class _SampleRows(_Rows):
    """Rows of `samples/2`; outputs whose length was not the model's own become error rows, and requests without output are
    skipped. Missing sample indices are assigned per prompt and model."""

    schema = samples.SCHEMA

    def __init__(self, config: ImportLengthsConfig, kind: str, skipped: SkippedRows, run_id: str) -> None:
        super().__init__(config, kind, skipped)
        self._defaults = {"model": config.model, "category": "", "dataset": config.dataset, "run_id": run_id}
        self._next_index = Counter[int]()

    def _row(self, number: int, row: dict[str, Any]) -> dict[str, Any]:
        row |= {name: value for name, value in self._defaults.items() if row.get(name) is None}
        for name, allowed in (
            ("prompt_id", "a prompt or its id (of a batch: --inputs); without them use --schema trace"),
            ("model", "the model's name; --model sets it"),
        ):
            if not row.get(name):
                raise self._error(number, name, row.get(name), allowed)
        key = f"{row['prompt_id']}\x00{row['model']}"
        if "sample_index" not in row:
            digest = digest64(key)
            row["sample_index"] = self._next_index[digest]
            self._next_index[digest] += 1
        elif not self._is_new(f"{key}\x00{row['sample_index']}"):
            value = key.replace("\x00", ", ")
            raise self._error(number, "prompt_id, model", value, "each prompt once for each model")
        if row["finish_reason"] == ERROR:
            row["output_tokens"] = 0
        # 0 prompt tokens: not counted by the source.
        row["prompt_tokens"] = row.get("prompt_tokens") or None
        if row.get("prompt") is not None:
            messages = (Message(item["role"], item["content"]) for item in row.get("messages") or ())
            row["prompt_sha256"] = samples.prompt_sha256(Prompt("", row["prompt"], messages=tuple(messages)))
        return row | {"engine": f"imported:{self._kind}", "engine_version": ""}


class _TraceRows(_Rows):
    """Rows of `trace/1`; requests without output or prompt tokens are skipped and counted.

    A turn of a session with a think time has the earliest possible arrival, as `TraceRequest` defines it: that of the
    previous turn plus the think time. Sessions without arrivals start at 0, and their turns without a think time follow at
    once.
    """

    schema = samples.TRACE_SCHEMA

    def __init__(self, config: ImportLengthsConfig, kind: str, skipped: SkippedRows) -> None:
        super().__init__(config, kind, skipped)
        self._start: Any = None
        self._earliest = 0.0
        self._last_time = float("-inf")
        self._num_turns = Counter[str]()
        # Of the sessions: arrival of the last turn, and its hash_ids and prompt_tokens.
        self._last_arrivals: dict[str, float] = {}
        self._last_blocks: dict[str, tuple[list[int], int]] = {}
        self.counts = {"num_out_of_order": 0, "num_without_max_tokens": 0, "num_without_arrival": 0}

    def _skip_reason(self, row: dict[str, Any]) -> str | None:
        reason = super()._skip_reason(row)
        return "no prompt: 0 prompt tokens" if reason is None and row.get("prompt_tokens") == 0 else reason

    def _row(self, number: int, row: dict[str, Any]) -> dict[str, Any]:
        row["model"] = row.get("model") or self._config.model or None
        element = f"-{row['element']}" if row.get("element") else ""
        row["request_id"] = f"r{number}{element}" if row.get("request_id") is None else row["request_id"]
        self.counts["num_without_max_tokens"] += row["max_tokens"] is None
        if row.get("session_id") is not None:
            self._add_turn(row)
        if row.get("prefix_tokens") is not None and row.get("prompt_tokens"):
            # The last token of a prompt is always computed.
            row["prefix_tokens"] = min(row["prefix_tokens"], row["prompt_tokens"] - 1)
        if (time := self._arrival(row)) is None:
            self.counts["num_without_arrival"] += self._config.arrivals is None
            return row
        self.counts["num_out_of_order"] += time < self._last_time and not row.get("turn")
        self._last_time, self._earliest = time, min(self._earliest, time)
        if row.get("session_id") is not None:
            self._last_arrivals[row["session_id"]] = time
        return row | {"arrival_s": time}

    def _add_turn(self, row: dict[str, Any]) -> None:
        """Numbers the turns of a session."""
        turn = self._num_turns[row["session_id"]]
        self._num_turns[row["session_id"]] += 1
        row["turn"] = turn if row.get("turn") is None else row["turn"]
        if not turn:
            row["think_time_s"] = None
        elif row.get("think_time_s") is None and row.get("arrival_s") is None:
            row["think_time_s"] = 0.0
        if row.get("hash_ids") is not None and row.get("prompt_tokens"):
            last_ids, last_tokens = self._last_blocks.get(row["session_id"], ([], 0))
            self._last_blocks[row["session_id"]] = (row["hash_ids"], row["prompt_tokens"])
            pairs = zip(last_ids, row["hash_ids"], strict=False)
            num_blocks = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            has_known_size = len(row["hash_ids"]) == math.ceil(row["prompt_tokens"] / HASH_BLOCK_TOKENS)
            if turn and has_known_size and row.get("prefix_tokens") is None:
                row["prefix_tokens"] = min(num_blocks * HASH_BLOCK_TOKENS, last_tokens)

    def _arrival(self, row: dict[str, Any]) -> float | None:
        """Seconds from the first time of the source; `rewrite_arrivals` makes them relative to the earliest one."""
        session, arrival = row.get("session_id"), row.get("arrival_s")
        if session is not None and row.get("think_time_s") is not None and session in self._last_arrivals:
            return self._last_arrivals[session] + float(row["think_time_s"])
        if arrival is None:
            return None if session is None else self._last_arrivals.get(session, 0.0)
        # Subtracted before the conversion to float, for exactness.
        self._start = arrival if self._start is None else self._start
        return float(arrival - self._start)

    def rewrite_arrivals(self, path: Path) -> None:
        """Makes the arrivals of a written file relative to the earliest one, or replaces them by drawn ones.

        A drawn arrival is that of a request without a session, or of a session, whose other turns keep their distance to it.
        """
        times: Iterator[float] | None = None
        if self._config.arrivals is not None:
            rng = np.random.Generator(np.random.PCG64(self._config.seed))
            num = self.finish_reasons.total() - self._num_turns.total() + len(self._num_turns)
            times = iter(self._config.arrivals.times(num, rng).tolist())
        elif not self._earliest:
            return
        with (
            atomic_file(path) as complete,
            pq.ParquetFile(path) as file,
            pq.ParquetWriter(complete, file.schema_arrow, compression="zstd") as writer,
        ):
            position = file.schema_arrow.names.index("arrival_s")
            shifts: dict[str, float] = {}  # of the sessions
            for batch in file.iter_batches(BATCH_ROWS):
                arrivals = pc.subtract(batch.column("arrival_s"), self._earliest)
                if times is not None:
                    sessions = batch.column("session_id").to_pylist()
                    arrivals = pa.array(_drawn(sessions, arrivals.to_pylist(), times, shifts))
                writer.write_batch(batch.set_column(position, file.schema_arrow.field(position), arrivals))


def _drawn(
    sessions: list[str | None], arrivals: list[float], times: Iterator[float], shifts: dict[str, float]
) -> list[float]:
    """Drawn arrivals of rows with these sessions and arrivals; `shifts` has those of earlier sessions and is updated."""
    drawn = []
    for session, arrival in zip(sessions, arrivals, strict=True):
        if session is None:
            drawn.append(next(times))
            continue
        if session not in shifts:
            shifts[session] = next(times) - arrival
        drawn.append(shifts[session] + arrival)
    return drawn
