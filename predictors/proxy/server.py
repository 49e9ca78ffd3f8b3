"""The proxy server: client port and admin port, start, reload, shutdown."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from aiohttp import web
from prometheus_client import Gauge, generate_latest

from predictors.hosting.http import HttpRunner, probe_routes
from predictors.hosting.process import file_state
from predictors.hosting.tls import ReplaceableContext, server_context
from predictors.proxy.config import RELOADED, ProxyConfig
from predictors.proxy.forecast import Forecaster
from predictors.proxy.handler import RequestHandler
from predictors.proxy.live_view import live_page
from predictors.proxy.order import HoldQueue
from predictors.proxy.relay import engine_tls
from scheduler_core.errors import TailcastError

logger = logging.getLogger(__name__)


class ProxyServer:
    """The proxy server; `start` binds and connects."""

    def __init__(self, config: ProxyConfig) -> None:
        self.handler = handler = RequestHandler(config)
        self.live_page = live_page(handler)
        #: Those of the client port and of the admin port.
        self._runners: list[HttpRunner] = []
        #: Of the same ports; empty without TLS.
        self._tls: list[ReplaceableContext] = []
        self._is_ready = False
        self.address = ""
        self._reloading = asyncio.Lock()
        self._watching: list[asyncio.Task[None]] = []
        queues = [engine.order for engine in handler.engines if isinstance(engine.order, HoldQueue)]
        for name, text, value in (
            ("held_bytes", "Bytes of the request bodies in memory.", lambda: handler.relay.num_held_bytes),
            ("in_flight", "Requests in flight.", lambda: self.num_in_flight),
            (
                "waiting",
                "Requests in the queue of the proxy.",
                lambda: sum(queue.num_waiting for queue in queues),
            ),
            (
                "released",
                "Requests admitted by the queue.",
                lambda: sum(queue.num_running for queue in queues),
            ),
        ):
            Gauge(f"tailcast_proxy_{name}", text, registry=handler.metrics.registry).set_function(value)
        labels, text = ["engine"] if config.replicas else [], "1 unless the engine is gone."
        is_up = Gauge("tailcast_proxy_engine_up", text, labels, registry=handler.metrics.registry)
        for engine in handler.engines:
            gauge = is_up.labels(engine.url) if config.replicas else is_up
            gauge.set_function(partial(getattr, engine, "is_up"))

    @property
    def num_in_flight(self) -> int:
        """Number of requests without a complete response."""
        return self.handler.num_in_flight

    async def start(self) -> tuple[int, int | None]:
        """Binds both ports and returns them; InputError if a port cannot be bound."""
        config = self.handler.config
        for engine in self.handler.engines:
            await engine.relay.start()

        @web.middleware  # not a route, which would not match every request target
        async def handle(request: web.Request, handler: object) -> web.StreamResponse:
            return await self.handler.handle(request)

        application = web.Application(middlewares=[handle])
        application.router.add_route(
            "*", "/{path:.*}", self.handler.handle
        )  # so that it need not fail to find one
        try:
            self._tls = [ReplaceableContext.of(context) for context in _server_tls(config)]
            port = await self._bind(application, config.port, "port", config.drain_timeout_s)
            admin = None
            if config.admin_port is not None:
                pages = web.Application()
                pages.add_routes(probe_routes(self._exposition, self._problem))
                pages.add_routes(self.live_page.routes())
                admin = await self._bind(pages, config.admin_port, "admin_port", 1.0)
        except BaseException:
            await self.stop()
            raise
        if self.handler.sessions is not None:
            await self.handler.sessions.start()
        forecasters = (self.handler.forecaster, self.handler.recorder.shadow)
        await asyncio.gather(*(forecaster.warm_up(config.warm_up_s) for forecaster in forecasters))
        if config.engine_probe_s:
            for engine in self.handler.engines:
                watching = engine.relay.monitor.watch(config.engine_probe_s)
                self._watching.append(asyncio.create_task(watching))
        self._is_ready = True
        probes = "" if admin is None else f", live page, probes and metrics on {config.host}:{admin}"
        self.address = f"{config.host}:{port} in front of {', '.join(config.urls)}{probes}"
        return port, admin

    async def stop(self) -> None:
        """Stops accepting requests, finishes those in flight, and closes all connections."""
        self._is_ready = False
        for watching in self._watching:
            watching.cancel()
        await asyncio.sleep(self.handler.config.drain_delay_s)
        runners, self._runners = self._runners, []
        for site in list(runners[0].sites) if runners else ():
            await site.stop()
        await self.handler.relay.finish_reading()  # aiohttp stops reading now
        for runner in runners:
            await runner.cleanup()
        if self.handler.sessions is not None:
            await self.handler.sessions.close()
        await self.handler.recorder.close()
        await self.handler.forecaster.close()
        for engine in self.handler.engines:
            await engine.relay.stop()

    async def reload(self, config: ProxyConfig) -> None:
        """Applies the options of `config` that can change while requests are in flight, reads certificates and new versions
        of the artifacts, and logs what has changed and what needs a restart. TailcastError, without any change, if a file
        or an artifact cannot be loaded."""
        async with self._reloading:
            if not self._is_ready:
                raise TailcastError("the proxy is starting or stopping")
            changed = self.handler.config.changed(config)
            names = set(RELOADED)
            if bool(self._tls) != (config.tls_cert is not None):
                names -= {"tls_cert", "tls_key", "tls_client_ca"}  # the port is open without TLS, or with it
            config = replace(self.handler.config, **{name: getattr(config, name) for name in names})
            server_contexts, engine_context = _server_tls(config), engine_tls(config)
            old = (self.handler.forecaster, self.handler.recorder.shadow)
            new = await self._successors(config)
            self.handler.apply(config, engine_context, *new)
            for tls, context in zip(self._tls, server_contexts, strict=True):
                tls.current = context
        applied = [f"{name} = {getattr(config, name)!r}" for name in changed if name in names]
        files = (config.tls_cert, config.tls_client_ca, config.engine_ca, *config.access_files)
        applied += [f"{file}: read again" for file in files if file is not None]
        for field, before, after in zip(("predictor", "shadow_predictor"), old, new, strict=True):
            if before is not after:
                applied.append(f"{field}: version {after.version} replaces {before.version}")
                await before.close()
        restart = [name for name in changed if name not in names]
        logger.info("reloaded: %s", "; ".join(applied) or "no change")
        if restart:
            logger.warning("these options need a restart: %s", ", ".join(restart))

    def reload_on_changes(self, reload: Callable[[], Awaitable[None]]) -> None:
        """Calls `reload` when a file of a certificate or token has changed, checked every `reload_poll_s`; until `stop`."""
        if self.handler.config.reload_poll_s:
            self._watching.append(asyncio.create_task(self._watch_files(self._files_state(), reload)))

    async def _watch_files(self, previous: list[object], reload: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(self.handler.config.reload_poll_s)
            state = self._files_state()
            if state != previous:
                previous = state
                await reload()

    def _files_state(self) -> list[object]:
        config = self.handler.config
        files = (
            *(config.tls_cert, config.tls_key, config.tls_client_ca, config.engine_ca),
            *config.access_files,
        )
        return [file_state(file) for file in files if file is not None]

    async def _successors(self, config: ProxyConfig) -> list[Forecaster]:
        """The forecasters of `config`, loaded. TailcastError if one of them cannot be loaded."""
        predictor = None if config.predictor == "none" else config.predictor
        shadow = self.handler.recorder.shadow
        loading = (
            self.handler.forecaster.successor(predictor, config.deadline_s, config.warm_up_s, config),
            shadow.successor(config.shadow_predictor, shadow.deadline_s, config.warm_up_s, config),
        )
        loaded = await asyncio.gather(*loading, return_exceptions=True)
        new = [forecaster for forecaster in loaded if isinstance(forecaster, Forecaster)]
        for error in loaded:
            if isinstance(error, BaseException):
                for forecaster in set(new) - {self.handler.forecaster, shadow}:
                    await forecaster.close()
                raise error
        return new

    async def _bind(self, application: web.Application, port: int, field: str, shutdown_s: float) -> int:
        timeout_s = self.handler.config.request_timeout_s
        runner = HttpRunner(
            application,
            keepalive_timeout=timeout_s,
            lingering_time=min(10.0, timeout_s),
            shutdown_timeout=shutdown_s,
            on_refused=self._count_malformed,
        )
        self._runners.append(runner)
        tls = self._tls[len(self._runners) - 1] if self._tls else None
        return await runner.bind(field, self.handler.config.host, port, ssl_context=tls)

    async def _problem(self) -> str:
        """Why the proxy is not ready; empty if it is."""
        if not self._is_ready:
            return "not ready"
        checks = (engine.relay.monitor.check() for engine in self.handler.engines)
        return "" if any(await asyncio.gather(*checks)) else "the engine cannot be reached"

    def _exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        if self.handler.recorder.calibration is not None:
            self.handler.recorder.calibration.publish()
        return generate_latest(self.handler.metrics.registry)

    def _count_malformed(self, status: int) -> None:
        """Counts a request that was refused before it could be read."""
        self.handler.metrics.requests.labels("malformed", str(status)).inc()
        self.handler.metrics.refused.labels("malformed_http").inc()


def _server_tls(config: ProxyConfig) -> list[ssl.SSLContext]:
    """TLS of the client port and of the admin port, which demands no certificate, because probes have none; empty without
    TLS."""
    contexts = (server_context(config), server_context(config, authenticates=False))
    return [context for context in contexts if context is not None]
