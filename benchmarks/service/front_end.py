"""Cost of the service's front end: CPU time of the server process per request. Model and tokenizer are
replaced by free ones, so that gRPC, queue, futures and threads remain.

Each variant runs in its own process and gets an open-loop load of single requests, in turn in each round. The
baselines are a grpc.aio server whose handler returns its input (the minimum for that library), and one whose
handler returns it from a thread (the minimum for a service that runs the model outside the event loop).

    python -m benchmarks.service.front_end [--rate 170] [--seconds 1] [--rounds 12]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc

from benchmarks.shared.command import Parser
from benchmarks.shared.processes import cpu_s, print_ports, printing_ports
from scheduler_core.report.page import markdown_table

SERVICE = "tailcast.predictor.v1.Predictor"
METHOD = f"/{SERVICE}/Predict"
PROMPT = "write a long essay about the sea and name three rivers that run into it " * 3
#: Name -> kind of server.
VARIANTS = {"grpc.aio echo": "echo", "grpc.aio echo by a thread": "thread", "Predict": "service"}


@dataclass
class Variant:
    """One server process and its CPU milliseconds per response, one entry per round."""

    pid: int
    address: str
    cpu_ms: list[float] = field(default_factory=list)


async def serve(kind: str, artifact: str) -> None:
    """Serves until terminated."""
    server: Any = _service(artifact) if kind == "service" else _echo(by_thread=kind == "thread")
    port = await server.start() if kind == "service" else server.add_insecure_port("127.0.0.1:0")
    if kind != "service":
        await server.start()
    print_ports(port)
    await asyncio.Event().wait()


def _echo(*, by_thread: bool) -> grpc.aio.Server:
    threads = ThreadPoolExecutor(1)

    async def answer(data: bytes, context: Any) -> bytes:
        if by_thread:
            return await asyncio.get_running_loop().run_in_executor(threads, bytes, data)
        return data

    server = grpc.aio.server()
    handlers = {"Predict": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    return server


def _service(artifact: str) -> Any:
    import numpy as np

    from predictors.heads import Predicted
    from predictors.runtime import open_runtime
    from predictors.service.batcher import BatchingSettings
    from predictors.service.config import ServeConfig
    from predictors.service.server import PredictionServer

    runtime: Any = open_runtime(artifact, provider="cpu")
    batching = BatchingSettings.cpu(2)
    numbers = [np.ones(size) for size in range(batching.max_batch + 1)]
    predictions = [Predicted(mu=ones * 5, sigma=ones, nu=ones * 3.5) for ones in numbers]
    tokens = runtime.tokenizer([PROMPT])[0]
    runtime.tokenizer = lambda prompts: [tokens] * len(prompts)
    runtime.run, runtime.warm_up = lambda prompts, *_, **__: predictions[len(prompts)], lambda: None
    return PredictionServer([runtime], batching, ServeConfig(artifact=artifact, port=0))


async def put_load(variant: Variant, rate: float, seconds: float) -> None:
    """Sends `rate` requests per second at equal intervals; appends the server's CPU time per response."""
    from predictors.proto import predictor_v1_pb2 as pb

    data = pb.PredictRequest(request_id="r", prompt=PROMPT).SerializeToString()
    async with grpc.aio.insecure_channel(variant.address) as channel:
        await channel.channel_ready()
        call: Any = cast(Any, channel).unary_unary(METHOD)
        for _ in range(20):
            await call(data)
        before, start, num_sent = cpu_s(variant.pid), time.perf_counter(), 0
        calls = set()
        while (now := time.perf_counter() - start) < seconds:
            while num_sent < now * rate:
                calls.add(asyncio.ensure_future(call(data)))
                num_sent += 1
            await asyncio.sleep(max(0.0, num_sent / rate - now))
        await asyncio.gather(*calls)
        variant.cpu_ms.append((cpu_s(variant.pid) - before) * 1000 / num_sent)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--rate", type=float, default=170.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=1.0, help="duration per variant and round")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        from predictors.hosting.process import run

        run(serve(*options.serve))
        return
    with contextlib.ExitStack() as stack:
        from tests.predictors.fakes import write_artifact

        artifact = write_artifact(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tiny")
        variants = {}
        for name, kind in VARIANTS.items():
            words = ("benchmarks.service.front_end", "--serve", kind, str(artifact))
            process, [port] = stack.enter_context(printing_ports(*words))
            variants[name] = Variant(process.pid, f"127.0.0.1:{port}")
        for _ in range(options.rounds):
            for variant in variants.values():
                asyncio.run(put_load(variant, options.rate, options.seconds))
    print(f"{options.rate:g} requests/s, {options.rounds} rounds of {options.seconds:g} s, interleaved\n")
    echo = next(iter(variants.values())).cpu_ms
    rows = []
    for name, variant in variants.items():
        cost = variant.cpu_ms
        over = statistics.median(own - its for own, its in zip(cost, echo, strict=True))
        rows.append((name, f"{statistics.median(cost):.2f} ({min(cost):.2f}-{max(cost):.2f})", f"{over:.2f}"))
    print(markdown_table(("variant", "CPU ms per request", "over the echo"), rows))


if __name__ == "__main__":
    main()
