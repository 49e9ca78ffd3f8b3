"""Import of a log, a trace or a public data set as a `samples/2` or `trace/1` file; the registry of importers."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_gen import samples
from data_gen.importers.logs import feedback_rows, openai_rows, parse_mapping, segments_of
from data_gen.importers.public_sets import castillo_rows, sharegpt_rows, trace_rows
from data_gen.importers.values import ERROR, LENGTH, STOP, UNKNOWN, Row, SkippedRows, table_rows
from data_gen.prompts import Message, Prompt
from data_gen.splits import digest64
from scheduler_core.errors import InputError
from scheduler_core.files import atomic_file, existing_file, sha256_file, writable_target, write_json
from scheduler_core.table_files import convertible

if TYPE_CHECKING:
    from data_gen.cli_import_lengths import ImportLengthsConfig

log = logging.getLogger(__name__)

BATCH_ROWS = 8192

#: Kind -> reader of its rows, and the schemas it supports, the default first. A reader takes the file, the configuration
#: and the skipped rows, which it updates.
Reader = Callable[[Path, "ImportLengthsConfig", SkippedRows], Iterator[Row]]
IMPORTERS: Mapping[str, tuple[Reader, tuple[str, ...]]] = {
    "log": (
        lambda path, config, skipped: table_rows(path, parse_mapping(config.columns), skipped),
        ("samples", "trace"),
    ),
    "openai-log": (lambda path, config, skipped: openai_rows(path, skipped), ("samples", "trace")),
    "feedback": (lambda path, config, skipped: feedback_rows(path, skipped.counts), ("samples", "trace")),
    "azure": (lambda path, config, skipped: trace_rows(path, "azure", skipped), ("trace",)),
    "burstgpt": (lambda path, config, skipped: trace_rows(path, "burstgpt", skipped), ("trace",)),
    "mooncake": (lambda path, config, skipped: trace_rows(path, "mooncake", skipped), ("trace",)),
    "sharegpt": (
        lambda path, config, skipped: sharegpt_rows(path, config.tokenizer, skipped.counts),
        ("trace",),
    ),
    "castillo": (lambda path, config, skipped: castillo_rows(path, skipped), ("samples",)),
}


def import_lengths(config: ImportLengthsConfig) -> dict[str, Any]:
    """Imports a file in batches; memory does not grow with the number of rows, except for hashes of ids.

    These take about 80 bytes for each prompt and model with numbered samples, and for each id that must be unique. Returns
    the content of `OUT.run.json`: options, counts, and the hash of the source.

    Raises:
        InputError: An option or a value is invalid; the message names its row and column.
    """
    if config.kind not in IMPORTERS:
        raise InputError("kind", config.kind, ", ".join(IMPORTERS))
    read, schemas = IMPORTERS[config.kind]
    name = config.schema or schemas[0]
    if name not in schemas:
        raise InputError("schema", name, f"{' or '.join(schemas)} for {config.kind}")
    if bool(config.tokenizer) != (config.kind == "sharegpt"):
        allowed = "a tokenizer for kind sharegpt, and none for the others"
        raise InputError("tokenizer", config.tokenizer, allowed)
    if config.arrivals is not None and name != "trace":
        raise InputError("--arrivals needs --schema trace: samples have no arrival times")
    file = Path(config.file)
    parts = segments_of(file) if config.kind == "feedback" else [existing_file(file, "file")]
    digests = [sha256_file(part) for part in parts]
    digest = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    target = writable_target(config.out, "out")
    unit = config.tokens or config.tokenizer or "the model's own"
    skipped = SkippedRows(stop=config.on_error == "stop")
    rows = _SampleRows(config, skipped, digest[:12]) if name == "samples" else _TraceRows(config, skipped)
    metadata = {"tailcast.tokens": unit, "tailcast.source": f"{config.kind}: {file.name}"}
    schema = rows.schema.with_metadata({**rows.schema.metadata, **metadata})
    with atomic_file(target) as temporary, convertible(file.name):
        converted = rows.converted(read(file, config, skipped))
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
        "kind": config.kind,
        "schema": "samples/2" if name == "samples" else "trace/1",
        "tokens": unit,
        "options": asdict(config),
        "source": {"name": file.name, "sha256": digest},
        "num_rows": rows.finish_reasons.total() + skipped.counts.total(),
        "num_written": rows.finish_reasons.total(),
        "finish_reasons": dict(rows.finish_reasons),
        "skipped": dict(skipped.counts),
        "bad_rows": skipped.bad,
        **rows.counts,
    }
    write_json(target.with_name(target.name + ".run.json"), content)
    names = ("path", "num_written", "num_rows", "finish_reasons", "skipped")
    message = "%s: %d of %d rows; finish reasons: %s; skipped: %s; %s"
    log.info(message, *(content[name] for name in names), rows.counts)
    return content


class _Rows:
    """Converts the rows of a source to rows of a schema, and counts the results."""

    schema: pa.Schema
    _skip_reason: Callable[[dict[str, Any]], str | None]
    _row: Callable[[int, dict[str, Any]], dict[str, Any]]

    def __init__(self, config: ImportLengthsConfig, skipped: SkippedRows) -> None:
        self._config = config
        self._skipped = skipped
        self._name = Path(config.file).name
        self._digests: set[int] = set()
        self.finish_reasons = Counter[str]()
        self.counts: dict[str, int] = {}

    def converted(self, rows: Iterator[Row]) -> Iterator[dict[str, Any]]:
        """Yields rows of the schema; repeated rows, and rows without a required value, are counted as bad."""
        last = 0
        for number, row in rows:
            try:
                converted = self._converted(number, row, is_repeated=number == last)
            except InputError as error:
                self._skipped.add_bad(number, error)
                converted = None
            last = number
            if converted is not None:
                self.finish_reasons[converted["finish_reason"]] += 1
                yield converted

    def _converted(self, number: int, row: dict[str, Any], *, is_repeated: bool) -> dict[str, Any] | None:
        """Converts one row; a skipped row is counted and returns None."""
        identifier = row.get("request_id")
        if identifier is not None and not is_repeated and not self._is_new(identifier):
            raise self._error(number, "request_id", identifier, "an id not used before")
        reason = self._skip_reason(row)
        if reason is None and not self._resolve_finish_reason(number, row):
            reason = "finish reason unknown"
        if reason is not None:
            self._skipped.counts[reason] += 1
            return None
        return self._row(number, row)

    def _error(self, number: int, column: str, value: object, allowed: str) -> InputError:
        return InputError(f"{self._name} row {number} column {column}", value, allowed)

    def _is_new(self, key: str) -> bool:
        digest = digest64(key)
        is_new = digest not in self._digests
        self._digests.add(digest)
        return is_new

    def _resolve_finish_reason(self, number: int, row: dict[str, Any]) -> bool:
        """Sets max_tokens and finish_reason; False for a row that is dropped because its finish reason is unknown.

        An unknown reason with a known max_tokens becomes "length" for an output of that length, else "stop".
        InputError if a length is missing or above max_tokens.
        """
        limit = self._config.max_tokens if row.get("max_tokens") is None else row["max_tokens"]
        length, reason = row["output_tokens"], row.get("finish_reason") or UNKNOWN
        if length is None and reason != ERROR:
            raise self._error(number, "output_tokens", length, "an integer")
        if limit is not None and limit < 1:
            raise self._error(number, "max_tokens", limit, "integers > 0")
        if limit is not None and length is not None and length > limit:
            raise self._error(number, "output_tokens", length, f"at most max_tokens = {limit}")
        if reason == UNKNOWN and limit is not None:
            reason = LENGTH if length >= limit else STOP
        if reason == UNKNOWN and self._config.unknown != "keep":
            reason = self._config.unknown
        row |= {"max_tokens": limit, "finish_reason": reason}
        return bool(reason != "drop")


class _SampleRows(_Rows):
    """Rows of `samples/2`: empty outputs become error rows; missing sample indices are assigned per prompt and model."""

    schema = samples.SCHEMA

    def __init__(self, config: ImportLengthsConfig, skipped: SkippedRows, run_id: str) -> None:
        super().__init__(config, skipped)
        self._defaults = {"model": config.model, "category": "", "dataset": config.dataset, "run_id": run_id}
        self._next_index = Counter[int]()

    def _skip_reason(self, row: dict[str, Any]) -> str | None:
        if row["output_tokens"] == 0 and row.get("finish_reason") != ERROR:
            row |= {"finish_reason": ERROR, "error": "empty: the output has no tokens"}
        return None

    def _row(self, number: int, row: dict[str, Any]) -> dict[str, Any]:
        row |= {name: value for name, value in self._defaults.items() if row.get(name) is None}
        for name, allowed in (
            ("prompt_id", "a prompt or its id; without them use --schema trace"),
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
        row["output_tokens"] = row["output_tokens"] or 0
        # 0 prompt tokens: not counted by the source.
        row["prompt_tokens"] = row.get("prompt_tokens") or None
        if row.get("prompt") is not None:
            messages = (Message(item["role"], item["content"]) for item in row.get("messages") or ())
            row["prompt_sha256"] = samples.prompt_sha256(Prompt("", row["prompt"], messages=tuple(messages)))
        return row | {"engine": f"imported:{self._config.kind}", "engine_version": ""}


class _TraceRows(_Rows):
    """Rows of `trace/1`; failed requests, and those without output or prompt tokens, are skipped and counted."""

    schema = samples.TRACE_SCHEMA

    def __init__(self, config: ImportLengthsConfig, skipped: SkippedRows) -> None:
        super().__init__(config, skipped)
        self._start: Any = None
        self._earliest = 0.0
        self._last_time = float("-inf")
        self._last_number, self._repeat = 0, 0
        self.counts = {"num_out_of_order": 0, "num_without_max_tokens": 0, "num_without_arrival": 0}

    def _skip_reason(self, row: dict[str, Any]) -> str | None:
        if row.get("finish_reason") == ERROR:
            return "failed"
        for name in ("output", "prompt"):
            if row.get(f"{name}_tokens") == 0:
                return f"no {name}: 0 {name} tokens"
        return None

    def _row(self, number: int, row: dict[str, Any]) -> dict[str, Any]:
        row["model"] = row.get("model") or self._config.model or None
        # Each element of a list of lengths in one row of the source is a request.
        self._repeat = self._repeat + 1 if number == self._last_number else 0
        self._last_number = number
        identifier = f"r{number}" if row.get("request_id") is None else row["request_id"]
        is_list_element = self._repeat and self._config.kind == "log"
        row["request_id"] = f"{identifier}-{self._repeat}" if is_list_element else identifier
        self.counts["num_without_max_tokens"] += row["max_tokens"] is None
        if row.get("arrival_s") is None:
            self.counts["num_without_arrival"] += self._config.arrivals is None
            return row
        # Subtracted before the conversion to float, for exactness. `rewrite_arrivals` makes times relative to the earliest.
        self._start = row["arrival_s"] if self._start is None else self._start
        time = row["arrival_s"] = float(row["arrival_s"] - self._start)
        self.counts["num_out_of_order"] += time < self._last_time
        self._last_time, self._earliest = time, min(self._earliest, time)
        return row

    def rewrite_arrivals(self, path: Path) -> None:
        """Makes the arrivals of a written file relative to the earliest one, or replaces them by drawn ones."""
        times: Any = None
        if self._config.arrivals is not None:
            rng = np.random.Generator(np.random.PCG64(self._config.seed))
            times = self._config.arrivals.times(self.finish_reasons.total(), rng)
        elif not self._earliest:
            return
        with (
            atomic_file(path) as complete,
            pq.ParquetFile(path) as file,
            pq.ParquetWriter(complete, file.schema_arrow, compression="zstd") as writer,
        ):
            position = file.schema_arrow.names.index("arrival_s")
            first = 0
            for batch in file.iter_batches(BATCH_ROWS):
                arrivals = pc.subtract(batch.column("arrival_s"), self._earliest)
                if times is not None:
                    arrivals = pa.array(times[first : first + len(batch)])
                first += len(batch)
                writer.write_batch(batch.set_column(position, file.schema_arrow.field(position), arrivals))
