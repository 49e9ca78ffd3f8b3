"""Online calibration in a serving process: background thread, state file and Prometheus metrics.

The state file is also that of what else such a process keeps over restarts.
"""

import io
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.prediction.correction import Correction, RequestContext
from scheduler_core.prediction.drift import DriftAlarm
from scheduler_core.prediction.outcome import Outcome
from scheduler_core.prediction.predictions import Prediction
from scheduler_core.shell.files import atomic_file, lock, writable_target

logger = logging.getLogger(__name__)
T = TypeVar("T")
#: Seconds between two writes of the file, and between two updates of the metrics by `publish_if_due`.
SAVE_S, PUBLISH_S = 60.0, 10.0
#: Seconds between two log lines with the same reason for not learning.
REMINDER_S = 3600.0
#: Why an output with ignore_eos or min_tokens is skipped, for reason "forced_length".
FORCED_LENGTH = "the length is that of the request (ignore_eos, min_tokens)"
#: Maximum number of ended requests in the queue, for example while the disk stalls; further ones are dropped.
MAX_PENDING = 10_000


class CalibrationGauges:
    """Gauges of a `Correction`, with a prefix in their names; `options` are passed to each gauge."""

    def __init__(self, prefix: str, registry: Any, **options: Any) -> None:
        from prometheus_client import Counter, Gauge  # installed with the engine or the extra

        def gauge(name: str, text: str, *labels: str) -> Any:
            names = ("served_model", *labels)
            return Gauge(f"{prefix}calibration_{name}", text, names, registry=registry, **options)

        self._counts = {
            "num_outputs": gauge("outputs", "Ended requests used for online calibration."),
            "num_censored": gauge("censored_outputs", "Ended requests that were truncated or aborted."),
            "num_alarms": gauge("drift_alarms", "Drift alarms of the corrected predictions."),
            "is_used": gauge("in_use", "1 if predictions are corrected, 0 if they are unchanged."),
            "memory_weight": gauge("memory_weight", "Weight of the memory in corrected predictions, 0 to 1."),
            "num_hits": gauge("memory_hits", "Ended requests with similar past requests in the memory."),
        }
        self._scopes = Gauge(
            f"{prefix}calibration_scopes", "Tenants with their own memory.", registry=registry, **options
        )
        self._remembered = Gauge(
            f"{prefix}calibration_remembered", "Past requests in the memories.", registry=registry, **options
        )
        which = "predictions"  # raw, calibrated (without the memory) or corrected (with it)
        self._coverage = gauge(
            "coverage", "Fraction of outputs not longer than a predicted quantile.", which, "quantile"
        )
        self._tau = gauge("kendall_tau", "Kendall's tau-b of predicted and true lengths.", which)
        self._crps = gauge("crps_log_tokens", "Mean CRPS of ln tokens.", which)
        text = "Ended requests that online calibration could not use, by reason."
        self.skipped = Counter(f"{prefix}calibration_skipped", text, ["reason"], registry=registry)
        #: Labels of each gauge, by served model.
        self._series: dict[str, set[tuple[Any, tuple[str, ...]]]] = {}

    def publish(self, calibration: Correction) -> None:
        """Updates all gauges, except those without a value yet; removes those of models that were dropped."""
        self._scopes.set(calibration.num_scopes)
        self._remembered.set(calibration.num_remembered)
        served_models = calibration.served_models
        for served_model in set(self._series) - set(served_models):
            series = self._series.pop(served_model)
            if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
                continue  # prometheus_client cannot remove labels there
            for gauge, labels in series:
                gauge.remove(*labels)
        for served_model in served_models:
            metrics = calibration.metrics(served_model)
            values: list[tuple[Any, tuple[str, ...], Any]] = [
                (gauge, (served_model,), metrics[name]) for name, gauge in self._counts.items()
            ]
            for which, key in (("raw", "before"), ("calibrated", "calibrated"), ("corrected", "after")):
                scores, labels = metrics[key], (served_model, which)
                values += [(self._tau, labels, scores["tau"]), (self._crps, labels, scores["crps"])]
                for quantile, fraction in scores["coverage"].items():
                    values.append((self._coverage, (*labels, quantile), fraction))
            for gauge, labels, value in values:
                if value is not None:
                    gauge.labels(*labels).set(value)
                    self._series.setdefault(served_model, set()).add((gauge, labels))


