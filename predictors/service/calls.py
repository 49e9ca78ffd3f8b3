"""Methods of the service, independent of the transport: messages in, messages or errors out."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import time
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any, TypeVar

import grpc

from predictors.hosting.tracing import Tracing
from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.artifacts import ArtifactTable
from predictors.service.errors import ClosedError, ErrorStatus, QueueFullError, renamed, status_code
from predictors.service.json_request import MAX_OBSERVATIONS
from predictors.service.learning import (
    AT_ONCE,
    MAX_OPEN,
    Learner,
    PromptEmbedder,
    context_of,
)
from predictors.service.messages import CheckedRequest, PipelineResult, check_request_id, predict_response
from predictors.service.pipeline import ServedArtifact
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.prediction.correction import RequestContext
from scheduler_core.prediction.joint import Parts, merged
from scheduler_core.prediction.predictions import MissingPart, Prediction

T = TypeVar("T")
# Maximum number of prompts of one PredictBatch or ModelInfer.
MAX_BATCH_REQUESTS = 256
# Bytes of requests to start before other tasks run.
CHUNK_BYTES = 2**15
# Fields of the metadata that have the same name in the manifest.
MANIFEST_FIELDS = (
    *("artifact_id", "artifact_version", "format_version", "served_models", "accepts_unknown_models"),
    *("heads", "nu", "truncation_side", "urgency_levels", "abstain_threshold", "bucket_edges"),
    *("quantile_levels", "conversations"),
)


class PredictorCalls:
    """Methods of the service; `max_message_bytes` is only reported in the metadata. Without a `learner` predictions are not
    corrected, and lengths cannot be observed."""

    def __init__(
        self,
        artifacts: ArtifactTable,
        max_message_bytes: int,
        tracing: Tracing | None = None,
        learner: Learner | None = None,
    ) -> None:
        self.artifacts = artifacts
        self.tracing = tracing
        self.learner = learner
        self._embedder = PromptEmbedder()
        self._max_message_bytes = max_message_bytes

    def check_capacity(self, method: str) -> None:
        """Raises QueueFullError if the queues of all artifacts are full, before a request is parsed."""
        if self.artifacts.is_full and self.tracing is None:  # with tracing, rejected requests need a span
            served = self.artifacts.default
            error = QueueFullError(served.settings.max_queue)
            served.metrics.request(method, status_code(error).name, 0.0, None)
            raise error

    def receive_trace(self, headers: Iterable[tuple[str, str | bytes]]) -> None:
        """Makes the spans of the running task children of the caller's span in `headers`."""
        if self.tracing is not None:
            self.tracing.receive(dict(headers))

    @contextmanager
    def counted(self, method: str) -> Iterator[None]:
        """Counts a request that is refused before an artifact is known, as one of the default artifact."""
        try:
            yield
        except TailcastError as error:
            self.artifacts.default.metrics.request(method, status_code(error).name, 0.0, None)
            raise

    def count_http(self, status: int) -> None:
        """Counts a request that the HTTP port has refused, as one of the default artifact."""
        self.artifacts.default.metrics.request("HTTP", f"HTTP_{status}", 0.0, None)

    async def predict(
        self,
        request: pb.PredictRequest,
        timeout_s: float | None,
        *,
        method: str,
    ) -> pb.PredictResponse:
        """Predicts one prompt within `timeout_s` (None: no limit); errors are those in `errors.STATUS`.
        `method` is the name for metrics and spans."""
        with self.counted(method):
            served = self.artifacts.get(request.artifact_id)
        with _measured(served, method, self.tracing) as call:
            if request.HasField("generated_tokens") and request.WhichOneof("input") is None:
                return self._progress(request)
            checked = served.reader.read(request)
            deadline = _deadline(call.start, timeout_s, request)
            if parts := self.artifacts.joined.get(served.name):
                result = await self._joined(parts, request, checked, deadline, method)
            else:
                result = await served.predict(checked, deadline=deadline)
            call.result = result
            prediction = await self._corrected(request, checked, result, served)
            return predict_response(request, result, served.manifest, checked.is_trained_model, prediction)

    async def _joined(
        self,
        parts: Parts,
        request: pb.PredictRequest,
        checked: CheckedRequest,
        deadline: float | None,
        method: str,
    ) -> PipelineResult:
        """The result of the first of joined artifacts that answers, with the heads of the others; `checked` is the request as
        the first one reads it. Raises the error of the first one if all fail, InputError for fields that one refuses."""
        served = [self.artifacts.get(name) for name in parts.names]
        for other in served[1:]:
            other.reader.check(request)
        calls = [functools.partial(served[0].predict, checked, deadline=deadline)]
        calls += [functools.partial(self._part, other, request, deadline, method) for other in served[1:]]
        outcomes = await parts.ask(calls, None if deadline is None else deadline - time.monotonic())
        for artifact, outcome in zip(served, outcomes, strict=True):
            if isinstance(outcome, MissingPart):
                artifact.metrics.missing.inc()
        results = [each for each in outcomes if isinstance(each, PipelineResult)]
        prediction = merged([each if isinstance(each, MissingPart) else each.prediction for each in outcomes])
        return results[0]._replace(prediction=prediction, cached=all(result.cached for result in results))

    async def _part(
        self, served: ServedArtifact, request: pb.PredictRequest, deadline: float | None, method: str
    ) -> PipelineResult:
        """The result of an artifact that is joined to another one; counted in its metrics."""
        with _measured(served, method) as call:
            if request.HasField("token_ids"):
                raise InputError("token_ids", "ids of another tokenizer", "a prompt or messages")
            call.result = await served.predict(served.reader.read(request), deadline=deadline)
            return call.result

    async def _corrected(
        self,
        request: pb.PredictRequest,
        checked: CheckedRequest,
        result: PipelineResult,
        served: ServedArtifact,
    ) -> Prediction:
        """The prediction after correction, with an embedding if the request asks for one."""
        prediction, learner = result.prediction, self.learner
        embedding = None
        if request.embedding or (learner is not None and learner.is_active):
            embedding = await self._embedder.embed(checked.prompt)
        if learner is not None:
            context = context_of(request, checked, result, embedding, self._scope(served))
            learner.add(request.request_id, result, context, served.name, checked.served_model)
            prediction = learner.corrected(prediction, context)
        return dataclasses.replace(prediction, embedding=embedding) if request.embedding else prediction

    def _progress(self, request: pb.PredictRequest) -> pb.PredictResponse:
        """The prediction of an earlier request, as corrected now, for its remaining length."""
        self.artifacts.get(request.artifact_id).reader.check(request)
        prior = None if self.learner is None else self.learner.get(request.request_id, request.tenant)
        if self.learner is None or prior is None:
            allowed = f"a prompt, or the id of one of the latest {MAX_OPEN:,} predictions without an observed length"
            raise InputError("request_id", request.request_id, allowed)
        prediction = self.learner.corrected(prior.result.prediction, prior.full_context())
        result = prior.result._replace(
            tokenize_s=0.0, queue_s=0.0, inference_s=0.0, batch_size=0, cached=True
        )
        manifest = self.artifacts.get(prior.artifact).manifest
        is_trained = manifest.served_model_number(prior.served_model) > 0
        return predict_response(request, result, manifest, is_trained, prediction)

    def _scope(self, served: ServedArtifact) -> str:
        return "" if served is self.artifacts.default else f"{served.name} "

    async def observe(self, request: pb.ObserveRequest) -> pb.ObserveResponse:
        """Learns true lengths; the response lists the observations that were refused. InputError for no or too many of them,
        and if this service does not learn."""
        if self.learner is None:
            allowed = "a service with --online_calibration true and --workers 1"
            raise InputError("Observe", "a service that does not learn", allowed)
        observations = request.observations
        if not 1 <= len(observations) <= MAX_OBSERVATIONS:
            raise InputError("observations", f"{len(observations)} of them", f"1 to {MAX_OBSERVATIONS}")
        response = pb.ObserveResponse()
        for start in range(0, len(observations), AT_ONCE):
            part = observations[start : start + AT_ONCE]
            errors = await asyncio.gather(*(self._observe(self.learner, each) for each in part))
            for index, error in enumerate(errors, start):
                if error is None:
                    response.num_accepted += 1
                else:
                    status = ErrorStatus.of(error)
                    response.errors.add(index=index, field=status.field, message=status.message)
        return response

    async def _observe(self, learner: Learner, observation: pb.Observation) -> Exception | None:
        """Learns one observation; returns the error, if any."""
        try:
            check_request_id(observation.request_id)
            prior = learner.get(observation.request_id, observation.request.tenant)
            if prior is not None:
                learner.observe(observation, prior.result.prediction, prior.full_context())
            elif observation.HasField("request"):
                prediction, context = await self._predicted_anew(observation.request)
                learner.observe(observation, prediction, context)
            else:
                allowed = f"the id of one of the latest {MAX_OPEN:,} predictions, once, or a request"
                raise InputError("request_id", observation.request_id, allowed)
        except Exception as error:
            return error
        return None

    async def _predicted_anew(self, request: pb.PredictRequest) -> tuple[Prediction, RequestContext]:
        """The uncorrected prediction of an observed request, and its context."""
        try:
            return await self.uncorrected(request)
        except InputError as error:
            raise renamed(error, f"request.{error.field}") from error

    async def uncorrected(self, request: pb.PredictRequest) -> tuple[Prediction, RequestContext]:
        """The uncorrected prediction of a request, and what the correction uses of it; not counted in the metrics."""
        served = self.artifacts.get(request.artifact_id)
        checked = served.reader.read(request)
        result = await served.predict(checked)
        embedding = await self._embedder.embed(checked.prompt)
        context = context_of(request, checked, result, embedding, self._scope(served))
        return result.prediction, context

    async def outcome(
        self,
        request: pb.PredictRequest,
        timeout_s: float | None,
        *,
        method: str,
        prefix: str = "",
    ) -> pb.Outcome:
        """Predicts one prompt of a batch; returns the prediction or error. `prefix` is for field names."""
        try:
            return pb.Outcome(prediction=await self.predict(request, timeout_s, method=method))
        except Exception as error:
            if prefix and isinstance(error, InputError):
                error = renamed(error, prefix + error.field)
            return ErrorStatus.of(error).outcome(request.request_id)

    async def predict_batch(
        self, request: pb.PredictBatchRequest, timeout_s: float | None
    ) -> pb.PredictBatchResponse:
        """Predicts a batch of prompts, each with its own outcome. InputError for no or too many prompts;
        ClosedError, which gRPC clients retry, if the service accepted none of them."""
        with self.counted("PredictBatch"):
            check_batch(len(request.requests))
        outcome = functools.partial(self.outcome, timeout_s=timeout_s, method="PredictBatch")
        outcomes = await gather_in_chunks(
            (message.ByteSize(), outcome(message, prefix=f"requests[{index}]."))
            for index, message in enumerate(request.requests)
        )
        if all(outcome.error.code == grpc.StatusCode.UNAVAILABLE.value[0] for outcome in outcomes):
            raise ClosedError
        return pb.PredictBatchResponse(outcomes=outcomes)

    def metadata(self, request: pb.GetMetadataRequest) -> pb.GetMetadataResponse:
        """Artifact, heads and limits; UnknownArtifactError for an unknown artifact id."""
        served = self.artifacts.get(request.artifact_id)
        manifest = self.artifacts.manifest(served)
        conditioning = manifest.conditioning
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
            learns=self.learner is not None,
            part_tokens=None if manifest.part_tokens is None else dataclasses.asdict(manifest.part_tokens),
        )


