"""Request traces: what arrives when, and (for the simulator only) true output lengths; read from files and written."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.files import atomic_file, existing_file, sha256_file
from scheduler_core.predictions import LengthPrediction
from scheduler_core.request import MAX_TIERS, Request
from scheduler_core.simulator.tables import check_table_path, file_rows, write_parquet, write_text

#: Latest arrival in seconds: the simulated clock is a float, which has a resolution of 2 microseconds there. Times since
#: 1970 are below it.
MAX_TIME_S = 1e10
#: Maximum number of tokens of a prompt or an output.
MAX_TOKENS = 2**31 - 1
SCHEMA = "trace/1"

REQUIRED = ("request_id", "arrival_s", "prompt_tokens", "output_tokens", "max_tokens")
_TEXTS = ("prompt", "prompt_id", "tenant", "category", "session_id")
#: Optional numbers: name -> (type, smallest, largest).
_NUMBERS: dict[str, tuple[type, float, float]] = {
    "tier": (int, 0, MAX_TIERS - 1),
    "priority": (int, -(2**53), 2**53),
    "ttft_slo_s": (float, 0, MAX_TIME_S),
    "tbt_slo_s": (float, 0, MAX_TIME_S),
    "ttlt_slo_s": (float, 0, MAX_TIME_S),
    "turn": (int, 0, 2**31),
    "think_time_s": (float, 0, MAX_TIME_S),
    "prefix_tokens": (int, 0, MAX_TOKENS),
}
_PREDICTED = ("mu", "sigma", "nu")
COLUMNS = (*REQUIRED, *_TEXTS, *_NUMBERS, *_PREDICTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One row of a trace.

    Attributes:
        arrival_s: Seconds from the start of the trace; of a later turn of a conversation the earliest possible arrival,
            see `think_time_s`.
        output_tokens: True length of the output, from 1 to max_tokens; for the simulator alone.
        max_tokens: The request's own limit, or the default for requests without one.
        tier: Declared level of urgency, 0 the most urgent.
        priority: Declared priority, smaller first.
        tenant: A user, an application, a class of customers.
        category: Kind of request, such as reasoning or chat.
        ttft_slo_s: Target of the time to the first token in seconds > 0; None: no target. tbt_slo_s (between two tokens)
            and ttlt_slo_s (to the last) likewise.
        session_id: Conversation that it is a turn of; None: none.
        turn: Number of the turn in its conversation, from 0.
        think_time_s: Seconds between the end of the previous turn and this turn's arrival; None: it arrives at
            `arrival_s` in any case.
        prefix_tokens: Leading tokens of the prompt that the previous turn has left in the cache, 0 to prompt_tokens - 1.

    Raises:
        InputError: A `Request` made from it would be invalid.
    """

    request_id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    prompt: str | None = None
    prompt_id: str | None = None
    prediction: LengthPrediction | None = None
    tier: int = 2
    priority: int = 0
    tenant: str = ""
    category: str = ""
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    ttlt_slo_s: float | None = None
    session_id: str | None = None
    turn: int = 0
    think_time_s: float | None = None
    prefix_tokens: int = 0

    def __post_init__(self) -> None:
        owner = f"of request {self.request_id}"
        if not -MAX_TIME_S <= self.arrival_s <= MAX_TIME_S:
            raise InputError(f"arrival_s {owner}", self.arrival_s, f"seconds up to {MAX_TIME_S:g}")
        if not max(self.prompt_tokens, self.max_tokens) <= MAX_TOKENS:
            allowed = f"prompt_tokens and max_tokens of at most {MAX_TOKENS}"
            raise InputError(f"tokens {owner}", (self.prompt_tokens, self.max_tokens), allowed)
        if self.turn < 0:
            raise InputError(f"turn {owner}", self.turn, "integers >= 0")
        if self.think_time_s is not None and not 0 <= self.think_time_s < math.inf:
            raise InputError(f"think_time_s {owner}", self.think_time_s, "seconds >= 0")
        if not 0 <= self.prefix_tokens < self.prompt_tokens:
            allowed = "integers from 0 to prompt_tokens - 1"
            raise InputError(f"prefix_tokens {owner}", self.prefix_tokens, allowed)

    def request(self, cached_prefix_tokens: int = 0) -> Request:
        """The request as the scheduler sees it, without the true length.

        Args:
            cached_prefix_tokens: Tokens of the prompt that are in the cache on arrival.
        """
        return Request(
            request_id=self.request_id,
            arrival_s=self.arrival_s,
            prompt_tokens=self.prompt_tokens,
            max_tokens=self.max_tokens,
            priority=self.priority,
            tier=self.tier,
            tenant=self.tenant,
            ttft_slo_s=self.ttft_slo_s,
            tbt_slo_s=self.tbt_slo_s,
            ttlt_slo_s=self.ttlt_slo_s,
            cached_prefix_tokens=cached_prefix_tokens,
        )


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival; `sha256` is that of their file, empty without one."""

    requests: tuple[TraceRequest, ...]
    source: str = ""
    sha256: str = ""

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def mean_rate_rps(self) -> float | None:
        """Arrivals per second from the first to the last; None if they all come at once."""
        span = self.requests[-1].arrival_s - self.requests[0].arrival_s
        return (len(self) - 1) / span if span > 0 and math.isfinite(span) else None

    def fingerprint(self) -> str:
        """SHA-256 of ids, arrivals, lengths, limits and tiers in order: equal for the same requests from any file."""
        digest = hashlib.sha256()
        for name in ("request_id", "tenant"):
            digest.update("\0".join(getattr(row, name) for row in self.requests).encode())
            digest.update(b"\1")
        digest.update(np.array([row.arrival_s for row in self.requests], "<f8").tobytes())
        for name in ("prompt_tokens", "output_tokens", "max_tokens", "tier"):
            digest.update(np.array([getattr(row, name) for row in self.requests], "<i8").tobytes())
        return digest.hexdigest()

    def with_poisson_arrivals(self, rate_rps: float, rng: np.random.Generator) -> Trace:
        """The same requests in the same order, with independent exponential gaps of mean 1 / rate_rps."""
        if not 0 < rate_rps < math.inf:
            raise InputError("rate", rate_rps, "requests per second > 0")
        times = np.cumsum(rng.exponential(1.0 / rate_rps, size=len(self)))
        rows = zip(self.requests, times, strict=True)
        return replace(self, requests=tuple(replace(row, arrival_s=float(time)) for row, time in rows))


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
        default_max_tokens: max_tokens of the requests that have none, as in public traces; outputs may not be longer.
            None: every request needs max_tokens of its own.

    Raises:
        InputError: Names the file, row, column and value that cannot be used, and what could.
    """
    file = existing_file(path, "trace")
    requests: dict[str, TraceRequest] = {}
    for number, values in enumerate(file_rows(file, "trace", COLUMNS), start=1):
        row = _Row(f"{file.name} row {number}", values, need_arrivals, default_max_tokens)
        request = row.request()
        if request.request_id in requests:
            raise row.error("request_id", "an id not used before")
        requests[request.request_id] = request
    if not requests:
        raise InputError("trace", str(path), "a file with at least one row")
    ordered = sorted(requests.values(), key=lambda request: request.arrival_s)
    return Trace(tuple(ordered), source=str(path), sha256=sha256_file(file))


