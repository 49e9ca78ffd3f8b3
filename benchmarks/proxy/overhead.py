"""Overhead of tailcast-proxy per request: latency, CPU and memory.

An engine with zero latency streams some events. A client sends it requests directly and through proxies, in
turn, one request at a time, so that all variants run under the same conditions. The first request of a turn
reaches a proxy that has been idle, and is counted separately. No predictor is used but in one variant; the
`policy_unpredicted` hints are still computed and added. Traces are exported to the process of the engine.

    python -m benchmarks.proxy.overhead [--requests 1000] [--events 20]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import ssl
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import psutil
import trustme
from aiohttp import web

from benchmarks.shared.command import Parser
from benchmarks.shared.processes import ROOT, command_ports, cpu_s, free_port, listens, running
from scheduler_core.report.page import markdown_table

CHAT = "/v1/chat/completions"
CONTENT = {"model": "m", "stream": True, "max_tokens": 500, "messages": [{"role": "user", "content": "name three rivers " * 30}]}  # fmt: skip
VARIANTS: dict[str, str] = {
    "direct": "",
    "proxy, vllm hints": "--engine vllm",
    "proxy, held queue": "--engine none --release 64",
    "proxy, held queue, policy that reads streams": "--engine none --release 64 --policy uniboost",
    "proxy, vllm hints and feedback": "--engine vllm --feedback FOLDER/feedback",
    "proxy, vllm hints and traces": "--engine vllm --traces true",
    "proxy, vllm hints and TLS": "--engine vllm --tls_cert FOLDER/tls.crt --tls_key FOLDER/tls.key",
    "proxy, vllm hints by the shipped predictor": "--engine vllm --predictor pretrained",
}


@dataclass
class Variant:
    """One route to the engine.

    Attributes:
        url: Address that the client uses.
        pid: Process id of the proxy; None: there is no proxy.
        first_ms, total_ms: Time to the first byte and end of the body, without the first request of a turn.
        paused_ms: Time to the first byte of the first request of each turn, after an idle period.
        cpu_s: CPU seconds of the proxy for each request, means of the turns.
        mib: Resident memory of the proxy at the end.
    """

    url: str
    pid: int | None
    first_ms: list[float] = field(default_factory=list)
    total_ms: list[float] = field(default_factory=list)
    paused_ms: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    mib: float = 0.0


async def engine(port: int, num_events: int) -> None:
    """Serves until terminated."""
    delta = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    word = {**delta, "choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": None}]}
    last = {**delta, "choices": [], "usage": {"prompt_tokens": 90, "completion_tokens": num_events}}
    events = [b"data: " + json.dumps(word).encode() + b"\n\n"] * num_events
    counts = b"data: " + json.dumps(last).encode() + b"\n\n"

    async def respond(request: web.Request) -> web.StreamResponse:
        wants = b"include_usage" in await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in [*events, *([counts] if wants else []), b"data: [DONE]\n\n"]:
            await response.write(event)
        await response.write_eof()
        return response

    async def collect(request: web.Request) -> web.Response:
        await request.read()
        return web.Response()

    application = web.Application()
    application.router.add_post(CHAT, respond)
    application.router.add_post("/v1/traces", collect)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


async def ask(client: aiohttp.ClientSession, variant: Variant) -> None:
    """Sends one request."""
    start = time.perf_counter()
    async with client.post(variant.url + CHAT, json=CONTENT) as response:
        await response.content.readany()
        first = time.perf_counter()
        await response.content.read()
    variant.first_ms.append(1e3 * (first - start))
    variant.total_ms.append(1e3 * (time.perf_counter() - start))


async def measure(variants: dict[str, Variant], num_requests: int, block: int, authority: Path) -> None:
    """Measures the variants in turn by `block` requests; CPU clocks are too coarse for single ones."""
    trusting = ssl.create_default_context(cafile=authority)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting)) as client:
        for variant in variants.values():
            for _ in range(100):
                await ask(client, variant)
            variant.first_ms.clear()
            variant.total_ms.clear()
        for _ in range(max(1, num_requests // block)):
            for variant in variants.values():
                before = cpu_s(variant.pid) if variant.pid else 0.0
                for _ in range(block):
                    await ask(client, variant)
                variant.paused_ms.append(variant.first_ms.pop(-block))
                del variant.total_ms[-block]
                if variant.pid:
                    variant.cpu_s.append((cpu_s(variant.pid) - before) / block)
        for variant in variants.values():
            if variant.pid:
                variant.mib = psutil.Process(variant.pid).memory_info().rss / 2**20


def table(variants: dict[str, Variant], num_events: int) -> str:
    """Percentiles of each variant, and the differences from direct requests."""
    direct = variants["direct"]
    head = (
        f"{len(direct.total_ms) + len(direct.paused_ms)} requests of each variant, {len(direct.paused_ms)} of them after "
        f"a pause, {num_events} events each; ms; + is the difference from direct without a pause\n\n"
    )
    header = "variant|first byte p50|p99|full response p50|p99|+ p50, first byte|+ p99, first byte"
    header += "|+ p50, first byte after a pause|requests per CPU second|MiB"
    rows = []
    for name, variant in variants.items():
        numbers = [np.percentile(values, level) for values in (variant.first_ms, variant.total_ms) for level in (50, 99)]  # fmt: skip
        numbers += [np.percentile(variant.first_ms, level) - np.percentile(direct.first_ms, level) for level in (50, 99)]  # fmt: skip
        numbers.append(np.median(variant.paused_ms) - np.median(direct.first_ms))
        cost = ("", "")
        if variant.pid is not None:
            # The median of the turns, because other jobs of the machine slow some of them down.
            cost = (f"{1 / np.median(variant.cpu_s):.0f}", f"{variant.mib:.0f}")
        rows.append((name, *(f"{number:.2f}" for number in numbers), *cost))
    return head + markdown_table(header.split("|"), rows)


def main() -> None:
    """Prints the table."""
    parser = Parser(__doc__)
    parser.add_argument("--requests", type=int, default=1000, help="requests of each variant")
    parser.add_argument("--block", type=int, default=50, help="requests per turn of a variant")
    parser.add_argument("--events", type=int, default=20, help="events of a response")
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        asyncio.run(engine(options.engine, options.events))
        return
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        port = free_port()
        command = [sys.executable, "-m", "benchmarks.proxy.overhead", "--engine", str(port)]
        command += ["--events", str(options.events)]
        environment = {"PYTHONPATH": str(ROOT)}
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{port}"
        authority = trustme.CA()
        certificate = authority.issue_cert("127.0.0.1")
        authority.cert_pem.write_to_path(f"{folder}/ca.pem")
        certificate.private_key_and_cert_chain_pem.write_to_path(f"{folder}/tls.crt")
        certificate.private_key_pem.write_to_path(f"{folder}/tls.key")
        stack.enter_context(running(command, lambda: listens(port), environment=environment))
        target = f"http://127.0.0.1:{port}"
        variants = {"direct": Variant(target, None)}
        for name, flags in VARIANTS.items():
            if flags:
                flags = flags if "--predictor" in flags else f"{flags} --predictor none"
                command = [target, *flags.replace("FOLDER", folder).split()]
                process, [port, *_] = stack.enter_context(command_ports("tailcast_proxy", *command))
                scheme = "https" if "--tls_cert" in flags else "http"
                variants[name] = Variant(f"{scheme}://127.0.0.1:{port}", process.popen.pid)
        asyncio.run(measure(variants, options.requests, options.block, Path(folder) / "ca.pem"))
        print(table(variants, options.events))


if __name__ == "__main__":
    main()
