"""Predictions of a request: within a deadline, and failing open."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from predictors.client import GrpcPredictor, InProcessPredictor

    PredictorClient = GrpcPredictor | InProcessPredictor

logger = logging.getLogger(__name__)


def open_predictor_client(address: str | None, field: str) -> PredictorClient | None:
    """The client of a predictor at grpc://HOST:PORT, or of an artifact folder in this process; None without an address.

    Raises:
        InputError: The option `field` is neither, or the artifact cannot be opened.
    """
    from predictors.client import connect, load

    if address is None:
        return None
    scheme, separator, target = address.partition("://")
    if separator and scheme == "grpc":
        return connect(target)
    if separator or not Path(address).is_dir():
        raise InputError(field, address, "grpc://HOST:PORT, or an artifact folder")
    return load(address)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Outcome of a query to a predictor.

    Attributes:
        prediction: None where there is none.
        outcome: answered, late, failed (no service, an invalid response), refused (the service refuses this request),
            no_text, absent (no predictor).
        seconds: Time spent on it.
    """

    prediction: Prediction | None
    outcome: str
    seconds: float = 0.0


class Forecaster:
    """Queries one predictor about one request at a time; a `Forecast` comes back by the deadline in any case.

    Args:
        predictor: The client; None: every forecast is absent.
        deadline_s: Time for a response, in seconds > 0.
    """

    def __init__(self, predictor: PredictorClient | None, deadline_s: float) -> None:
        self._predictor = predictor
        self._deadline_s = deadline_s
        self._bucket_edges: tuple[float, ...] | None = None
        self._is_down = False

    async def warm_up(self, deadline_s: float) -> None:
        """Loads or connects; without success the proxy serves all the same."""
        if self._predictor is None:
            return
        try:
            async with asyncio.timeout(deadline_s):
                self._bucket_edges = tuple((await self._predictor.metadata()).bucket_edges)
        except (TimeoutError, TailcastError) as error:
            logger.warning("no predictor yet: %s", error or "no response in time")

    async def forecast(self, request: PredictionRequest) -> Forecast:
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
        except Exception as error:  # no fault of a predictor, of whatever kind, may cost a request
            outcome = _outcome(error) if isinstance(error, TailcastError) else "failed"
            if not self._is_down:  # once for each outage
                logger.warning("no prediction, requests go on without: %s", _public_text(error))
            self._is_down = True
        if prediction is not None and self._is_down:
            logger.info("the predictor responds again")
            self._is_down = False
        return Forecast(prediction=prediction, outcome=outcome, seconds=time.perf_counter() - start)

    async def close(self) -> None:
        """Closes connections."""
        if self._predictor is not None:
            await self._predictor.close()


def prediction_of(response: pb.PredictResponse, bucket_edges: tuple[float, ...]) -> Prediction:
    """A response as the scheduler's prediction.

    Raises:
        InputError: Numbers that no scheduler can use.
    """
    length = urgency = bucket = rank = None
    if response.HasField("mu"):
        length = LengthPrediction(
            response.mu, response.sigma, response.nu, response.artifact_id, response.artifact_version
        )
    if response.HasField("urgency"):
        urgency = UrgencyPrediction(tuple(response.urgency.probabilities))
    if response.bucket_probabilities:
        bucket = BucketPrediction(tuple(response.bucket_probabilities), bucket_edges)
    if response.HasField("rank"):
        rank = RankPrediction(response.rank)
    return Prediction(length=length, urgency=urgency, bucket=bucket, rank=rank)


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
