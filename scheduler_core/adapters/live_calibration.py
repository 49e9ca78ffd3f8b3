"""Online calibration of a process that serves: its file and its Prometheus metrics."""

import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.files import writable_target, write_json
from scheduler_core.online_calibration import DriftAlarm, OnlineCalibration
from scheduler_core.predictions import Prediction

logger = logging.getLogger(__name__)
#: Seconds between two writes of the file, and between two updates of the metrics by `publish_if_due`.
SAVE_S, PUBLISH_S = 60.0, 10.0
#: Ended requests that wait to be learned from, as while the disk stalls; further ones are left out.
MAX_PENDING = 10_000


class CalibrationGauges:
    """Gauges of an `OnlineCalibration`, their names with a prefix; `options` are further arguments of the gauges."""

    def __init__(self, prefix: str, registry: Any, **options: Any) -> None:
        from prometheus_client import Gauge  # the engine or the extra brings it

        def gauge(name: str, text: str, *labels: str) -> Any:
            names = ("served_model", *labels)
            return Gauge(f"{prefix}calibration_{name}", text, names, registry=registry, **options)

        self._counts = {
            "num_outputs": gauge("outputs", "Ended requests that online calibration has learned from."),
            "num_censored": gauge("censored_outputs", "Those of them that were truncated or aborted."),
            "num_alarms": gauge("drift_alarms", "Drift alarms of the corrected predictions."),
            "is_used": gauge("in_use", "1 where predictions are corrected, 0 where they stay as they are."),
        }
        which = "predictions"  # raw or corrected
        self._coverage = gauge(
            "coverage", "Outputs up to a predicted quantile, as a fraction.", which, "quantile"
        )
        self._tau = gauge("kendall_tau", "Kendall's tau-b of predicted and true lengths.", which)
        self._crps = gauge("crps_log_tokens", "Mean CRPS of ln tokens.", which)

    def publish(self, calibration: OnlineCalibration) -> None:
        """Sets all of them; those that are not known stay as they are."""
        for served_model in calibration.served_models:
            metrics = calibration.metrics(served_model)
            for name, gauge in self._counts.items():
                gauge.labels(served_model).set(metrics[name])
            for which, key in (("raw", "before"), ("corrected", "after")):
                scores = metrics[key]
                values = [(self._tau.labels(served_model, which), scores["tau"])]
                values.append((self._crps.labels(served_model, which), scores["crps"]))
                for quantile, fraction in scores["coverage"].items():
                    values.append((self._coverage.labels(served_model, which, quantile), fraction))
                for gauge, value in values:
                    if value is not None:
                        gauge.set(value)


class LiveCalibration:
    """Corrects predictions, and learns from ended requests in a thread of its own; never fails a request.

    `file` is a JSON file that keeps what has been learned over restarts, None: nothing is kept; `InputError` if it has
    another content, or cannot be written. `clock` is monotonic, in seconds.
    """

    def __init__(
        self, file: str | None, gauges: CalibrationGauges, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.calibration = OnlineCalibration()
        self._file = None if file is None else writable_target(file, "calibration_file")
        self._gauges = gauges
        self._clock = clock
        self._saved_s = self._published_s = clock()
        self._has_changed = False
        self._num_observed = self._num_learned = 0
        #: All that is learned, published and written, in order.
        self._thread = ThreadPoolExecutor(1, "tailcast-calibration")
        if self._file is not None and self._file.exists():
            self.calibration.restore(_content(self._file))

    def correct(
        self, served_model: str, prediction: Prediction | None, prompt_tokens: int | None
    ) -> Prediction | None:
        """The prediction with its length corrected, if it has one."""
        if prediction is None or prediction.length is None:
            return prediction
        return replace(
            prediction, length=self.calibration.correct(served_model, prediction.length, prompt_tokens)
        )

    def observe(
        self,
        served_model: str,
        prediction: Prediction | None,
        prompt_tokens: int | None,
        output_tokens: int,
        *,
        finished: bool,
        max_tokens: int | None,
    ) -> None:
        """An ended request to learn from soon, see `OnlineCalibration.observe`; an impossible one is logged and left out."""
        if prediction is None or prediction.length is None or output_tokens < 1:
            return
        if self._num_observed - self._num_learned >= MAX_PENDING:
            return
        self._num_observed += 1
        limit = max_tokens if max_tokens is not None and max_tokens >= output_tokens else None
        arguments = served_model, prediction.length, prompt_tokens, output_tokens
        observe = partial(self.calibration.observe, *arguments, finished=finished, max_tokens=limit)
        self._submit(self._learn, served_model, observe)

    def publish(self) -> None:
        """Brings the metrics up to date; waits until all observed requests have been learned from."""
        published = self._submit(self._gauges.publish, self.calibration)
        if published is not None:
            published.result()

    def publish_if_due(self) -> None:
        """Brings the metrics up to date soon, at most every `PUBLISH_S`."""
        if self._has_changed and self._clock() - self._published_s >= PUBLISH_S:
            self._published_s = self._clock()
            self._submit(self._gauges.publish, self.calibration)

    def close(self) -> None:
        """Learns from what has been observed, and writes the file; again does nothing."""
        self._submit(self._save)
        self._thread.shutdown()

    def _submit(self, task: Callable[..., None], *args: Any) -> Future[None] | None:
        """Runs a task in the thread; None where that has been closed."""
        with suppress(RuntimeError):
            return self._thread.submit(_run, task, *args)
        return None

    def _learn(self, served_model: str, observe: Callable[[], DriftAlarm | None]) -> None:
        self._num_learned += 1
        try:
            alarm = observe()
        except InputError as error:
            logger.warning("a length that calibration cannot use: %s", error)
            return
        self._has_changed = True
        if alarm is not None:
            text = "outputs of %r are %s than predicted since about %d of them: the calibration begins anew"
            logger.warning(text, served_model, alarm.reason.replace("_", " "), alarm.num_outputs)
        if self._clock() - self._saved_s >= SAVE_S:
            self._save()

    def _save(self) -> None:
        if self._file is None or not self._has_changed:
            return
        self._saved_s, self._has_changed = self._clock(), False
        try:
            write_json(self._file, self.calibration.state())
        except (OSError, TailcastError) as error:
            logger.warning("what calibration has learned cannot be written: %s", error)


def _run(task: Callable[..., None], *args: Any) -> None:
    try:
        task(*args)
    except Exception:
        logger.exception("online calibration has failed")


def _content(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            "calibration_file", str(file), f"a file that calibration has written ({error})"
        ) from error
