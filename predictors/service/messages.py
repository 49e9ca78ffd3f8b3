"""Messages of the interface: bytes to checked requests with bounded work, and predictions to responses."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from predictors.artifact import Manifest
from predictors.manifest import checked_temperature
from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.errors import UnparsableError
from predictors.service.pipeline import PipelineResult, PredictionPipeline
from predictors.tokenizer import TokenizedPrompt, conversation_text
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.lengths import LogT, expected_and_cvar
from scheduler_core.urgency import effective_level

M = TypeVar("M")

# Elements of a message: as many take some milliseconds to parse.
MAX_ELEMENTS = 20_000
# Messages up to this size are parsed without counting: their parsing time is bounded anyway.
UNCOUNTED_BYTES = 2**16

MAX_QUANTILE_LEVELS = 100
MAX_REQUEST_ID_CHARS = 1024
MAX_MESSAGES = 4096
MAX_TEMPERATURE = 100.0  # far above what any engine samples with; beyond it the model's numbers overflow
DEFAULT_CVAR_LEVEL = 0.9
DEFAULT_QUANTILE_LEVELS = (0.5, 0.9, 0.99)


def parse(kind: type[M], data: bytes) -> M:
    """The message of some bytes.

    Raises:
        UnparsableError: They are not one, for example truncated, or text that is not UTF-8; or too many elements.
    """
    if len(data) > UNCOUNTED_BYTES:
        elements = _elements(kind.DESCRIPTOR, data, 0, len(data))  # type: ignore[attr-defined]
        if next(itertools.islice(elements, MAX_ELEMENTS, None), 1) is None:
            raise UnparsableError(kind.__name__, f"more than {MAX_ELEMENTS} elements")
    try:
        return kind.FromString(data)  # type: ignore[attr-defined,no-any-return]
    except Exception as error:  # its class differs between the implementations of protobuf
        raise UnparsableError(kind.__name__, error) from error


def _elements(message: Descriptor, data: bytes, at: int, end: int) -> Iterator[None]:
    """One None for each field of a serialized message and of those in it, repeated ones one by one.

    They bound the time of parsing, which cannot be interrupted. Fields in a group (which parsers skip) count as those
    around it. Malformed bytes end the count: the parser will refuse them.
    """
    inner = _counted_messages(message)
    while at < end:
        yield None
        tag, at = _varint(data, at, end)
        kind = tag & 7
        if kind == 0:
            _, at = _varint(data, at, end)
        elif kind == 2:
            length, at = _varint(data, at, end)
            if tag >> 3 in inner:
                yield from _elements(inner[tag >> 3], data, at, min(end, at + length))
            at += length
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        elif kind > 5:
            return


@functools.cache
def _counted_messages(message: Descriptor) -> dict[int, Descriptor]:
    """Number -> message of the fields that hold messages in which again messages or texts are repeated."""

    def is_counted(field: FieldDescriptor) -> bool:
        return field.message_type is not None or (
            field.is_repeated and field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
        )

    return {
        field.number: field.message_type
        for field in message.fields
        if field.message_type is not None and any(is_counted(inner) for inner in field.message_type.fields)
    }


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """A number and the position behind it."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
    return value, at


class CheckedRequest(NamedTuple):
    """The valid input and conditions of a request."""

    prompt: str | TokenizedPrompt
    served_model: str | None
    temperature: float | None
    is_trained_model: bool


