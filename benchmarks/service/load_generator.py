"""Load generator for prediction servers; runs in its own process so that it affects measurements little.

Open loop (`--rate`): requests start at the times of a Poisson process regardless of earlier ones, and latency
counts from the time at which a request was due. Closed loop (`--callers`): each caller sends a request as
soon as it has the previous response. Prints one JSON object; see `report`.

    python -m benchmarks.service.load_generator grpc://127.0.0.1:50051 --rate 100 --seconds 10
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import aiohttp
import numpy as np

from benchmarks.shared.command import Parser
from predictors.client import ClientSettings, GrpcPredictor, PredictorError
from scheduler_core.prediction.predictor import PredictionRequest

OK = "OK"
#: Number of connections over gRPC, and of different prompts.
CONNECTIONS, NUM_PROMPTS = 4, 2000
#: Deadline of one request.
TIMEOUT_S = 20.0
TEXT = (
    "write name list the a long short story essay river mountain code function proof of in about with for and "
    "explain compare summarise table python history why how between first every answer steps simple"
)
#: Sends a prompt and returns the status: OK, a gRPC status, or "HTTP 503".
Ask = Callable[[str], Awaitable[str]]
#: Due time and latency in seconds, and status; for an exception its name.
Finished = tuple[float, float, str]


def make_prompts(seed: int, median_words: float = 22.0) -> Iterator[str]:
    """Endless texts of 4 to 200 words, as in chats: log-normal around `median_words`, 1 % above 6 times that."""
    words = TEXT.split()
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(rng.normal(np.log(median_words), 0.75, size=NUM_PROMPTS)), 4, 200).astype(int)
    return itertools.cycle([" ".join(rng.choice(words, size=length)) for length in lengths])


async def run_load(load: argparse.Namespace) -> list[Finished]:
    """Sends a load from this event loop; returns its requests, those of the warm-up included."""
    prompts, finished = make_prompts(load.seed), list[Finished]()
    end_s = load.seconds + load.warmup_s
    async with connected(load) as ask:
        begin = time.perf_counter()

        async def one(due_s: float) -> None:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    status = await ask(next(prompts))
            except Exception as error:
                status = type(error).__name__
            finished.append((due_s, time.perf_counter() - begin - due_s, status))

        async def caller() -> None:
            while (now_s := time.perf_counter() - begin) < end_s:
                await one(now_s)

        if load.rate is None:
            await asyncio.gather(*(caller() for _ in range(load.callers)))
            return finished
        rng, due_s = np.random.default_rng(load.seed + 1), 0.0
        async with asyncio.TaskGroup() as tasks:
            while (due_s := due_s + rng.exponential(1 / load.rate)) < end_s:
                await asyncio.sleep(max(0.0, begin + due_s - time.perf_counter()))
                tasks.create_task(one(due_s))
    return finished


def report(finished: Sequence[Finished], seconds: float, warmup_s: float) -> dict[str, Any]:
    """Results of the part after the warm-up.

    Returns:
        num_requests: Requests that were due in it. all_answers: Responses, also to requests of the warm-up.
        statuses: Number of requests by status. answers_per_s: Responses received within it, per second.
        latency_ms: p50, p90, p99 and max of the successful requests; empty if there are none.
    """
    due_s, latency_s, status = map(np.array, zip(*finished, strict=True))
    counted, answered, ended_s = due_s >= warmup_s, status == OK, due_s + latency_s
    latencies = 1000 * latency_s[counted & answered]
    in_time = answered & (ended_s >= warmup_s) & (ended_s < warmup_s + seconds)
    return {
        "num_requests": int(counted.sum()),
        "all_answers": int(answered.sum()),
        "statuses": dict(Counter(status[counted].tolist())),
        "answers_per_s": float(in_time.sum() / seconds),
        "latency_ms": {
            name: float(np.percentile(latencies, level))
            for name, level in (("p50", 50), ("p90", 90), ("p99", 99), ("max", 100))
            if len(latencies)
        },
    }


@contextlib.asynccontextmanager
async def connected(load: argparse.Namespace) -> AsyncIterator[Ask]:
    """Connects to the server of a load by the scheme of its URL; yields a function that sends a prompt."""
    scheme, _, address = load.url.partition("://")
    if scheme == "grpc":
        # Our client without its retries; every prompt is a separate request.
        settings = ClientSettings(timeout_s=TIMEOUT_S, max_attempts=1, num_connections=CONNECTIONS)
        async with GrpcPredictor(address, settings) as predictor:

            async def by_grpc(prompt: str) -> str:
                try:
                    await predictor.responses([PredictionRequest("", prompt, 1)])
                except PredictorError as error:
                    return error.code
                return OK

            yield by_grpc
        return
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def by_http(prompt: str) -> str:
            async with session.post(load.url, json={"prompt": prompt}) as response:
                await response.read()
                return OK if response.status == 200 else f"HTTP {response.status}"

        yield by_http


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("url", help="grpc:// or http:// address")
    parser.add_argument("--seconds", type=float, default=10.0, help="time in which requests start and count")
    parser.add_argument("--warmup_s", type=float, default=0.0, help="seconds before, which do not count")
    parser.add_argument("--rate", type=float, help="requests per second; default: closed loop")
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    load = parser.parse_args()
    print(json.dumps(report(asyncio.run(run_load(load)), load.seconds, load.warmup_s)))


if __name__ == "__main__":
    main()
