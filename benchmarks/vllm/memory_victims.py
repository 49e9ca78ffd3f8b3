"""Recomputed tokens of vLLM's rule for preempted requests and of ours, on a real engine with few blocks.

    make vllm-env
    python -m benchmarks.vllm.memory_victims [--kv_tokens 3200] [--load 0.9] [--requests 100] [--repetitions 3] [--policy fcfs]

Both sides get the same requests in the same order and at the same times: random prompts and outputs of fixed lengths, both
lognormal. `fcfs` is vLLM's order, so that only the preempted requests differ; their remaining output is known, because their
length is fixed. The first run, of vLLM's own scheduler with all requests present, gives the capacity, and the step times of the
engine clock that arrivals follow (`clock.py`). Prefix caching is off, as in `server.py`: recomputed are all prompt tokens of
the step log beyond those of the prompts, in percent of all tokens. Latencies are in engine time.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.command import Parser
from benchmarks.shared.pages import mean_cell
from benchmarks.vllm.client import send_all
from benchmarks.vllm.clock import EngineClock
from benchmarks.vllm.mixes import BLOCK_TOKENS, TOKEN_IDS
from benchmarks.vllm.model import NAME, packaged_model
from benchmarks.vllm.plan import Ask
from benchmarks.vllm.results import CLOCK, calibrated, measured_capacity, run_metrics
from benchmarks.vllm.server import MODEL, EngineServer, StepTail, engine_server
from scheduler_core.report.page import markdown_table
from scheduler_core.shell.files import write_json

VLLM = "vLLM's own"
MAX_PROMPT, MAX_OUTPUT = 700, 200
COLUMNS = {
    "recomputed": "recomputed, %", "ttlt_mean": "latency mean, s", "ttlt_p99": "P99", "ttft_mean": "TTFT mean, s",
    "ttft_p99": "P99", "pause_mean": "longest pause mean, s", "pause_p99": "P99",
}  # fmt: skip


def asks(options: argparse.Namespace, repetition: int, rate_rps: float | None) -> list[Ask]:
    """The requests of a run; without a rate all arrive at once."""
    rng = np.random.default_rng(options.seed)
    num = options.requests
    prompts = rng.lognormal(4.1, 1.2, num).astype(int).clip(1, MAX_PROMPT).tolist()
    outputs = rng.lognormal(4.0, 0.7, num).astype(int).clip(2, MAX_OUTPUT).tolist()
    texts = [tuple(rng.integers(*TOKEN_IDS, prompt).tolist()) for prompt in prompts]
    rng = np.random.default_rng([options.seed, repetition])
    times_s = np.zeros(num) if rate_rps is None else np.cumsum(rng.exponential(1 / rate_rps, num))
    return [
        Ask(f"r{number}", texts[number], float(at_s), number, outputs[number])
        for number, at_s in zip(rng.permutation(num).tolist(), times_s, strict=True)
    ]


def metrics(run: Mapping[str, Any]) -> dict[str, float]:
    """The columns of a run."""
    rows = run["requests"]
    prompt_tokens = sum(row["prompt_tokens"] for row in rows)
    tokens = prompt_tokens + sum(row["output_tokens"] for row in rows)
    processed = sum(step[2] for step in run["steps"])
    pauses_s = [max(np.diff(row["token_clock_s"]), default=0.0) for row in rows]
    pauses = {"pause_mean": float(np.mean(pauses_s)), "pause_p99": float(np.percentile(pauses_s, 99))}
    return run_metrics(rows, CLOCK) | pauses | {"recomputed": 100 * (processed - prompt_tokens) / tokens}


class Engines:
    """The engine of each side, started at its first run; idle ones are paused."""

    def __init__(self, options: argparse.Namespace, stack: ExitStack) -> None:
        self._options = options
        self._stack = stack
        self._engines: dict[str, EngineServer] = {}

    def run(self, side: str, rows: list[Ask], clock: EngineClock) -> dict[str, Any]:
        """Performs a run, see `send_all`."""
        for engine in self._engines.values():
            engine.process.pause()
        if side in self._engines:
            self._engines[side].process.resume()
        else:
            self._engines[side] = self._start(side)
        engine = self._engines[side]
        return send_all(engine.url, MODEL, rows, 0.0, clock, StepTail(engine.steps))

    def _start(self, side: str) -> EngineServer:
        options = self._options
        # vLLM never uses one block of its cache.
        blocks = -(-options.kv_tokens // BLOCK_TOKENS) + 1
        words = ["--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(blocks)]
        engine = self._stack.enter_context(
            engine_server(
                options.vllm_python, options.model, options.out, "vllm" if side == VLLM else side,
                max_num_seqs=options.max_num_seqs,
                settings=None if side == VLLM else {"policy": side},
                options=words,
            )
        )  # fmt: skip
        rows = [Ask(f"w{number}", tuple(range(100, 164)), 0.0, number, 4 + number) for number in range(16)]
        send_all(engine.url, MODEL, rows, 0.0, EngineClock(), StepTail(engine.steps))
        return engine


def main() -> int:
    options = _parser().parse_args()
    if options.model is None:
        options.model = options.vllm_python.parents[1] / "models" / NAME
        packaged_model(options.model)
    options.out.mkdir(parents=True, exist_ok=True)
    results = defaultdict[str, list[dict[str, float]]](list)
    with ExitStack() as stack:
        engines = Engines(options, stack)
        first = engines.run(VLLM, asks(options, 0, None), EngineClock())
        step_time = calibrated(first["steps"]).step_time
        rate_rps = options.load * measured_capacity(first["requests"], options.max_num_seqs)
        for repetition in range(options.repetitions):
            sides = (VLLM, options.policy)[:: 1 if repetition % 2 == 0 else -1]
            for side in sides:
                run = engines.run(side, asks(options, repetition, rate_rps), EngineClock(step_time))
                results[side].append(metrics(run))
                write_json(options.out / "results.json", {"all at once": metrics(first), **results})
                print(
                    f"{side}, repetition {repetition}: recomputed {results[side][-1]['recomputed']:.1f} %",
                    flush=True,
                )
    lines = [
        [side, *(mean_cell([run[name] for run in runs]) for name in COLUMNS)]
        for side, runs in results.items()
    ]
    pairs = list(zip(results[options.policy], results[VLLM], strict=True))
    ratios = [[own[name] / other[name] for own, other in pairs if other[name]] for name in COLUMNS]
    print(markdown_table(("scheduler", *COLUMNS.values()), [*lines, ["ratio", *map(mean_cell, ratios)]]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--vllm_python", type=Path, default=Path(".venv-vllm/bin/python"), help="see make vllm-env")
    add("--model", type=Path, help="model folder; default: SmolLM2, saved next to vLLM's environment")
    add("--out", type=Path, default=Path("out/vllm_memory_victims"), help="folder of logs and results.json")
    add("--policy", default="fcfs", help="policy of our side; it must not evict by key")
    add("--kv_tokens", type=int, default=3200)
    add("--max_num_seqs", type=int, default=24)
    add("--load", type=float, default=0.9, help="fraction of the capacity with this memory")
    add("--requests", type=int, default=100)
    add("--repetitions", type=int, default=3)
    add("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
