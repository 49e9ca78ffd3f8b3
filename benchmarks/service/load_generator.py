"""Load generator for prediction servers; runs in its own process so that it affects measurements little.

Open loop (`--rate`): requests start at the times of a Poisson process regardless of earlier ones, and latency
counts from the time at which a request was due. Closed loop (`--callers`): each caller sends a request as
soon as it has the previous response. Prints one JSON object.

    python -m benchmarks.service.load_generator grpc://127.0.0.1:50051 --rate 100 --seconds 10
    python -m benchmarks.service.load_generator http://127.0.0.1:8000/predict --rate 20 --seconds 10
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks.service.prompts import make_prompts
from benchmarks.shared.command import Parser

OK = "OK"
Ask = Callable[[str], Awaitable[str]]
"""Sends a prompt and returns the name of the status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Parameters of a load.

    Attributes:
        url: grpc:// or http:// address.
        seconds: Time in which requests start.
        warmup_s: Seconds at the start that are not counted.
        rate: Requests per second of an open loop; None: closed loop.
        callers: Number of callers of the closed loop.
        timeout_s: Deadline of one request.
        connections: Number of connections.
        seed: Seed of prompts and arrival times.
        num_prompts: Number of different prompts.
        body: HTTP only: kind of JSON body; see `json_body`.
        max_tokens: gRPC only: also request predictions truncated at this length.
    """

    url: str
    seconds: float
    warmup_s: float = 0.0
    rate: float | None = None
    callers: int = 64
    timeout_s: float = 30.0
    connections: int = 4
    seed: int = 0
    num_prompts: int = 2000
    body: str = "prompt"
    max_tokens: int | None = None


@dataclass(slots=True)
class Tally:
    """Results: due time in seconds, latency and status of every request that was due after the warm-up."""

    due_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    status: list[str] = field(default_factory=list)
    lag_s: list[float] = field(default_factory=list)

    def add(self, due_s: float, latency_s: float, status: str) -> None:
        """Records a finished request."""
        self.due_s.append(due_s)
        self.latency_s.append(latency_s)
        self.status.append(status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Results of the measured part of a load.

    Attributes:
        seconds: Length of the measured part.
        num_requests: Requests that were due in it.
        all_answers: Responses, including those to requests of the warm-up.
        statuses: Number of requests by status: OK, a gRPC status, "HTTP 503", or the name of an exception.
        answers_per_s: Responses received within the measured part, per second.
        latency_ms: p50, p90, p99 and max of the successful requests; empty if there are none.
        refused_ms: The same for requests rejected with RESOURCE_EXHAUSTED.
        lag_p99_ms: Delay of the generator itself, open loop only; above a few ms, it had too little CPU.
        answers_by_second: Responses by the second in which they were received.
    """

    seconds: float
    num_requests: int
    all_answers: int
    statuses: dict[str, int]
    answers_per_s: float
    latency_ms: dict[str, float]
    refused_ms: dict[str, float]
    lag_p99_ms: float | None
    answers_by_second: list[int]


async def run_load(load: Load) -> Report:
    """Sends a load from this event loop and returns its report."""
    tally = Tally()
    async with connected(load) as ask:
        begin = time.perf_counter()
        if load.rate is None:
            await _closed_loop(load, ask, tally, begin)
        else:
            await _open_loop(load, ask, tally, begin)
    return report(load, tally)


async def _open_loop(load: Load, ask: Ask, tally: Tally, begin: float) -> None:
    assert load.rate is not None
    rng = np.random.default_rng(load.seed + 1)
    prompts = itertools.cycle(make_prompts(load.num_prompts, load.seed))
    due = 0.0
    tasks: set[asyncio.Task[None]] = set()
    while (due := due + rng.exponential(1 / load.rate)) < load.seconds + load.warmup_s:
        ahead = begin + due - time.perf_counter()
        if ahead > 0:
            await asyncio.sleep(ahead)
        elif len(tasks) % 32 == 0:
            await asyncio.sleep(0)
        if due >= load.warmup_s:
            tally.lag_s.append(max(0.0, time.perf_counter() - begin - due))
        task = asyncio.create_task(_one(load, ask, tally, next(prompts), begin, due))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)


async def _closed_loop(load: Load, ask: Ask, tally: Tally, begin: float) -> None:
    prompts = itertools.cycle(make_prompts(load.num_prompts, load.seed))

    async def caller() -> None:
        while (now := time.perf_counter() - begin) < load.seconds + load.warmup_s:
            await _one(load, ask, tally, next(prompts), begin, now)

    await asyncio.gather(*(caller() for _ in range(load.callers)))


