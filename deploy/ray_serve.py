"""The prediction service on Ray Serve, for clusters that have one: replicas over machines, one gRPC and HTTP front.

    ARTIFACT=/path/to/artifact serve run deploy/ray_serve.yaml

Every replica batches by itself, as `serve-predictor` does. Clients of the gRPC port work unchanged.
"""

from __future__ import annotations

import os
from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.errors import ErrorStatus
from predictors.service.gateway import json_object, message_json
from predictors.service.in_process import InProcessPredictor
from predictors.service.json_request import request_message

LOAD_TARGET = 16
"""Requests in flight per replica that Ray Serve aims at."""
MAX_BODY_BYTES = 4 * 2**20
"""Largest HTTP body, as `serve-predictor --max_message_mib`; Ray Serve itself has no limit."""


@serve.deployment(
    max_ongoing_requests=512,
    autoscaling_config={"min_replicas": 1, "max_replicas": 16, "target_ongoing_requests": LOAD_TARGET},
    ray_actor_options={"num_cpus": 1},
)
class PredictorReplica:
    """One replica: the artifact, in this process.

    Args:
        artifact: Artifact folder, at the same path on every machine.
        public_key: PEM file of an Ed25519 key that it must be signed with; None: it need not be.
    """

    def __init__(self, artifact: str, public_key: str | None = None) -> None:
        self._service = InProcessPredictor(artifact, public_key=public_key)

    async def check_health(self) -> None:
        """Fails where the artifact cannot be loaded."""
        await self._service.calls()

    async def Predict(self, request: pb.PredictRequest, grpc_context: Any) -> pb.PredictResponse:
        """gRPC: one prompt."""
        calls = await self._service.calls()
        try:
            return await calls.predict(request, None, method="Predict")
        except Exception as error:
            _fail(grpc_context, error)
            return pb.PredictResponse()

    async def PredictBatch(
        self, request: pb.PredictBatchRequest, grpc_context: Any
    ) -> pb.PredictBatchResponse:
        """gRPC: many prompts."""
        calls = await self._service.calls()
        try:
            return await calls.predict_batch(request, None)
        except Exception as error:
            _fail(grpc_context, error)
            return pb.PredictBatchResponse()

    async def GetMetadata(self, request: pb.GetMetadataRequest, grpc_context: Any) -> pb.GetMetadataResponse:
        """gRPC: what is served."""
        calls = await self._service.calls()
        try:
            return calls.metadata(request)
        except Exception as error:
            _fail(grpc_context, error)
            return pb.GetMetadataResponse()

    async def __call__(self, request: Request) -> JSONResponse:
        """HTTP: one prompt as JSON, as at /v1/predict of serve-predictor."""
        calls = await self._service.calls()
        try:
            body = await limited_body(request)
            if body is None:
                error_text = f"a body of more than {MAX_BODY_BYTES} bytes"
                return JSONResponse({"error": error_text}, status_code=413)
            message = request_message(await json_object(body))
            return JSONResponse(message_json(await calls.predict(message, None, method="HTTP Predict")))
        except Exception as error:
            status = ErrorStatus.of(error)
            return JSONResponse({"error": status.message}, status_code=status.http_status)


async def limited_body(request: Request) -> bytes | None:
    """The body of a request; None, without the rest, if it has more than `MAX_BODY_BYTES`."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            return None
    return bytes(body)


def _fail(grpc_context: Any, error: Exception) -> None:
    status = ErrorStatus.of(error)
    grpc_context.set_code(status.code)
    grpc_context.set_details(status.message)


def application(arguments: dict[str, str]) -> serve.Application:
    """What `serve run` and `serve deploy` start; arguments `artifact` and `public_key`, or the environment variables
    ARTIFACT and PUBLIC_KEY."""
    return PredictorReplica.bind(
        arguments.get("artifact") or os.environ["ARTIFACT"],
        arguments.get("public_key") or os.environ.get("PUBLIC_KEY"),
    )
