"""Ports of the proxy: one for clients, one for probes and metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from aiohttp import web

from predictors.http_edge import HttpRunner
from predictors.proxy.completions import Completions
from predictors.proxy.config import ProxyConfig
from predictors.proxy.engines import CLIENT_HEADERS
from predictors.proxy.errors import EngineLostError, Refusal, too_many
from predictors.proxy.feedback import Recorder
from predictors.proxy.metrics import ProxyMetrics
from predictors.proxy.parsing import CHAT, TEXT
from predictors.proxy.prediction import Forecaster, open_predictor_client
from predictors.proxy.relay import Relay
from predictors.service.metrics import CONTENT_TYPE
from scheduler_core.errors import InputError

logger = logging.getLogger(__name__)
#: Methods of requests that no engine generates for.
READING = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
#: Paths that no engine generates for, whatever the method: all others are held and limited, known or not.
UNQUEUED = frozenset(
    {"/tokenize", "/detokenize", "/apply-template", "/v1/messages/count_tokens", "/ping"}
    | {f"/api/{name}" for name in ("show", "pull", "push", "create", "copy")}  # Ollama's
)
#: Time for a response of the shadow predictor.
SHADOW_DEADLINE_S = 10.0
#: Arrivals count from here (2026-01-01 UTC), so that proxies, and a proxy and its successor, have one order.
ORIGIN_S = 1_767_225_600.0


def wall_clock() -> Callable[[], float]:
    """A clock in seconds since `ORIGIN_S`: the system's time when it is made, and from there on monotonic."""
    offset_s = time.time() - ORIGIN_S - time.monotonic()
    return lambda: offset_s + time.monotonic()


