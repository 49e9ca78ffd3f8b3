"""Request traces: what arrives when, and (for the simulator only) how long the answers really were."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.files import existing_file, sha256_file
from scheduler_core.predictions import LengthPrediction

REQUIRED = ("request_id", "arrival_s", "prompt_tokens", "output_tokens", "max_tokens")
_PREDICTED = ("mu", "sigma", "nu")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One row of a trace.

    Attributes:
        request_id: Unique in the trace.
        arrival_s: Seconds from the start of the trace.
        prompt_tokens: Length of the prompt, > 0.
        output_tokens: True length of the answer, from 1 to max_tokens. Known to the simulator alone.
        max_tokens: The request's own cap, or the default for requests without one.
        prompt: Text of the prompt; None if the trace has none.
        prompt_id: Which prompt it is; None if the trace does not say.
        prediction: Predicted length found in the trace; None if there is none.
    """

    request_id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    prompt: str | None = None
    prompt_id: str | None = None
    prediction: LengthPrediction | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival.

    Attributes:
        requests: The rows.
        source: Where they come from.
        sha256: Hash of the file; empty if it was not a file.
    """

    requests: tuple[TraceRequest, ...]
    source: str = ""
    sha256: str = ""

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def has_predictions(self) -> bool:
        """At least one row carries a prediction."""
        return any(row.prediction is not None for row in self.requests)


def load_trace(
    path: str | Path, *, need_arrivals: bool = True, default_max_tokens: int | None = None
) -> Trace:
    """Reads a trace from JSON lines (.jsonl), CSV (.csv) or Parquet (.parquet).

    Columns: request_id, arrival_s, prompt_tokens, output_tokens, max_tokens; optional prompt, prompt_id, and mu,
    sigma, nu (a predicted log-t length; all three or none). Others are ignored. Rows are sorted by arrival.

    Args:
        path: The file.
        need_arrivals: False if arrival times will be drawn: arrival_s may then be missing or empty and is 0.
        default_max_tokens: Cap of the requests that have none, as in public traces; it may not be shorter than their
            answers. None: every request needs a cap of its own.

    Raises:
        InputError: Names the file, row, column and value that cannot be used, and what could.
    """
    file = existing_file(path, "trace")
    requests: list[TraceRequest] = []
    seen: set[str] = set()
    for number, raw in _rows(file):
        row = _Row(f"{file.name} row {number}", raw, need_arrivals, default_max_tokens)
        request = row.request()
        if request.request_id in seen:
            raise InputError(f"{row.where} column request_id", request.request_id, "an id not used before")
        seen.add(request.request_id)
        requests.append(request)
    if not requests:
        raise InputError("trace", str(path), "a file with at least one row")
    requests.sort(key=lambda request: request.arrival_s)
    return Trace(tuple(requests), source=str(path), sha256=sha256_file(file))


def _rows(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(number of the row from 1, columns) of each row."""
    readers = {".jsonl": _json_rows, ".csv": _csv_rows, ".parquet": _parquet_rows}
    if file.suffix not in readers:
        raise InputError("trace", file.name, "a name that ends in .jsonl, .csv or .parquet")
    try:
        yield from enumerate(readers[file.suffix](file), start=1)
    except UnicodeDecodeError as error:
        raise InputError("trace", file.name, f"UTF-8 text ({error.reason} at byte {error.start})") from error


