"""Latency of rejections by a service with a full queue: a model that takes milliseconds, under overload.

It depends on the number of gRPC servers on the port (`num_listeners`); variants are measured in turn.
Latency counts from the time at which the client sent the call. The load comes from this process.

    python -m benchmarks.service.refusals
    python -m benchmarks.service.refusals --overload 2 --seconds 10
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

METHOD = "/tailcast.predictor.v1.Predictor/Predict"
PROMPT = "write a long essay about the sea and name three rivers"
MAX_QUEUE = 64
CONNECTIONS = 8
VARIANTS = {"1 listener": 1, "4 listeners": 4}


@dataclass
class Variant:
    """One server process and the results of its load."""

    process: subprocess.Popen[str]
    port: int
    answered_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0

    def cpu_now_s(self) -> float:
        """CPU seconds that the server process has used so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def row(self) -> str:
        """Row of the table."""
        parts = [f"{len(self.answered_s) / self.seconds:9.0f}", f"{len(self.refused_s):8d}"]
        for values in (self.refused_s, self.answered_s):
            quantiles = np.quantile(values, [0.5, 0.99]) * 1000 if values else [float("nan")] * 2
            parts += [f"{value:9.0f}" for value in quantiles]
        num_calls = len(self.answered_s) + len(self.refused_s)
        return " ".join([*parts, f"{self.cpu_s * 1000 / num_calls:8.2f}"])


def serve(artifact: str, listeners: int) -> None:
    """Writes the port to stdout and serves until terminated."""
    from predictors.hosting.process import run
    from predictors.runtime import open_runtime
    from predictors.service.batcher import BatchingSettings
    from predictors.service.config import ServeConfig
    from predictors.service.server import PredictionServer

    async def main() -> None:
        batching = dataclasses.replace(BatchingSettings.cpu(os.cpu_count() or 1), max_queue=MAX_QUEUE)
        config = ServeConfig(artifact=artifact, port=0)
        runtimes = [open_runtime(artifact, provider="cpu")]
        server = PredictionServer(runtimes, batching, config, num_listeners=listeners)
        sys.stdout.write(f"{await server.start()}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()

    run(main())


@contextlib.contextmanager
def started(artifact: Path, listeners: int) -> Iterator[Variant]:
    """A running variant; terminated at the end."""
    options = ["--serve", str(artifact), "--listeners", str(listeners)]
    process = subprocess.Popen([sys.executable, __file__, *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Variant(process, int(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()


@contextlib.asynccontextmanager
async def asking(variant: Variant) -> Any:
    """A function that sends one request over one of several connections and records its latency."""
    from predictors.proto import predictor_v1_pb2 as pb

    data = pb.PredictRequest(request_id="r", prompt=PROMPT).SerializeToString()
    async with contextlib.AsyncExitStack() as stack:
        options = [("grpc.use_local_subchannel_pool", 1)]
        address = f"127.0.0.1:{variant.port}"
        calls: list[Any] = []
        for _ in range(CONNECTIONS):
            channel: Any = await stack.enter_async_context(
                grpc.aio.insecure_channel(address, options=options)
            )
            await channel.channel_ready()
            calls.append(channel.unary_unary(METHOD))

        async def ask(number: int) -> None:
            start = time.perf_counter()
            durations = variant.answered_s
            try:
                await calls[number % CONNECTIONS](data, timeout=60)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                durations = variant.refused_s
            durations.append(time.perf_counter() - start)

        yield ask


async def capacity(variant: Variant, seconds: float, callers: int = 32) -> float:
    """Responses per second in a closed loop of `callers` callers."""
    num_before = len(variant.answered_s)
    async with asking(variant) as ask:
        end = time.perf_counter() + seconds

        async def caller(number: int) -> None:
            while time.perf_counter() < end:
                await ask(number)

        await asyncio.gather(*(caller(number) for number in range(callers)))
    rate = (len(variant.answered_s) - num_before) / seconds
    del variant.answered_s[num_before:]
    return rate


async def flood(variant: Variant, rate: float, seconds: float, seed: int) -> None:
    """Open loop: sends requests at the times of a Poisson process."""
    rng = np.random.default_rng(seed)
    tasks: set[asyncio.Task[None]] = set()
    async with asking(variant) as ask:
        cpu_s, start, due, number = variant.cpu_now_s(), time.perf_counter(), 0.0, 0
        while (due := due + rng.exponential(1 / rate)) < seconds:
            await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
            tasks.add(asyncio.create_task(ask(number)))
            number += 1
        await asyncio.gather(*tasks)
        variant.cpu_s += variant.cpu_now_s() - cpu_s
        variant.seconds += time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--overload", type=float, default=1.2, help="load as a multiple of the capacity")
    parser.add_argument("--seconds", type=float, default=3.0, help="duration per variant and round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--listeners", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.listeners)
        return
    from tests.service.harness import write_costly_artifact

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        artifact = write_costly_artifact(folder / "costly", layers=96)
        variants = {
            name: stack.enter_context(started(artifact, listeners)) for name, listeners in VARIANTS.items()
        }
        rate = 0.0
        for turn in range(options.rounds):
            # Measured in each round, because it changes on a shared machine.
            rate = options.overload * asyncio.run(capacity(next(iter(variants.values())), 2.0))
            for variant in variants.values():
                asyncio.run(flood(variant, rate, options.seconds, turn))
        print(f"{options.overload:g} times the capacity (last round {rate:.0f}/s), queue of {MAX_QUEUE}")
        print(
            f"{'':30} {'served/s':>9} {'refused':>8} {'refused ms p50, p99':>19} {'served ms p50, p99':>19}  CPU ms"
        )
        for name, variant in variants.items():
            print(f"{name:30} {variant.row()}")


if __name__ == "__main__":
    main()
