"""`import_lengths`: a public set, a trace or a log in, a `samples/2` or `trace/1` file out."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from data_gen.importers.batch import MAX_TOKENS, Batch
from data_gen.importers.kinds import KINDS, Kind, SchemaName
from data_gen.importers.logs import log_batches, parse_mapping
from data_gen.importers.sinks import Counts, Given, SamplesSink, TraceSink, Unknown
from data_gen.tables import convertible
from scheduler_core.errors import InputError
from scheduler_core.files import atomic_file, existing_file, sha256_file, writable_target, write_json

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """What the source does not say.

    Attributes:
        schema: "samples" or "trace"; None takes the kind's usual one.
        model: Name of the model, where rows have none.
        dataset: Name of the set of prompts, where rows have none.
        max_tokens: Cap on all answers, where rows have none; in the unit of the lengths.
        unknown: What becomes of answers of which nothing says whether they were cut: "keep" them as "unknown", take
            them as "stop" or as "length", or "drop" them.
        columns: Of kind `log`: NAME=COLUMN pairs, see `data_gen.importers.logs`.
        tokens: What the lengths count, where the kind leaves it open.
    """

    schema: SchemaName | None = None
    model: str = ""
    dataset: str = ""
    max_tokens: int | None = None
    unknown: Unknown = "keep"
    columns: str = ""
    tokens: str = ""

    def __post_init__(self) -> None:
        if self.max_tokens is not None and not 1 <= self.max_tokens <= MAX_TOKENS:
            raise InputError("max_tokens", self.max_tokens, f"integers from 1 to {MAX_TOKENS}, or unset")
        if self.unknown not in ("keep", "stop", "length", "drop"):
            raise InputError("unknown", self.unknown, "keep, stop, length or drop")


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import did.

    Attributes:
        path: The file written.
        schema: "samples/2" or "trace/1".
        num_rows: Answers or requests found in the source.
        num_written: Rows written.
        finish_reasons: Rows written, by how the answer ended.
        left_out: Rows not written, by reason.
        num_out_of_order: Requests of a trace that come before the one above them.
        num_without_cap: Requests of a trace whose cap is unknown: the simulator needs a default for them.
        num_without_arrival: Requests of a trace without an arrival time.
    """

    path: Path
    schema: str
    num_rows: int
    num_written: int
    finish_reasons: dict[str, int]
    left_out: dict[str, int]
    num_out_of_order: int = 0
    num_without_cap: int = 0
    num_without_arrival: int = 0


def import_lengths(
    kind: str, path: str | Path, out: str | Path, options: ImportOptions | None = None
) -> ImportReport:
    """Imports a file; batch by batch, so that a week's trace needs no more memory than a small one.

    Only ids are remembered: about 100 bytes for each prompt and model where samples have to be counted, 8 for each
    id that must be unique. Writes `OUT.run.json` beside `out`: options, counts, and the source's hash.

    Args:
        kind: A name of `KINDS`.
        path: The source.
        out: Parquet file to write.
        options: What the source does not say.

    Raises:
        InputError: Names the row, column and value that cannot be used.
    """
    options = options or ImportOptions()
    if kind not in KINDS:
        raise InputError("kind", kind, ", ".join(KINDS))
    known = KINDS[kind]
    schema = options.schema or known.schemas[0]
    if schema not in known.schemas:
        raise InputError("schema", schema, f"{' or '.join(known.schemas)} for {kind}")
    file = existing_file(path, "file")
    target = writable_target(out, "out")
    digest = sha256_file(file)
    given = Given(
        name=file.name,
        kind=kind,
        unit=options.tokens or known.tokens,
        run_id=digest[:12],
        model=options.model,
        dataset=options.dataset,
        max_tokens=options.max_tokens,
        unknown=options.unknown,
    )
    report = _written(target, given, schema, _reader(kind, known, options)(file))
    content: dict[str, Any] = asdict(report) | {"path": report.path.name}
    content |= {"kind": kind, "tokens": given.unit, "options": asdict(options)}
    content["source"] = {"name": file.name, "sha256": digest}
    write_json(target.with_name(target.name + ".run.json"), content)
    _log(report)
    return report


def _reader(kind: str, known: Kind, options: ImportOptions) -> Any:
    if kind != "log":
        if options.columns:
            raise InputError("columns", options.columns, "nothing: only kind log has a mapping of columns")
        return known.read
    if not options.columns:
        raise InputError("columns", options.columns, "NAME=COLUMN,... with at least output_tokens")
    return partial(log_batches, mapping=parse_mapping(options.columns))


def _written(target: Path, given: Given, schema: SchemaName, batches: Iterator[Batch]) -> ImportReport:
    counts = Counts()
    with atomic_file(target) as temporary:
        sink = (SamplesSink if schema == "samples" else TraceSink)(temporary, given, counts)
        try:
            with convertible(given.name):
                for batch in batches:
                    sink.write(batch)
        finally:
            sink.close()
        if not counts.num_written:
            raise InputError(
                "file", given.name, f"at least one usable row (left out: {dict(counts.left_out)})"
            )
    report = {
        "path": target,
        "schema": "samples/2" if schema == "samples" else "trace/1",
        "num_rows": counts.num_rows,
        "num_written": counts.num_written,
        "finish_reasons": dict(counts.finish_reasons),
        "left_out": dict(counts.left_out),
    }
    if isinstance(sink, TraceSink):
        names = ("num_out_of_order", "num_without_cap", "num_without_arrival")
        report |= {name: getattr(sink, name) for name in names}
    return ImportReport(**report)  # type: ignore[arg-type]


def _log(report: ImportReport) -> None:
    log.info(
        "%s: %d of %d rows (%s); left out: %s",
        report.path,
        report.num_written,
        report.num_rows,
        ", ".join(f"{count} {reason}" for reason, count in report.finish_reasons.items()),
        ", ".join(f"{count} {reason}" for reason, count in report.left_out.items()) or "none",
    )
    if report.num_out_of_order:
        log.warning(
            "%d requests come before the one above them: the rows keep the order of the source",
            report.num_out_of_order,
        )
    unknown = report.finish_reasons.get("unknown", 0)
    if unknown and report.schema == "samples/2":
        log.warning("of %d answers nothing says whether they were cut: finish_reason is unknown", unknown)
    if report.num_without_cap:
        log.warning(
            "of %d requests the cap is unknown: give max_tokens here, or default_max_tokens to the simulator",
            report.num_without_cap,
        )