class RequestReader:
    """Checks requests for one artifact."""

    def __init__(self, pipeline: PredictionPipeline, max_prompt_chars: int | None) -> None:
        self._pipeline = pipeline
        self._manifest = pipeline.runtime.artifact.manifest
        self._max_prompt_chars = max_prompt_chars

    def read(self, request: pb.PredictRequest) -> CheckedRequest:
        """The request's input and conditions; raises InputError for the first wrong field."""
        if len(request.request_id) > MAX_REQUEST_ID_CHARS:
            raise _too_many("request_id", len(request.request_id), "characters", MAX_REQUEST_ID_CHARS)
        kind = request.WhichOneof("input")
        if kind == "token_ids":
            prompt: str | TokenizedPrompt = self._token_ids(request.token_ids)
        elif kind == "messages":
            prompt = self._text("messages", self._message_text(request.messages))
        else:
            prompt = self._text("prompt", request.prompt)
        served_model = request.served_model or None
        is_trained_model = self._pipeline.is_trained_on(served_model)
        temperature = request.temperature if request.HasField("temperature") else None
        if checked_temperature(temperature) > MAX_TEMPERATURE:
            raise InputError("temperature", temperature, f"0 to {MAX_TEMPERATURE:g}, or unset")
        self._check_numbers(request)
        return CheckedRequest(prompt, served_model, temperature, is_trained_model)

    def _text(self, field: str, text: str) -> str:
        if not text or text.isspace():
            raise InputError(field, text[:20], "a text that is not empty")
        if self._max_prompt_chars is not None and len(text) > self._max_prompt_chars:
            raise _too_many(field, len(text), "characters", self._max_prompt_chars)
        return text

    def _message_text(self, chat: pb.ChatMessages) -> str:
        """The part of a conversation that the artifact was trained on: the last user message, or all of it."""
        messages = chat.messages
        if len(messages) > MAX_MESSAGES:
            raise _too_many("messages", len(messages), "messages", MAX_MESSAGES)
        role = messages[-1].role if messages else "no message"
        if role != "user":
            raise InputError("messages", role, "a conversation whose last message has the role user")
        if self._manifest.conversations:
            return conversation_text((message.role, message.content) for message in messages)
        content: str = messages[-1].content
        return content

    def _token_ids(self, token_ids: pb.TokenIds) -> TokenizedPrompt:
        max_length = self._manifest.max_length
        size = self._pipeline.runtime.tokenizer.vocabulary_size
        if not 1 <= len(token_ids.ids) <= max_length:
            raise InputError("token_ids", f"{len(token_ids.ids)} ids", f"1 to {max_length} of them")
        ids = np.array(token_ids.ids, dtype=np.int64)
        wrong = ids[(ids < 0) | (ids >= size)]
        if len(wrong):
            raise InputError("token_ids", int(wrong[0]), f"0 to {size - 1}")
        return TokenizedPrompt(ids, truncated=False)

    def _check_numbers(self, request: pb.PredictRequest) -> None:
        if request.HasField("max_tokens") and request.max_tokens < 1:
            raise InputError("max_tokens", request.max_tokens, "an integer >= 1, or unset")
        if request.HasField("cvar_level") and not 0 <= request.cvar_level < 1:
            raise InputError("cvar_level", request.cvar_level, "a number in [0, 1)")
        levels = request.quantile_levels
        if len(levels) > MAX_QUANTILE_LEVELS:
            raise _too_many("quantile_levels", len(levels), "levels", MAX_QUANTILE_LEVELS)
        for level in levels:
            if not 0 < level < 1:
                raise InputError("quantile_levels", level, "numbers in (0, 1)")
        if request.HasField("declared_tier"):
            names = self._manifest.urgency_levels
            highest = len(names) - 1 if names else math.inf
            if not 0 <= request.declared_tier <= highest:
                allowed = f"0 to {highest}" if names else "an integer >= 0"
                raise InputError("declared_tier", request.declared_tier, allowed)
        if request.HasField("timeout_s") and not request.timeout_s > 0:
            raise InputError("timeout_s", request.timeout_s, "seconds > 0, or unset")


def _too_many(field: str, count: int, unit: str, maximum: int) -> InputError:
    return InputError(field, f"{count} {unit}", f"at most {maximum}")


