"""Table of file formats with one record for each request, their detection, and the reader of all of them.

A format lists, for each canonical column, the paths of its values in the versions of that format (`source_row` describes
paths). A new format is an entry in `FORMATS`; only formats whose rows need a rule of their own have a reader elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from data_gen.importers.config import TimeUnit
from data_gen.importers.source_row import SourceRow, records_at
from data_gen.importers.values import MAPPED, Row, SkippedRows, canonical_row, failure
from scheduler_core.errors import InputError
from scheduler_core.prediction.outcome import FORMAT as FEEDBACK_FORMAT
from scheduler_core.shell.table_files import file_rows

log = logging.getLogger(__name__)

#: Maximum number of rows in which a format is looked for: traces begin with spans that are no requests.
_DETECTION_ROWS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of files.

    Attributes:
        columns: Canonical column -> paths of its values, separated by " | "; the first with a value is used.
        marks: Sets of paths; a row that has all paths of one set has this format.
        schemas: Schemas that the format fills, the default first.
        time_unit: Unit of times whose name has none.
        records: Paths to the lists of records in a row; a row without them is a record itself.
        failed_records: Paths to lists of failed records.
        requests: Paths, as above -> values of records that are requests; a record with another value is none. With
            `requests`, a record with neither output_tokens, model nor error is none either.
        failures: Path -> values of failed requests.
    """

    columns: Mapping[str, str]
    marks: Sequence[tuple[str, ...]] = ()
    schemas: tuple[str, ...] = ("samples", "trace")
    time_unit: TimeUnit = "s"
    records: Sequence[str] = ()
    failed_records: Sequence[str] = ()
    requests: Mapping[str, Sequence[str]] = field(default_factory=dict)
    failures: Mapping[str, Sequence[str]] = field(default_factory=dict)


def _attribute(*names: str) -> str:
    """Paths of attributes of a span: of OpenTelemetry, or flattened to columns."""
    return " | ".join(f"attributes.{name} | {name}" for name in names)