def _json_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    with open(file, encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InputError(f"{file.name} line {number}", line.strip(), "a JSON object") from error
            if not isinstance(row, dict):
                raise InputError(f"{file.name} line {number}", line.strip(), "a JSON object")
            yield row


def _csv_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    with open(file, encoding="utf-8", newline="") as stream:
        reader = csv.DictReader(stream, strict=True)
        try:
            for row in reader:
                yield {name: None if value == "" else value for name, value in row.items()}
        except csv.Error as error:
            raise InputError(f"{file.name} line {reader.line_num}", str(error), "a CSV row") from error


def _parquet_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("pyarrow", "sim") from error
    try:
        table = pq.ParquetFile(file)
        wanted = (*REQUIRED, "prompt", "prompt_id", *_PREDICTED)
        columns = [name for name in table.schema_arrow.names if name in wanted]
        for batch in table.iter_batches(columns=columns):
            yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise InputError("trace", str(file), f"a readable Parquet file ({error})") from error


def _way_out(name: str) -> str:
    """What else can be done about a column that a trace may well lack."""
    return "; or default_max_tokens for requests without a cap" if name == "max_tokens" else ""


class _Row:
    """Checks the values of one row."""

    def __init__(
        self, where: str, raw: Mapping[str, Any], need_arrivals: bool, default_max_tokens: int | None
    ) -> None:
        self.where = where
        self._raw = raw
        self._optional = set() if need_arrivals else {"arrival_s"}
        self._default_max_tokens = default_max_tokens
        if default_max_tokens is not None:
            self._optional.add("max_tokens")

    def request(self) -> TraceRequest:
        for name in REQUIRED:
            if name not in self._raw and name not in self._optional:
                found = ", ".join(str(key) for key in self._raw)
                allowed = "a trace with columns " + ", ".join(REQUIRED) + _way_out(name)
                raise InputError(f"{self.where} column {name}", found, allowed)
        cap = "max_tokens"
        if self._default_max_tokens is not None and self._raw.get(cap) is None:
            cap, max_tokens = "default_max_tokens", self._default_max_tokens
        else:
            max_tokens = self._integer("max_tokens")
        return TraceRequest(
            request_id=self._text("request_id"),
            arrival_s=self._arrival(),
            prompt_tokens=self._integer("prompt_tokens"),
            output_tokens=self._integer("output_tokens", max_tokens, cap),
            max_tokens=max_tokens,
            prompt=self._optional_text("prompt"),
            prompt_id=self._optional_text("prompt_id"),
            prediction=self._prediction(),
        )

    def _wrong(self, name: str, allowed: str) -> InputError:
        return InputError(f"{self.where} column {name}", self._raw.get(name), allowed)

    def _number(self, name: str, allowed: str) -> float:
        value = self._raw.get(name)
        if isinstance(value, bool) or value is None:
            raise self._wrong(name, allowed)
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise self._wrong(name, allowed) from error
        if not math.isfinite(number):
            raise self._wrong(name, allowed)
        return number

    def _integer(self, name: str, high: int | None = None, of: str = "") -> int:
        """A number from 1, at most `high`, which is the value of `of`."""
        allowed = "integers > 0" + _way_out(name) if high is None else f"integers from 1 to {of} = {high}"
        number = self._number(name, allowed)
        if number != int(number) or number < 1 or (high is not None and number > high):
            raise self._wrong(name, allowed)
        return int(number)

    def _arrival(self) -> float:
        if "arrival_s" in self._optional and self._raw.get("arrival_s") is None:
            return 0.0
        number = self._number("arrival_s", "seconds >= 0")
        if number < 0:
            raise self._wrong("arrival_s", "seconds >= 0")
        return number

    def _text(self, name: str) -> str:
        value = self._raw.get(name)
        if value is None or isinstance(value, bool) or str(value) == "":
            raise self._wrong(name, "a string that is not empty")
        return str(value)

    def _optional_text(self, name: str) -> str | None:
        value = self._raw.get(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def _prediction(self) -> LengthPrediction | None:
        if all(self._raw.get(name) is None for name in _PREDICTED):
            return None
        values = [
            self._number(name, "a finite number (mu, sigma and nu, or none of them)") for name in _PREDICTED
        ]
        try:
            return LengthPrediction(values[0], values[1], values[2])
        except InputError as error:
            raise InputError(f"{self.where}, {error.field}", error.value, error.allowed) from error
