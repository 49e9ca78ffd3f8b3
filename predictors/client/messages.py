"""Conversion between the scheduler's types and the messages of the interface, for every client."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Self, TypeVar

import grpc

from predictors.proto import predictor_v1_pb2 as pb
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.predictions import (
    BucketPrediction,
    LengthPrediction,
    PointPrediction,
    Prediction,
    RankPrediction,
    UrgencyPrediction,
)
from scheduler_core.predictor import PredictionRequest

T = TypeVar("T")

# Most requests of one call, and largest sum of their prompts' bytes; more are sent in several calls at the same time.
MAX_BATCH_REQUESTS = 64
MAX_BATCH_BYTES = 2 * 2**20


class PredictorError(TailcastError):
    """The service could not be reached, refused a request (`request_id` where it is about one) or failed; `code` is the name
    of the gRPC status, for example "RESOURCE_EXHAUSTED"."""

    def __init__(self, message: str, code: str, request_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.request_id = request_id

    def __reduce__(self) -> tuple[type[Self], tuple[str, str, str | None]]:
        return type(self), (str(self), self.code, self.request_id)

    @classmethod
    def about(cls, message: pb.PredictRequest | None, code: str, details: str | None, address: str) -> Self:
        """The error about a request, if it is about one."""
        request_id = None if message is None else message.request_id
        request = "" if message is None else f"request {request_id!r}: "
        return cls(f"predictor {address}: {request}{code}: {details}", code, request_id)


class AsyncClient(ABC):
    """What the asynchronous clients have in common; implements `scheduler_core.predictor.Predictor`."""

    address: str
    timeout_s: float

    async def predict(
        self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None
    ) -> list[Prediction]:
        """Predictions of all heads of the artifact, in the order of `requests`, by the deadline of this call (None: the client's).

        Raises:
            PredictorError: The service could not be reached in time, or refused or failed one of the requests.
            InputError: A prompt cannot be sent, the deadline is not allowed, or the artifact is refused.
        """
        return predictions(await self.responses(requests, timeout_s=timeout_s), self.address)

    async def responses(
        self,
        requests: Sequence[PredictionRequest],
        *,
        timeout_s: float | None = None,
        truncated_length: bool = False,
    ) -> list[pb.PredictResponse]:
        """The service's responses, as `predict`; with `truncated_length` they have the statistics of the length truncated at
        each request's max_tokens too."""
        messages = [request_message(request, truncated_length) for request in requests]
        return await self.send(messages, self.timeout_s if timeout_s is None else checked_timeout(timeout_s))

    @abstractmethod
    async def send(self, messages: Sequence[pb.PredictRequest], timeout_s: float) -> list[pb.PredictResponse]:
        """The service's responses to any number of messages, in their order; raises as `predict`."""

    @abstractmethod
    async def metadata(self) -> pb.GetMetadataResponse:
        """Artifact, limits and provider of the service."""

    @abstractmethod
    async def close(self) -> None:
        """Ends connections or threads; the client can be used again."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def request_message(request: PredictionRequest, truncated_length: bool) -> pb.PredictRequest:
    """The message of a request; with `truncated_length` its max_tokens are sent too."""
    try:
        return pb.PredictRequest(
            request_id=request.request_id,
            prompt=request.prompt,
            served_model=request.served_model,
            temperature=request.temperature,
            max_tokens=request.max_tokens if truncated_length else None,
        )
    except (TypeError, ValueError) as error:
        field, allowed = f"prompt of request {request.request_id!r}", f"valid Unicode text ({error})"
        raise InputError(field, request.prompt[:40], allowed) from error


def chunks(messages: Sequence[pb.PredictRequest]) -> Iterator[list[pb.PredictRequest]]:
    """Consecutive parts within the limits of one call; a prompt over the byte limit has its own."""
    chunk: list[pb.PredictRequest] = []
    num_bytes = 0
    for message in messages:
        size = len(message.prompt) * 4  # bytes of a character in UTF-8: at most 4
        if chunk and (len(chunk) >= MAX_BATCH_REQUESTS or num_bytes + size > MAX_BATCH_BYTES):
            yield chunk
            chunk, num_bytes = [], 0
        chunk.append(message)
        num_bytes += size
    if chunk:
        yield chunk


async def gathered(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; when this is canceled or one fails, the others are canceled too."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def batch_responses(
    batch: pb.PredictBatchResponse, messages: Sequence[pb.PredictRequest], address: str
) -> list[pb.PredictResponse]:
    """The responses to a batch; raises the first error there is."""
    if len(batch.outcomes) != len(messages):
        details = f"{len(batch.outcomes)} outcomes for {len(messages)} requests"
        raise PredictorError.about(messages[0], "INTERNAL", details, address)
    return [response(*pair, address) for pair in zip(batch.outcomes, messages, strict=True)]


def response(outcome: pb.Outcome, message: pb.PredictRequest, address: str) -> pb.PredictResponse:
    """The response to a message; raises PredictorError if the outcome is one."""
    if outcome.WhichOneof("outcome") == "prediction":
        return outcome.prediction
    number = outcome.error.code
    code = next((code.name for code in grpc.StatusCode if code.value[0] == number), "UNKNOWN")
    raise PredictorError.about(message, code, outcome.error.message, address)


def predictions(responses: Sequence[pb.PredictResponse], address: str) -> list[Prediction]:
    """Responses as the scheduler's predictions; raises PredictorError for numbers that no scheduler can use."""
    result = []
    for one in responses:
        try:
            result.append(prediction(one))
        except InputError as error:
            raise PredictorError(f"predictor {address}: {error}", "INTERNAL", one.request_id) from error
    return result


def prediction(response: pb.PredictResponse) -> Prediction:
    """A response as the scheduler's prediction, with all of its heads; raises InputError for impossible numbers."""
    length = urgency = bucket = rank = point = None
    if response.HasField("mu"):
        artifact = (response.artifact_id, response.artifact_version)
        parameters = (response.mu, response.sigma, response.nu)
        length = LengthPrediction(*parameters, *artifact, tuple(response.quantiles))
    if response.HasField("urgency"):
        threshold = response.urgency.abstain_threshold
        urgency = UrgencyPrediction(
            tuple(response.urgency.probabilities),
            threshold if response.urgency.HasField("abstain_threshold") else None,
        )
    if response.bucket_probabilities:
        bucket = BucketPrediction(tuple(response.bucket_probabilities), tuple(response.bucket_edges))
    if response.HasField("rank"):
        rank = RankPrediction(response.rank)
    if response.HasField("regression_tokens"):
        point = PointPrediction(max(response.regression_tokens, 1.0))  # an output has a token at least
    return Prediction(length=length, urgency=urgency, bucket=bucket, rank=rank, point=point)


def checked_timeout(timeout_s: float) -> float:
    """`timeout_s` itself, if it is one; otherwise raises InputError."""
    if not 0 < timeout_s < math.inf:
        raise InputError("timeout_s", timeout_s, "a finite number of seconds > 0")
    return timeout_s