_TRACE = ("trace",)
FORMATS: Mapping[str, Format] = {
    "vllm-bench": Format(
        marks=[("input_lens", "output_lens")],
        columns={
            "arrival_s": "start_times",
            "model": "model_id",
            "prompt_tokens": "input_lens",
            "output_tokens": "output_lens",
            "ttft_s": "ttfts",
            "total_s": "ttfts+itls",
            "error": "errors",
        },
        schemas=_TRACE,
    ),
    "guidellm": Format(
        marks=[("benchmarks",), ("request_start_time", "output_tokens"), ("request_latency", "output_tokens")],
        columns={
            "request_id": "request_id",
            "arrival_s": "request_start_time | info.timings.request_start"
            " | scheduler_info.request_timings.request_start | start_time",
            "model": "request_args.model | request_args.body.model | model",
            "prompt": "prompt",
            "messages": "request_args.messages | request_args.body.messages",
            "prompt_tokens": "prompt_tokens | input_metrics.total_tokens | input_metrics.text_tokens",
            "output_tokens": "output_tokens | output_metrics.total_tokens | output_metrics.text_tokens",
            "ttft_s": "time_to_first_token_ms | time_to_first_token",
            "first_token_s": "info.timings.first_token_iteration | info.timings.first_iteration"
            " | scheduler_info.request_timings.first_iteration | first_token_time",
            "total_s": "request_latency",
            "end_s": "request_end_time | info.timings.request_end | end_time",
            "error": "info.error | error",
        },
        schemas=("trace", "samples"),
        records=("benchmarks.requests.successful",),
        failed_records=("benchmarks.requests.errored", "benchmarks.requests.incomplete"),
    ),
    "aiperf": Format(
        marks=[("metadata.request_start_ns", "metrics")],
        columns={
            "request_id": "metadata.x_request_id",
            "arrival_s": "metadata.request_start_ns",
            "end_s": "metadata.request_end_ns",
            "ttft_s": "metrics.time_to_first_token.value",
            "prompt_tokens": "metrics.input_sequence_length.value",
            "output_tokens": "metrics.output_sequence_length.value"
            " | metrics.output_token_count.value+metrics.reasoning_token_count.value",
            "error": "error",
        },
        time_unit="ms",
        schemas=_TRACE,
    ),
    "inference-perf": Format(
        marks=[("info.input_tokens", "info.output_tokens")],
        columns={
            "messages": "request",
            "model": "request.model",
            "max_tokens": "request.max_completion_tokens | request.max_tokens",
            "arrival_s": "start_time",
            "first_token_s": "info.output_token_times.0",
            "end_s": "end_time",
            "prompt_tokens": "info.input_tokens",
            "output_tokens": "info.output_tokens",
            "finish_reason": "response.choices.0.finish_reason",
            "error": "error",
        },
        schemas=("trace", "samples"),
    ),
    "otel": Format(
        marks=[
            ("resourceSpans",),
            ("resource_spans",),
            ("attributes.gen_ai",),
            ("attributes.llm",),
            ("gen_ai",),
            ("attributes", "start_time", "end_time"),
        ],
        columns={
            "request_id": "spanId | span_id | context.span_id",
            "tenant": _attribute("user.id", "enduser.id", "session.id", "gen_ai.conversation.id"),
            "model": _attribute("gen_ai.request.model", "gen_ai.response.model", "llm.request.model", "llm.model_name"),
            "messages": _attribute("gen_ai.input.messages", "gen_ai.prompt", "llm.input_messages", "llm.prompts", "input.value", "events.0.attributes.gen_ai.prompt", "ai.prompt.messages", "request_data"),
            "system": _attribute("gen_ai.system_instructions"),
            "arrival_s": "startTimeUnixNano | start_time_unix_nano | start_time | startTime | start_timestamp",
            "end_s": "endTimeUnixNano | end_time_unix_nano | end_time | endTime | end_timestamp",
            "ttft_s": _attribute("gen_ai.latency.time_to_first_token"),
            "temperature": _attribute("gen_ai.request.temperature", "llm.invocation_parameters.temperature"),
            "top_p": _attribute("gen_ai.request.top_p", "llm.invocation_parameters.top_p"),
            "max_tokens": _attribute(
                "gen_ai.request.max_tokens",
                "llm.request.max_tokens",
                "llm.invocation_parameters.max_completion_tokens",
                "llm.invocation_parameters.max_tokens",
                "llm.invocation_parameters.max_output_tokens",
            ),
            "prompt_tokens": _attribute(
                "gen_ai.usage.input_tokens",
                "gen_ai.usage.prompt_tokens",
                "llm.usage.input_tokens",
                "llm.usage.prompt_tokens",
                "llm.token_count.prompt",
            ),
            "output_tokens": _attribute(
                "gen_ai.usage.output_tokens",
                "gen_ai.usage.completion_tokens",
                "llm.usage.output_tokens",
                "llm.usage.completion_tokens",
                "llm.token_count.completion",
            ),
            "finish_reason": _attribute(
                "gen_ai.response.finish_reasons",
                "gen_ai.response.finish_reason",
                "gen_ai.completion.0.finish_reason",
                "llm.response.finish_reason",
                "llm.response.stop_reason",
                "llm.output_messages.0.message.finish_reason",
            ),
            "error": _attribute("error.type"),
        },
        records=(
            "resourceSpans.scopeSpans.spans",
            "resourceSpans.instrumentationLibrarySpans.spans",
            "resource_spans.scope_spans.spans",
        ),
        requests={
            _attribute("gen_ai.operation.name"): ("chat", "text_completion", "generate_content", "completion"),
            _attribute("llm.request.type"): ("chat", "completion"),
            _attribute("openinference.span.kind") + " | span_kind": ("LLM",),
            _attribute("traceloop.span.kind"): (),
        },
        failures={
            "status.code": ("2", "STATUS_CODE_ERROR", "ERROR"),
            "status.status_code": ("2", "ERROR", "StatusCode.ERROR"),
            "status_code": ("ERROR", "STATUS_CODE_ERROR"),
        },
    ),
    "litellm": Format(
        marks=[("call_type", "completion_tokens"), ("spend", "completion_tokens")],
        columns={
            "request_id": "request_id | id",
            "tenant": "end_user | user | team_id",
            "model": "model_group | model",
            "messages": "messages | proxy_server_request",
            "arrival_s": "startTime",
            "first_token_s": "completionStartTime",
            "end_s": "endTime",
            "prompt_tokens": "prompt_tokens",
            "output_tokens": "completion_tokens",
            "max_tokens": " | ".join(
                f"{parent}.{name}"
                for parent in ("proxy_server_request", "model_parameters")
                for name in ("max_completion_tokens", "max_tokens", "max_output_tokens")
            ),
            "temperature": "proxy_server_request.temperature | model_parameters.temperature",
            "top_p": "proxy_server_request.top_p | model_parameters.top_p",
            "finish_reason": "response.choices.0.finish_reason | response.incomplete_details.reason | response.status",
        },
        records=("data",),
        failures={"status": ("failure",)},
    ),
    "langfuse": Format(
        marks=[
            ("usageDetails",),
            ("usage_details",),
            ("modelParameters",),
            ("model_parameters", "input"),
            ("completionStartTime", "input"),
        ],
        columns={
            "request_id": "id",
            "tenant": "userId | user_id | sessionId | session_id",
            "model": "model | provided_model_name | providedModelName",
            "messages": "input",
            "arrival_s": "startTime | start_time",
            "first_token_s": "completionStartTime | completion_start_time",
            "end_s": "endTime | end_time",
            "temperature": "modelParameters.temperature | model_parameters.temperature",
            "top_p": "modelParameters.top_p | model_parameters.top_p",
            "max_tokens": " | ".join(
                f"{parent}.{name}"
                for parent in ("modelParameters", "model_parameters")
                for name in ("max_completion_tokens", "max_tokens", "max_output_tokens", "maxTokens")
            ),
            # Langfuse counts cached and reasoning tokens beside input and output.
            "prompt_tokens": " | ".join(
                "+".join(f"{parent}.input{suffix}" for suffix in ("", "_cached_tokens", "_cache_read", "_cache_creation"))
                for parent in ("usageDetails", "usage_details")
            )
            + " | usage.input | usage.promptTokens | usage.inputTokens | usage.prompt_tokens | promptTokens | inputUsage",
            "output_tokens": " | ".join(
                f"{parent}.output+{parent}.output_reasoning_tokens" for parent in ("usageDetails", "usage_details")
            )
            + " | usage.output | usage.completionTokens | usage.outputTokens | usage.completion_tokens"
            " | completionTokens | outputUsage",
            "finish_reason": "output.choices.0.finish_reason | output.finish_reason | metadata.finish_reason",
        },
        records=("data", "observations"),
        requests={"type": ("GENERATION",)},
        failures={"level": ("ERROR",)},
    ),
    "bailian": Format(
        marks=[("chat_id", "parent_chat_id", "input_length", "output_length")],
        columns={
            "request_id": "chat_id",
            "category": "type",
            "arrival_s": "timestamp",
            "prompt_tokens": "input_length",
            "output_tokens": "output_length",
            "hash_ids": "hash_ids",
        },
        schemas=_TRACE,
    ),
    "langsmith": Format(
        marks=[("run_type", "start_time", "inputs")],
        columns={
            "request_id": "id",
            "model": "extra.invocation_params.model | extra.invocation_params.model_name | extra.metadata.ls_model_name",
            "messages": "inputs.messages | inputs",
            "arrival_s": "start_time",
            "first_token_s": "first_token_time",
            "end_s": "end_time",
            "max_tokens": "extra.invocation_params.max_completion_tokens | extra.invocation_params.max_tokens",
            "temperature": "extra.invocation_params.temperature",
            "prompt_tokens": "prompt_tokens",
            "output_tokens": "completion_tokens",
            "finish_reason": "outputs.choices.0.finish_reason | outputs.generations.0.0.generation_info.finish_reason",
            "error": "error",
        },
        requests={"run_type": ("llm",)},  # chains count the tokens of their calls again
    ),
    "mooncake": Format(
        marks=[("input_length", "output_length")],
        columns={
            "arrival_s": "timestamp",
            "prompt_tokens": "input_length",
            "output_tokens": "output_length",
            "session_id": "session_id",
            "think_time_s": "delay",
            "hash_ids": "hash_ids",
        },
        time_unit="ms",
        schemas=_TRACE,
    ),
    "agent-sessions": Format(
        marks=[("session", "agent", "cached_tokens", "output_tokens")],
        columns={
            "tenant": "session",
            "session_id": "session/agent",
            "model": "model",
            "category": "input_types",
            "arrival_s": "time_s",
            "think_time_s": "think_time_s",
            "prompt_tokens": "input_tokens",
            "prefix_tokens": "cached_tokens",
            "output_tokens": "output_tokens",
            "finish_reason": "stop",
            "ttft_s": "ttft_s",
            "total_s": "api_time_s",
        },
        schemas=_TRACE,
    ),
    "azure": Format(
        marks=[("TIMESTAMP", "ContextTokens", "GeneratedTokens")],
        columns={"arrival_s": "TIMESTAMP", "prompt_tokens": "ContextTokens", "output_tokens": "GeneratedTokens"},
        schemas=_TRACE,
    ),
    "burstgpt": Format(
        marks=[("Timestamp", "Request tokens", "Response tokens")],
        columns={
            "arrival_s": "Timestamp",
            "prompt_tokens": "Request tokens",
            "output_tokens": "Response tokens",
            "model": "Model",
            "category": "Log Type",
            "tenant": "Session ID",
            "total_s": "Elapsed time",
        },
        schemas=_TRACE,
    ),
    "vidur": Format(
        marks=[("num_prefill_tokens", "num_decode_tokens")],
        columns={
            "arrival_s": "arrived_at",
            "prompt_tokens": "num_prefill_tokens",
            "output_tokens": "num_decode_tokens",
        },
        schemas=_TRACE,
    ),
    "log": Format(
        marks=[("output_tokens",), ("completion_tokens",)],
        columns={name: name for name in MAPPED}
        | {
            "prompt_tokens": "prompt_tokens | input_tokens",
            "output_tokens": "output_tokens | completion_tokens",
            "finish_reason": "finish_reason | finished",
        },
    ),
}  # fmt: skip

