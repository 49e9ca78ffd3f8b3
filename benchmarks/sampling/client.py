"""CPU cost of the client of a sampling run: our backend, raw aiohttp, the `openai` client and raw httpx.

All use the same fake server in another process. Its responses are cheap and have a random delay short enough
that the client is the bottleneck. Each measurement runs in its own process; clients take turns in each round.
CPU time per 1,000 responses depends least on other load on the machine. Our backend does more than others:
seeds, token counts, retries, limits, and typed results in another thread. httpx scans its list of connections
at the start and end of each request, which takes O(n^2) time for n connections.

    python -m benchmarks.sampling.client                       # 100 and 1,000 and 10,000 requests in flight
    python -m benchmarks.sampling.client --stream --concurrency 1000
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = "fake-model"
TEXT = "Explain in a few sentences why the sky is blue and the sunset is red."
SIDES = ("tailcast", "aiohttp", "openai", "httpx")


@dataclass
class Measured:
    """Results of one process, measured after its warm-up."""

    answers: int
    seconds: float
    cpu_s: float
    memory_mib: float


class Meter:
    """Counts responses after the warm-up and signals the end of the measurement."""

    def __init__(self, warm_up_s: float, seconds: float) -> None:
        self._begin = time.perf_counter() + warm_up_s
        self._end = self._begin + seconds
        self._started: tuple[float, float] | None = None
        self._num_answers = 0

    def count(self, responses: int = 1) -> bool:
        """Counts responses; returns False when the time is over."""
        now = time.perf_counter()
        if self._started is None:
            if now >= self._begin:
                self._started = (now, time.process_time())
        else:
            self._num_answers += responses
        return now < self._end

    def result(self) -> Measured:
        """Results of the measurement."""
        started, cpu = self._started or (time.perf_counter(), time.process_time())
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return Measured(self._num_answers, time.perf_counter() - started, time.process_time() - cpu, memory)


def body(stream: bool, number: int) -> dict[str, object]:
    """Request body as our backend sends it, built again for every request as a caller would."""
    fields: dict[str, object] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": TEXT}],
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": 32,
        "seed": number,
    }
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return fields


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


async def with_aiohttp(url: str, concurrency: int, stream: bool, meter: Meter) -> None:
    """Raw aiohttp: post, read, parse."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=600)
    ) as session:

        async def ask(number: int) -> int:
            async with session.post(url + "/chat/completions", json=body(stream, number)) as response:
                if not stream:
                    return int((await response.json())["usage"]["completion_tokens"])
                count = 0
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        content = json.loads(line[6:])
                        count = content["usage"]["completion_tokens"] if content.get("usage") else count
                return int(count)

        await closed_loop(concurrency, meter, ask)


async def with_httpx(url: str, concurrency: int, stream: bool, meter: Meter) -> None:
    """Raw httpx."""
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=600) as client:

        async def ask(number: int) -> int:
            if not stream:
                response = await client.post(url + "/chat/completions", json=body(stream, number))
                return int(response.json()["usage"]["completion_tokens"])
            count = 0
            async with client.stream(
                "POST", url + "/chat/completions", json=body(stream, number)
            ) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        content = json.loads(line[6:])
                        count = content["usage"]["completion_tokens"] if content.get("usage") else count
            return count

        await closed_loop(concurrency, meter, ask)


async def with_openai(url: str, concurrency: int, stream: bool, meter: Meter) -> None:
    """The `openai` package, asynchronous."""
    import httpx
    import openai

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    http_client = openai.DefaultAsyncHttpxClient(limits=limits, timeout=600)  # type: ignore[arg-type]
    async with openai.AsyncOpenAI(
        base_url=url, api_key="none", http_client=http_client, max_retries=0
    ) as client:

        async def ask(number: int) -> int:
            completion = await client.chat.completions.create(**body(stream, number))  # type: ignore[call-overload]
            if not stream:
                return int(completion.usage.completion_tokens)
            count = 0
            async for piece in completion:
                count = piece.usage.completion_tokens if piece.usage else count
            return count

        await closed_loop(concurrency, meter, ask)


