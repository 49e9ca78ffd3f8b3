"""Asking a predictor: within a deadline, and never in the request's way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from predictors.proto import predictor_v1_pb2 as pb
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.predictions import (
    BucketPrediction,
    LengthPrediction,
    Prediction,
    RankPrediction,
    UrgencyPrediction,
)
from scheduler_core.predictor import PredictionRequest

logger = logging.getLogger(__name__)


class Responder(Protocol):
    """The clients of `predictors.client`, asynchronous and in-process."""

    async def responses(
        self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None
    ) -> list[pb.PredictResponse]:
        """What the artifact says, in the order of the requests."""
        ...

    async def metadata(self) -> pb.GetMetadataResponse:
        """What the artifact is."""
        ...

    async def close(self) -> None:
        """Gives up connections."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What came of asking.

    Attributes:
        prediction: None where there is none.
        outcome: answered, late, failed (no service, a wrong answer), refused (the service refuses this request), no_text,
            absent (no predictor).
        seconds: Spent on it.
    """

    prediction: Prediction | None
    outcome: str
    seconds: float = 0.0


class Forecaster:
    """Asks one predictor about one request at a time; whatever happens, a `Forecast` comes back by the deadline.

    Args:
        predictor: Who answers; None: nobody.
        deadline_s: Time for an answer, in seconds > 0.

    Raises:
        InputError: The deadline is not above 0.
    """

    def __init__(self, predictor: Responder | None, deadline_s: float) -> None:
        if not 0 < deadline_s <= 60:
            raise InputError("deadline_s", deadline_s, "seconds in (0, 60]")
        self._predictor = predictor
        self._deadline_s = deadline_s
        self._bucket_edges: tuple[float, ...] | None = None
        self._worked = True

    async def warm_up(self, deadline_s: float) -> bool:
        """Loads or connects; returns whether a predictor answers. Without one the proxy serves all the same."""
        if self._predictor is None:
            return False
        try:
            async with asyncio.timeout(deadline_s):
                found = await self._predictor.metadata()
        except (TimeoutError, TailcastError) as error:
            logger.warning("no predictor yet: %s", error or "no answer in time")
            return False
        self._bucket_edges = tuple(found.bucket_edges)
        return True

    async def ask(self, request: PredictionRequest) -> Forecast:
        """The prediction of a request, or why there is none."""
        if self._predictor is None:
            return Forecast(prediction=None, outcome="absent")
        if not request.prompt:
            return Forecast(prediction=None, outcome="no_text")
        start = time.perf_counter()
        prediction, outcome = None, "answered"
        try:
            async with asyncio.timeout(self._deadline_s):
                [response] = await self._predictor.responses([request], timeout_s=self._deadline_s)
                if response.bucket_probabilities and self._bucket_edges is None:
                    self._bucket_edges = tuple((await self._predictor.metadata()).bucket_edges)
            prediction = prediction_of(response, self._bucket_edges or ())
        except TimeoutError:
            outcome = "late"
        except TailcastError as error:
            outcome = _outcome(error)
            self._note(error)
        except Exception as error:
            # Fails open: no fault of a predictor, of whatever kind, may cost a request.
            outcome = "failed"
            self._note(error)
        if prediction is not None and not self._worked:
            logger.info("the predictor answers again")
            self._worked = True
        return Forecast(prediction=prediction, outcome=outcome, seconds=time.perf_counter() - start)

    async def close(self) -> None:
        """Gives up connections."""
        if self._predictor is not None:
            await self._predictor.close()

    def _note(self, error: Exception) -> None:
        if self._worked:  # once for each outage
            logger.warning("no prediction, requests go on without: %s", _public_text(error))
        self._worked = False


def prediction_of(found: pb.PredictResponse, bucket_edges: tuple[float, ...]) -> Prediction:
    """A response in the scheduler's words.

    Raises:
        InputError: Numbers that no scheduler can use.
    """
    length = urgency = bucket = rank = None
    if found.HasField("mu"):
        length = LengthPrediction(found.mu, found.sigma, found.nu, found.artifact_id, found.artifact_version)
    if found.HasField("urgency"):
        urgency = UrgencyPrediction(tuple(found.urgency.probabilities))
    if found.bucket_probabilities:
        bucket = BucketPrediction(tuple(found.bucket_probabilities), bucket_edges)
    if found.HasField("rank"):
        rank = RankPrediction(found.rank)
    return Prediction(length=length, urgency=urgency, bucket=bucket, rank=rank)


def _public_text(error: Exception) -> str:
    """What of an error may be logged: texts of other ones can quote a request."""
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