class _Row:
    """The checked values of one row of a file."""

    def __init__(
        self, location: str, values: Mapping[str, Any], need_arrivals: bool, default_max_tokens: int | None
    ) -> None:
        self._location = location
        self._values = values
        self._defaults = {} if need_arrivals else {"arrival_s": 0.0}
        if default_max_tokens is not None:
            self._defaults["max_tokens"] = default_max_tokens

    def request(self) -> TraceRequest:
        for name in REQUIRED:
            if name not in self._values and name not in self._defaults:
                allowed = "a trace with columns " + ", ".join(REQUIRED) + _alternative(name)
                columns = ", ".join(map(str, self._values))
                raise InputError(f"{self._location} column {name}", columns, allowed)
        max_tokens = self._tokens("max_tokens")
        limit = "max_tokens" if self._has("max_tokens") else "default_max_tokens"
        optional: dict[str, Any] = {name: self._text(name) for name in _TEXTS if self._has(name)}
        for name, (kind, low, high) in _NUMBERS.items():
            if self._has(name):
                optional[name] = self._number(name, kind, low, high)
        try:
            row = TraceRequest(
                request_id=self._id(),
                arrival_s=self._number("arrival_s", float, 0, MAX_TIME_S, "seconds"),
                prompt_tokens=self._tokens("prompt_tokens"),
                output_tokens=self._tokens("output_tokens", max_tokens, f"{limit} = {max_tokens}"),
                max_tokens=max_tokens,
                prediction=self._prediction(),
                **optional,
            )
            row.request()
        except InputError as error:
            if error.field.startswith(self._location):
                raise
            raise InputError(f"{self._location}, {error.field}", error.value, error.allowed) from error
        return row

    def error(self, name: str, allowed: str) -> InputError:
        return InputError(f"{self._location} column {name}", self._values.get(name), allowed)

    def _has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def _tokens(self, name: str, high: int = MAX_TOKENS, limit: str = str(MAX_TOKENS)) -> int:
        allowed = f"integers from 1 to {limit}" + _alternative(name)
        return int(self._number(name, int, 1, high, allowed=allowed))

    def _number(
        self, name: str, kind: type, low: float, high: float, unit: str = "numbers", allowed: str = ""
    ) -> float:
        if name in self._defaults and not self._has(name):
            return self._defaults[name]
        unit, end = ("integers", str(high)) if kind is int else (unit, f"{high:g}")
        allowed = allowed or f"{unit} from {low} to {end}"
        value = self._values.get(name)
        if isinstance(value, bool) or value is None:
            raise self.error(name, allowed)
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise self.error(name, allowed) from error
        if not low <= number <= high or not math.isfinite(number) or (kind is int and number != int(number)):
            raise self.error(name, allowed)
        return int(number) if kind is int else number

    def _id(self) -> str:
        value = self._values.get("request_id")
        if value is None or isinstance(value, bool) or str(value) == "":
            raise self.error("request_id", "a string that is not empty")
        return str(value)

    def _text(self, name: str) -> str:
        value = self._values[name]
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def _prediction(self) -> LengthPrediction | None:
        if not any(self._has(name) for name in _PREDICTED):
            return None
        allowed = "a finite number (mu, sigma and nu, or none of them)"
        mu, sigma, nu = (
            self._number(name, float, -math.inf, math.inf, allowed=allowed) for name in _PREDICTED
        )
        return LengthPrediction(mu, sigma, nu)


