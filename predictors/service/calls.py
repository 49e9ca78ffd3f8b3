"""The service's methods, independent of the transport: messages in, messages or errors out."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Coroutine, Iterable, Mapping
from importlib import metadata
from typing import Any, TypeVar

import grpc

from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.artifacts import ArtifactTable
from predictors.service.errors import ClosedError, ErrorStatus, QueueFullError, renamed, status_code
from predictors.service.messages import predict_response
from predictors.service.pipeline import PipelineResult
from predictors.service.tracing import Tracing
from scheduler_core.errors import InputError

T = TypeVar("T")
# In one PredictBatch or ModelInfer.
MAX_BATCH_REQUESTS = 256
# Of requests, handled in one go.
CHUNK_BYTES = 2**15
# Of the metadata, by their names in the manifest.
MANIFEST_FIELDS = (
    *("artifact_id", "artifact_version", "format_version", "served_models", "accepts_unknown_models"),
    *("heads", "nu", "truncation_side", "urgency_levels", "abstain_threshold", "bucket_edges"),
    "quantile_levels",
)


class PredictorCalls:
    """The methods; `max_message_bytes` is reported in the metadata."""

    def __init__(
        self, artifacts: ArtifactTable, max_message_bytes: int, tracing: Tracing | None = None
    ) -> None:
        self.artifacts = artifacts
        self.tracing = tracing
        self._max_message_bytes = max_message_bytes

    def check_capacity(self, method: str) -> None:
        """Raises QueueFullError, before a request is even parsed, where no artifact has a free slot."""
        if self.artifacts.is_full and self.tracing is None:  # a traced refusal needs its span
            served = self.artifacts.default
            error = QueueFullError(served.settings.max_queue)
            served.metrics.request(method, status_code(error).name, 0.0, None)
            raise error

    async def predict(
        self,
        request: pb.PredictRequest,
        timeout_s: float | None,
        *,
        method: str,
        trace: Mapping[str, str] | None = None,
    ) -> pb.PredictResponse:
        """One prompt, for a caller who gives up after `timeout_s` (None: never); errors as in `errors.STATUS`. Metrics and
        spans have the name `method`; `trace` is the caller's W3C trace context."""
        served = self.artifacts.get(request.artifact_id)
        start = time.monotonic()
        result: PipelineResult | None = None
        code = "OK"
        span = None if self.tracing is None else self.tracing.start(method, trace)
        try:
            checked = served.reader.read(request)
            result = await served.predict(checked, deadline=_deadline(start, timeout_s, request))
            return predict_response(request, result, served.manifest, checked.is_trained_model)
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        except Exception as error:
            code = status_code(error).name
            raise
        finally:
            served.metrics.request(method, code, time.monotonic() - start, result)
            if self.tracing is not None:
                self.tracing.end(span, served.name, served.version, code, result)

    async def outcome(
        self,
        request: pb.PredictRequest,
        timeout_s: float | None,
        *,
        method: str,
        prefix: str = "",
        trace: Mapping[str, str] | None = None,
    ) -> pb.Outcome:
        """One prompt of several: its prediction or its error. `prefix` goes before names of wrong fields."""
        try:
            return pb.Outcome(prediction=await self.predict(request, timeout_s, method=method, trace=trace))
        except Exception as error:
            if prefix and isinstance(error, InputError):
                error = renamed(error, prefix + error.field)
            return ErrorStatus.of(error).outcome(request.request_id)

    async def predict_batch(
        self, request: pb.PredictBatchRequest, timeout_s: float | None, trace: Mapping[str, str] | None = None
    ) -> pb.PredictBatchResponse:
        """Many prompts, each with its own outcome; InputError for too many or none, ClosedError (which gRPC clients retry) where
        the service took none of them."""
        check_batch(len(request.requests))
        outcome = functools.partial(self.outcome, timeout_s=timeout_s, method="PredictBatch", trace=trace)
        outcomes = await gather_in_chunks(
            (one.ByteSize(), outcome(one, prefix=f"requests[{index}]."))
            for index, one in enumerate(request.requests)
        )
        if all(outcome.error.code == grpc.StatusCode.UNAVAILABLE.value[0] for outcome in outcomes):
            raise ClosedError
        return pb.PredictBatchResponse(outcomes=outcomes)

    def metadata(self, request: pb.GetMetadataRequest) -> pb.GetMetadataResponse:
        """Artifact, heads and limits; raises UnknownArtifactError if no artifact has that id."""
        served = self.artifacts.get(request.artifact_id)
        manifest, conditioning = served.manifest, served.manifest.conditioning
        return pb.GetMetadataResponse(
            **{name: getattr(manifest, name) for name in MANIFEST_FIELDS},
            max_length_tokens=manifest.max_length,
            provider=served.runtime.provider,
            server_version=metadata.version("tailcast"),
            max_batch_requests=MAX_BATCH_REQUESTS,
            max_message_bytes=self._max_message_bytes,
            conditioned_on_served_model=conditioning is not None,
            conditioned_on_temperature=conditioning is not None and conditioning.temperature,
            artifact_ids=self.artifacts.names,
            max_prompt_chars=served.reader.max_prompt_chars or 0,
        )


def check_batch(num_requests: int) -> None:
    """Raises InputError for more requests than one PredictBatch may have, or none."""
    if not 1 <= num_requests <= MAX_BATCH_REQUESTS:
        raise InputError("requests", f"{num_requests} requests", f"1 to {MAX_BATCH_REQUESTS} of them")


async def gather_in_chunks(calls: Iterable[tuple[int, Coroutine[Any, Any, T]]]) -> list[T]:
    """Results of concurrent coroutines, which must not raise; between starting ones whose inputs (sizes in bytes) are large,
    other tasks get their turns."""
    tasks, size = [], 0
    async with asyncio.TaskGroup() as group:
        for num_bytes, call in calls:
            tasks.append(group.create_task(call))
            size += num_bytes
            if size > CHUNK_BYTES:
                size = 0
                await asyncio.sleep(0)
    return [task.result() for task in tasks]


def _deadline(now: float, timeout_s: float | None, request: pb.PredictRequest) -> float | None:
    own_s = request.timeout_s if request.HasField("timeout_s") else math.inf
    seconds = min(own_s, math.inf if timeout_s is None else timeout_s)
    return None if seconds == math.inf else now + seconds
