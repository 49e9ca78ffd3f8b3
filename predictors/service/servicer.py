"""The gRPC methods: checks what came in, asks the pipeline, and maps every error to a status in one table."""

from __future__ import annotations

import asyncio
import logging
from importlib import metadata
from typing import Any

import grpc

from predictors.artifact import FORMAT_VERSION
from predictors.manifest import checked_temperature
from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto import predictor_v1_pb2_grpc
from predictors.service.errors import BatchError, ClosedError, ExpiredError, QueueFullError
from predictors.service.pipeline import PredictionPipeline
from predictors.service.response import predict_response
from scheduler_core.errors import InputError, TailcastError

logger = logging.getLogger(__name__)

STATUS: dict[type[Exception], grpc.StatusCode] = {
    InputError: grpc.StatusCode.INVALID_ARGUMENT,
    QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ExpiredError: grpc.StatusCode.DEADLINE_EXCEEDED,
    ClosedError: grpc.StatusCode.UNAVAILABLE,
    BatchError: grpc.StatusCode.INTERNAL,
    TailcastError: grpc.StatusCode.INTERNAL,
}

MAX_QUANTILE_LEVELS = 100
MAX_REQUEST_ID_CHARS = 1024

Context = grpc.aio.ServicerContext[Any, Any]


class PredictorServicer(predictor_v1_pb2_grpc.PredictorServicer):
    """Service tailcast.predictor.v1.Predictor.

    Args:
        pipeline: What predicts.
        max_batch_requests: Most requests in one PredictBatch.
        max_message_bytes: Limit of the transport, told in the metadata.
    """

    def __init__(
        self, pipeline: PredictionPipeline, *, max_batch_requests: int, max_message_bytes: int
    ) -> None:
        self._pipeline = pipeline
        self._max_batch_requests = max_batch_requests
        self._max_message_bytes = max_message_bytes

    async def Predict(self, request: pb.PredictRequest, context: Context) -> pb.PredictResponse:
        """One prompt; see the .proto for the statuses."""
        outcome = await self._outcome(request, self._deadline(context), where="")
        if isinstance(outcome, pb.PredictResponse):
            return outcome
        code, message, _ = outcome
        await context.abort(code, message)
        raise AssertionError("abort raises")

    async def PredictBatch(
        self, request: pb.PredictBatchRequest, context: Context
    ) -> pb.PredictBatchResponse:
        """Many prompts, each with its own outcome."""
        if not 1 <= len(request.requests) <= self._max_batch_requests:
            error = InputError(
                "requests", f"{len(request.requests)} requests", f"1 to {self._max_batch_requests} of them"
            )
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        deadline = self._deadline(context)
        outcomes = await asyncio.gather(
            *(
                self._outcome(one, deadline, where=f"requests[{index}].")
                for index, one in enumerate(request.requests)
            )
        )
        return pb.PredictBatchResponse(
            outcomes=[
                pb.Outcome(prediction=outcome)
                if isinstance(outcome, pb.PredictResponse)
                else _error_outcome(one.request_id, *outcome)
                for one, outcome in zip(request.requests, outcomes, strict=True)
            ]
        )

    async def GetMetadata(self, request: pb.GetMetadataRequest, context: Context) -> pb.GetMetadataResponse:
        """What is served."""
        manifest = self._pipeline.runtime.artifact.manifest
        return pb.GetMetadataResponse(
            artifact_id=manifest.artifact_id,
            artifact_version=manifest.artifact_version,
            format_version=FORMAT_VERSION,
            served_models=manifest.served_models,
            nu=manifest.nu,
            max_length_tokens=manifest.max_length,
            truncation_side=manifest.truncation_side,
            provider=self._pipeline.runtime.provider,
            server_version=metadata.version("tailcast"),
            max_batch_requests=self._max_batch_requests,
            max_message_bytes=self._max_message_bytes,
            kind=manifest.kind,
            heads=manifest.heads,
            conditioned_on_served_model=manifest.conditioning is not None,
            conditioned_on_temperature=manifest.conditioning is not None
            and manifest.conditioning.temperature,
            accepts_unknown_models=manifest.accepts_unknown_models,
            urgency_levels=manifest.urgency_levels,
            abstain_threshold=manifest.abstain_threshold,
            bucket_edges=manifest.bucket_edges,
        )

    def _deadline(self, context: Context) -> float | None:
        remaining = context.time_remaining()
        return None if remaining is None else self._pipeline.clock.now() + remaining

    async def _outcome(
        self, request: pb.PredictRequest, deadline: float | None, where: str
    ) -> pb.PredictResponse | tuple[grpc.StatusCode, str, str]:
        """The answer, or (status code, message, name of the wrong field)."""
        try:
            self._check(request, where)
            prediction = await self._pipeline.predict(
                request.prompt,
                served_model=request.served_model or None,
                temperature=request.temperature if request.HasField("temperature") else None,
                deadline=deadline,
            )
            return predict_response(request, prediction, self._pipeline.runtime.artifact.manifest)
        except TailcastError as error:
            code = next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
            return code, str(error), error.field if isinstance(error, InputError) else ""
        except Exception:
            logger.exception("request %r failed", request.request_id)
            return grpc.StatusCode.INTERNAL, "internal error; the server's log has the details", ""

    def _check(self, request: pb.PredictRequest, where: str) -> None:
        """Raises InputError for the first field that is wrong, its name prefixed with `where`."""
        if len(request.request_id) > MAX_REQUEST_ID_CHARS:
            raise InputError(
                f"{where}request_id", request.request_id, f"at most {MAX_REQUEST_ID_CHARS} characters"
            )
        if not request.prompt or request.prompt.isspace():
            raise InputError(f"{where}prompt", request.prompt[:20], "a text that is not empty")
        try:
            self._pipeline.runtime.artifact.manifest.served_model_number(request.served_model)
            checked_temperature(request.temperature if request.HasField("temperature") else None)
        except InputError as error:
            raise InputError(where + error.field, error.value, error.allowed) from error
        if request.HasField("max_tokens") and request.max_tokens < 1:
            raise InputError(f"{where}max_tokens", request.max_tokens, "an integer >= 1, or unset")
        if request.HasField("cvar_level") and not 0 <= request.cvar_level < 1:
            raise InputError(f"{where}cvar_level", request.cvar_level, "a number in [0, 1)")
        if len(request.quantile_levels) > MAX_QUANTILE_LEVELS:
            raise InputError(
                f"{where}quantile_levels",
                f"{len(request.quantile_levels)} levels",
                f"at most {MAX_QUANTILE_LEVELS}",
            )
        for level in request.quantile_levels:
            if not 0 < level < 1:
                raise InputError(f"{where}quantile_levels", level, "numbers in (0, 1)")


def _error_outcome(request_id: str, code: grpc.StatusCode, message: str, field: str) -> pb.Outcome:
    number: int = code.value[0]
    return pb.Outcome(
        error=pb.PredictionError(request_id=request_id, code=number, message=message, field=field)
    )
