"""The HTTP side: JSON for curl, OpenAPI, metrics, probes, and the Open Inference Protocol over REST."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from google.protobuf.json_format import MessageToDict

from predictors.http_edge import HttpRunner, read_body
from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.calls import PredictorCalls
from predictors.service.json_messages import as_json, from_json, json_object
from predictors.service.metrics import CONTENT_TYPE, ServiceMetrics
from predictors.service.oip_http import OpenInferenceRoutes
from predictors.service.openapi import openapi
from predictors.service.security import BearerTokens
from predictors.service.statuses import Failure
from predictors.service.tracing import TRACE_KEYS
from scheduler_core.errors import InputError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# Probes ask these without a token.
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"})


class HttpGateway:
    """The HTTP port of a server, in the same event loop.

    Args:
        calls: What the service does.
        metrics: What is shown at /metrics.
        max_message_bytes: Largest body; a larger one gets 413.
        tokens: Who may ask; None: anybody.
    """

    def __init__(
        self,
        calls: PredictorCalls,
        metrics: ServiceMetrics,
        *,
        max_message_bytes: int,
        tokens: BearerTokens | None = None,
    ) -> None:
        self._calls = calls
        self._metrics = metrics
        self._max_message_bytes = max_message_bytes
        self._tokens = tokens
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None, *, reuse_port: bool) -> int:
        """Binds and answers; returns the port.

        Raises:
            InputError: The port cannot be bound.
        """
        # A caller that hangs up takes its request out of the queue.
        self._runner = HttpRunner(self.application(), shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, ssl_context=tls, reuse_port=reuse_port or None)
        try:
            await site.start()
        except OSError as error:
            await self.stop()
            raise InputError(
                "http_port", f"{host}:{port}", f"an address that can be bound ({error.strerror})"
            ) from error
        bound: int = self._runner.addresses[0][1]
        return bound

    async def stop(self) -> None:
        """Closes the port."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def application(self) -> web.Application:
        """The routes."""
        application = web.Application(
            client_max_size=self._max_message_bytes, middlewares=[_middleware(self._tokens)]
        )
        application.router.add_post("/v1/predict", self._predict)
        application.router.add_post("/v1/predict-batch", self._predict_batch)
        application.router.add_get("/v1/metadata", self._metadata)
        application.router.add_get("/openapi.json", self._openapi)
        application.router.add_get("/metrics", self._show_metrics)
        application.router.add_get("/healthz", self._live)
        application.router.add_get("/readyz", self._ready)
        OpenInferenceRoutes(self._calls).add_to(application.router)
        return application

    async def _predict(self, request: web.Request) -> web.Response:
        message = from_json(pb.PredictRequest, await json_object(await read_body(request)))
        response = await self._calls.predict(message, None, method="HTTP Predict", trace=_trace(request))
        return _json(as_json(response))

    async def _predict_batch(self, request: web.Request) -> web.Response:
        content = await json_object(await read_body(request))
        requests = content.get("requests")
        if isinstance(requests, list):
            self._calls.check_batch(len(requests))
        message = from_json(pb.PredictBatchRequest, content)
        response = await self._calls.predict_batch(message, None, _trace(request))
        parts = []
        for outcome in response.outcomes:
            parts.append(json.dumps(as_json(outcome), allow_nan=False))
            if len(parts) % 16 == 0:
                await asyncio.sleep(0)  # those of many quantiles take a millisecond each
        return web.json_response(text=f'{{"outcomes": [{", ".join(parts)}]}}')

    async def _metadata(self, request: web.Request) -> web.Response:
        message = pb.GetMetadataRequest(artifact_id=request.query.get("artifact_id", ""))
        return _json(as_json(self._calls.metadata(message)))

    async def _openapi(self, request: web.Request) -> web.Response:
        return _json(openapi())

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def _live(self, request: web.Request) -> web.Response:
        return web.Response(text="live\n")

    async def _ready(self, request: web.Request) -> web.Response:
        ready = self._calls.artifacts.is_ready
        return web.Response(text="ready\n" if ready else "not ready\n", status=200 if ready else 503)


def _middleware(tokens: BearerTokens | None) -> Any:
    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Lets known callers in, and makes every error a response."""
        try:
            if tokens is not None and request.path not in OPEN_PATHS:
                tokens.check(request.headers.get("Authorization"))
            return await handler(request)
        except web.HTTPException:
            raise
        except Exception as error:
            failure = Failure.of(error)
            content: dict[str, Any] = (
                {"error": failure.message}
                if request.path.startswith("/v2")
                else MessageToDict(failure.status())
            )
            return _json(content, status=failure.http_status)

    return answer


def _json(content: dict[str, Any], status: int = 200) -> web.Response:
    return web.json_response(content, status=status, dumps=lambda found: json.dumps(found, allow_nan=False))


def _trace(request: web.Request) -> dict[str, str]:
    """The caller's trace context; a value that is not ASCII is none."""
    return {key: request.headers[key] for key in TRACE_KEYS if request.headers.get(key, "é").isascii()}