class LiveCalibration:
    """Corrects predictions and updates the calibration in a background thread; its errors never fail a request.

    `file` keeps the calibration across restarts (see `packed`); None: no file. `InputError` if its
    content is invalid, or it cannot be written. `clock` is monotonic, in seconds.
    """

    def __init__(
        self, file: str | None, gauges: CalibrationGauges, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.calibration = Correction()
        self._file: StateFile | None = None
        self._gauges = gauges
        self._clock = clock
        self._saved_s = self._published_s = clock()
        self._has_changed = False
        self._num_observed = self._num_learned = 0
        self._reminded_s: dict[str, float] = {}
        #: Single thread that runs updates, metrics and writes in order.
        self._thread = ThreadPoolExecutor(1, "tailcast-calibration")
        if file is not None:
            hint = "; to share a memory, use one tailcast serve"
            self._file = StateFile(file, "calibration_file", hint, self.calibration.restore)

    def correct(self, context: RequestContext, prediction: Prediction | None) -> Prediction | None:
        """The prediction with its length corrected, if it has one."""
        if prediction is None or prediction.length is None:
            return prediction
        return replace(prediction, length=self.calibration.correct(context, prediction.length))

    def observe(self, context: RequestContext, outcome: Outcome) -> bool:
        """Queues an ended request for `Correction.observe`; those without a predicted or true length, and beyond
        `MAX_PENDING`, are left out, invalid ones are logged and skipped. Returns whether it is in the queue."""
        if outcome.prediction is None or outcome.output_tokens < 1:
            return False
        if self._num_observed - self._num_learned >= MAX_PENDING:
            self.skip("queue_full", "requests end faster than online calibration can learn from them")
            return False
        self._num_observed += 1
        return self._submit(self._learn, context, outcome) is not None

    def skip(self, reason: str, explanation: str) -> None:
        """Counts an ended request that cannot be used. Logs the explanation once per reason and hour; reasons are
        labels of a metric, so they must be constants."""
        self._gauges.skipped.labels(reason).inc()
        now = self._clock()
        if now - self._reminded_s.get(reason, -REMINDER_S) >= REMINDER_S:
            self._reminded_s[reason] = now
            logger.warning("online calibration does not learn from some outputs: %s", explanation)

    def read(self, function: Callable[[Correction], T]) -> T | None:
        """The result of a function of the calibration after all observed requests; None after `close`, or if it fails. Waits."""
        result = self._submit(function, self.calibration)
        return None if result is None else result.result()

    def publish(self) -> None:
        """Updates the metrics; waits until all observed requests have been processed."""
        self.read(self._gauges.publish)

    def publish_if_due(self) -> None:
        """Schedules an update of the metrics, at most every `PUBLISH_S` seconds."""
        if self._has_changed and self._clock() - self._published_s >= PUBLISH_S:
            self._published_s = self._clock()
            self._submit(self._gauges.publish, self.calibration)

    def close(self) -> None:
        """Processes all observed requests and writes the file. A second call has no effect."""
        self._submit(self._save)
        self._thread.shutdown()
        if self._file is not None:
            self._file.close()

    def _submit(self, task: Callable[..., T], *args: Any) -> Future[T | None] | None:
        """Runs a task in the thread; None after `close`."""
        with suppress(RuntimeError):
            return self._thread.submit(_run, task, *args)
        return None

    def _learn(self, context: RequestContext, outcome: Outcome) -> None:
        self._num_learned += 1
        try:
            alarm: DriftAlarm | None = self.calibration.observe(context, outcome)
        except InputError as error:
            logger.warning("calibration skipped an invalid request: %s", error)
            return
        self._has_changed = True
        if alarm is not None:
            text = (
                "outputs of %r have been %s than predicted for about %d outputs: calibration is mostly reset"
            )
            logger.warning(text, context.served_model, alarm.reason.replace("_", " "), alarm.num_outputs)
        if self._clock() - self._saved_s >= SAVE_S:
            self._save()

    def _save(self) -> None:
        if self._file is None or not self._has_changed:
            return
        self._saved_s, self._has_changed = self._clock(), False
        self._file.write(self.calibration.state())


class StateFile:
    """A file that keeps a state over restarts, of one process at a time.

    `restore` gets the state of an existing file at once, and raises InputError if it is invalid. `InputError` for `option` if the
    file cannot be read or written, or another process uses it; `hint` is what to do then.
    """

    def __init__(
        self, file: str, option: str, hint: str, restore: Callable[[Mapping[str, Any]], object]
    ) -> None:
        self._path, self._option = writable_target(file, option), option
        allowed = f"a file that no other process uses{hint}"
        lock_path = self._path.with_name(self._path.name + ".lock")
        #: Lets other processes use the file.
        self.close = lock(lock_path, option, file, allowed)
        try:
            if self._path.exists():
                restore(self._content())
        except InputError:
            self.close()
            raise

    def write(self, state: Mapping[str, Any]) -> None:
        """Replaces the state; logs if that fails."""
        try:
            with atomic_file(self._path) as temporary:
                temporary.write_bytes(packed(state))
        except (OSError, TailcastError) as error:
            logger.warning("the file of %s cannot be written: %s", self._option, error)

    def _content(self) -> Any:
        if not self._path.is_file():
            raise InputError(self._option, str(self._path), "a regular file, or the name of a new one")
        try:
            return unpacked(self._path.read_bytes())
        except Exception as error:  # of numpy, zipfile, zlib and tokenize, which share no base class
            raise InputError(
                self._option, str(self._path), f"a file written with this option ({error})"
            ) from error


def packed(state: Mapping[str, Any]) -> bytes:
    """A state as a file: numpy's zip archive of its arrays and, as "state", the rest in JSON with the names of
    the arrays."""
    arrays: dict[str, Any] = {}

    def without_arrays(value: Any) -> Any:
        arrays[name := str(len(arrays))] = value
        return {"array": name}

    text = json.dumps(state, allow_nan=False, default=without_arrays)
    stream = io.BytesIO()
    np.savez(stream, state=np.frombuffer(text.encode(), np.uint8), **arrays)
    return stream.getvalue()


def unpacked(content: bytes) -> Any:
    """The state in the content of a file; raises an error if it is neither `packed` nor JSON, as earlier versions wrote it."""
    if not content.startswith(b"PK"):
        return json.loads(content)
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:

        def with_arrays(value: dict[str, Any]) -> Any:
            return archive[value["array"]] if value.keys() == {"array"} else value

        return json.loads(archive["state"].tobytes(), object_hook=with_arrays)


def _run(task: Callable[..., T], *args: Any) -> T | None:
    try:
        return task(*args)
    except Exception:
        logger.exception("online calibration has failed")
        return None