#: Kinds with a reader of their own -> marks. They are looked for before `log`.
OTHER_MARKS: Mapping[str, Sequence[tuple[str, ...]]] = {
    "castillo": [("output_sizes", "prompt_text")],
    "openai-log": [
        ("request", "response"),
        ("response.body",),
        ("response.usage",),
        ("request_body", "response_body"),
        ("custom_id", "response"),
        ("custom_id", "result"),
        ("choices",),
        ("usage.completion_tokens",),
        ("usage.output_tokens",),
        ("usageMetadata",),
        ("done_reason", "eval_count"),
    ],
    "sharegpt": [("conversations",), ("conversation",), ("items",)],
}


def parse_mapping(text: str) -> dict[str, str]:
    """Parses a mapping such as `output_tokens=usage.completion_tokens,model=name`; empty for an empty text. InputError for
    invalid syntax, or a name that is not in `MAPPED`."""
    mapping: dict[str, str] = {}
    for item in text.split(",") if text else ():
        name, equals, source = (word.strip() for word in item.partition("="))
        if not equals or not source or name not in MAPPED or name in mapping:
            allowed = "NAME=COLUMN, each NAME once and one of " + ", ".join(MAPPED)
            raise InputError("columns", item.strip(), allowed)
        mapping[name] = source
    if mapping and "output_tokens" not in mapping:
        raise InputError("columns", text, "also output_tokens=COLUMN")
    return mapping


