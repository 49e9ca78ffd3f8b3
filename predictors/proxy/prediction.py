"""Predictions within a deadline; a failure never fails the request."""

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
    """Outcome of a query to a predictor, and its duration in seconds.

    The outcome is answered, late, failed (service unavailable, invalid response), refused (by the service),
    no_text or absent (no predictor). `prompt_tokens` is None if the predictor truncated the prompt.
    """

    prediction: Prediction | None
    outcome: str
    seconds: float = 0.0
    prompt_tokens: int | None = None


class Forecaster:
    """Queries one predictor (see `open_client`; None: every forecast is absent) for single requests, and
    returns a `Forecast` within `deadline_s` seconds in any case."""

    def __init__(self, predictor: str | None, field: str, deadline_s: float) -> None:
        from predictors.client import open_client

        self._predictor: AsyncClient | None = None if predictor is None else open_client(predictor, field)
        self._deadline_s = deadline_s
        self._is_down = False

    async def warm_up(self, deadline_s: float) -> None:
        """Loads the artifact or connects to the service; a failure is only logged."""
        if self._predictor is None:
            return
        try:
            async with asyncio.timeout(deadline_s):
                await self._predictor.metadata()
        except (TimeoutError, TailcastError) as error:
            logger.warning("the predictor is not ready: %s", error or "no response in time")

    async def forecast(self, request: PredictionRequest) -> Forecast:
        """The prediction of a request, or the reason for its absence."""
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
        except Exception as error:  # no failure of a predictor may fail a request
            outcome = _outcome(error) if isinstance(error, TailcastError) else "failed"
            if not self._is_down:  # log once per outage
                logger.warning("no prediction, requests continue without: %s", _public_text(error))
            self._is_down = True
        if prediction is not None and self._is_down:
            logger.info("the predictor responds again")
            self._is_down = False
        return Forecast(prediction, outcome, time.perf_counter() - start, prompt_tokens)

    async def close(self) -> None:
        """Closes the client."""
        if self._predictor is not None:
            await self._predictor.close()


def _public_text(error: Exception) -> str:
    """The part of an error that can be logged; other parts can quote a request."""
    code = getattr(error, "code", None)
    if code in ("UNAVAILABLE", "UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED"):
        return str(error)
    if _outcome(error) == "refused":
        return "the service rejects the request; if the name of its model is unknown, set --served_model"
    return str(code or type(error).__name__)


def _outcome(error: Exception) -> str:
    code = getattr(error, "code", "INVALID_ARGUMENT" if isinstance(error, InputError) else "")
    if code == "DEADLINE_EXCEEDED":
        return "late"
    return "refused" if code in ("INVALID_ARGUMENT", "NOT_FOUND") else "failed"
