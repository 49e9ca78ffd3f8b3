"""Predictions within a deadline; a failure never fails the request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.prediction.predictions import Prediction
from scheduler_core.prediction.predictor import (
    PredictionRequest,
    Predictor,
    PredictorAddress,
    addresses,
    open_predictor,
)
from scheduler_core.prediction.service_access import ACCESS_FILES, NO_FILES, ServiceAccess

logger = logging.getLogger(__name__)
#: A predictor is slow if `SLOW` of its last `WINDOW` predictions were late, but at least `MIN_LATE`; it is in time again at
#: half of that.
WINDOW, SLOW, MIN_LATE = 100, 0.1, 5
#: Minimum seconds between two log lines that the predictor is gone, and that it refuses requests.
GONE_S, REFUSED_S = 60.0, 3600.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """Outcome of a query to a predictor, and its duration in seconds.

    The outcome is answered, partial (without a part of a joined predictor), late, failed (service unavailable, invalid
    response), refused (by the service), no_text or absent (no predictor).
    """

    prediction: Prediction | None
    outcome: str
    seconds: float = 0.0


class PredictorLog:
    """Logs when a predictor is gone, back, slow, in time again, and when it refuses requests. `name` is the option that
    sets the predictor; `clock` is monotonic, in seconds."""

    def __init__(self, name: str, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = f"the {name.replace('_', ' ')}"
        self._deadline_s = deadline_s
        self._clock = clock
        self._late: deque[bool] = deque(maxlen=WINDOW)
        self._is_down = self._is_slow = False
        self._logged_s: dict[str, float] = {}

    def observe(self, outcome: str, error: Exception | None = None) -> None:
        """Observes the outcome of a query (see `Forecast`), and the error that caused it, if any."""
        if outcome == "refused" and error is not None and self._is_due(outcome, REFUSED_S):
            logger.warning("%s refuses requests, they continue without: %s", self._name, _public_text(error))
        if outcome == "failed" and error is not None and not self._is_down and self._is_due(outcome, GONE_S):
            logger.warning("%s is gone, requests continue without: %s", self._name, _public_text(error))
            self._is_down = True
        if outcome in ("answered", "partial") and self._is_down:
            logger.info("%s is back", self._name)
            self._is_down = False
        if outcome in ("answered", "partial", "late"):
            self._observe_time(outcome == "late")

    def _observe_time(self, is_late: bool) -> None:
        self._late.append(is_late)
        num_late, num = sum(self._late), len(self._late)
        limit = max(MIN_LATE, SLOW * num)
        if not self._is_slow and num_late >= limit:
            text = "%s is slow: %d of its last %d predictions were later than %g s; their requests continue without"
            logger.warning(text, self._name, num_late, num, self._deadline_s)
            self._is_slow = True
        elif self._is_slow and num_late < limit / 2:
            logger.info(
                "%s is in time again: %d of its last %d predictions were late", self._name, num_late, num
            )
            self._is_slow = False

    def _is_due(self, outcome: str, every_s: float) -> bool:
        now, logged_s = self._clock(), self._logged_s.get(outcome)
        if logged_s is not None and now - logged_s < every_s:
            return False
        self._logged_s[outcome] = now
        return True


class Forecaster:
    """Queries one predictor (see `open_predictor`; None: every forecast is absent) for single requests, and
    returns a `Forecast` within `deadline_s` seconds in any case. `access`: for services. InputError if one of its files is
    invalid."""

    def __init__(
        self, predictor: str | None, field: str, deadline_s: float, access: ServiceAccess = NO_FILES
    ) -> None:
        self._predictor: Predictor | None = None
        if predictor is not None:
            self._predictor = open_predictor(predictor, field, access)
        self._name, self._field, self.deadline_s = predictor, field, deadline_s
        self._files = _files_of(access)
        self._log = PredictorLog(field, deadline_s)
        self._num_running = 0
        self._all_done = asyncio.Event()
        #: Version of the artifact when it was loaded or the service was reached; None before.
        self.version: str | None = None

    @property
    def is_remote(self) -> bool:
        """Whether a service predicts, at least some heads."""
        parts = [] if self._name is None else addresses(self._name)
        return any(PredictorAddress.of(part).is_service for part in parts)

    @property
    def client(self) -> Any:
        """The predictor, for calls of its own kind; None without one."""
        return self._predictor

    async def warm_up(self, timeout_s: float) -> None:
        """Loads the artifact or connects to the service; a failure is only logged."""
        try:
            await self._load(timeout_s)
        except TailcastError as error:
            logger.warning("the predictor is not ready: %s", error)

    async def successor(
        self, predictor: str | None, deadline_s: float, timeout_s: float, access: ServiceAccess = NO_FILES
    ) -> Forecaster:
        """The forecaster for new options, ready to use; this one if there is no change. A service is not queried again (its
        client reads new files by itself), a folder is loaded again for its new version. TailcastError if it cannot be loaded
        or reached, or a file of `access` is invalid."""
        options = (predictor, deadline_s, _files_of(access))
        is_same = options == (self._name, self.deadline_s, self._files)
        if is_same and (predictor is None or PredictorAddress.of(predictor).scheme not in ("local", "joint")):
            if predictor is not None:
                await asyncio.to_thread(open_predictor, predictor, self._field, access)  # checks the files
            return self
        successor = await asyncio.to_thread(Forecaster, predictor, self._field, deadline_s, access)
        try:
            await successor._load(timeout_s)
        except BaseException:
            await successor.close()
            raise
        if is_same and successor.version == self.version:
            await successor.close()
            return self
        return successor

    async def forecast(self, request: PredictionRequest) -> Forecast:
        """The prediction of a request, or the reason for its absence."""
        if self._predictor is None:
            return Forecast(None, "absent")
        if not request.prompt:
            return Forecast(None, "no_text")
        start = time.perf_counter()
        prediction: Prediction | None = None
        outcome = "answered"
        failure: Exception | None = None
        self._num_running += 1
        try:
            async with asyncio.timeout(self.deadline_s):
                [prediction] = await self._predictor.predict([request], timeout_s=self.deadline_s)
            outcome = "partial" if prediction.missing else outcome
        except TimeoutError:
            outcome = "late"
        except Exception as error:  # no failure of a predictor may fail a request
            failure, outcome = error, _outcome(error) if isinstance(error, TailcastError) else "failed"
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._all_done.set()
        if outcome == "late" and not self._predictor.is_connected:  # the client retries until the deadline
            failure, outcome = ConnectionError("not connected"), "failed"
        self._log.observe(outcome, failure)
        return Forecast(prediction, outcome, time.perf_counter() - start)

    async def close(self) -> None:
        """Closes the client when the running forecasts have ended, within their deadline."""
        if self._num_running:
            self._all_done.clear()
            await self._all_done.wait()
        if self._predictor is not None:
            await self._predictor.close()

    async def _load(self, timeout_s: float) -> None:
        """Loads the artifact or reaches the service; TailcastError if it fails or takes longer."""
        if self._predictor is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                self.version = await self._predictor.load()
        except TimeoutError as error:
            raise TailcastError(f"no response from {self._field} in {timeout_s:g} s") from error


def _files_of(access: ServiceAccess) -> list[str | None]:
    return [getattr(access, name) for name in ACCESS_FILES]


def _public_text(error: Exception) -> str:
    """The part of an error that can be logged; other parts can quote a request."""
    code = getattr(error, "code", None)
    if code in ("UNAVAILABLE", "UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED"):
        return str(error)
    if _outcome(error) == "refused":
        if "served_model: got " in str(error):  # what follows the client's name are those of the artifact
            names = str(error).rpartition("; allowed: ")[2]
            return f"the model of the request is none of the artifact's; set --model; allowed: {names}"
        return "the service rejects the request; if the name of its model is unknown, set --model"
    return str(code or type(error).__name__)


def _outcome(error: Exception) -> str:
    code = getattr(error, "code", "INVALID_ARGUMENT" if isinstance(error, InputError) else "")
    if code == "DEADLINE_EXCEEDED":
        return "late"
    return "refused" if code in ("INVALID_ARGUMENT", "NOT_FOUND") else "failed"
