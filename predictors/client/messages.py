"""Conversion between the scheduler's types and the messages of the gRPC interface."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import grpc

from predictors.proto import predictor_v1_pb2 as pb
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.predictions import LengthPrediction
from scheduler_core.predictor import PredictionRequest


class PredictorError(TailcastError):
    """The service could not be reached, refused a request or failed.

    Args:
        message: What happened, naming the address.
        code: Name of the gRPC status, for example "RESOURCE_EXHAUSTED".
        request_id: The request it is about, if it is about one.
    """

    def __init__(self, message: str, code: str, request_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.request_id = request_id

    def __reduce__(self) -> tuple[type[Self], tuple[str, str, str | None]]:
        return type(self), (str(self), self.code, self.request_id)


Result = pb.PredictResponse | PredictorError
# Largest sum of prompt bytes in one call of more than one request.
MAX_BATCH_BYTES = 2 * 2**20


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
        raise InputError(
            f"prompt of request {request.request_id!r}", request.prompt[:40], f"valid Unicode text ({error})"
        ) from error


def chunks(messages: Sequence[pb.PredictRequest], max_requests: int) -> Iterator[list[pb.PredictRequest]]:
    """Consecutive parts within the limits of one call; a prompt over the byte limit has its own."""
    chunk: list[pb.PredictRequest] = []
    num_bytes = 0
    for message in messages:
        size = len(message.prompt) * 4  # bytes of a character in UTF-8: at most 4
        if chunk and (len(chunk) >= max_requests or num_bytes + size > MAX_BATCH_BYTES):
            yield chunk
            chunk, num_bytes = [], 0
        chunk.append(message)
        num_bytes += size
    if chunk:
        yield chunk


def batch_results(
    response: pb.PredictBatchResponse, messages: Sequence[pb.PredictRequest], address: str
) -> list[Result]:
    """The outcomes of a batch, one per message."""
    if len(response.outcomes) != len(messages):
        text = f"predictor {address}: {len(response.outcomes)} outcomes for {len(messages)} requests"
        return [PredictorError(text, "INTERNAL", message.request_id) for message in messages]
    return [
        outcome_result(outcome, message, address)
        for outcome, message in zip(response.outcomes, messages, strict=True)
    ]


def outcome_result(outcome: pb.Outcome, message: pb.PredictRequest, address: str) -> Result:
    """The response to a message, or its error."""
    if outcome.WhichOneof("outcome") == "prediction":
        return outcome.prediction
    return failure(message, _code_name(outcome.error.code), outcome.error.message, address)


def call_failed(error: Any, messages: Sequence[pb.PredictRequest], address: str) -> list[Result]:
    """A gRPC error of the whole call as the result of each of its requests."""
    return [failure(message, error.code().name, error.details(), address) for message in messages]


def failure(message: pb.PredictRequest, code: str, details: str | None, address: str) -> PredictorError:
    """The error about one request."""
    text = f"predictor {address}: request {message.request_id!r}: {code}: {details}"
    return PredictorError(text, code, message.request_id)


def succeeded(results: Sequence[Result]) -> list[pb.PredictResponse]:
    """The responses; raises the first error there is."""
    responses = []
    for result in results:
        if isinstance(result, PredictorError):
            raise result
        responses.append(result)
    return responses


def length_prediction(response: pb.PredictResponse, address: str) -> LengthPrediction:
    """The length distribution of a response; raises PredictorError where there is no usable one."""
    if not response.HasField("mu"):
        text = f"predictor {address}: artifact {response.artifact_id!r} predicts no length distribution"
        raise PredictorError(text, "FAILED_PRECONDITION", response.request_id)
    try:
        return LengthPrediction(
            mu=response.mu,
            sigma=response.sigma,
            nu=response.nu,
            artifact_id=response.artifact_id,
            artifact_version=response.artifact_version,
        )
    except InputError as error:
        raise PredictorError(f"predictor {address}: {error}", "INTERNAL", response.request_id) from error


def _code_name(number: int) -> str:
    return next((code.name for code in grpc.StatusCode if code.value[0] == number), "UNKNOWN")