async def _one(load: Load, ask: Ask, tally: Tally, prompt: str, begin: float, due: float) -> None:
    try:
        async with asyncio.timeout(load.timeout_s):
            status = await ask(prompt)
    except Exception as error:
        status = type(error).__name__
    tally.add(due, time.perf_counter() - begin - due, status)


def report(load: Load, tally: Tally) -> Report:
    """Computes counts and quantiles of the measured part."""
    due, latency = np.array(tally.due_s), np.array(tally.latency_s)
    status = np.array(tally.status, dtype=object)
    counted = due >= load.warmup_s
    ended = due + latency
    end = load.warmup_s + load.seconds
    answered = status == OK
    in_time = answered & (ended >= load.warmup_s) & (ended < end)
    seconds = (ended[in_time] - load.warmup_s).astype(int)
    return Report(
        seconds=load.seconds,
        num_requests=int(counted.sum()),
        all_answers=int(answered.sum()),
        statuses=dict(Counter(status[counted].tolist())),
        answers_per_s=float(in_time.sum() / load.seconds),
        latency_ms=_quantiles(latency[counted & answered]),
        refused_ms=_quantiles(latency[counted & (status == "RESOURCE_EXHAUSTED")]),
        lag_p99_ms=float(np.quantile(tally.lag_s, 0.99) * 1000) if tally.lag_s else None,
        answers_by_second=np.bincount(seconds, minlength=int(load.seconds)).tolist() if len(due) else [],
    )


def json_body(kind: str, prompt: str) -> dict[str, Any]:
    """One prompt as "prompt": {"prompt": ...}, "prompts": {"prompts": [...]}, or "tensors": Open Inference Protocol."""
    if kind == "tensors":
        tensor = {"name": "prompt", "shape": [1, 1], "datatype": "BYTES", "data": [prompt]}
        return {"inputs": [tensor]}
    return {"prompts": [prompt]} if kind == "prompts" else {"prompt": prompt}


def _quantiles(seconds: Any) -> dict[str, float]:
    if not len(seconds):
        return {}
    p50, p90, p99, top = np.quantile(seconds, [0.5, 0.9, 0.99, 1.0]) * 1000
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99), "max": float(top)}


@contextlib.asynccontextmanager
async def connected(load: Load) -> AsyncIterator[Ask]:
    """Connects to the server of a load by the scheme of its URL; yields a function that sends a prompt."""
    scheme, _, address = load.url.partition("://")
    if scheme in ("http", "https"):
        async with _http(load) as ask:
            yield ask
    elif scheme == "grpc":
        async with _grpc(load, address) as ask:
            yield ask
    else:
        raise SystemExit(f"url: got {load.url!r}; allowed: grpc:// or http://")


@contextlib.asynccontextmanager
async def _grpc(load: Load, address: str) -> AsyncIterator[Ask]:
    """Uses our client without its retries; every prompt is a separate request."""
    from predictors.client import ClientSettings, GrpcPredictor, PredictorError
    from scheduler_core.prediction.predictor import PredictionRequest

    settings = ClientSettings(timeout_s=load.timeout_s, max_attempts=1, num_connections=load.connections)
    truncated_length = load.max_tokens is not None
    async with GrpcPredictor(address, settings) as predictor:

        async def ask(prompt: str) -> str:
            try:
                await predictor.responses(
                    [PredictionRequest("", prompt, load.max_tokens or 1)], truncated_length=truncated_length
                )
            except PredictorError as error:
                return error.code
            return OK

        yield ask


@contextlib.asynccontextmanager
async def _http(load: Load) -> AsyncIterator[Ask]:
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def ask(prompt: str) -> str:
            async with session.post(load.url, json=json_body(load.body, prompt)) as response:
                await response.read()
                return OK if response.status == 200 else f"HTTP {response.status}"

        yield ask


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--warmup_s", type=float, default=0.0)
    parser.add_argument("--rate", type=float, help="requests per second; default: closed loop")
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--timeout_s", type=float, default=30.0)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_prompts", type=int, default=2000)
    parser.add_argument("--body", choices=("prompt", "prompts", "tensors"), default="prompt")
    parser.add_argument("--max_tokens", type=int)
    load = Load(**vars(parser.parse_args()))
    print(json.dumps(asdict(asyncio.run(run_load(load)))))


if __name__ == "__main__":
    main()
