"""Cost of the service's front end: CPU time of the server process per request. Model and tokenizer are
replaced by free ones, so that gRPC, queue, futures and threads remain.

Each variant runs in its own process and gets an open-loop load of single requests, in turn in each round. The
baselines are a grpc.aio server whose handler returns its input (the minimum for that library), and one whose
handler returns it from a thread (the minimum for a service that runs the model outside the event loop).

    python -m benchmarks.service.front_end
    python -m benchmarks.service.front_end --rate 500 --seconds 10
    python -m benchmarks.service.front_end --before CHECKOUT    # also the service of another checkout
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs
METHOD = "/tailcast.predictor.v1.Predictor/Predict"
STREAM = "/tailcast.predictor.v1.Predictor/PredictStream"
PROMPT = "write a long essay about the sea and name three rivers that run into it " * 3
ROOT = Path(__file__).resolve().parents[2]
FLOORS = {"grpc.aio echo": ("echo", METHOD), "grpc.aio echo by a thread": ("thread", METHOD)}
SERVICE = {"Predict": ("service", METHOD), "PredictStream": ("service", STREAM)}


@dataclass
class Variant:
    """One server process, its method, and CPU milliseconds per response, one entry per round."""

    process: subprocess.Popen[str]
    address: str
    method: str
    cpu_ms: list[float] = field(default_factory=list)

    def cpu_s(self) -> float:
        """CPU seconds that the server process has used so far."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def serve(kind: str, artifact: str) -> None:
    """Writes the port to stdout and serves until terminated."""
    port = await (_service(artifact) if kind == "service" else _echo(by_thread=kind == "thread"))
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


async def _echo(*, by_thread: bool) -> int:
    threads = ThreadPoolExecutor(1)

    async def answer(data: bytes, context: Any) -> bytes:
        if by_thread:
            return await asyncio.get_running_loop().run_in_executor(threads, bytes, data)
        return data

    server = grpc.aio.server()
    handlers = {"Predict": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("tailcast.predictor.v1.Predictor", handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    _keep.append(server)
    return port


async def _service(artifact: str) -> int:
    import numpy as np

    from predictors.runtime import Predicted, open_runtime
    from predictors.service.batcher import BatchingSettings
    from predictors.service.config import ServeConfig
    from predictors.service.server import PredictionServer

    runtime: Any = open_runtime(artifact, provider="cpu")
    batching = BatchingSettings.cpu(2)

    numbers = [np.ones(size) for size in range(batching.max_batch + 1)]
    predictions = [Predicted(mu=ones * 5, sigma=ones, nu=ones * 3.5) for ones in numbers]

    def run(prompts: Any, *conditions: Any, **options: Any) -> Predicted:
        return predictions[len(prompts)]

    tokens = runtime.tokenizer([PROMPT])[0]
    runtime.tokenizer = lambda prompts: [tokens] * len(prompts)
    runtime.run, runtime.warm_up = run, lambda: None
    server = PredictionServer([runtime], batching, ServeConfig(artifact=artifact, port=0))
    _keep.append(server)
    return await server.start()


_keep: list[Any] = []  # grpc.aio stops a server that is garbage-collected


@contextlib.contextmanager
def started(kind: str, method: str, artifact: Path, checkout: Path) -> Iterator[Variant]:
    """A running variant with the service of a checkout; terminated at the end."""
    process = subprocess.Popen(
        [
            sys.executable,
            str(checkout / "benchmarks" / "service" / "front_end.py"),
            "--serve",
            kind,
            "--artifact",
            str(artifact),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ) | {"PYTHONPATH": str(checkout)},
    )
    try:
        assert process.stdout is not None
        yield Variant(process, f"127.0.0.1:{int(process.stdout.readline())}", method)
    finally:
        process.kill()
        process.communicate()


async def put_load(variant: Variant, rate: float, seconds: float) -> None:
    """Sends `rate` requests per second at equal intervals; appends the server's CPU time per response."""
    from predictors.proto import predictor_v1_pb2 as pb

    data = pb.PredictRequest(request_id="r", prompt=PROMPT).SerializeToString()
    async with grpc.aio.insecure_channel(variant.address) as channel:
        await channel.channel_ready()
        send = _streaming(channel) if variant.method == STREAM else _unary(channel, variant.method)
        async with send as call:
            for _ in range(20):
                await call(data)
            before, start, num_sent = variant.cpu_s(), time.perf_counter(), 0
            calls = set()
            while (now := time.perf_counter() - start) < seconds:
                while num_sent < now * rate:
                    calls.add(asyncio.ensure_future(call(data)))
                    num_sent += 1
                await asyncio.sleep(max(0.0, num_sent / rate - now))
            await asyncio.gather(*calls)
            variant.cpu_ms.append((variant.cpu_s() - before) * 1000 / num_sent)


@contextlib.asynccontextmanager
async def _unary(channel: Any, method: str) -> Any:
    yield channel.unary_unary(method)


@contextlib.asynccontextmanager
async def _streaming(channel: Any) -> Any:
    stream = channel.stream_stream(STREAM)()
    waiting: list[asyncio.Future[None]] = []
    writing = asyncio.Lock()

    async def read() -> None:
        while (await stream.read()) is not EOF:
            waiting.pop(0).set_result(None)

    async def call(data: bytes) -> None:
        waiting.append(asyncio.get_running_loop().create_future())
        answered = waiting[-1]
        async with writing:
            await stream.write(data)
        await answered

    reader = asyncio.ensure_future(read())
    try:
        yield call
    finally:
        await stream.done_writing()
        await reader


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=170.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=1.0, help="duration per variant and round")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--before", type=Path, help="another checkout whose service is also measured")
    parser.add_argument("--serve", choices=("echo", "thread", "service"), help=argparse.SUPPRESS)
    parser.add_argument("--artifact", help="default: a tiny artifact")
    options = parser.parse_args()
    if options.serve:
        from predictors.hosting.process import run

        run(serve(options.serve, options.artifact))
        return
    with contextlib.ExitStack() as stack:
        artifact = Path(options.artifact or stack.enter_context(tempfile.TemporaryDirectory()))
        if options.artifact is None:
            from tests.predictors.fakes import write_artifact

            artifact = write_artifact(artifact / "tiny")
        targets = {name: (*how, ROOT) for name, how in (FLOORS | SERVICE).items()}
        if options.before is not None:
            before = options.before.resolve()
            targets |= {f"{name}, before": (*how, before) for name, how in SERVICE.items()}
        variants = {
            name: stack.enter_context(started(*how[:2], artifact, how[2])) for name, how in targets.items()
        }
        for _ in range(options.rounds):
            for variant in variants.values():
                asyncio.run(put_load(variant, options.rate, options.seconds))
    print(f"{options.rate:g} requests/s, {options.rounds} rounds of {options.seconds:g} s, interleaved")
    print(f"{'variant':26} {'CPU ms per request':>20} {'over the echo':>14}")
    echo = next(iter(variants.values()))
    for name, variant in variants.items():
        middle, low, high = statistics.median(variant.cpu_ms), min(variant.cpu_ms), max(variant.cpu_ms)
        over = statistics.median(own - its for own, its in zip(variant.cpu_ms, echo.cpu_ms, strict=True))
        print(f"{name:26} {f'{middle:.2f} ({low:.2f}-{high:.2f})':>20} {over:14.2f}")


if __name__ == "__main__":
    main()