def with_tailcast(url: str, concurrency: int, stream: bool, meter: Meter) -> None:
    """Our backend with 20 outputs per prompt and an endless stream of prompts."""
    from data_gen.backend import SamplingSettings, Work
    from data_gen.openai.backend import OpenAIBackend
    from data_gen.openai.options import OpenAIOptions
    from data_gen.prompts import Prompt

    options = OpenAIOptions(base_urls=(url,), concurrency=concurrency, stream=stream)
    indices = tuple(range(20))
    work = (Work(Prompt(str(number), TEXT), indices) for number in itertools.count())
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
    arguments = (options.url, options.concurrency[0], options.stream, meter)
    if options.side == "tailcast":
        with_tailcast(*arguments)
    else:
        sides = {"aiohttp": with_aiohttp, "httpx": with_httpx, "openai": with_openai}
        asyncio.run(sides[options.side](*arguments))
    print(json.dumps(vars(meter.result())))


@contextmanager
def fake_server(delay_s: float, interval_s: float) -> Iterator[str]:
    """Runs a fast fake server in another process; yields its address."""
    command = [sys.executable, "-m", "benchmarks.sampling.fast_openai", str(delay_s), str(interval_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    finally:
        process.terminate()
        process.communicate()


def in_a_process(url: str, side: str, concurrency: int, options: argparse.Namespace) -> Measured | None:
    """Result of one client in a new process; None if it does not finish in time."""
    command = [sys.executable, __file__, "--side", side, "--url", url, "--concurrency", str(concurrency)]
    # Opening the connections and a few rounds of all requests take longer with more connections.
    seconds = max(options.seconds, 1.2e-3 * concurrency)
    warm_up_s = max(options.warm_up_s, 0.8e-3 * concurrency)
    command += ["--seconds", str(seconds), "--warm-up-s", str(warm_up_s)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            command + ["--stream"] * options.stream,
            stdout=subprocess.PIPE,
            check=True,
            env=environment,
            cwd=ROOT,
            timeout=2 * (seconds + warm_up_s) + 20,
        )
    except subprocess.TimeoutExpired:
        return None
    return Measured(**json.loads(done.stdout))


def main() -> None:
    """Prints a table for each number of requests in flight."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--stream", action="store_true", help="32 events per response")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="measured time per client and round")
    parser.add_argument("--warm-up-s", type=float, default=2.0)
    parser.add_argument("--offered", type=float, default=20_000.0, help="maximum responses/s of the server")
    parser.add_argument("--interval-s", type=float, default=0.02, help="interval between stream events")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        measure(options)
        return
    packages = ", ".join(f"{name} {version(name)}" for name in ("aiohttp", "httpx", "openai"))
    print(f"Python {platform.python_version()}, {packages}, {os.cpu_count()} cores, {platform.machine()}")
    print(f"{options.rounds} rounds, interleaved; mean (minimum-maximum)")
    for concurrency in options.concurrency:
        measured: dict[str, list[Measured]] = {side: [] for side in options.sides}
        with fake_server(concurrency / options.offered, options.interval_s) as url:
            for round_number in range(options.rounds):
                for side in options.sides:
                    if round_number == len(measured[side]):
                        result = in_a_process(url, side, concurrency, options)
                        measured[side] += [] if result is None else [result]
        print_table(concurrency, measured, options.stream)


def print_table(concurrency: int, measured: dict[str, list[Measured]], stream: bool) -> None:
    """Prints a row for each client."""
    print(f"\n{concurrency} requests in flight, {'streamed' if stream else 'not streamed'}")
    print(f"{'side':10} {'responses/s':>20} {'CPU s / 1,000':>20} {'peak MiB':>9}")
    for side, results in measured.items():
        good = [one for one in results if one.answers]
        if not good:
            print(f"{side:10} {'no completion in time':>20}")
            continue
        rates = [one.answers / one.seconds for one in good]
        costs = [1000 * one.cpu_s / one.answers for one in good]
        memory = max(one.memory_mib for one in good)
        print(f"{side:10} {_range(rates, 0):>20} {_range(costs, 3):>20} {memory:9.0f}")


def _range(values: list[float], digits: int) -> str:
    mean, least, most = statistics.mean(values), min(values), max(values)
    return f"{mean:.{digits}f} ({least:.{digits}f}-{most:.{digits}f})"


if __name__ == "__main__":
    main()
