"""Traces as files: JSON lines, CSV or Parquet, read row by row with every value checked."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.files import atomic_file, existing_file, sha256_file, writable_target
from scheduler_core.predictions import LengthPrediction
from scheduler_core.request import MAX_TIERS
from scheduler_core.simulator.row_file import parquet_file, text_rows
from scheduler_core.simulator.trace import MAX_TIME_S, MAX_TOKENS, Trace, TraceRequest

REQUIRED = ("request_id", "arrival_s", "prompt_tokens", "output_tokens", "max_tokens")
SCHEMA = b"trace/1"
_PREDICTED = ("mu", "sigma", "nu")
#: Columns beyond the required ones that are numbers: name -> (integers, smallest, largest).
_NUMBERS = {
    "tier": (True, 0, MAX_TIERS - 1),
    "priority": (True, -(2**53), 2**53),
    "ttft_slo_s": (False, 0, MAX_TIME_S),
    "tbt_slo_s": (False, 0, MAX_TIME_S),
    "ttlt_slo_s": (False, 0, MAX_TIME_S),
    "turn": (True, 0, 2**31),
    "think_time_s": (False, 0, MAX_TIME_S),
    "prefix_tokens": (True, 0, MAX_TOKENS),
}
_TEXTS = ("prompt", "prompt_id", "tenant", "category", "session_id")
COLUMNS = (*REQUIRED, *_TEXTS, *_NUMBERS, *_PREDICTED)


def load_trace(
    path: str | Path, *, need_arrivals: bool = True, default_max_tokens: int | None = None
) -> Trace:
    """Reads a trace from JSON lines (.jsonl), CSV (.csv) or Parquet (.parquet).

    Columns: those of `TraceRequest`, of which request_id, arrival_s, prompt_tokens, output_tokens and max_tokens are
    needed; a predicted log-t length is in mu, sigma, nu (all three or none). Others are ignored, and an empty value
    is that of a missing column. Rows are sorted by arrival.

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
    if file.suffix == ".parquet":
        yield from enumerate(_parquet_rows(file), start=1)
    elif file.suffix in (".jsonl", ".csv"):
        yield from enumerate(text_rows(file, "trace"), start=1)
    else:
        raise InputError("trace", file.name, "a name that ends in .jsonl, .csv or .parquet")


def _parquet_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    with parquet_file(file, "trace") as table:
        columns = [name for name in table.schema_arrow.names if name in COLUMNS]
        for batch in table.iter_batches(columns=columns):
            yield from batch.to_pylist()


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
        given: dict[str, Any] = {name: self._optional_text(name) for name in _TEXTS if self._has(name)}
        given |= {name: self._optional_number(name) for name in _NUMBERS if self._has(name)}
        values = dict(
            request_id=self._text("request_id"),
            arrival_s=self._arrival(),
            prompt_tokens=self._integer("prompt_tokens"),
            output_tokens=self._integer("output_tokens", max_tokens, cap),
            max_tokens=max_tokens,
            prediction=self._prediction(),
            **given,
        )
        try:
            row = TraceRequest(**values)
            row.request()
        except InputError as error:
            raise InputError(f"{self.where}, {error.field}", error.value, error.allowed) from error
        return row

    def _has(self, name: str) -> bool:
        return self._raw.get(name) is not None

    def _optional_number(self, name: str) -> int | float:
        whole, low, high = _NUMBERS[name]
        allowed = f"{'integers' if whole else 'numbers'} from {low} to {high if whole else f'{high:g}'}"
        number = self._number(name, allowed)
        if not low <= number <= high or (whole and number != int(number)):
            raise self._wrong(name, allowed)
        return int(number) if whole else number

    def _wrong(self, name: str, allowed: str) -> InputError:
        return InputError(f"{self.where} column {name}", self._raw.get(name), allowed)

    def _number(self, name: str, allowed: str) -> float:
        value = self._raw.get(name)
        if isinstance(value, bool) or value is None:
            raise self._wrong(name, allowed)
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise self._wrong(name, allowed) from error
        if not math.isfinite(number):
            raise self._wrong(name, allowed)
        return number

    def _integer(self, name: str, high: int | None = None, of: str = "") -> int:
        """A number from 1, at most `high`, which is the value of `of`."""
        allowed = f"integers from 1 to {MAX_TOKENS}" + _way_out(name)
        if high is not None:
            allowed = f"integers from 1 to {of} = {high}"
        number = self._number(name, allowed)
        if number != int(number) or not 1 <= number <= (MAX_TOKENS if high is None else high):
            raise self._wrong(name, allowed)
        return int(number)

    def _arrival(self) -> float:
        if "arrival_s" in self._optional and self._raw.get("arrival_s") is None:
            return 0.0
        allowed = f"seconds from 0 to {MAX_TIME_S:g}"
        number = self._number("arrival_s", allowed)
        if not 0 <= number <= MAX_TIME_S:
            raise self._wrong("arrival_s", allowed)
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


def write_trace(trace: Trace, path: str | Path) -> None:
    """Writes a trace as JSON lines, CSV or Parquet by the name's ending, atomically; `load_trace` reads it back.

    Columns in which every row has the default are left out.

    Raises:
        InputError: The name ends in something else, or there is no such folder.
    """
    target = Path(path)
    if target.suffix not in (".jsonl", ".csv", ".parquet"):
        raise InputError("trace", target.name, "a name that ends in .jsonl, .csv or .parquet")
    writable_target(target, "trace")
    rows = [_values(row) for row in trace.requests]
    columns = [name for name in COLUMNS if any(name in row for row in rows)]
    with atomic_file(target) as temporary:
        if target.suffix == ".parquet":
            try:
                import pyarrow as pa
                import pyarrow.parquet as pq
            except ImportError as error:
                raise MissingExtraError("pyarrow", "sim") from error
            table = pa.table({name: [row.get(name) for row in rows] for name in columns})
            pq.write_table(
                table.replace_schema_metadata({"tailcast.schema": SCHEMA}), temporary, compression="zstd"
            )
            return
        with open(temporary, "w", encoding="utf-8", newline="") as stream:
            if target.suffix == ".jsonl":
                stream.writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows)
            else:
                writer = csv.DictWriter(stream, fieldnames=columns)
                writer.writeheader()
                writer.writerows(rows)


_DEFAULTS = {item.name: item.default for item in fields(TraceRequest) if item.default is not MISSING}


def _values(row: TraceRequest) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in (*REQUIRED, *_TEXTS, *_NUMBERS)}
    values = {name: value for name, value in values.items() if name in REQUIRED or value != _DEFAULTS[name]}
    if row.prediction is not None:
        values |= {name: getattr(row.prediction, name) for name in _PREDICTED}
    return values
