"""Predictions for a file of prompts; invalid rows are counted, or stop the command."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.prediction.api_request import MAX_TOKENS, ApiRequest, integer, read_request
from scheduler_core.prediction.predictions import DEFAULT_MAX_TOKENS
from scheduler_core.shell.command import report_left_out
from scheduler_core.shell.files import existing_file
from scheduler_core.shell.json_text import from_json
from scheduler_core.shell.progress import tracked
from scheduler_core.shell.table_files import file_rows
from scheduler_core.simulator.tables import check_table_path, columns_of, write_table
from tailcast.length_predictor import LengthPredictor
from tailcast.output_length import OutputLength

log = logging.getLogger(__name__)

SCHEMA = "predictions/1"
#: Columns with a nested API request, as in Batch APIs and in logs.
_NESTED = ("body", "request", "params")
#: Columns that may hold messages, options or sampling parameters as JSON text.
_JSON = (
    *("messages", "input", "system", "instructions", "options", "parameters", "sampling_params", "tools"),
    *("response_format", "reasoning", "thinking", "chat_template_kwargs", "stop", "tool_choice"),
)
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens")
_NAMES = ("request_id", "custom_id")
_BATCH_ROWS = 256


class _PromptRow(NamedTuple):
    """One valid row: its row number (line number in text files), the text to predict from, and its request, with the limit
    of the output and the defaults of the file."""

    number: int
    request_id: str | None
    text: str
    request: ApiRequest


@dataclass(slots=True)
class _BadRows:
    """Number of invalid rows by reason."""

    stop: bool
    name: str
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, number: int, error: TailcastError, reason: str | None = None) -> None:
        """Counts an invalid row by reason (None: the field of the error); raises TailcastError if `stop`."""
        if self.stop:
            raise TailcastError(f"{self.name} row {number}: {error}") from error
        if reason is None:
            reason = error.field if isinstance(error, InputError) and error.allowed else str(error)
        if reason not in self.counts:
            log.warning("%s row %d skipped: %s", self.name, number, error)
        self.counts[reason] = self.counts.get(reason, 0) + 1

    def __str__(self) -> str:
        return ", ".join(f"{count} for {reason}" for reason, count in self.counts.items()) or "none"


def predict_file(
    predictor: LengthPredictor,
    data: str,
    out: str,
    defaults: ApiRequest,
    *,
    stop: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> int:
    """Writes predictions to the table `out`, one row per valid row of the file `data`; returns the exit code, see
    `report_left_out`.

    Columns: row, request_id, model, mu, sigma, nu, max_tokens, median_tokens, p90_tokens, p99_tokens,
    expected_tokens (truncated at max_tokens), artifact_id, artifact_version; with a predictor of urgency also urgency_level
    (null if it abstains) and urgency_probability. InputError if no row is valid.

    Args:
        defaults: Model, max_tokens and temperature of rows without their own.
        stop: Whether an invalid row raises TailcastError; otherwise it is counted.
    """
    file, target = existing_file(data, "data"), check_table_path(out, "out")
    if target.is_file() and not overwrite:
        raise InputError("out", out, "a new file; --overwrite true replaces this one")
    bad = _BadRows(stop, file.name)
    rows = iter(tracked(_prompt_rows(file, predictor, defaults, bad), "predict", progress))
    table: list[dict[str, Any]] = []
    missing: Counter[str] = Counter()
    while batch := list(islice(rows, _BATCH_ROWS)):
        for row, length in _predictions(predictor, batch, bad):
            table.append(_columns(row, length))
            missing.update(map(str, length.missing))
    if not table:
        raise InputError("data", data, f"a file with valid rows (skipped: {bad})")
    write_table(columns_of(table), target, SCHEMA, "out")
    log.info("%s: %d predictions; rows skipped: %s", target, len(table), bad)
    for part, count in missing.items():
        log.warning("%d of %d predictions lack the part %s", count, len(table), part)
    return report_left_out(bad.counts, len(table) + sum(bad.counts.values()))


def _prompt_rows(
    file: Path, predictor: LengthPredictor, defaults: ApiRequest, bad: _BadRows
) -> Iterator[_PromptRow]:
    for number, values in file_rows(file, "data", on_bad_row=partial(bad.add, reason="format")):
        try:
            yield _prompt_row(number, values, predictor, defaults)
        except InputError as error:
            bad.add(number, error)


def _prompt_row(
    number: int, values: Mapping[str, Any], predictor: LengthPredictor, defaults: ApiRequest
) -> _PromptRow:
    request = _request(values)
    body = read_request(request)
    text = body.text(predictor.form)
    if not text.strip():
        allowed = "a text, unless there are messages or an input"
        raise InputError("prompt", request.get("prompt"), allowed)
    for name in _LIMITS:
        if (limit := request.get(name)) is None:
            continue
        if (num_tokens := integer(limit)) is None or num_tokens > MAX_TOKENS:
            raise InputError(name, limit, f"integers up to {MAX_TOKENS}; 0 or less is no limit")
    if request.get("temperature") is not None and body.temperature is None:
        raise InputError("temperature", request["temperature"], "numbers >= 0")
    request_id = next((values[name] for name in _NAMES if values.get(name) is not None), None)
    body = replace(
        body,
        model=str(request.get("model") or defaults.model),
        max_tokens=body.max_tokens or defaults.max_tokens or DEFAULT_MAX_TOKENS,
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        num_outputs=1,  # predictions are those of one output
    )
    return _PromptRow(number, None if request_id is None else str(request_id), text, body)


def _request(values: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the request in a row, without empty cells; JSON texts are parsed. InputError for invalid JSON."""
    request: Any = values
    while inner := next(
        (each for name in _NESTED if isinstance(each := from_json(request.get(name)), Mapping)), None
    ):
        request = inner
    body = {name: value for name, value in request.items() if value not in (None, "")}
    if request is values:
        body.pop("text", None)  # a prompt of SGLang's API, but an output in tables
    body |= {name: from_json(body[name]) for name in _JSON if name in body}
    if isinstance(body.get("messages"), str):
        raise InputError("messages", body["messages"], "a JSON list")
    return body


