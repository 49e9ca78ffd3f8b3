"""The proxy's two ports: one for clients, one for probes and metrics."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass

from aiohttp import HttpVersion11, web

from predictors.proxy.asked import CHAT, TEXT
from predictors.proxy.engines import CLIENT_HINTS
from predictors.proxy.forecast import Forecaster
from predictors.proxy.handling import Completions
from predictors.proxy.headers import check_headers
from predictors.proxy.metrics import ProxyMetrics
from predictors.proxy.problems import Refusal
from predictors.proxy.recording import Recorder
from predictors.proxy.relay import EngineLostError
from predictors.proxy.tenants import Tenants, tenant_of
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PortSettings:
    """Where the proxy listens, and how it ends.

    Attributes:
        host: Address of both ports.
        port: For clients; 0 takes a free one.
        admin_port: For /metrics, /healthz and /readyz; None: no such port.
        max_body_bytes: Larger bodies are refused.
        max_inside: Further requests are refused.
        tenant_header: Header with the tenant's name.
        request_timeout_s: Seconds in which a client has to send a request's headers, and then its body.
        drain_delay_s: Seconds that `stop` goes on to serve while /readyz says 503.
        drain_timeout_s: Seconds that `stop` leaves to the requests inside.
        access_log: A log line for each completion.

    Raises:
        InputError: A setting is outside its range.
    """

    host: str = "127.0.0.1"
    port: int = 0
    admin_port: int | None = None
    max_body_bytes: int = 16 * 2**20
    max_inside: int = 4096
    tenant_header: str = "x-tailcast-tenant"
    request_timeout_s: float = 30.0
    drain_delay_s: float = 0.0
    drain_timeout_s: float = 600.0
    access_log: bool = False

    def __post_init__(self) -> None:
        for name in ("port", "admin_port"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 65535:
                raise InputError(name, value, "0 to 65535; 0 takes a free port")
        for name in ("max_body_bytes", "max_inside"):
            if getattr(self, name) < 1:
                raise InputError(name, getattr(self, name), "an integer >= 1")
        if not 0 < self.request_timeout_s <= 3600:
            raise InputError("request_timeout_s", self.request_timeout_s, "seconds in (0, 3600]")
        for name in ("drain_delay_s", "drain_timeout_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(name, getattr(self, name), "a finite number of seconds >= 0")


class ProxyServer:
    """Serves until it is stopped.

    Args:
        completions: Handles completions; everything else passes through its relay.
        tenants: Limits, of completions.
        settings: Ports and limits.
        forecasters: What has to be warmed up and closed.
        recorder: What has to be closed after the last request; None: nothing.
        metrics: Counts.
    """

    def __init__(
        self,
        completions: Completions,
        tenants: Tenants,
        settings: PortSettings,
        *,
        forecasters: list[Forecaster],
        recorder: Recorder | None,
        metrics: ProxyMetrics,
    ) -> None:
        self._completions, self._relay = completions, completions.relay
        self._tenants, self._settings = tenants, settings
        self._forecasters, self._recorder, self._metrics = forecasters, recorder, metrics
        self._runners: list[web.AppRunner] = []
        self._inside = 0
        self._ready = False
        metrics.watch("inside", lambda: self._inside)
        if completions.queue is not None:
            queue = completions.queue
            metrics.watch("waiting", lambda: queue.num_waiting)
            metrics.watch("released", lambda: queue.num_running)

    @property
    def num_inside(self) -> int:
        """Requests whose answers are not complete."""
        return self._inside

    async def start(self, warm_up_s: float = 60.0) -> tuple[int, int | None]:
        """Binds both ports; returns them.

        Args:
            warm_up_s: Longest wait for the predictors; the proxy serves without them too.

        Raises:
            InputError: A port cannot be bound.
        """
        settings = self._settings
        await self._relay.start()
        try:
            port = await self._bind(self._application(), settings.port, "port", settings.drain_timeout_s)
            admin = None
            if settings.admin_port is not None:
                admin = await self._bind(self._admin(), settings.admin_port, "admin_port", 1.0)
        except BaseException:
            await self.stop()
            raise
        await asyncio.gather(*(forecaster.warm_up(warm_up_s) for forecaster in self._forecasters))
        self._ready = True
        return port, admin

    async def stop(self) -> None:
        """Takes no more, answers what is inside, and closes everything."""
        self._ready = False
        await asyncio.sleep(self._settings.drain_delay_s)
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
        # A client that hangs up ends its request at the engine; bodies pass compressed as they are. A connection whose
        # next request is not there in time is closed, whether a part of it came or nothing.
        runner = web.AppRunner(
            application,
            access_log=None,
            handler_cancellation=True,
            auto_decompress=False,
            keepalive_timeout=self._settings.request_timeout_s,
            lingering_time=min(10.0, self._settings.request_timeout_s),
            shutdown_timeout=shutdown_s,
        )
        await runner.setup()
        self._runners.append(runner)
        host = self._settings.host
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise InputError(
                field, f"{host}:{port}", f"an address that can be bound ({error.strerror})"
            ) from error
        bound: int = runner.addresses[0][1]
        return bound

    def _application(self) -> web.Application:
        application = web.Application(client_max_size=self._settings.max_body_bytes)
        application.router.add_route("*", "/{path:.*}", self._handle, expect_handler=_continue)
        return application

    def _admin(self) -> web.Application:
        application = web.Application()
        application.router.add_get("/metrics", self._show_metrics)
        application.router.add_get("/healthz", self._live)
        application.router.add_get("/readyz", self._show_ready)
        return application

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        generates = request.method not in READING and request.raw_path not in UNQUEUED
        kind = "completion" if generates and request.path in (CHAT, TEXT) else "other"
        start, code = time.perf_counter(), "499"  # the client hung up
        self._inside += 1
        try:
            self._check(request)
            response = await (self._completion(request) if generates else self._other(request))
            code = str(response.status)
            return response
        except Refusal as refusal:
            code = str(refusal.status)
            self._metrics.refused.labels(refusal.code or "other").inc()
            return refusal.response(closes=not request.content.is_eof())
        except EngineLostError as error:
            code = "broken"
            logger.warning("the engine's answer to %s broke off: %s", request.rel_url.raw_path, error)
            return web.Response(status=502)  # nobody reads it: the connection is closed
        except ConnectionError:
            return web.Response(status=499)
        finally:
            self._inside -= 1
            self._metrics.requests.labels(kind, code).inc()
            if self._settings.access_log:
                seconds = time.perf_counter() - start
                path = request.rel_url.raw_path
                found = {"path": path, "code": code, "seconds": round(seconds, 6)}
                logger.info("%s %s", request.method, path, extra=found)

    def _check(self, request: web.Request) -> None:
        """Refuses a request that could not be passed on as it came.

        Raises:
            Refusal: 400.
        """
        target = request.raw_path
        try:
            check_headers(
                request.headers, (self._settings.tenant_header, self._completions.rules.tier_header)
            )
            if request.method == "CONNECT" or not (target.startswith("/") or request.rel_url.absolute):
                raise InputError("request target", "another form", "a path, or an absolute URL")
            if not target.isascii():
                raise InputError("request target", "other characters", "ASCII, others percent-encoded")
        except InputError as error:
            raise Refusal.of(error) from error

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        if self._inside > self._settings.max_inside:
            text = f"requests inside the proxy: got {self._inside}; allowed: {self._settings.max_inside}"
            raise Refusal(429, text, kind="rate_limit_exceeded", code="proxy_full", retry_after_s=1)
        tenant = tenant_of(request.headers, self._settings.tenant_header)
        outcome = "broken"
        try:
            self._tenants.enter(tenant)
            try:
                response = await self._completions.handle(request, tenant)
            finally:
                self._tenants.leave(tenant)
            outcome = "passed"
            return response
        except Refusal as refusal:
            outcome = refusal.code or "other"
            raise
        finally:
            self._tenants.count(tenant, outcome)

    async def _other(self, request: web.Request) -> web.StreamResponse:
        if "Upgrade" in request.headers:
            text = f"Upgrade: got {request.headers['Upgrade']!r}; allowed: none"
            raise Refusal(501, text, param="Upgrade", code="upgrade_not_supported")
        body = await self._relay.read(request) if request.can_read_body else None
        without = CLIENT_HINTS.headers if self._completions.rules.restricts() else ()
        upstream = await self._relay.send(request, body, without=without)
        try:
            return await self._relay.answer(request, upstream, None)
        finally:
            upstream.close() if not upstream.content.at_eof() else upstream.release()

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def _live(self, request: web.Request) -> web.Response:
        return web.Response(text="live\n")

    async def _show_ready(self, request: web.Request) -> web.Response:
        return web.Response(
            text="ready\n" if self._ready else "not ready\n", status=200 if self._ready else 503
        )


async def _continue(request: web.Request) -> web.Response | None:
    """Asks a client that waits for it to send its body."""
    if request.version < HttpVersion11:
        return None
    if request.headers.get("Expect", "").lower() != "100-continue":
        refusal = Refusal(
            417, "Expect: got another value; allowed: 100-continue", param="Expect", code="invalid_value"
        )
        return refusal.response(closes=True)
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0
    return None
