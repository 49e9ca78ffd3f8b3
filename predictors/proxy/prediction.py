"""Predictions of a request: within a deadline, and failing open."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from predictors.client.messages import AsyncClient, predictions
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.predictions import Prediction
from scheduler_core.predictor import PredictionRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Outcome of a query to a predictor, and the seconds spent on it.

    The outcome is answered, late, failed (no service, an invalid response), refused (the service refuses this request),
    no_text, or absent (no predictor); `prompt_tokens` are by the artifact's tokenizer, None where it did not read all of it.
    """

    prediction: Prediction | None
    outcome: str
    seconds: float = 0.0
    prompt_tokens: int | None = None


class Forecaster:
    """Queries one predictor, spelled as in `open_client` (None: every forecast is absent), about one request at a time; a
    `Forecast` comes back by the deadline (seconds) in any case."""

    def __init__(self, predictor: str | None, field: str, deadline_s: float) -> None:
        from predictors.client import open_client

        self._predictor: AsyncClient | None = None if predictor is None else open_client(predictor, field)
        self._deadline_s = deadline_s
        self._is_down = False

    async def warm_up(self, deadline_s: float) -> None:
        """Loads or connects; without success the proxy serves all the same."""
        if self._predictor is None:
            return
        try:
            async with asyncio.timeout(deadline_s):
                await self._predictor.metadata()
        except (TimeoutError, TailcastError) as error:
            logger.warning("no predictor yet: %s", error or "no response in time")

    async def forecast(self, request: PredictionRequest) -> Forecast:
        """The prediction of a request, or why there is none."""
        if self._predictor is None:
            return Forecast(None, "absent")
        if not request.prompt:
            return Forecast(None, "no_text")
        start = time.perf_counter()
        prediction: Prediction | None = None
        outcome, prompt_tokens = "answered", None
        try:
            async with asyncio.timeout(self._deadline_s):
                [response] = await self._predictor.responses([request], timeout_s=self._deadline_s)
            [prediction] = predictions([response], self._predictor.address)
            prompt_tokens = None if response.truncated else response.prompt_tokens or None
        except TimeoutError:
            outcome = "late"
        except Exception as error:  # no fault of a predictor, of whatever kind, may cost a request
            outcome = _outcome(error) if isinstance(error, TailcastError) else "failed"
            if not self._is_down:  # once for each outage
                logger.warning("no prediction, requests go on without: %s", _public_text(error))
            self._is_down = True
        if prediction is not None and self._is_down:
            logger.info("the predictor responds again")
            self._is_down = False
        return Forecast(prediction, outcome, time.perf_counter() - start, prompt_tokens)

    async def close(self) -> None:
        """Closes connections."""
        if self._predictor is not None:
            await self._predictor.close()


def _public_text(error: Exception) -> str:
    """The part of an error that may be logged: texts of other errors can quote a request."""
    code = getattr(error, "code", None)
    if code in ("UNAVAILABLE", "UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED"):
        return str(error)
    if _outcome(error) == "refused":
        return "the request is refused; if it is for the name of its model, --served_model sets another"
    return str(code or type(error).__name__)


def _outcome(error: Exception) -> str:
    code = getattr(error, "code", "INVALID_ARGUMENT" if isinstance(error, InputError) else "")
    if code == "DEADLINE_EXCEEDED":
        return "late"
    return "refused" if code in ("INVALID_ARGUMENT", "NOT_FOUND") else "failed"