def _predictions(
    predictor: LengthPredictor, rows: list[_PromptRow], bad: _BadRows
) -> Iterator[tuple[_PromptRow, OutputLength]]:
    """Predictions of the valid rows; if the predictor rejects a batch, predicts its rows one by one."""
    try:
        texts, models = [row.text for row in rows], [row.request.model or None for row in rows]
        predictions = predictor.predictions(
            texts,
            models,
            [row.request.temperature for row in rows],
            conversations=[row.request.conversation for row in rows],
        )
    except TailcastError as error:
        if getattr(error, "code", None) not in (None, "INVALID_ARGUMENT"):
            raise  # a failure of the service, not of a row
        if len(rows) > 1:
            for row in rows:
                yield from _predictions(predictor, [row], bad)
        else:
            bad.add(rows[0].number, error)
        return
    for row, prediction in zip(rows, predictions, strict=True):
        max_tokens = row.request.max_tokens or DEFAULT_MAX_TOKENS
        requested = row.request.prediction(prediction, max_tokens)
        assert requested is not None
        yield row, OutputLength.of(requested, max_tokens)


def _columns(row: _PromptRow, length: OutputLength) -> dict[str, Any]:
    prediction, urgency = length.prediction, length.urgency
    columns = {
        "row": row.number,
        "request_id": row.request_id,
        "model": row.request.model or None,
        "mu": prediction.mu,
        "sigma": prediction.sigma,
        "nu": prediction.nu,
        "max_tokens": length.max_tokens,
        "median_tokens": length.median,
        "p90_tokens": length.quantile(0.9),
        "p99_tokens": length.quantile(0.99),
        "expected_tokens": length.expected_tokens,
        "artifact_id": prediction.artifact_id,
        "artifact_version": prediction.artifact_version,
    }
    if urgency is not None:
        columns["urgency_level"] = None if urgency.abstains else urgency.level
        columns["urgency_probability"] = max(urgency.probabilities)
    return columns
