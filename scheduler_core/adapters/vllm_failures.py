"""An exception inside the scheduler does not take the engine down."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any

from scheduler_core.adapters.engine_metrics import EngineMetrics
from scheduler_core.adapters.live_calibration import LiveCalibration
from scheduler_core.adapters.prediction_thread import PredictionThread
from scheduler_core.adapters.settings import EngineSettings
from scheduler_core.adapters.vllm_queue import PolicyQueue
from scheduler_core.adapters.vllm_version import new_queue

logger = logging.getLogger("vllm.tailcast")  # below vLLM's logger, so that its handlers show it


def guarded(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A method that does nothing once one of its scheduler has failed. An exception is passed to `_tailcast_fail`."""

    @wraps(hook)
    def call(self: Any, *args: Any) -> Any:
        if self._tailcast_failed:
            return None
        try:
            return hook(self, *args)
        except Exception as error:
            self._tailcast_fail(hook.__name__.removeprefix("_tailcast_"), error)
            return None

    return call


def _close(parts: Sequence[LiveCalibration | PredictionThread]) -> None:
    for part in parts:
        with suppress(Exception):
            part.close()


class FailSafe:
    """What the scheduler does after an exception in one of its parts. Each is logged once, and counted by part.

    After one of policy or batch former vLLM schedules as without tailcast, with all requests where they are. Predictor and
    calibration only go themselves, and calibration goes with the predictor.
    """

    # Attributes of the scheduler.
    policy: Any
    waiting: Any
    _tailcast_settings: EngineSettings
    _tailcast_metrics: EngineMetrics
    _tailcast_thread: PredictionThread | None
    _tailcast_calibration: LiveCalibration | None
    #: What is vLLM's own again after a failure.
    _tailcast_own: dict[str, Any]
    #: Maximum numbers of prompt tokens in the step that is being planned, by request.
    _tailcast_chunks: dict[str, int]
    _tailcast_failed = False

    def _tailcast_fail(self, hook: str, error: Exception) -> None:
        """Called with the first exception of policy or former: vLLM schedules alone from now on."""
        self._tailcast_failed = True
        self._tailcast_chunks = {}
        if isinstance(self.waiting, PolicyQueue):
            self.waiting.fail()
        self._tailcast_metrics.failures.labels(hook).inc()
        text = "tailcast has stopped, and vLLM schedules in its own order: policy %s failed in %s: %s: %s"
        arguments = (self._tailcast_settings.policy, hook, type(error).__name__, error)
        logger.error(text, *arguments, exc_info=error)
        self._tailcast_close()

    def _tailcast_restore(self) -> None:
        """Gives the waiting requests back to vLLM's own queue, between two steps."""
        if isinstance(self.waiting, PolicyQueue):
            waiting = sorted(self.waiting, key=lambda request: (request.arrival_time, request.request_id))
            for name, value in self._tailcast_own.items():
                setattr(self, name, value)
            self.waiting = new_queue(self.policy)
            for request in waiting:
                self.waiting.add_request(request)

    def _tailcast_close(self, *, predictor: bool = True) -> threading.Thread:
        """Ends calibration, and optionally the predictor, in a thread of its own: the engine does not wait for them."""
        parts: list[LiveCalibration | PredictionThread] = []
        if self._tailcast_calibration is not None:
            parts.append(self._tailcast_calibration)
        if predictor and self._tailcast_thread is not None:
            parts.append(self._tailcast_thread)
            self._tailcast_thread = None
        self._tailcast_calibration = None
        closing = threading.Thread(target=_close, args=(parts,), daemon=True)
        closing.start()
        return closing

    def _tailcast_part_failed(self, part: str, error: Exception) -> None:
        """Called with an exception of predictor or calibration: the other parts go on without it."""
        self._tailcast_metrics.failures.labels(part).inc()
        logger.error("tailcast goes on without its %s: %s", part, error, exc_info=error)
        self._tailcast_close(predictor=part == "predictor")
