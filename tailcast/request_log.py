"""Requests of a log for a plan: a trace, or any log that `import-lengths` reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np

from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.policies import policy_class
from scheduler_core.shell.command import report_left_out
from scheduler_core.shell.files import existing_file
from scheduler_core.shell.table_files import file_rows
from scheduler_core.simulator.planning.config import PlanConfig
from scheduler_core.simulator.planning.traffic import at_drawn_times, units_of
from scheduler_core.simulator.trace import Trace, load_trace

#: Columns that make a table a trace of the simulator.
_TRACE = ("request_id", "prompt_tokens", "output_tokens")
#: Texts that are predicted in one call.
_BATCH = 256


@dataclass(slots=True)
class RequestLog:
    """The requests of a log with predicted lengths, what may mislead in them, and rows that were left out, by reason."""

    trace: Trace
    warnings: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    def report(self) -> int:
        """Logs how many rows were left out as the last line; returns the exit code, see `report_left_out`."""
        return report_left_out(self.left_out, len(self.trace) + self.left_out.total())


def read_requests(log: str, config: PlanConfig, scratch: Path) -> RequestLog:
    """The requests of a log for the plan of `config`; `scratch` is a folder for temporary files. `InputError` if a row of a trace is invalid,
    or the log has no usable requests, no lengths or no times of arrival."""
    path = Path(log)
    left_out: Counter[str] = Counter()
    if not path.is_dir():
        existing_file(path, "log")
    if path.is_dir() or not _is_trace(path):
        path, left_out = _imported(path, scratch)
    requests = RequestLog(_trace(path, config), left_out=left_out)
    if requests.trace.requests[0].arrival_s == requests.trace.requests[-1].arrival_s and config.rate is None:
        raise InputError("log", log, "times of arrival; or a rate, with which they are drawn")
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
            raise InputError("log", log, allowed)
    _add_slos(requests, config)
    _predict(requests, config)
    return requests


def _is_trace(path: Path) -> bool:
    rows = file_rows(path, "log", on_bad_row=lambda *_: None)
    first = next(iter(islice(rows, 1)), None)
    return first is not None and all(first[1].get(name) is not None for name in _TRACE)


def _imported(path: Path, scratch: Path) -> tuple[Path, Counter[str]]:
    """The log as a trace file in `scratch`, and left-out rows by reason."""
    try:
        from data_gen.importers.config import ImportLengthsConfig
        from data_gen.importers.import_lengths import import_lengths
    except ImportError as error:
        raise MissingExtraError(error.name or "pyarrow", "gen") from error
    target = scratch / "imported.parquet"
    try:
        content = import_lengths(
            ImportLengthsConfig(kind="auto", file=str(path), out=str(target), schema="trace")
        )
    except InputError as error:
        if "output_tokens" in error.field or "output_tokens" in str(error.allowed):
            raise InputError("log", str(path), f"lengths of the outputs ({error})") from error
        raise
    return target, Counter(content["skipped"])


def _trace(path: Path, config: PlanConfig) -> Trace:
    longest = 1
    for _, row in file_rows(path, "log", ("output_tokens",)):
        try:
            longest = max(longest, int(row.get("output_tokens") or 1))
        except (TypeError, ValueError, OverflowError):
            continue  # `load_trace` says what is wrong with it
    return load_trace(path, need_arrivals=config.rate is None, default_max_tokens=longest)


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

        with open_length_predictor(config.predictor) as predictor:
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