def predict_response(
    request: pb.PredictRequest, result: PipelineResult, manifest: Manifest, *, is_trained_model: bool
) -> pb.PredictResponse:
    """The response to a valid request; raises TailcastError if the model's urgency is not a distribution."""
    prediction = result.prediction
    response = pb.PredictResponse(
        request_id=request.request_id,
        mu=prediction.mu,
        sigma=prediction.sigma,
        nu=prediction.nu,
        artifact_id=manifest.artifact_id,
        artifact_version=manifest.artifact_version,
        prompt_tokens=result.prompt_tokens,
        truncated=result.truncated,
        durations=pb.Durations(
            tokenize_ns=round(result.tokenize_s * 1e9),
            queue_ns=round(result.queue_s * 1e9),
            inference_ns=round(result.inference_s * 1e9),
            batch_size=result.batch_size,
        ),
        bucket_probabilities=prediction.bucket,
        bucket=None if prediction.bucket is None else most_likely(prediction.bucket),
        regression_tokens=prediction.regression_tokens,
        rank=prediction.rank,
        sigma_within=prediction.sigma_within,
        cached=result.cached,
    )
    if manifest.conditioning is not None:
        response.served_model_known = is_trained_model
    if prediction.urgency is not None:
        declared = request.declared_tier if request.HasField("declared_tier") else None
        response.urgency.CopyFrom(urgency(prediction.urgency, manifest.abstain_threshold, declared))
    if request.HasField("max_tokens") and prediction.mu is not None:
        assert prediction.sigma is not None and prediction.nu is not None  # noqa: PT018
        response.truncated_length.CopyFrom(
            truncated_length(
                prediction.mu,
                prediction.sigma,
                prediction.nu,
                max_tokens=request.max_tokens,
                cvar_level=request.cvar_level if request.HasField("cvar_level") else None,
                levels=request.quantile_levels,
            )
        )
    return response


def urgency(
    probabilities: Sequence[float], abstain_threshold: float | None, declared_tier: int | None = None
) -> pb.Urgency:
    """The likeliest level (the more urgent one of two equally likely ones), and whether it is likely enough.

    Args:
        probabilities: Of the levels, the most urgent first.
        abstain_threshold: The manifest's: lowest probability of the likeliest level that counts; None: any; 1: none,
            even one that rounding made certain.
        declared_tier: The tier that the client declared; with it the message has the level to schedule at.

    Raises:
        TailcastError: The probabilities are not a distribution.
    """
    # `effective_level` takes None for "always abstain".
    threshold = 0.0 if abstain_threshold is None else abstain_threshold if abstain_threshold < 1 else None
    message = pb.Urgency(
        probabilities=probabilities,
        level=most_likely(probabilities),
        abstain=threshold is None or max(probabilities) < threshold,
    )
    if declared_tier is not None:
        try:
            message.effective_level = int(effective_level(probabilities, declared_tier, threshold))
        except InputError as error:
            raise TailcastError(f"the model gave urgency = {list(probabilities)}: {error}") from error
    return message


def most_likely(probabilities: Sequence[float]) -> int:
    """Position of the highest probability, the first of equal ones."""
    return max(range(len(probabilities)), key=probabilities.__getitem__)


def truncated_length(
    mu: float, sigma: float, nu: float, *, max_tokens: int, cvar_level: float | None, levels: Sequence[float]
) -> pb.TruncatedLength:
    """Expectation, CVaR and quantiles of min(X, max_tokens) in tokens, as `scheduler_core.lengths.LogT` gives them.

    For one request in the event loop: what depends on the level and nu alone is computed once.

    Args:
        mu, sigma, nu: Parameters of the log-t distribution.
        max_tokens: Where X is truncated, >= 1.
        cvar_level: Level in [0, 1); None = 0.9.
        levels: Levels of the quantiles, in (0, 1); empty = 0.5, 0.9, 0.99.
    """
    alpha = DEFAULT_CVAR_LEVEL if cvar_level is None else cvar_level
    if alpha >= 0.5:
        expected, cvar = expected_and_cvar(mu, sigma, nu, max_tokens, alpha)
    else:
        lengths = LogT(mu, sigma, nu)
        expected, cvar = float(lengths.expected(max_tokens)), float(lengths.cvar(alpha, max_tokens))
    log_max_tokens = math.log(max_tokens)
    quantiles = []
    for level in levels or DEFAULT_QUANTILE_LEVELS:
        log_tokens = mu + sigma * _t_quantile(level, nu)
        tokens = float(max_tokens) if log_tokens >= log_max_tokens else math.exp(log_tokens)
        quantiles.append(pb.Quantile(level=level, tokens=tokens))
    return pb.TruncatedLength(
        max_tokens=max_tokens,
        expected_tokens=expected,
        cvar_level=alpha,
        cvar_tokens=cvar,
        quantiles=quantiles,
    )


@functools.lru_cache(maxsize=4096)
def _t_quantile(level: float, nu: float) -> float:
    return float(LogT(0.0, 1.0, nu).logppf(level))
