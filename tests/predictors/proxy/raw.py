"""Requests to a proxy as bytes."""

from __future__ import annotations

import asyncio

from tests.predictors.proxy.fake_engine import RunningProxy


async def raw_answer(proxy: RunningProxy, data: bytes) -> bytes:
    """All that the proxy answers until it closes the connection.

    Args:
        proxy: The proxy.
        data: What is sent.
    """
    host, port = proxy.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        async with asyncio.timeout(60):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()
