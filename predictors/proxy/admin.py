"""Pages of the admin port: metrics and probes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from predictors.proxy.engine_monitor import EngineMonitor
from predictors.service.metrics import CONTENT_TYPE


def admin_pages(
    exposition: Callable[[], bytes], is_ready: Callable[[], bool], monitor: EngineMonitor
) -> web.Application:
    """/metrics, rendered by `exposition` in a thread; /healthz; /readyz, ready while the proxy and the engine are."""
    routes = web.RouteTableDef()

    @routes.get("/metrics")
    async def metrics(request: web.Request) -> web.Response:
        text = await asyncio.to_thread(exposition)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    @routes.get("/healthz")
    async def live(request: web.Request) -> web.Response:
        return web.Response(text="live\n")

    @routes.get("/readyz")
    async def ready(request: web.Request) -> web.Response:
        if not is_ready():
            return web.Response(text="not ready\n", status=503)
        if not await monitor.check():
            return web.Response(text="the engine cannot be reached\n", status=503)
        return web.Response(text="ready\n")

    application = web.Application()
    application.add_routes(routes)
    return application
