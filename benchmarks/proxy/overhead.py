"""Overhead of tailcast-proxy per request, without the prediction: latency and CPU.

An engine with zero latency streams some events. A client sends it requests directly and through proxies, in
turn, one request at a time, so that all variants run under the same conditions. The first request of a turn
reaches a proxy that has been idle, and is counted separately. No predictor is used (`benchmarks.service`
measures that); the `policy_unpredicted` hints are still computed and added.

    python -m benchmarks.proxy.overhead
    python -m benchmarks.proxy.overhead --requests 5000 --events 200
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
from aiohttp import web

CHAT = "/v1/chat/completions"
CONTENT = {"model": "m", "stream": True, "max_tokens": 500, "messages": [{"role": "user", "content": "name three rivers " * 30}]}  # fmt: skip
VARIANTS: dict[str, list[str] | None] = {
    "direct": None,
    "proxy, vllm hints": ["--engine", "vllm"],
    "proxy, held queue": ["--engine", "none", "--release", "64"],
    "proxy, held queue, policy that reads streams": [
        "--engine",
        "none",
        "--release",
        "64",
        "--policy",
        "uniboost",
    ],
    "proxy, vllm hints and feedback": ["--engine", "vllm", "--feedback", "FOLDER"],
}


@dataclass
class Variant:
    """One route to the engine.

    Attributes:
        url: Address that the client uses.
        pid: Process id of the proxy; None: there is no proxy.
        admin: Port of the proxy's metrics.
        first_ms, total_ms: Time to the first byte and end of the body, without the first request of a turn.
        paused_ms: Time to the first byte of the first request of each turn, after an idle period.
        cpu_s: CPU seconds of the proxy.
        own_share: Fraction of requests that the proxy held for less than a millisecond, by its own metrics.
    """

    url: str
    pid: int | None
    admin: str = ""
    first_ms: list[float] = field(default_factory=list)
    total_ms: list[float] = field(default_factory=list)
    paused_ms: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    own_share: float | None = None


def cpu_s(pid: int | None) -> float:
    """CPU seconds that a process has used."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def engine(num_events: int) -> None:
    """Writes the port to stdout and serves until terminated."""
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

    application = web.Application()
    application.router.add_post(CHAT, respond)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    sys.stdout.write(f"{runner.addresses[0][1]}\n")
    sys.stdout.flush()
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


async def measure(variants: dict[str, Variant], num_requests: int, block: int) -> None:
    """Measures the variants in turn by `block` requests; CPU clocks are too coarse for single ones."""
    async with aiohttp.ClientSession() as client:
        for variant in variants.values():
            for _ in range(100):
                await ask(client, variant)
            variant.first_ms.clear()
            variant.total_ms.clear()
        for _ in range(max(1, num_requests // block)):
            for variant in variants.values():
                before = cpu_s(variant.pid)
                for _ in range(block):
                    await ask(client, variant)
                variant.paused_ms.append(variant.first_ms.pop(-block))
                del variant.total_ms[-block]
                variant.cpu_s += cpu_s(variant.pid) - before
        for variant in variants.values():
            if variant.admin:
                async with client.get(variant.admin + "/metrics") as response:
                    variant.own_share = share_within(await response.text())


def share_within(metrics: str) -> float:
    """Fraction of requests in the buckets up to 1 ms of tailcast_proxy_overhead_seconds."""
    rows = dict(
        line.rsplit(" ", 1)
        for line in metrics.splitlines()
        if line.startswith("tailcast_proxy_overhead_seconds")
    )
    within = float(rows['tailcast_proxy_overhead_seconds_bucket{le="0.001"}'])
    return within / float(rows["tailcast_proxy_overhead_seconds_count"])


def table(variants: dict[str, Variant], num_events: int) -> str:
    """Percentiles of each variant, and the differences from direct requests."""
    direct = variants["direct"]
    lines = [
        f"{len(direct.total_ms) + len(direct.paused_ms)} requests of each variant, {len(direct.paused_ms)} of them after a pause, "
        f"{num_events} events each; ms; + is the difference from direct without a pause",
        "| variant | first byte p50 | p99 | full response p50 | p99 | + p50, first byte | + p99, first byte | + p50, first byte after a pause | CPU per request | own time < 1 ms |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, variant in variants.items():
        numbers = [np.percentile(values, level) for values in (variant.first_ms, variant.total_ms) for level in (50, 99)]  # fmt: skip
        more = [np.percentile(variant.first_ms, level) - np.percentile(direct.first_ms, level) for level in (50, 99)]  # fmt: skip
        more.append(np.median(variant.paused_ms) - np.median(direct.first_ms))
        cells = [f"{number:.2f}" for number in [*numbers, *more]]
        num_requests = len(variant.total_ms) + len(variant.paused_ms)
        cpu = "" if variant.pid is None else f"{1e3 * variant.cpu_s / num_requests:.2f}"
        own = "" if variant.own_share is None else f"{100 * variant.own_share:.2f} %"
        lines.append(f"| {name} | {' | '.join(cells)} | {cpu} | {own} |")
    return "\n".join(lines)


def start(command: list[str], port_file: Path | None = None) -> tuple[subprocess.Popen[str], int]:
    """Starts a process that writes its port to stdout or to a file."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if port_file is None:
        return process, int(process.stdout.readline())
    while not port_file.exists():
        if process.poll() is not None:
            raise SystemExit(f"{command} ended with {process.returncode}")
        time.sleep(0.05)
    return process, int(port_file.read_text().split()[0])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000, help="requests of each variant")
    parser.add_argument("--block", type=int, default=50, help="requests per turn of a variant")
    parser.add_argument("--events", type=int, default=20, help="events of a response")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        asyncio.run(engine(options.events))
        return
    processes: list[subprocess.Popen[str]] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            process, port = start([__file__, "--engine", "--events", str(options.events)])
            processes.append(process)
            target = f"http://127.0.0.1:{port}"
            variants = {}
            for number, (name, flags) in enumerate(VARIANTS.items()):
                if flags is None:
                    variants[name] = Variant(target, None)
                    continue
                port_file = Path(folder) / f"port{number}"
                words = [word.replace("FOLDER", f"{folder}/feedback") for word in flags]
                command = [
                    "-m",
                    "predictors.commands.tailcast_proxy",
                    target,
                    "--predictor",
                    "none",
                    "--port",
                    "0",
                    "--admin_port",
                    "0",
                    "--port_file",
                    str(port_file),
                    *words,
                ]
                process, port = start(command, port_file)
                processes.append(process)
                admin = f"http://127.0.0.1:{port_file.read_text().split()[1]}"
                variants[name] = Variant(f"http://127.0.0.1:{port}", process.pid, admin)
            asyncio.run(measure(variants, options.requests, options.block))
            print(table(variants, options.events))
            for process in processes:
                process.terminate()
                process.wait()
    finally:
        for process in processes:
            process.kill()


if __name__ == "__main__":
    main()