def detect(path: Path) -> str | None:
    """The kind of a file: the first in whose format one of its rows is; None if there is none."""
    tables = {name: each.marks for name, each in FORMATS.items() if name != "log"}
    marks = [
        *tables.items(),
        *OTHER_MARKS.items(),
        ("log", FORMATS["log"].marks),
        ("sharegpt", [("messages",)]),
    ]
    rows = file_rows(path, "file", objects=True, on_bad_row=lambda *_: None)
    for _, columns in islice(rows, _DETECTION_ROWS):
        source = SourceRow(columns)
        if str(source.get("format")).startswith(FEEDBACK_FORMAT.partition("/")[0]):
            return "feedback"
        for name, alternatives in marks:
            sources = [source]
            if name in FORMATS:
                records = islice(_records(columns, FORMATS[name]), _DETECTION_ROWS)
                sources += [SourceRow(record) for record, _ in records if record is not columns]
            if any(all(map(each.has, paths)) for each in sources for paths in alternatives):
                return name
    return None


def format_rows(
    path: Path, source_format: Format, skipped: SkippedRows, *, mapping: Mapping[str, str] | None = None
) -> Iterator[Row]:
    """Yields the requests of a file in a format.

    A record whose output_tokens is a list has a request for each element; other lists must be as long. Such requests without
    an id, and those of a row with several records, have their index in the row as `element`.

    Args:
        path: The file.
        source_format: Its format.
        skipped: Record of invalid rows and of rows that are no requests.
        mapping: Canonical column -> path, instead of the columns of the format.

    Raises:
        InputError: A value is invalid; the message names row, column and value. Or no row has a column of `mapping`.
    """
    if mapping:
        source_format = replace(source_format, columns=mapping, requests={}, failures={})
    columns = {name: tuple(paths.split(" | ")) for name, paths in source_format.columns.items()}
    unused = dict(mapping or {})
    is_table = source_format.columns == FORMATS["log"].columns
    location, number = path.name, 0
    for number, raw in file_rows(path, "file", objects=True, on_bad_row=skipped.add_bad):
        location = f"{path.name} row {number}"
        if is_table:
            is_table = False  # the first row speaks for the others
            used = {path for paths in columns.values() for path in paths}
            if ignored := sorted(str(name) for name in raw if name not in used):
                log.info(
                    "%s: columns that are not used (see --columns): %s", path.name, ", ".join(ignored)[:300]
                )
        element = 0
        for record, is_failed in _records(raw, source_format):
            source = SourceRow(record)
            unused = {name: column for name, column in unused.items() if not source.has(column)}
            if not _is_request(source, source_format, columns):
                skipped.num_other += 1
                continue
            problem = "failed: not complete" if is_failed else _problem(source, source_format)
            try:
                rows = [
                    _row(each, columns, location, source_format.time_unit, problem)
                    for each in _elements(source, columns, location)
                ]
            except InputError as error:
                skipped.add_bad(number, error)
                continue
            for index, row in enumerate(rows):
                if index and row.get("request_id") is not None:
                    row["request_id"] = f"{row['request_id']}-{index}"
                yield number, row | {"element": element}
                element += 1
    if number and unused:
        raise InputError(
            "columns", ", ".join(f"{name}={path}" for name, path in unused.items()), f"columns of {path.name}"
        )


