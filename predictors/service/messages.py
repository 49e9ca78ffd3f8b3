"""Conversion of bytes to validated requests, in bounded time, and of predictions to responses."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from predictors.manifest import Manifest, checked_temperature
from predictors.proto import predictor_v1_pb2 as pb
from predictors.runtime import ArtifactRuntime
from predictors.service.errors import UnparsableError
from predictors.tokenizer import TokenizedPrompt
from predictors.wire import response_fields
from scheduler_core.errors import InputError, suggestion
from scheduler_core.lengths import LogT
from scheduler_core.prediction.correction import MAX_NAME_CHARS
from scheduler_core.prediction.predictions import DEFAULT_MAX_TOKENS, LengthPrediction, Prediction
from scheduler_core.prediction.prompt_text import messages_of

M = TypeVar("M")
logger = logging.getLogger(__name__)

# Maximum number of elements of a message; parsing that many takes a few milliseconds.
MAX_ELEMENTS = 20_000
# Messages up to this size are parsed without counting elements, because their parsing time is short anyway.
UNCOUNTED_BYTES = 2**16

MAX_QUANTILE_LEVELS = 100
MAX_REQUEST_ID_CHARS = 1024
MAX_MESSAGES = 4096
MAX_LOGGED_MODELS = 16
MAX_TEMPERATURE = 100.0  # far above sampling temperatures in use; the model overflows above it
DEFAULT_CVAR_LEVEL = 0.9
DEFAULT_QUANTILE_LEVELS = (0.5, 0.9, 0.99)


def parse(kind: type[M], data: bytes) -> M:
    """Parses a message; UnparsableError for truncated bytes, text that is not UTF-8, or too many elements."""
    if len(data) > UNCOUNTED_BYTES:
        elements = _elements(kind.DESCRIPTOR, data, 0, len(data))  # type: ignore[attr-defined]
        if next(itertools.islice(elements, MAX_ELEMENTS, None), 1) is None:
            raise UnparsableError(kind.__name__, f"more than {MAX_ELEMENTS} elements")
    try:
        return kind.FromString(data)  # type: ignore[attr-defined,no-any-return]
    except Exception as error:  # its class differs between the implementations of protobuf
        raise UnparsableError(kind.__name__, error) from error


def _elements(message: Descriptor, data: bytes, start: int, end: int) -> Iterator[None]:
    """Yields None for each field (or repeated element) of a serialized message and its nested messages,
    because their number bounds the parsing time. Ends at malformed bytes, which the parser rejects."""
    offset = start
    inner = _counted_messages(message)
    while offset < end:
        yield None
        tag, offset = _varint(data, offset, end)
        kind = tag & 7
        if kind == 0:
            _, offset = _varint(data, offset, end)
        elif kind == 2:
            length, offset = _varint(data, offset, end)
            if tag >> 3 in inner:
                yield from _elements(inner[tag >> 3], data, offset, min(end, offset + length))
            offset += length
        elif kind in (1, 5):
            offset += 8 if kind == 1 else 4
        elif kind > 5:
            return


@functools.cache
def _counted_messages(message: Descriptor) -> dict[int, Descriptor]:
    """Field number -> message type, for message fields whose type has messages or repeated texts."""

    texts = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)

    def is_counted(field: FieldDescriptor) -> bool:
        return field.message_type is not None or (field.is_repeated and field.type in texts)

    return {
        field.number: field.message_type
        for field in message.fields
        if field.message_type is not None and any(is_counted(inner) for inner in field.message_type.fields)
    }


def _varint(data: bytes, offset: int, end: int) -> tuple[int, int]:
    """The varint at an offset, and the offset after it."""
    value = shift = 0
    while offset < end and shift < 70:
        byte = data[offset]
        offset += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
    return value, offset


class CheckedRequest(NamedTuple):
    """Validated input of a request: a text or at most max_length valid token ids, served model and sampling
    temperature (None: unknown), and whether the artifact was trained on outputs of that model."""

    prompt: str | TokenizedPrompt
    served_model: str | None = None
    temperature: float | None = None
    is_trained_model: bool = False


class PipelineResult(NamedTuple):
    """Prediction for one prompt and its cost, 0 if cached. A tuple, like all types created per request,
    because creating a frozen dataclass takes three times as long."""

    prediction: Prediction
    prompt_tokens: int
    truncated: bool
    tokenize_s: float
    queue_s: float
    inference_s: float
    batch_size: int
    cached: bool = False
    prompt_chars: int = 0


class RequestReader:
    """Validates requests for one artifact."""

    def __init__(self, runtime: ArtifactRuntime, max_prompt_chars: int | None) -> None:
        self._runtime = runtime
        self._manifest = runtime.artifact.manifest
        self._form = self._manifest.form
        self._unknown_models: set[int] = set()  # hashes of names
        self.max_prompt_chars = max_prompt_chars

    def check(self, request: pb.PredictRequest) -> None:
        """Validates the fields of a request that are not its input; InputError for the first wrong one."""
        check_request_id(request.request_id)
        if len(request.tenant) > MAX_NAME_CHARS:
            raise _too_many("tenant", len(request.tenant), "characters", MAX_NAME_CHARS)
        self._check_numbers(request)

    def read(self, request: pb.PredictRequest) -> CheckedRequest:
        """Validates a request; InputError for the first wrong field."""
        self.check(request)
        kind = request.WhichOneof("input")
        if kind == "token_ids":
            prompt: str | TokenizedPrompt = self._token_ids(request.token_ids)
        elif kind == "messages":
            prompt = self._text("messages", self._message_text(request.messages))
        else:
            prompt = self._text("prompt", request.prompt)
        served_model = request.served_model or None
        is_trained_model = self._manifest.served_model_number(served_model) > 0
        if served_model and not is_trained_model:
            self._log_unknown(served_model)
        temperature = request.temperature if request.HasField("temperature") else None
        if checked_temperature(temperature) > MAX_TEMPERATURE:
            raise InputError("temperature", temperature, f"0 to {MAX_TEMPERATURE:g}, or unset")
        return CheckedRequest(prompt, served_model, temperature, is_trained_model)

    def _log_unknown(self, model: str) -> None:
        """Logs, once for each of the first names, the served models similar to an unknown one, which could be a secret."""
        names, logged = self._manifest.served_models, self._unknown_models
        if len(logged) >= MAX_LOGGED_MODELS or hash(model) in logged or not names or model in names:
            return
        logged.add(hash(model))
        text = "artifact %s: requests name a model that is none of its %d served models; it is predicted as an unknown one%s"
        logger.warning(text, self._manifest.artifact_id, len(names), suggestion(model, names))

    def _text(self, field: str, text: str) -> str:
        if not text or text.isspace():
            raise InputError(field, text[:20], "a non-empty text")
        if self.max_prompt_chars is not None and len(text) > self.max_prompt_chars:
            raise _too_many(field, len(text), "characters", self.max_prompt_chars)
        return text

    def _message_text(self, chat: pb.ChatMessages) -> str:
        if len(chat.messages) > MAX_MESSAGES:
            raise _too_many("messages", len(chat.messages), "messages", MAX_MESSAGES)
        return self._form.text(messages_of(chat.messages))

    def _token_ids(self, token_ids: pb.TokenIds) -> TokenizedPrompt:
        max_length = self._manifest.max_length
        size = self._runtime.tokenizer.vocabulary_size
        if not 1 <= len(token_ids.ids) <= max_length:
            raise InputError("token_ids", f"{len(token_ids.ids)} ids", f"1 to {max_length} ids")
        ids = np.array(token_ids.ids, dtype=np.int64)
        wrong = ids[(ids < 0) | (ids >= size)]
        if len(wrong):
            raise InputError("token_ids", int(wrong[0]), f"0 to {size - 1}")
        return TokenizedPrompt(ids, truncated=False)

    def _check_numbers(self, request: pb.PredictRequest) -> None:
        names = self._manifest.urgency_levels
        tiers = f"0 to {len(names) - 1}" if names else "an integer >= 0"
        levels = request.quantile_levels
        if len(levels) > MAX_QUANTILE_LEVELS:
            raise _too_many("quantile_levels", len(levels), "levels", MAX_QUANTILE_LEVELS)
        wrong_levels = [level for level in levels if not 0 < level < 1]
        if wrong_levels:
            raise InputError("quantile_levels", wrong_levels[0], "numbers in (0, 1)")
        for field, is_allowed, allowed in (
            ("max_tokens", request.max_tokens >= 1, "an integer >= 1, or unset"),
            ("cvar_level", 0 <= request.cvar_level < 1, "a number in [0, 1)"),
            ("declared_tier", 0 <= request.declared_tier < (len(names) or 2**31), tiers),
            ("timeout_s", request.timeout_s > 0, "seconds > 0, or unset"),
            ("generated_tokens", request.generated_tokens >= 0, "an integer >= 0, or unset"),
        ):
            if not is_allowed and request.HasField(field):
                raise InputError(field, getattr(request, field), allowed)


def check_request_id(request_id: str) -> None:
    """InputError for an id that is too long."""
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        raise _too_many("request_id", len(request_id), "characters", MAX_REQUEST_ID_CHARS)


def _too_many(field: str, count: int, unit: str, maximum: int) -> InputError:
    return InputError(field, f"{count} {unit}", f"at most {maximum}")


def predict_response(
    request: pb.PredictRequest,
    result: PipelineResult,
    manifest: Manifest,
    is_trained_model: bool,
    prediction: Prediction | None = None,
) -> pb.PredictResponse:
    """The response to a validated request; `prediction` is the corrected one, if there is a correction. `manifest` is that
    of the artifact, or of the first of joined ones."""
    is_corrected = prediction is not None and prediction.length is not result.prediction.length
    prediction = prediction or result.prediction
    response = pb.PredictResponse(
        request_id=request.request_id,
        artifact_id=manifest.artifact_id,
        artifact_version=manifest.artifact_version,
        **response_fields(prediction),
        **({} if prediction.length is None else _length_numbers(request, prediction.length)),
        prompt_tokens=result.prompt_tokens,
        prompt_chars=result.prompt_chars,
        truncated=result.truncated,
        durations=pb.Durations(
            tokenize_ns=round(result.tokenize_s * 1e9),
            queue_ns=round(result.queue_s * 1e9),
            inference_ns=round(result.inference_s * 1e9),
            batch_size=result.batch_size,
        ),
        served_model_known=None if manifest.conditioning is None else is_trained_model,
        cached=result.cached,
        corrected=is_corrected,
    )
    if prediction.urgency is not None and request.HasField("declared_tier"):
        response.urgency.effective_level = prediction.urgency.effective_level(request.declared_tier)
    return response


def _length_numbers(request: pb.PredictRequest, length: LengthPrediction) -> dict[str, Any]:
    """Response fields of the length truncated at max_tokens of the request or the default."""
    numbers: dict[str, Any] = {}
    max_tokens = DEFAULT_MAX_TOKENS
    levels = request.quantile_levels or DEFAULT_QUANTILE_LEVELS
    if request.HasField("max_tokens"):
        max_tokens = request.max_tokens
        truncated = truncated_length(
            length,
            max_tokens=max_tokens,
            cvar_level=request.cvar_level if request.HasField("cvar_level") else DEFAULT_CVAR_LEVEL,
            levels=levels,
        )
        numbers |= {"truncated_length": truncated, "expected_tokens": truncated.expected_tokens}
    else:
        numbers["expected_tokens"] = length.expected_and_cvar(max_tokens)[0]
    if request.HasField("generated_tokens"):
        numbers["remaining"] = remaining_length(length, request.generated_tokens, max_tokens, levels)
    median, p90 = _truncated_quantiles(length, (0.5, 0.9), max_tokens)
    return numbers | {"median_tokens": median, "p90_tokens": p90}


def truncated_length(
    length: LengthPrediction, *, max_tokens: int, cvar_level: float, levels: Sequence[float]
) -> pb.TruncatedLength:
    """Expectation, CVaR and quantiles of min(X, max_tokens) in tokens. Values that depend only on the level
    and nu are cached."""
    if cvar_level >= 0.5:
        expected, cvar = length.expected_and_cvar(max_tokens, cvar_level)
    else:
        lengths = length.distribution()
        expected, cvar = float(lengths.expected(max_tokens)), float(lengths.cvar(cvar_level, max_tokens))
    return pb.TruncatedLength(
        max_tokens=max_tokens,
        expected_tokens=expected,
        cvar_level=cvar_level,
        cvar_tokens=cvar,
        quantiles=_quantile_messages(levels, _truncated_quantiles(length, levels, max_tokens)),
    )


def remaining_length(
    length: LengthPrediction, generated_tokens: int, max_tokens: int, levels: Sequence[float]
) -> pb.RemainingLength:
    """Expectation and quantiles of min(X, max_tokens) - g in tokens, given that X > g = generated_tokens; 0 if g is at least
    max_tokens, and max_tokens - g if such a long output was predicted to be impossible."""
    limit = max(max_tokens - generated_tokens, 0)
    lengths = length.distribution()
    longer = float(lengths.sf(generated_tokens)) if generated_tokens else 1.0
    quantiles = [float(limit)] * len(levels)
    if longer > 0.0:
        tokens = lengths.ppf(1.0 - (1.0 - np.array(levels)) * longer) - generated_tokens
        quantiles = np.clip(tokens, 0.0, limit).tolist()
    return pb.RemainingLength(
        generated_tokens=generated_tokens,
        expected_tokens=length.table(max_tokens).expected_remaining(generated_tokens),
        quantiles=_quantile_messages(levels, quantiles),
    )


def _quantile_messages(levels: Sequence[float], tokens: Sequence[float]) -> list[pb.Quantile]:
    return [pb.Quantile(level=level, tokens=each) for level, each in zip(levels, tokens, strict=True)]


def _truncated_quantiles(length: LengthPrediction, levels: Sequence[float], max_tokens: int) -> list[float]:
    if length.quantiles:
        logs = length.distribution().logppf(levels).tolist()
    else:
        logs = [length.mu + length.sigma * _t_quantile(level, length.nu) for level in levels]
    limit = math.log(max_tokens)
    return [float(max_tokens) if log_tokens >= limit else math.exp(log_tokens) for log_tokens in logs]


@functools.lru_cache(maxsize=4096)
def _t_quantile(level: float, nu: float) -> float:
    return float(LogT(0.0, 1.0, nu).logppf(level))
