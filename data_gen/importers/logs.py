"""Production logs and other tables of output lengths.

`log` reads any table with a mapping from canonical columns to the table's (`output_tokens=usage.completion_tokens`;
dots go into objects), by default the columns that have canonical names. `openai-log` reads responses of the OpenAI API:
one on each line, alone, beside its request (`{"request": ..., "response": ...}`), or as the Batch API writes it
(`{"custom_id", "response": {"body"}}`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data_gen.importers.values import ERROR, MAPPED, Row, SkippedRows, checked_columns
from scheduler_core.errors import InputError
from scheduler_core.table_files import file_rows

_OF_REQUEST = {"temperature": "temperature", "top_p": "top_p", "tenant": "user", "model": "model"}
_OF_RESPONSE = {
    "model": "model",
    "arrival_s": "created",
    "prompt_tokens": "usage.prompt_tokens",
    "output_tokens": "usage.completion_tokens",
}


def parse_mapping(text: str) -> dict[str, str]:
    """`output_tokens=usage.completion_tokens,model=name` as a dictionary; empty for an empty text.

    Raises:
        InputError: It is not of that form, or names a column that is not among `MAPPED`.
    """
    mapping: dict[str, str] = {}
    for item in text.split(",") if text else ():
        name, equals, source = (word.strip() for word in item.partition("="))
        if not equals or not source or name not in MAPPED or name in mapping:
            allowed = "NAME=COLUMN, each once, with NAME of " + ", ".join(MAPPED)
            raise InputError("columns", item.strip(), allowed)
        mapping[name] = source
    if mapping and "output_tokens" not in mapping:
        raise InputError("columns", text, "also output_tokens=COLUMN")
    return mapping


def openai_rows(path: Path, skipped: SkippedRows) -> Iterator[Row]:
    """OpenAI-style responses; one with several choices is an error row, since they share one count."""
    for number, raw in file_rows(path, "file", on_bad_row=skipped.add_bad):
        try:
            row = _openai_row(raw, f"{path.name} row {number}")
        except InputError as error:
            skipped.add_bad(number, error)
            continue
        yield number, row


def _openai_row(raw: Mapping[str, Any], location: str) -> dict[str, Any]:
    response = raw.get("response", raw)
    if isinstance(response, Mapping) and "body" in response:
        response = response["body"]
    request = raw.get("request", raw if "messages" in raw or "prompt" in raw else {})
    if isinstance(request, Mapping) and "body" in request:
        request = request["body"]
    if not isinstance(request := request or {}, Mapping):
        raise InputError(f"{location} column request", request, "an object")
    limit = "max_completion_tokens" if request.get("max_completion_tokens") else "max_tokens"
    mapping = {**_OF_REQUEST, "max_tokens": limit}
    if request.get("messages") is not None:
        mapping["messages"] = "messages"
    elif request.get("prompt") is not None:
        mapping["prompt"] = "prompt"
    row = checked_columns(request, mapping, location, optional=mapping)
    is_response = isinstance(response, Mapping)
    identifier = raw.get("custom_id") or (response.get("id") if is_response else None)
    row["request_id"] = None if identifier is None else str(identifier)
    if not is_response or raw.get("error") or response.get("error"):
        reason = raw.get("error") or (response.get("error") if is_response else response)
        text = reason.get("message") if isinstance(reason, Mapping) else reason
        return row | {"output_tokens": 0, "finish_reason": ERROR, "error": f"refused: {text}"}
    optional = ("model", "arrival_s", "prompt_tokens")
    received = checked_columns(response, _OF_RESPONSE, location, optional)
    row |= received | {"model": received["model"] or row["model"]}
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise InputError(f"{location} column choices", choices, "a list of at least one choice")
    if len(choices) > 1:
        problem = f"shared_count: {len(choices)} choices share one token count"
        return row | {"output_tokens": 0, "finish_reason": ERROR, "error": problem}
    return row | checked_columns(choices[0], {"finish_reason": "finish_reason"}, f"{location} choices")