@dataclasses.dataclass(slots=True)
class _Call:
    """A call of an artifact: when it started, by `time.monotonic`, and its result, None before."""

    start: float
    result: PipelineResult | None = None


@contextmanager
def _measured(served: ServedArtifact, method: str, tracing: Tracing | None = None) -> Iterator[_Call]:
    """Counts a call of an artifact in its metrics, with the status code and the result; with `tracing` it has a span."""
    call, code = _Call(time.monotonic()), "OK"
    span = None if tracing is None else tracing.start(method)
    try:
        yield call
    except asyncio.CancelledError:
        code = "CANCELLED"
        raise
    except Exception as error:
        code = status_code(error).name
        raise
    finally:
        served.metrics.request(method, code, time.monotonic() - call.start, call.result)
        if tracing is not None:
            _end_span(tracing, span, served, code, call.result)


def _end_span(
    tracing: Tracing, span: Any, served: ServedArtifact, code: str, result: PipelineResult | None
) -> None:
    """Ends a span; its attributes are the artifact, the status code and the durations of the parts."""
    artifact = {"tailcast.artifact_id": served.name, "tailcast.artifact_version": served.version}
    span.set_attributes({**artifact, "rpc.response.status_code": code})
    if result is not None:
        for name in ("tokenize_s", "queue_s", "inference_s", "batch_size", "cached"):
            span.set_attribute(f"tailcast.{name}", getattr(result, name))
    if code != "OK":
        span.set_attribute("error.type", code)
        tracing.fail(span, code)
    span.end()


def check_batch(num_requests: int) -> None:
    """Raises InputError unless the number of requests of a batch is allowed."""
    if not 1 <= num_requests <= MAX_BATCH_REQUESTS:
        raise InputError("requests", f"{num_requests} requests", f"1 to {MAX_BATCH_REQUESTS} requests")


async def gather_in_chunks(calls: Iterable[tuple[int, Coroutine[Any, Any, T]]]) -> list[T]:
    """Results of concurrent coroutines, which must not raise. `calls` has their input sizes in bytes; between
    chunks of large inputs, other tasks can run."""
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
    request_s = request.timeout_s if request.HasField("timeout_s") else math.inf
    seconds = min(request_s, math.inf if timeout_s is None else timeout_s)
    return None if seconds == math.inf else now + seconds
