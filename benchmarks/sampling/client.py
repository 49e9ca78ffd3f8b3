"""CPU cost of the client of a sampling run: our backend, raw aiohttp, the `openai` client and raw httpx.

All use the same fake server in another process. Its responses are cheap and have a random delay short enough
that the client is the bottleneck. Each measurement runs in its own process; clients take turns in each round.
CPU time per 1,000 responses depends least on other load on the machine. Our backend does more than others:
seeds, token counts, retries, limits, and typed results in another thread. httpx scans its list of connections
at the start and end of each request, which takes O(n^2) time for n connections.

    python -m benchmarks.sampling.client [--concurrency 100 1000 10000] [--rounds 2]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import closing

from benchmarks.shared.command import Parser
from benchmarks.shared.processes import ROOT, printing_ports
from benchmarks.shared.timing import memory_mb
from scheduler_core.report.page import markdown_table

TEXT = "Explain in a few sentences why the sky is blue and the sunset is red."
SIDES = ("tailcast", "aiohttp", "openai", "httpx")


class Meter:
    """Counts responses after the warm-up and signals the end of the measurement."""

    def __init__(self, warm_up_s: float, seconds: float) -> None:
        self._begin = time.perf_counter() + warm_up_s
        self._end = self._begin + seconds
        self._started: tuple[float, float] | None = None
        self._num_answers = 0

    def count(self) -> bool:
        """Counts a response; returns False when the time is over."""
        now = time.perf_counter()
        if self._started is not None:
            self._num_answers += 1
        elif now >= self._begin:
            self._started = (now, time.process_time())
        return now < self._end

    def result(self) -> tuple[float, float, float]:
        """Responses per second, CPU seconds per 1,000 responses, and the peak memory in MiB."""
        assert self._started is not None
        begin, cpu = self._started
        num = max(self._num_answers, 1)
        return num / (time.perf_counter() - begin), 1000 * (time.process_time() - cpu) / num, memory_mb()


def body(number: int) -> dict[str, object]:
    """Request body as our backend sends it, built again for every request as a caller would."""
    return {
        "model": "fake-model", "messages": [{"role": "user", "content": TEXT}], "temperature": 1.0, "top_p": 1.0,
        "max_tokens": 32, "seed": number,
    }  # fmt: skip


async def closed_loop(concurrency: int, meter: Meter, ask: Callable[[int], Awaitable[int]]) -> None:
    """Runs `concurrency` callers with one request each until the time is over; `ask` returns a length."""
    numbers = itertools.count()

    async def call() -> None:
        while True:
            if await ask(next(numbers)) != 32:
                raise SystemExit("unexpected response")
            if not meter.count():
                return

    tasks = [asyncio.create_task(call()) for _ in range(concurrency)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        if error is not None and not isinstance(error, asyncio.CancelledError):
            raise error


async def with_aiohttp(url: str, concurrency: int, meter: Meter) -> None:
    """Raw aiohttp: post, read, parse."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def ask(number: int) -> int:
            async with session.post(url + "/chat/completions", json=body(number)) as response:
                return int((await response.json())["usage"]["completion_tokens"])

        await closed_loop(concurrency, meter, ask)


async def with_httpx(url: str, concurrency: int, meter: Meter) -> None:
    """Raw httpx."""
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=600) as client:

        async def ask(number: int) -> int:
            response = await client.post(url + "/chat/completions", json=body(number))
            return int(response.json()["usage"]["completion_tokens"])

        await closed_loop(concurrency, meter, ask)


async def with_openai(url: str, concurrency: int, meter: Meter) -> None:
    """The `openai` package, asynchronous."""
    import httpx
    import openai

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    http = openai.DefaultAsyncHttpxClient(limits=limits, timeout=600)  # type: ignore[arg-type]
    async with openai.AsyncOpenAI(base_url=url, api_key="none", http_client=http, max_retries=0) as client:

        async def ask(number: int) -> int:
            completion = await client.chat.completions.create(**body(number))  # type: ignore[call-overload]
            return int(completion.usage.completion_tokens)

        await closed_loop(concurrency, meter, ask)


