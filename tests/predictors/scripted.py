"""A gRPC server whose answers a test writes, for faults that the real one cannot be made to show."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto import predictor_v1_pb2_grpc

NOBODY = "127.0.0.1:1"  # a reserved port on which nothing listens


def answer(request: pb.PredictRequest) -> pb.PredictResponse:
    """A prediction that tells which prompt it is for: mu is the prompt's length."""
    return pb.PredictResponse(
        request_id=request.request_id,
        mu=float(len(request.prompt)),
        sigma=0.5,
        nu=3.5,
        artifact_id="scripted",
    )


class Scripted(predictor_v1_pb2_grpc.PredictorServicer):
    """Fails the first calls with a status, then answers.

    Args:
        code: Status of the failures.
        num_failures: How many calls fail.

    Attributes:
        calls: The prompts of each call so far.
        gate: Answers wait until it is set.
    """

    def __init__(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE, num_failures: int = 0) -> None:
        self.code = code
        self.num_failures = num_failures
        self.calls: list[list[str]] = []
        self.metadata: list[dict[str, str]] = []
        self.num_under_way = 0
        self.num_calls_by_peer: dict[str, int] = {}
        self.gate = asyncio.Event()
        self.gate.set()

    async def Predict(self, request: pb.PredictRequest, context: Any) -> pb.PredictResponse:
        await self._begin([request], context)
        return answer(request)

    async def PredictBatch(self, request: pb.PredictBatchRequest, context: Any) -> pb.PredictBatchResponse:
        await self._begin(list(request.requests), context)
        return pb.PredictBatchResponse(
            outcomes=[pb.Outcome(prediction=answer(one)) for one in request.requests]
        )

    async def _begin(self, requests: list[pb.PredictRequest], context: Any) -> None:
        self.calls.append([request.prompt for request in requests])
        self.metadata.append({str(key): str(value) for key, value in context.invocation_metadata()})
        peer = context.peer()
        self.num_calls_by_peer[peer] = self.num_calls_by_peer.get(peer, 0) + 1
        number = len(self.calls)
        if number <= self.num_failures:
            await context.abort(self.code, "not now")
        self.num_under_way += 1
        try:
            await self.gate.wait()
        finally:
            self.num_under_way -= 1


@contextlib.asynccontextmanager
async def serving(servicer: predictor_v1_pb2_grpc.PredictorServicer, port: int = 0) -> AsyncIterator[str]:
    """A server on a loopback port, and its address."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    predictor_v1_pb2_grpc.add_PredictorServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.stop(None)
