"""Messages of a call and their outcomes, used by all clients, and the base class of the asynchronous ones."""

from __future__ import annotations

import asyncio
import math
from abc import abstractmethod
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Self, TypeVar

import grpc

from predictors.proto import predictor_v1_pb2 as pb
from predictors.wire import prediction_of
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.prediction.predictions import Prediction
from scheduler_core.prediction.predictor import PredictionRequest, Predictor
from scheduler_core.prediction.prompt_text import PartTokens, PromptForm

T = TypeVar("T")

# Maximum number of requests and of prompt bytes per call; larger batches are split into concurrent calls.
MAX_BATCH_REQUESTS = 64
MAX_BATCH_BYTES = 2 * 2**20
# Maximum number of messages of a request, and of characters of those before the last.
MAX_MESSAGES, MAX_CHARS = 64, 16_384
# Maximum number of observations per call.
MAX_OBSERVATIONS = 500


class PredictorError(TailcastError):
    """The service is unreachable, rejected a request or failed. `code` is the name of the gRPC status, for
    example "RESOURCE_EXHAUSTED"; `request_id` is None if the error does not refer to a request."""

    def __init__(self, message: str, code: str, request_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.request_id = request_id

    def __reduce__(self) -> tuple[type[Self], tuple[str, str, str | None]]:
        return type(self), (str(self), self.code, self.request_id)

    @classmethod
    def about(cls, message: pb.PredictRequest | None, code: str, details: str | None, address: str) -> Self:
        """An error that refers to the request `message`, or to none (None)."""
        request_id = None if message is None else message.request_id
        request = f"request {request_id!r}: " if request_id else ""
        return cls(f"predictor {address}: {request}{code}: {details}", code, request_id)


class AsyncClient(Predictor):
    """Base class of the asynchronous clients."""

    address: str
    timeout_s: float

    async def predict(
        self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None
    ) -> list[Prediction]:
        """Predictions of all heads, in the order of `requests`; `timeout_s` overrides the client's deadline.

        Raises:
            PredictorError: The service cannot be reached in time, or a request was rejected or failed.
            InputError: A prompt is not valid text, the deadline is out of range, or the artifact is invalid.
        """
        messages = [request_message(request, embedding=True) for request in requests]
        return predictions(await self._send(messages, timeout_s), self.address)

    async def responses(
        self,
        requests: Sequence[PredictionRequest],
        *,
        timeout_s: float | None = None,
        truncated_length: bool = False,
    ) -> list[pb.PredictResponse]:
        """Responses of the service; arguments and errors as in `predict`. With `truncated_length` they also
        have the statistics of the length truncated at max_tokens of each request."""
        messages = [request_message(request, truncated_length=truncated_length) for request in requests]
        return await self._send(messages, timeout_s)

    async def _send(
        self, messages: Sequence[pb.PredictRequest], timeout_s: float | None
    ) -> list[pb.PredictResponse]:
        return await self.send(messages, self.timeout_s if timeout_s is None else checked_timeout(timeout_s))

    async def load(self) -> str:
        return (await self.metadata()).artifact_version

    @abstractmethod
    async def send(self, messages: Sequence[pb.PredictRequest], timeout_s: float) -> list[pb.PredictResponse]:
        """Responses of the service to any number of messages, in their order; raises as `predict`."""

    @abstractmethod
    async def metadata(self) -> pb.GetMetadataResponse:
        """Artifact, limits and provider of the service."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def request_message(
    request: PredictionRequest, *, truncated_length: bool = False, embedding: bool = False
) -> pb.PredictRequest:
    """The message of a request; with `truncated_length` it includes max_tokens, with `embedding` it asks for one."""
    try:
        return pb.PredictRequest(
            request_id=request.request_id,
            **_input(request),
            served_model=request.served_model,
            temperature=request.temperature,
            max_tokens=request.max_tokens if truncated_length else None,
            embedding=embedding,
            tenant=request.tenant,
            system_prompt_key=request.system_prompt,
        )
    except (TypeError, ValueError) as error:
        field, allowed = f"prompt of request {request.request_id!r}", f"valid Unicode text ({error})"
        raise InputError(field, request.prompt[:40], allowed) from error


def _input(request: PredictionRequest) -> dict[str, Any]:
    """The prompt, or its conversation: of many messages the first and the last ones, and of a long text before the last
    ones the beginning and the end, because predictors read little of them."""
    messages = request.messages
    if not messages:
        return {"prompt": request.prompt}
    if len(messages) > MAX_MESSAGES:
        messages = (*messages[: MAX_MESSAGES // 4], *messages[-MAX_MESSAGES * 3 // 4 :])
    texts = [each.text for each in messages]
    for number, text in enumerate(texts[:-1]):
        if len(text) > MAX_CHARS and text != request.prompt:
            texts[number] = text[: MAX_CHARS // 2] + text[-MAX_CHARS // 2 :]
    chat = [pb.ChatMessage(role=each.role, content=text) for each, text in zip(messages, texts, strict=True)]
    return {"messages": pb.ChatMessages(messages=chat)}


def chunks(messages: Sequence[pb.PredictRequest]) -> Iterator[list[pb.PredictRequest]]:
    """Splits messages into chunks within the limits of a call; a prompt above the byte limit is one chunk."""
    chunk: list[pb.PredictRequest] = []
    num_bytes = 0
    for message in messages:
        size = message.ByteSize()
        if chunk and (len(chunk) >= MAX_BATCH_REQUESTS or num_bytes + size > MAX_BATCH_BYTES):
            yield chunk
            chunk, num_bytes = [], 0
        chunk.append(message)
        num_bytes += size
    if chunk:
        yield chunk


async def gathered(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all calls; if one fails or this coroutine is canceled, the other calls are canceled."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def batch_responses(
    batch: pb.PredictBatchResponse, messages: Sequence[pb.PredictRequest], address: str
) -> list[pb.PredictResponse]:
    """The responses of a batch; raises PredictorError for the first failed request."""
    if len(batch.outcomes) != len(messages):
        details = f"{len(batch.outcomes)} outcomes for {len(messages)} requests"
        raise PredictorError.about(messages[0], "INTERNAL", details, address)
    return [response(*pair, address) for pair in zip(batch.outcomes, messages, strict=True)]


def response(outcome: pb.Outcome, message: pb.PredictRequest, address: str) -> pb.PredictResponse:
    """The response to a message; raises PredictorError if the outcome is an error."""
    if outcome.WhichOneof("outcome") == "prediction":
        return outcome.prediction
    number = outcome.error.code
    code = next((code.name for code in grpc.StatusCode if code.value[0] == number), "UNKNOWN")
    raise PredictorError.about(message, code, outcome.error.message, address)


def predictions(responses: Sequence[pb.PredictResponse], address: str) -> list[Prediction]:
    """Converts responses to predictions; raises PredictorError for values out of range."""
    result = []
    for message in responses:
        try:
            result.append(prediction_of(message))
        except InputError as error:
            raise PredictorError(f"predictor {address}: {error}", "INTERNAL", message.request_id) from error
    return result


def prompt_form(metadata: pb.GetMetadataResponse) -> PromptForm:
    """What the service reads of a conversation."""
    parts = {field.name: value for field, value in metadata.part_tokens.ListFields()}
    part_tokens = PartTokens(**parts) if metadata.HasField("part_tokens") else None
    return PromptForm(conversations=metadata.conversations, part_tokens=part_tokens)


def observe_requests(observations: Sequence[pb.Observation]) -> Iterator[pb.ObserveRequest]:
    """Splits observations into calls within the limit of the service."""
    for start in range(0, len(observations), MAX_OBSERVATIONS):
        yield pb.ObserveRequest(observations=observations[start : start + MAX_OBSERVATIONS])


def refused(responses: Sequence[pb.ObserveResponse]) -> list[pb.ObservationError]:
    """The errors of the responses to all calls of `observe_requests`, with the indices of the observations."""
    errors = []
    for number, response in enumerate(responses):
        for error in response.errors:
            index = number * MAX_OBSERVATIONS + error.index
            errors.append(pb.ObservationError(index=index, field=error.field, message=error.message))
    return errors


def checked_timeout(timeout_s: float) -> float:
    """Returns `timeout_s`; raises InputError unless it is finite and > 0."""
    if not 0 < timeout_s < math.inf:
        raise InputError("timeout_s", timeout_s, "a finite number of seconds > 0")
    return timeout_s