class ProxyServer:
    """Serves until it is stopped; nothing is bound or connected before `start`.

    `num_in_flight` counts requests whose responses are not complete.

    Raises:
        InputError: An option is outside its range.
    """

    def __init__(self, config: ProxyConfig) -> None:
        self._config = config
        self._metrics = metrics = ProxyMetrics()
        self._relay = Relay(config)
        client = open_predictor_client(config.predictor, "predictor")
        self._forecasters = [Forecaster(client, config.deadline_s)]
        shadow = None
        if config.shadow_predictor is not None:
            client = open_predictor_client(config.shadow_predictor, "shadow_predictor")
            shadow = Forecaster(client, SHADOW_DEADLINE_S)
            self._forecasters.append(shadow)
        self._recorder = None if config.feedback is None else Recorder(config, metrics, shadow)
        self._completions = Completions(
            config,
            relay=self._relay,
            forecaster=self._forecasters[0],
            recorder=self._recorder,
            metrics=metrics,
            clock=wall_clock(),
        )
        self._runners: list[web.AppRunner] = []
        self.num_in_flight = 0
        self._is_ready = False
        metrics.watch("in_flight", lambda: self.num_in_flight)
        queue = self._completions.queue
        if queue is not None:
            metrics.watch("waiting", lambda: queue.num_waiting)
            metrics.watch("released", lambda: queue.num_running)

    async def start(self) -> tuple[int, int | None]:
        """Binds both ports; returns them.

        Raises:
            InputError: A port cannot be bound.
        """
        config = self._config
        await self._relay.start()
        try:
            port = await self._bind(self._application(), config.port, "port", config.drain_timeout_s)
            admin = None
            if config.admin_port is not None:
                admin = await self._bind(self._admin(), config.admin_port, "admin_port", 1.0)
        except BaseException:
            await self.stop()
            raise
        await asyncio.gather(*(forecaster.warm_up(config.warm_up_s) for forecaster in self._forecasters))
        self._is_ready = True
        return port, admin

    async def stop(self) -> None:
        """Takes no more requests, finishes those in flight, and closes everything."""
        self._is_ready = False
        await asyncio.sleep(self._config.drain_delay_s)
        runners, self._runners = self._runners, []
        for site in [] if not runners else list(runners[0].sites):
            await site.stop()
        await self._relay.finish_reading()  # from here on aiohttp reads no more
        for runner in runners:
            await runner.cleanup()
        if self._recorder is not None:
            await self._recorder.close()
        for forecaster in self._forecasters:
            await forecaster.close()
        await self._relay.stop()

    async def _bind(self, application: web.Application, port: int, field: str, shutdown_s: float) -> int:
        timeout_s = self._config.request_timeout_s
        runner = HttpRunner(
            application,
            request_timeout_s=timeout_s,
            keepalive_timeout=timeout_s,
            lingering_time=min(10.0, timeout_s),
            shutdown_timeout=shutdown_s,
        )
        await runner.setup()
        self._runners.append(runner)
        host = self._config.host
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            allowed = f"an address that can be bound ({error.strerror})"
            raise InputError(field, f"{host}:{port}", allowed) from error
        bound: int = runner.addresses[0][1]
        return bound

    def _application(self) -> web.Application:
        application = web.Application(client_max_size=self._config.max_body_bytes)
        application.router.add_route("*", "/{path:.*}", self._handle)
        return application

    def _admin(self) -> web.Application:
        application = web.Application()
        application.router.add_get("/metrics", self._get_metrics)
        application.router.add_get("/healthz", self._get_health)
        application.router.add_get("/readyz", self._get_ready)
        return application

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        generates = request.method not in READING and request.raw_path not in UNQUEUED
        kind = "completion" if generates and request.path in (CHAT, TEXT) else "other"
        start, code = time.perf_counter(), "499"  # the client hung up
        self.num_in_flight += 1
        try:
            self._check(request)
            response = await (self._generate(request) if generates else self._pass(request))
            code = str(response.status)
            return response
        except Refusal as refusal:
            code = str(refusal.status)
            self._metrics.refused.labels(refusal.code or "other").inc()
            return refusal.response(closes=not request.content.is_eof())
        except EngineLostError as error:
            code = "broken"
            logger.warning("the engine's response to %s broke off: %s", request.rel_url.raw_path, error)
            return web.Response(status=502)  # not sent: the connection is closed
        except ConnectionError:
            return web.Response(status=499)
        finally:
            self.num_in_flight -= 1
            self._metrics.requests.labels(kind, code).inc()
            if self._config.access_log:
                path, seconds = request.rel_url.raw_path, round(time.perf_counter() - start, 6)
                fields = {"path": path, "code": code, "seconds": seconds}
                logger.info("%s %s", request.method, path, extra=fields)

    def _check(self, request: web.Request) -> None:
        """Refuses a request that could not be passed on as it came.

        Raises:
            Refusal: 400.
        """
        target = request.raw_path
        try:
            self._completions.rules.check_headers(request.headers)
            if request.method == "CONNECT" or not (target.startswith("/") or request.rel_url.absolute):
                raise InputError("request target", "another form", "a path, or an absolute URL")
            if not target.isascii():
                raise InputError("request target", "other characters", "ASCII, others percent-encoded")
        except InputError as error:
            raise Refusal.of(error) from error

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        limit = self._config.max_in_flight
        if self.num_in_flight > limit:
            raise too_many(f"requests in flight: got {self.num_in_flight}; allowed: {limit}", "proxy_full")
        return await self._completions.handle(request)

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        if "Upgrade" in request.headers:
            text = f"Upgrade: got {request.headers['Upgrade']!r}; allowed: none"
            raise Refusal(501, text, param="Upgrade", code="upgrade_not_supported")
        body = await self._relay.read(request) if request.can_read_body else None
        without = CLIENT_HEADERS if self._completions.rules.restricts else ()
        upstream = await self._relay.send(request, body, without=without)
        try:
            return await self._relay.respond(request, upstream, None)
        finally:
            upstream.close() if not upstream.content.at_eof() else upstream.release()

    async def _get_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def _get_health(self, request: web.Request) -> web.Response:
        return web.Response(text="live\n")

    async def _get_ready(self, request: web.Request) -> web.Response:
        status = 200 if self._is_ready else 503
        return web.Response(text="ready\n" if self._is_ready else "not ready\n", status=status)
