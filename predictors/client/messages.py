"""Between the scheduler's words and the messages of the interface."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from predictors.client.errors import PredictorError
from predictors.client.retrying import Result
from predictors.client.settings import ClientSettings, TlsSettings
from predictors.proto import predictor_v1_pb2 as pb
from scheduler_core.errors import InputError
from scheduler_core.predictions import LengthPrediction
from scheduler_core.predictor import PredictionRequest


def checked_address(address: str) -> str:
    """The address itself if it is "host:port" or "unix:PATH"; raises InputError otherwise."""
    if re.fullmatch(r"unix:.+", address):
        return address
    match = re.fullmatch(r"(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})", address)
    if match is None or not 1 <= int(match[1]) <= 65535:
        raise InputError("predictor address", address, "HOST:PORT with a port from 1 to 65535, or unix:PATH")
    return address


def channel_options(settings: ClientSettings) -> list[tuple[str, Any]]:
    """Options of a gRPC channel."""
    return [
        # A name with several addresses (a headless Kubernetes service) is spread over all of them.
        ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})),
        # `retrying` does this, with a budget, and for the parts of a batch.
        ("grpc.enable_retries", 0),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        # Reconnect quickly: a restarted server is back in about a second.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # In spite of its name the time a connection may take to be made: a busy server, or a far one with TLS, needs some.
        ("grpc.min_reconnect_backoff_ms", 10_000),
        # A connection that died without a word is found within half a minute of a call; servers allow such pings.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        # Otherwise channels to the same address share one connection.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def channel_credentials(tls: TlsSettings) -> grpc.ChannelCredentials:
    """Reads the PEM files; raises InputError naming the one that cannot be read."""
    return grpc.ssl_channel_credentials(
        root_certificates=_pem("tls ca", tls.ca),
        private_key=_pem("tls key", tls.key),
        certificate_chain=_pem("tls certificate", tls.certificate),
    )


def call_metadata(settings: ClientSettings) -> tuple[tuple[str, str], ...]:
    """What every call carries beside its message."""
    return () if settings.token is None else (("authorization", f"Bearer {settings.token}"),)


def request_message(request: PredictionRequest, *, capped: bool) -> pb.PredictRequest:
    """The message of a request; with `capped` its max_tokens are sent too."""
    try:
        return pb.PredictRequest(
            request_id=request.request_id,
            prompt=request.prompt,
            served_model=request.served_model,
            temperature=request.temperature,
            max_tokens=request.max_tokens if capped else None,
        )
    except (TypeError, ValueError) as error:
        raise InputError(
            f"prompt of request {request.request_id!r}", request.prompt[:40], f"valid Unicode text ({error})"
        ) from error


def chunks(
    messages: Sequence[pb.PredictRequest], settings: ClientSettings
) -> Iterator[list[pb.PredictRequest]]:
    """Consecutive parts within the limits of one call; a prompt over the byte limit goes alone."""
    chunk: list[pb.PredictRequest] = []
    num_bytes = 0
    for message in messages:
        size = len(message.prompt) * 4  # bytes of a character in UTF-8: at most 4
        if chunk and (
            len(chunk) >= settings.max_batch_requests or num_bytes + size > settings.max_batch_bytes
        ):
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
    """The answer to a message, or why there is none."""
    if outcome.WhichOneof("outcome") == "prediction":
        return outcome.prediction
    return failure(message, _code_name(outcome.error.code), outcome.error.message, address)


def call_failed(error: Any, messages: Sequence[pb.PredictRequest], address: str) -> list[Result]:
    """What a gRPC error of the whole call means for each of its requests."""
    return [failure(message, error.code().name, error.details(), address) for message in messages]


def failure(message: pb.PredictRequest, code: str, details: str | None, address: str) -> PredictorError:
    """The error about one request."""
    text = f"predictor {address}: request {message.request_id!r}: {code}: {details}"
    return PredictorError(text, code, message.request_id)


def all_failed(results: Sequence[Result]) -> bool:
    """Whether there is no answer among the results."""
    return all(isinstance(result, PredictorError) for result in results)


def succeeded(results: Sequence[Result]) -> list[pb.PredictResponse]:
    """The responses; raises the first error there is."""
    found = []
    for result in results:
        if isinstance(result, PredictorError):
            raise result
        found.append(result)
    return found


def length_prediction(found: pb.PredictResponse, address: str) -> LengthPrediction:
    """What a scheduler needs of a response; raises PredictorError where there is no usable length in it."""
    if not found.HasField("mu"):
        text = f"predictor {address}: artifact {found.artifact_id!r} predicts no length distribution"
        raise PredictorError(text, "FAILED_PRECONDITION", found.request_id)
    try:
        return LengthPrediction(
            mu=found.mu,
            sigma=found.sigma,
            nu=found.nu,
            artifact_id=found.artifact_id,
            artifact_version=found.artifact_version,
        )
    except InputError as error:
        raise PredictorError(f"predictor {address}: {error}", "INTERNAL", found.request_id) from error


def _code_name(number: int) -> str:
    return next((code.name for code in grpc.StatusCode if code.value[0] == number), "UNKNOWN")


def _pem(field: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InputError(field, path, f"a readable PEM file ({error.strerror})") from error