def _records(raw: Mapping[str, Any], source_format: Format) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """The records of a row, and whether they are in a list of failed ones."""
    paths = (*source_format.records, *source_format.failed_records)
    if not any(path.partition(".")[0] in raw for path in paths):
        yield raw, False
    for path in paths:
        for record in records_at(raw, path):
            yield record, path in source_format.failed_records


def _is_request(source: SourceRow, source_format: Format, columns: Mapping[str, Sequence[str]]) -> bool:
    if not source_format.requests:
        return True
    for paths, values in source_format.requests.items():
        _, value = source.first(paths.split(" | "))
        if value is not None and str(value) not in values:
            return False
    evidence = ("output_tokens", "model", "error")
    return any(source.first(columns[name])[1] is not None for name in evidence if name in columns)


def _problem(source: SourceRow, source_format: Format) -> str | None:
    """Why a request failed; None if it did not."""
    for path, values in source_format.failures.items():
        if str(value := source.get(path)) in values:
            return f"failed: {path} is {value}"
    return None


def _elements(source: SourceRow, columns: Mapping[str, Sequence[str]], location: str) -> list[SourceRow]:
    """The record, or a record for each element of its lists, if its output_tokens is a list."""
    path, lengths = source.first(columns["output_tokens"])
    if not isinstance(lengths, list):
        return [source]
    lists = {path: lengths}
    for column, paths in columns.items():
        if column in ("messages", "hash_ids"):
            continue
        for name in (part for path in paths for part in path.split("+")):
            if isinstance(value := source.get(name), list):
                lists[name] = value
    for name, values in lists.items():
        if len(values) != len(lengths):
            allowed = f"one for each of {len(lengths)} lengths"
            raise InputError(f"{location} column {name}", values, allowed)
    return [
        SourceRow({**source.columns, **{name: values[index] for name, values in lists.items()}})
        for index in range(len(lengths))
    ]


def _row(
    source: SourceRow,
    columns: Mapping[str, Sequence[str]],
    location: str,
    time_unit: TimeUnit,
    problem: str | None,
) -> dict[str, Any]:
    """The canonical columns of a request; `problem`: why it failed. InputError if it has no length and did not fail."""
    row = canonical_row(source, columns, location, time_unit)
    if problem is not None and row.get("finish_reason") != "error":
        row |= failure(problem)
    paths = columns["output_tokens"]
    if (
        row["output_tokens"] is None
        and row.get("finish_reason") != "error"
        and not any(map(source.has, paths))
    ):
        allowed = f"also {' or '.join(paths)} (--columns output_tokens=COLUMN names another one)"
        raise InputError(f"{location}: columns", sorted(map(str, source.columns)), allowed)
    return row