def _alternative(name: str) -> str:
    return "; or default_max_tokens for requests without max_tokens" if name == "max_tokens" else ""


def write_trace(trace: Trace, path: str | Path) -> None:
    """Writes a trace as JSON lines, CSV or Parquet by the name's ending, atomically; `load_trace` reads it back.

    Columns in which every row has the default are left out.

    Raises:
        InputError: The name ends in something else, or there is no such folder.
    """
    target = check_table_path(path, "trace")
    rows = [_row_values(row) for row in trace.requests]
    names = [name for name in COLUMNS if any(name in row for row in rows)]
    with atomic_file(target) as temporary:
        if target.suffix == ".parquet":
            write_parquet({name: [row.get(name) for row in rows] for name in names}, temporary, SCHEMA)
        else:
            write_text(target.suffix, temporary, names, ([row.get(name) for name in names] for row in rows))


_DEFAULTS = {item.name: item.default for item in fields(TraceRequest) if item.default is not MISSING}


def _row_values(row: TraceRequest) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in (*REQUIRED, *_TEXTS, *_NUMBERS)}
    values = {name: value for name, value in values.items() if name in REQUIRED or value != _DEFAULTS[name]}
    if row.prediction is not None:
        values |= {name: getattr(row.prediction, name) for name in _PREDICTED}
    return values
