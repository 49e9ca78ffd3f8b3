"""Importers of requests with their responses, and of the proxy's feedback log.

`openai-log` imports responses of the OpenAI, Anthropic, Ollama and Gemini APIs, one per line: alone, with the request
(`{"request": ..., "response": ...}`), or in the format of a Batch API (`{"custom_id", "response": {"body"}}`), whose requests
are in another file.

`feedback` imports the log of `tailcast-proxy --feedback FOLDER`, one output per request: a folder of segments
(feedback-*.jsonl, in the order of their names) or a single segment. Lines that are not records (torn by a crash, damaged)
and copies of earlier records are skipped and counted.

| record | as sample |
|---|---|
| finish_reason stop, length, ... | mapped by `values.FINISH_REASONS` |
| the client disconnected ("abort") | an error row: the client determined that length, not the model |
| of a request with ignore_eos or min_tokens | an error row, for the same reason |
| counted by events ("deltas") | its length: the proxy converts events to tokens |
| only the hash of the prompt | the hash is the prompt id; sufficient for a trace, or for prompts stored elsewhere |

A trace keeps all records with an output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_gen.importers.source_row import SourceRow
from data_gen.importers.values import (
    ERROR,
    FINISH_REASONS,
    LENGTH,
    STOP,
    UNKNOWN,
    Row,
    SkippedRows,
    canonical_row,
    conversation_columns,
    failure,
    forced_length,
    prompt_columns,
    read_prompt,
    shared_count,
)
from data_gen.prompts import prompt_id_of
from scheduler_core.errors import InputError
from scheduler_core.prediction.api_request import read_request
from scheduler_core.prediction.outcome import Outcome, read_log
from scheduler_core.shell.json_text import from_json
from scheduler_core.shell.table_files import file_rows

_COLUMNS = {"request_id", "tier", "tenant", "temperature", "top_p", "prompt_tokens", "output_tokens", "ttft_s", "total_s"}  # fmt: skip
#: Locations of request and response in a line.
_REQUESTS = ("request.body", "request", "body", "params", "request_body")
_RESPONSES = ("response.body", "response", "result.message", "response_body")
_RESPONSE_MEMBERS = ("response", "result", "response_body")
#: Canonical column -> paths in a response: of OpenAI chat and completions, Responses, Anthropic, Ollama, and Gemini.
_OF_RESPONSE: Mapping[str, Sequence[str]] = {
    "model": ("model", "modelVersion"),
    "arrival_s": ("created", "created_at", "createTime"),
    "max_tokens": ("max_output_tokens",),
    # Anthropic counts cached tokens beside the others.
    "prompt_tokens": (
        "usage.prompt_tokens",
        "usage.input_tokens+usage.cache_creation_input_tokens+usage.cache_read_input_tokens",
        "prompt_eval_count",
        "usageMetadata.promptTokenCount",
        "prompt_tokens",
    ),
    "output_tokens": (
        "usage.completion_tokens",
        "usage.output_tokens",
        "eval_count",
        "usageMetadata.candidatesTokenCount+usageMetadata.thoughtsTokenCount",
        "completion_tokens",
    ),
    "finish_reason": (
        "choices.0.finish_reason",
        "incomplete_details.reason",
        "status",
        "stop_reason",
        "done_reason",
        "candidates.0.finishReason",
        "finish_reason",
    ),
}
#: Canonical column -> paths in a line, beside request and response.
_OF_LINE: Mapping[str, Sequence[str]] = {
    "arrival_s": ("arrival_s", "timestamp", "created_at", "start_time", "startTime", "request_created_at"),
    "ttft_s": ("ttft_s",),
    "total_s": ("total_s",),
}
_PROMPTS = (
    "prompt",
    "messages",
    "contents",
    "input",
    "inputs",
    "text",
    "input_ids",
    "token_ids",
    "prompt_token_ids",
)


def openai_rows(path: Path, inputs: str | None, skipped: SkippedRows) -> Iterator[Row]:
    """Yields requests with their responses; a response with several choices, which share one token count, becomes an error
    row. `inputs`: input file of a batch, whose requests are joined by custom_id."""
    requests = {} if inputs is None else _inputs(Path(inputs))
    for number, raw in file_rows(path, "file", objects=True, on_bad_row=skipped.add_bad):
        try:
            row = _api_row(SourceRow(raw), requests, f"{path.name} row {number}")
        except InputError as error:
            skipped.add_bad(number, error)
            continue
        yield number, row


def _inputs(path: Path) -> dict[str, Mapping[str, Any]]:
    """The bodies of the requests of a batch, by custom_id."""
    requests = {}
    for number, raw in file_rows(path, "inputs", objects=True):
        source = SourceRow(raw)
        identifier, body = source.get("custom_id"), from_json(source.first(_REQUESTS)[1])
        if identifier is None or not isinstance(body, Mapping):
            raise InputError(f"{path.name} row {number}", sorted(raw), "custom_id and body")
        requests[str(identifier)] = body
    return requests


def _api_row(source: SourceRow, inputs: Mapping[str, Mapping[str, Any]], location: str) -> dict[str, Any]:
    line = source.columns
    response = from_json(source.first(_RESPONSES)[1])
    has_lengths = any(map(source.has, _OF_RESPONSE["output_tokens"]))
    if not isinstance(response, Mapping) and (
        has_lengths or not any(name in line for name in _RESPONSE_MEMBERS)
    ):
        response = line  # beside the text of the output, as in Ollama's responses
    custom_id = source.get("custom_id")
    request = from_json(source.first(_REQUESTS)[1])
    if request is None:
        is_request = any(name in line for name in _PROMPTS)
        request = inputs.get(str(custom_id), line if is_request else {})
    if isinstance(request, Mapping):
        body, user = read_request(request), request.get("user")
        prompt = {name: request[name] for name in _PROMPTS if request.get(name)}
    else:
        body, user, prompt = read_prompt(request), None, {"prompt": request}
    is_response = isinstance(response, Mapping)
    identifier = custom_id or (response.get("id") if is_response else None)
    row: dict[str, Any] = {
        "request_id": None if identifier is None else str(identifier),
        "tenant": str(user) if isinstance(user, str | int) else None,
        "model": body.model or None,
        "max_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        **prompt_columns(body, prompt),
    }
    problem = (
        source.get("error") or source.get("result.error") or (response.get("error") if is_response else None)
    )
    if problem or response is None:
        text = problem.get("message") if isinstance(problem, Mapping) else problem
        return row | failure(f"refused: {text}")
    if not is_response:
        raise InputError(f"{location} column response", response, "an object with token counts")
    row = _with_response(row, source, SourceRow(response), location)
    return row | (forced_length() if body.forces_length else {})


def _with_response(
    row: dict[str, Any], line: SourceRow, response: SourceRow, location: str
) -> dict[str, Any]:
    """The columns of a request, and those of its response."""
    received = canonical_row(response, _OF_RESPONSE, location)
    if received["output_tokens"] is None and not any(map(response.has, _OF_RESPONSE["output_tokens"])):
        names = sorted(map(str, response.columns))
        raise InputError(f"{location}: columns", names, "also usage.completion_tokens or usage.output_tokens")
    if received["arrival_s"] is None and line.columns is not response.columns:
        received |= canonical_row(line, _OF_LINE, location)
    limit = received["max_tokens"] if row["max_tokens"] is None else row["max_tokens"]
    row |= received | {"model": received["model"] or row["model"], "max_tokens": limit}
    choices = response.get("choices")
    if isinstance(choices, list) and len(choices) > 1:
        row |= shared_count(len(choices))
    return row


def feedback_rows(path: Path, skipped: Counter[str]) -> Iterator[Row]:
    """Yields rows of a feedback log; `skipped` counts skipped lines by reason."""
    for number, outcome in read_log(path, skipped):
        yield number, _row(outcome)


def _row(outcome: Outcome) -> dict[str, Any]:
    row = {name: getattr(outcome, name) for name in _COLUMNS} | {
        "model": outcome.served_model,
        "arrival_s": outcome.time,
        "max_tokens": outcome.limit,
        "finish_reason": FINISH_REASONS.get(outcome.finish_reason.lower(), UNKNOWN),
        **_prompt(outcome),
    }
    if row["finish_reason"] == UNKNOWN and outcome.finished is not None:
        row["finish_reason"] = STOP if outcome.finished else LENGTH
    if outcome.finish_reason == "abort":
        row |= {"finish_reason": ERROR, "error": "abort: the client disconnected"}
    elif row["finish_reason"] == ERROR:
        row["error"] = f"{outcome.finish_reason}: as logged"
    elif outcome.forced_length:
        row |= forced_length()
    return row


def _prompt(outcome: Outcome) -> dict[str, Any]:
    columns = conversation_columns(outcome.messages)
    if columns:
        return columns
    if outcome.prompt:
        return {"prompt_id": prompt_id_of(outcome.prompt), "prompt": outcome.prompt}
    return {"prompt_id": outcome.prompt_sha256}
