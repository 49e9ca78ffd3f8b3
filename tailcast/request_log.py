"""Requests of a log for a plan: a trace, or any log that `import-lengths` reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.policies import policy_class
from scheduler_core.prediction.api_request import read_request
from scheduler_core.prediction.predictions import DEFAULT_MAX_TOKENS
from scheduler_core.shell.files import existing_file
from scheduler_core.shell.json_text import from_json
from scheduler_core.shell.table_files import file_rows
from scheduler_core.simulator.planning.config import PlanConfig
from scheduler_core.simulator.planning.traffic import at_drawn_times, units_of
from scheduler_core.simulator.trace import Trace, TraceRequest, load_trace

#: Columns that make a table a trace of the simulator.
_TRACE = ("request_id", "prompt_tokens", "output_tokens")
#: Texts that are predicted in one call.
_BATCH = 256
#: Locations of a request and of its time in a row.
_REQUESTS = ("request.body", "request", "body", "params", "proxy_server_request")
_TIMES = (
    "arrival_s",
    "timestamp",
    "created_at",
    "created",
    "start_time",
    "startTime",
    "request_created_at",
    "time",
)


@dataclass(slots=True)
class RequestLog:
    """The requests of a log with predicted lengths, what may mislead in them, and rows that were left out, by reason."""

    trace: Trace
    warnings: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def read_requests(log: Trace | str | Path, config: PlanConfig, scratch: Path) -> RequestLog:
    """The requests of a log for the plan of `config`; `scratch` is a folder for temporary files. `InputError` if a row of a trace is invalid,
    or the log has no usable requests, neither lengths nor prompts, or no times of arrival."""
    if isinstance(log, Trace):
        requests, log = RequestLog(log), log.source
    else:
        requests = _read(Path(log), config, scratch)
    if not len(requests.trace):
        raise InputError("log", str(log), "at least one request")
    if requests.trace.requests[0].arrival_s == requests.trace.requests[-1].arrival_s and config.rate is None:
        raise InputError("log", str(log), "times of arrival; or a rate, with which they are drawn")
    if config.rate is not None:
        rng = np.random.default_rng(config.seed)
        requests.trace = at_drawn_times(requests.trace, config.rate, rng)
        requests.warnings.append(f"times of arrival were drawn, at {config.rate:g} requests per second")
    else:
        units = units_of(requests.trace.requests)
        first_s = units[0][0].arrival_s
        together = sum(unit[0].arrival_s == first_s for unit in units)
        if together > 0.5 * len(units):
            allowed = f"sessions with times of arrival ({together} of {len(units)} start at the same time); or a rate"
            raise InputError("log", str(log), allowed)
    _add_slos(requests, config)
    _predict(requests, config)
    return requests


def _read(path: Path, config: PlanConfig, scratch: Path) -> RequestLog:
    """The requests of a file or folder."""
    if not path.is_dir():
        existing_file(path, "log")
        if _is_trace(path):
            return RequestLog(_trace(path, config))
    try:
        imported, left_out = _imported(path, scratch)
    except InputError as error:
        return _with_drawn_lengths(path, config, error)
    return RequestLog(_trace(imported, config), left_out=left_out)


def _is_trace(path: Path) -> bool:
    """Whether it is a table with the columns of a trace; not if it is none, such as one JSON object."""
    try:
        first = next(iter(file_rows(path, "log", on_bad_row=lambda *_: None)), None)
    except InputError:
        return False
    return first is not None and all(first[1].get(name) is not None for name in _TRACE)


def _imported(path: Path, scratch: Path) -> tuple[Path, Counter[str]]:
    """The log as a trace file in `scratch`, and left-out rows by reason."""
    try:
        from data_gen.importers.config import ImportLengthsConfig
        from data_gen.importers.import_lengths import import_lengths
    except ImportError as error:
        raise MissingExtraError(error.name or "pyarrow", "gen") from error
    target = scratch / "imported.parquet"
    options = ImportLengthsConfig(kind="auto", file=str(path), out=str(target), schema="trace")
    content = import_lengths(options)
    return target, Counter(content["skipped"])


def _trace(path: Path, config: PlanConfig) -> Trace:
    longest = 1
    for _, row in file_rows(path, "log", ("output_tokens",)):
        try:
            longest = max(longest, int(row.get("output_tokens") or 1))
        except (TypeError, ValueError, OverflowError):
            continue  # `load_trace` says what is wrong with it
    return load_trace(path, need_arrivals=config.rate is None, default_max_tokens=longest)


def _with_drawn_lengths(path: Path, config: PlanConfig, problem: InputError) -> RequestLog:
    """The requests of a log of prompts without lengths, which are drawn from their predictions; prompt tokens are estimated
    from characters. The `InputError` of its import if it has no prompts."""
    from data_gen.importers.source_row import SourceRow
    from data_gen.importers.values import canonical_row
    from tailcast.length_predictor import open_length_predictor

    if path.is_dir() or config.predictor == "oracle":
        raise problem
    rng, rows, left_out = np.random.default_rng(config.seed), [], Counter[str]()
    with open_length_predictor(config.predictor, config) as predictor:
        for number, columns in file_rows(path, "log", objects=True, on_bad_row=lambda *_: None):
            source = SourceRow(columns)
            nested = from_json(source.first(_REQUESTS)[1])
            body = read_request(nested if isinstance(nested, Mapping) else columns)
            text = body.text(predictor.form)
            if not text.strip():
                left_out["no prompt and no length"] += 1
                continue
            time = canonical_row(source, {"arrival_s": _TIMES}, f"{path.name} row {number}")["arrival_s"]
            [prediction] = predictor.predictions([text], [body.model or None], [body.temperature])
            assert prediction.length is not None
            limit = body.max_tokens or DEFAULT_MAX_TOKENS
            drawn = float(prediction.length.distribution().ppf(rng.uniform(0.001, 0.999)))
            row = TraceRequest(
                request_id=f"r{number}",
                arrival_s=0.0 if time is None else float(time),
                prompt_tokens=body.prompt_tokens(),
                output_tokens=max(1, min(limit, round(drawn))),
                max_tokens=limit,
                prediction=prediction.length,
                model=body.model,
            )
            rows.append(row)
    if not rows:
        raise problem
    rows.sort(key=lambda row: row.arrival_s)
    first_s = rows[0].arrival_s
    trace = Trace(tuple([replace(row, arrival_s=row.arrival_s - first_s) for row in rows]), str(path))
    warning = (
        f"the log has no lengths of outputs: they were drawn from the predictor {config.predictor}, and prompt tokens "
        "estimated from characters"
    )
    return RequestLog(trace, [warning], left_out)


def _add_slos(requests: RequestLog, config: PlanConfig) -> None:
    """Gives requests without a target of their own those of the options."""
    slos = {name: getattr(config, name) for name in ("ttft_slo_s", "tbt_slo_s", "ttlt_slo_s")}
    slos = {name: value for name, value in slos.items() if value is not None}
    if slos:
        rows = [
            replace(row, **{name: value for name, value in slos.items() if getattr(row, name) is None})
            for row in requests.trace.requests
        ]
        requests.trace = replace(requests.trace, requests=tuple(rows))


def _predict(requests: RequestLog, config: PlanConfig) -> None:
    """Adds predicted lengths to rows with prompts, if an order uses them, and removes the prompts."""
    rows = list(requests.trace.requests)
    orders = [order for order in config.orders if "length" in policy_class(order).inputs]
    has_predictions = any(row.prediction is not None for row in rows)
    prompts = [(index, row) for index, row in enumerate(rows) if row.prompt]
    if orders and prompts and not has_predictions and config.predictor != "oracle":
        from tailcast.length_predictor import open_length_predictor

        with open_length_predictor(config.predictor, config) as predictor:
            for start in range(0, len(prompts), _BATCH):
                batch = prompts[start : start + _BATCH]
                texts = [str(row.prompt) for _, row in batch]
                models = [row.model or None for _, row in batch]
                predictions = predictor.predictions(texts, models, [None] * len(batch))
                for (index, row), prediction in zip(batch, predictions, strict=True):
                    rows[index] = replace(row, prediction=prediction.length)
        missing = len(rows) - len(prompts)
        if missing:
            requests.warnings.append(
                f"{missing} of {len(rows)} requests have no prompt and no predicted length"
            )
    requests.trace = replace(requests.trace, requests=tuple([replace(row, prompt=None) for row in rows]))
