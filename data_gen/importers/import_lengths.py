"""`import_lengths`: a log, a trace or a public set in, a `samples/2` or `trace/1` file out; the registry of importers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from data_gen.importers.castillo import castillo_rows
from data_gen.importers.feedback import feedback_rows
from data_gen.importers.logs import log_rows, openai_rows
from data_gen.importers.rows import MAX_TOKENS, ImportedRows
from data_gen.importers.traces import trace_rows
from data_gen.importers.writers import ImportCounts, ImportDefaults, SamplesWriter, TraceWriter, Unknown
from data_gen.tables import convertible
from scheduler_core.errors import InputError
from scheduler_core.files import atomic_file, existing_file, sha256_file, writable_target, write_json

log = logging.getLogger(__name__)


SchemaName = Literal["samples", "trace"]
_MODEL = "the model's own"


@dataclass(frozen=True, slots=True)
class Importer:
    """One kind of source: its reader, what its tokens are, and the schemas it can fill, the usual one first."""

    read: Callable[..., Iterator[ImportedRows]]
    tokens: str
    schemas: tuple[SchemaName, ...]


IMPORTERS: Mapping[str, Importer] = {
    "castillo": Importer(castillo_rows, _MODEL, ("samples",)),
    "azure": Importer(partial(trace_rows, kind="azure"), _MODEL, ("trace",)),
    "burstgpt": Importer(partial(trace_rows, kind="burstgpt"), _MODEL, ("trace",)),
    "mooncake": Importer(partial(trace_rows, kind="mooncake"), _MODEL, ("trace",)),
    "openai-log": Importer(openai_rows, _MODEL, ("samples", "trace")),
    "feedback": Importer(feedback_rows, _MODEL, ("samples", "trace")),
    "log": Importer(log_rows, _MODEL, ("samples", "trace")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """Values for what the source does not hold.

    Attributes:
        schema: "samples" or "trace"; None takes the kind's usual one.
        model: Name of the model, where rows have none.
        dataset: Name of the set of prompts, where rows have none.
        max_tokens: Of all requests, where rows have none; in the unit of the lengths.
        unknown: Treatment of outputs whose finish reason is unknown: "keep" them as "unknown", take them as "stop" or
            as "length", or "drop" them.
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
    """Counts of an import.

    Attributes:
        path: The file written.
        schema: "samples/2" or "trace/1".
        num_rows: Outputs or requests of the source.
        num_written: Rows written.
        finish_reasons: Rows written, by how the output ended.
        skipped: Rows not written, by reason.
        num_out_of_order: Requests of a trace that come before the one above them.
        num_without_max_tokens: Requests of a trace whose max_tokens is unknown: the simulator needs a default for them.
        num_without_arrival: Requests of a trace without an arrival time.
    """

    path: Path
    schema: str
    num_rows: int
    num_written: int
    finish_reasons: dict[str, int]
    skipped: dict[str, int]
    num_out_of_order: int = 0
    num_without_max_tokens: int = 0
    num_without_arrival: int = 0


def import_lengths(
    kind: str, path: str | Path, out: str | Path, options: ImportOptions | None = None
) -> ImportReport:
    """Imports a file; batch by batch, so that a week's trace needs no more memory than a small one.

    Only ids are remembered: about 100 bytes for each prompt and model where samples have to be counted, 8 for each
    id that must be unique. Writes `OUT.run.json` beside `out`: options, counts, and the source's hash.

    Args:
        kind: A name of `IMPORTERS`.
        path: The source.
        out: Parquet file to write.
        options: Values for what the source does not hold.

    Raises:
        InputError: Names the row, column and value that cannot be used.
    """
    options = options or ImportOptions()
    if kind not in IMPORTERS:
        raise InputError("kind", kind, ", ".join(IMPORTERS))
    importer = IMPORTERS[kind]
    schema = options.schema or importer.schemas[0]
    if schema not in importer.schemas:
        raise InputError("schema", schema, f"{' or '.join(importer.schemas)} for {kind}")
    file = existing_file(path, "file")
    target = writable_target(out, "out")
    digest = sha256_file(file)
    defaults = ImportDefaults(
        name=file.name,
        kind=kind,
        unit=options.tokens or importer.tokens,
        run_id=digest[:12],
        model=options.model,
        dataset=options.dataset,
        max_tokens=options.max_tokens,
        unknown=options.unknown,
    )
    if options.columns and kind != "log":
        raise InputError("columns", options.columns, "nothing: only kind log has a mapping of columns")
    words = {"columns": options.columns} if kind == "log" else {}
    report = _write(target, defaults, schema, importer.read(file, **words))
    content: dict[str, Any] = asdict(report) | {"path": report.path.name}
    content |= {"kind": kind, "tokens": defaults.unit, "options": asdict(options)}
    content["source"] = {"name": file.name, "sha256": digest}
    write_json(target.with_name(target.name + ".run.json"), content)
    _log(report)
    return report


def _write(
    target: Path, defaults: ImportDefaults, schema: SchemaName, batches: Iterator[ImportedRows]
) -> ImportReport:
    counts = ImportCounts()
    with atomic_file(target) as temporary:
        writer = (SamplesWriter if schema == "samples" else TraceWriter)(temporary, defaults, counts)
        try:
            with convertible(defaults.name):
                for batch in batches:
                    writer.write(batch)
        finally:
            writer.close()
        if not counts.num_written:
            allowed = f"at least one usable row (skipped: {dict(counts.skipped)})"
            raise InputError("file", defaults.name, allowed)
    names = ("num_out_of_order", "num_without_max_tokens", "num_without_arrival")
    return ImportReport(
        path=target,
        schema="samples/2" if schema == "samples" else "trace/1",
        num_rows=counts.num_rows,
        num_written=counts.num_written,
        finish_reasons=dict(counts.finish_reasons),
        skipped=dict(counts.skipped),
        **{name: getattr(writer, name) for name in names if isinstance(writer, TraceWriter)},
    )


def _log(report: ImportReport) -> None:
    log.info(
        "%s: %d of %d rows (%s); skipped: %s",
        report.path,
        report.num_written,
        report.num_rows,
        ", ".join(f"{count} {reason}" for reason, count in report.finish_reasons.items()),
        ", ".join(f"{count} {reason}" for reason, count in report.skipped.items()) or "none",
    )
    if report.num_out_of_order:
        log.warning(
            "%d requests come before the one above them: the rows keep the order of the source",
            report.num_out_of_order,
        )
    unknown = report.finish_reasons.get("unknown", 0)
    if unknown and report.schema == "samples/2":
        log.warning("the finish_reason of %d outputs is unknown", unknown)
    if report.num_without_max_tokens:
        log.warning(
            "max_tokens of %d requests is unknown: give it here, or default_max_tokens to the simulator",
            report.num_without_max_tokens,
        )