def with_tailcast(url: str, concurrency: int, meter: Meter) -> None:
    """Our backend with 20 outputs per prompt and an endless stream of prompts."""
    from data_gen.backend import SamplingSettings, Work
    from data_gen.openai.backend import OpenAIBackend
    from data_gen.openai.options import OpenAIOptions
    from data_gen.prompts import Prompt

    options = OpenAIOptions(base_urls=(url,), concurrency=concurrency)
    work = (Work(Prompt(str(number), TEXT), tuple(range(20))) for number in itertools.count())
    with closing(OpenAIBackend(options)) as backend:
        for result in backend.sample(work, SamplingSettings(20, 32, 1.0, 1.0, 0)):
            if [output.output_tokens for output in result.outputs] != [32]:
                raise SystemExit("unexpected response")
            if not meter.count():
                break
        if backend.counters:
            raise SystemExit(f"failed requests: {backend.counters}")


def measure(options: argparse.Namespace) -> None:
    """Measures one client in this process and prints the result as JSON."""
    from data_gen.openai.http_client import allow_descriptors

    allow_descriptors(options.concurrency[0])
    meter = Meter(options.warm_up_s, options.seconds)
    arguments = (options.url, options.concurrency[0], meter)
    if options.side == "tailcast":
        with_tailcast(*arguments)
    else:
        sides = {"aiohttp": with_aiohttp, "httpx": with_httpx, "openai": with_openai}
        asyncio.run(sides[options.side](*arguments))
    print(json.dumps(meter.result()))


def in_a_process(url: str, side: str, concurrency: int, options: argparse.Namespace) -> list[float] | None:
    """`Meter.result` of one client in a new process; None if it does not finish in time."""
    # Opening the connections and a few rounds of all requests take longer with more connections.
    seconds, warm_up_s = (
        max(options.seconds, 1.2e-3 * concurrency),
        max(options.warm_up_s, 0.8e-3 * concurrency),
    )
    command = [sys.executable, "-m", "benchmarks.sampling.client", "--side", side, "--url", url]
    command += ["--concurrency", str(concurrency), "--seconds", str(seconds), "--warm_up_s", str(warm_up_s)]
    try:
        limit_s = 2 * (seconds + warm_up_s) + 20
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None
    result: list[float] = json.loads(done.stdout)
    return result


def main() -> None:
    """Prints a table for each number of requests in flight."""
    parser = Parser(__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="measured time per client and round")
    parser.add_argument("--warm_up_s", type=float, default=2.0)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        measure(options)
        return
    print(f"{options.rounds} rounds, interleaved; mean (minimum-maximum)")
    for concurrency in options.concurrency:
        results: dict[str, list[list[float]]] = {side: [] for side in options.sides}
        # The server could return 20,000 responses/s.
        with printing_ports("benchmarks.sampling.fast_openai", str(concurrency / 20_000)) as (
            _,
            [port],
        ):
            for _, side in itertools.product(range(options.rounds), options.sides):
                if (
                    result := in_a_process(f"http://127.0.0.1:{port}/v1", side, concurrency, options)
                ) is not None:
                    results[side].append(result)
        print(f"\n{concurrency} requests in flight\n")
        rows = []
        for side, values in results.items():
            digits = zip(zip(*values, strict=True), (0, 3, 0), strict=False)
            cells = [f"{statistics.mean(x):.{n}f} ({min(x):.{n}f}-{max(x):.{n}f})" for x, n in digits]
            rows.append((side, *(cells or ("no completion in time", "-", "-"))))
        print(markdown_table(("side", "responses/s", "CPU s / 1,000", "peak MiB"), rows))


if __name__ == "__main__":
    main()
