"""The service's methods, whatever they are called through: messages in, messages or errors out."""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
from collections.abc import Coroutine, Iterable, Iterator
from importlib import metadata
from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from predictors.artifact import FORMAT_VERSION
from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.errors import ClosedError, QueueFullError, UnparsableError, renamed
from predictors.service.models import ArtifactTable, Served
from predictors.service.pipeline import Prediction
from predictors.service.response import predict_response
from predictors.service.statuses import Failure
from predictors.service.tracing import Tracing
from scheduler_core.errors import InputError

M = TypeVar("M")
T = TypeVar("T")
# Of requests, read in one go.
PART_BYTES = 2**15
# Elements of a message: as many take some milliseconds to parse.
MAX_ELEMENTS = 20_000
# As few bytes are parsed in no longer, whatever they are.
UNCOUNTED_BYTES = 2**16
OK = "OK"


class PredictorCalls:
    """What the service does.

    Args:
        artifacts: What predicts.
        max_batch_requests: Most requests in one PredictBatch.
        max_message_bytes: Limit of the transport, told in the metadata.
        max_prompt_chars: Longest prompt, told in the metadata; None: any.
        tracing: Who records spans; default: nobody.
    """

    def __init__(
        self,
        artifacts: ArtifactTable,
        *,
        max_batch_requests: int,
        max_message_bytes: int,
        max_prompt_chars: int | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.artifacts = artifacts
        self.max_batch_requests = max_batch_requests
        self._max_message_bytes = max_message_bytes
        self._max_prompt_chars = max_prompt_chars
        self._tracing = tracing or Tracing()

    @property
    def is_tracing(self) -> bool:
        """Whether anybody looks at `trace`."""
        return self._tracing.is_on

    def check_room(self, method: str) -> None:
        """Refuses a request before it is even parsed, where that is all that could come of it.

        Raises:
            QueueFullError: No artifact has a place left.
        """
        if self.artifacts.is_full and not self._tracing.is_on:  # a refusal that is traced needs its span
            served = self.artifacts.default
            error = QueueFullError(served.pipeline.settings.max_queue)
            served.metrics.answered(method, Failure.code_of(error).name, 0.0, None, None)
            raise error

    async def predict(
        self, request: pb.PredictRequest, timeout_s: float | None, *, method: str, trace: Any = None
    ) -> pb.PredictResponse:
        """One prompt.

        Args:
            request: What is asked.
            timeout_s: Seconds until the caller gives up; None: never.
            method: Name for the metrics.
            trace: What the caller sent along to tell its own trace.

        Raises:
            TailcastError: See `statuses.STATUS`.
        """
        served = self.artifacts.get(request.artifact_id)
        start = served.pipeline.clock.now()
        prediction: Prediction | None = None
        code = OK
        span = self._tracing.start(method, trace)
        try:
            asked = served.reader.read(request)
            prediction = await served.pipeline.predict(
                asked.prompt,
                served_model=asked.served_model,
                temperature=asked.temperature,
                deadline=_deadline(start, timeout_s, request),
            )
            manifest = served.pipeline.runtime.artifact.manifest
            return predict_response(request, prediction, manifest, knows_model=asked.knows_model)
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        except Exception as error:
            code = Failure.code_of(error).name
            raise
        finally:
            self._count(served, method, code, start, prediction)
            span.end(served.name, served.version, code, prediction)

    async def outcome(
        self,
        request: pb.PredictRequest,
        timeout_s: float | None,
        *,
        method: str,
        where: str = "",
        trace: Any = None,
    ) -> pb.Outcome:
        """One prompt of several; whatever goes wrong is its outcome. `where` stands before names of wrong fields."""
        try:
            return pb.Outcome(prediction=await self.predict(request, timeout_s, method=method, trace=trace))
        except InputError as error:
            if where:
                error = renamed(error, where + error.field)
            return Failure.of(error).outcome(request.request_id)
        except Exception as error:
            return Failure.of(error).outcome(request.request_id)

    async def predict_batch(
        self, request: pb.PredictBatchRequest, timeout_s: float | None, trace: Any = None
    ) -> pb.PredictBatchResponse:
        """Many prompts, each with its own outcome.

        Raises:
            InputError: Too many or none.
            ClosedError: The service took none of them: as a status of the whole call, which gRPC clients retry.
        """
        self.check_batch(len(request.requests))
        outcomes = await at_once(
            (
                one.ByteSize(),
                self.outcome(one, timeout_s, method="PredictBatch", where=f"requests[{index}].", trace=trace),
            )
            for index, one in enumerate(request.requests)
        )
        if all(outcome.error.code == grpc.StatusCode.UNAVAILABLE.value[0] for outcome in outcomes):
            raise ClosedError
        return pb.PredictBatchResponse(outcomes=outcomes)

    def check_batch(self, num_requests: int) -> None:
        """Raises InputError for more requests than one PredictBatch may have, or none."""
        if not 1 <= num_requests <= self.max_batch_requests:
            raise InputError(
                "requests", f"{num_requests} requests", f"1 to {self.max_batch_requests} of them"
            )

    def metadata(self, request: pb.GetMetadataRequest) -> pb.GetMetadataResponse:
        """What is served.

        Raises:
            UnknownArtifactError: No artifact has that id.
        """
        served = self.artifacts.get(request.artifact_id)
        runtime = served.pipeline.runtime
        manifest = runtime.artifact.manifest
        return pb.GetMetadataResponse(
            artifact_id=manifest.artifact_id,
            artifact_version=manifest.artifact_version,
            format_version=FORMAT_VERSION,
            served_models=manifest.served_models,
            nu=manifest.nu,
            max_length_tokens=manifest.max_length,
            truncation_side=manifest.truncation_side,
            provider=runtime.provider,
            server_version=metadata.version("tailcast"),
            max_batch_requests=self.max_batch_requests,
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
            artifact_ids=self.artifacts.names,
            max_prompt_chars=self._max_prompt_chars or 0,
        )

    def _count(
        self, served: Served, method: str, code: str, start: float, prediction: Prediction | None
    ) -> None:
        seconds = served.pipeline.clock.now() - start
        if prediction is None or prediction.cached:
            served.metrics.answered(method, code, seconds, None, None)
        else:
            served.metrics.answered(method, code, seconds, prediction.tokenise_s, prediction.queue_s)


async def at_once(calls: Iterable[tuple[int, Coroutine[Any, Any, T]]]) -> list[T]:
    """Results of coroutines that run at the same time; between starting large ones, others get their turns.

    Args:
        calls: Size in bytes of what each reads, and the coroutine, which must not raise.
    """
    tasks, size = [], 0
    async with asyncio.TaskGroup() as group:
        for num_bytes, call in calls:
            tasks.append(group.create_task(call))
            size += num_bytes
            if size > PART_BYTES:
                size = 0
                await asyncio.sleep(0)
    return [task.result() for task in tasks]


def parsed(kind: type[M], data: bytes) -> M:
    """The message that `data` is.

    Raises:
        UnparsableError: It is none, for example cut off, or text that is not UTF-8; or it has too many elements.
    """
    if len(data) > UNCOUNTED_BYTES:
        elements = _elements(kind.DESCRIPTOR, data, 0, len(data))  # type: ignore[attr-defined]
        if next(itertools.islice(elements, MAX_ELEMENTS, None), 1) is None:
            raise UnparsableError(kind.__name__, f"more than {MAX_ELEMENTS} elements")
    try:
        return kind.FromString(data)  # type: ignore[attr-defined,no-any-return]
    except Exception as error:  # which one, differs between the implementations of protobuf
        raise UnparsableError(kind.__name__, error) from error


def _elements(message: Descriptor, data: bytes, at: int, end: int) -> Iterator[None]:
    """One None for each field of a serialized message and of those in it, repeated ones one by one.

    Parsing takes a time that they bound, and cannot be interrupted. Fields in a group (which parsers skip) count as those
    around it. What is no message ends the count: the parser will refuse it.
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
    """Of a message's fields those that hold messages in which again messages or texts are repeated: number -> message."""
    return {
        field.number: field.message_type
        for field in message.fields
        if field.message_type is not None and any(_is_counted(one) for one in field.message_type.fields)
    }


def _is_counted(field: FieldDescriptor) -> bool:
    return field.message_type is not None or (
        field.is_repeated and field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    )


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


def _deadline(now: float, timeout_s: float | None, request: pb.PredictRequest) -> float | None:
    seconds = math.inf if timeout_s is None else timeout_s
    if request.HasField("timeout_s"):
        seconds = min(seconds, request.timeout_s)
    return None if seconds == math.inf else now + seconds
