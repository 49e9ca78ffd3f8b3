"""Cost of a step in vLLM's scheduler and in ours, without a model.

    PYTHONPATH=. .venv-vllm/bin/python -m benchmarks.vllm.scheduler [--policies vllm bounded_shortest tie ssjf] [--rounds 3]
                                                   [--running 256] [--waiting 2000] [--steps 2000]

Run by vLLM's Python (`make vllm-env`). Every scheduler is vLLM's real AsyncScheduler with its KV cache
manager. Ours also has a policy, a prediction for each request that arrives one step later, and online
calibration in its own thread. Every finished request is replaced by a new one, so that the numbers of running
and waiting requests are constant. With shortest-first policies more requests finish per step, so vLLM's own
code has more work too. Per step: CPU time of `schedule`, `update_from_output` and the arrivals, in the
calling thread, without garbage collection. Each scheduler runs in its own process, as in an engine, round by
round.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import numpy as np
import torch
from vllm import EngineArgs, SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.shared.command import Parser
from benchmarks.vllm.model import NAME, packaged_model
from scheduler_core.adapters.vllm import scheduler_class
from scheduler_core.prediction.predictions import LengthPrediction, Prediction
from scheduler_core.prediction.predictor import PredictionEvent, PredictionStatus
from scheduler_core.report.page import markdown_table

BLOCK_TOKENS, PROMPT_TOKENS, MAX_TOKENS, SIGMA, NU = 16, 100, 1500, 0.5, 3.5

#: vLLM's own scheduler.
VLLM = "vllm"

#: Warm-up steps.
WARM_UP = 400


class Predictions:
    """Replaces the plugin's thread: a prediction for each submitted request, one step later."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._events: list[PredictionEvent] = []
        self.lengths: dict[str, int] = {}

    def submit(self, query: Any, _: Any) -> None:
        mu = math.log(self.lengths[query.request_id]) + SIGMA * self._rng.standard_normal()
        prediction = Prediction(length=LengthPrediction(mu, SIGMA, NU))
        self._events.append(
            PredictionEvent(query.request_id, prediction, None, 0.001, PredictionStatus.ANSWERED)
        )

    def take(self) -> list[PredictionEvent]:
        events, self._events = self._events, []
        return events

    def withdraw(self, request_id: str) -> None:
        self.lengths.pop(request_id)

    def close(self) -> None:
        pass


class Side:
    """A scheduler with its requests.

    Args:
        policy: Policy of our scheduler; None: vLLM's own scheduler.
        model: Folder of a model, for its configuration.
        options: Parsed options.
    """

    num_ended = 0

    def __init__(self, policy: str | None, model: Path, options: argparse.Namespace) -> None:
        self._rng = np.random.default_rng(0)
        self._predictions = Predictions(np.random.default_rng(1))
        self._num_requests = 0
        # A predictor enables online calibration; its predictions are generated here.
        ours = {"tailcast": {"policy": policy, "predictor": "tiny"}}
        settings = {} if policy is None else {"additional_config": ours}
        config = EngineArgs(
            model=str(model), dtype="float32", max_model_len=2048, max_num_seqs=options.running, async_scheduling=True,
            enable_prefix_caching=False, block_size=BLOCK_TOKENS, max_num_batched_tokens=8192, **settings,
        ).create_engine_config()  # fmt: skip
        config.scheduler_config.async_scheduling = True
        num_blocks = config.cache_config.num_gpu_blocks = options.running * 2048 // BLOCK_TOKENS
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=32, dtype=torch.float32)
        cache = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        kind: Any = AsyncScheduler if policy is None else scheduler_class()
        self._scheduler = kind(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
        )
        if policy is not None:
            self._scheduler._tailcast_thread.close()
            self._scheduler._tailcast_thread = self._predictions
        for _ in range(options.running + options.waiting):
            self._add()

    def step(self) -> float:
        """Runs one step and returns its seconds."""
        begin = time.thread_time()
        plan = self._scheduler.schedule()
        planned = time.thread_time()
        names = list(plan.num_scheduled_tokens)
        samples = [[] if self._scheduler.requests[name].is_prefill_chunk else [7] for name in names]
        rows = {name: row for row, name in enumerate(names)}
        result = ModelRunnerOutput(req_ids=names, req_id_to_index=rows, sampled_token_ids=samples)
        generated = time.thread_time()
        self._scheduler.update_from_output(plan, result)
        ended = self._num_requests - len(self._scheduler.requests) - self.num_ended
        for _ in range(ended):
            self._add()
        self.num_ended += ended
        return time.thread_time() - generated + planned - begin

    def counts(self) -> tuple[int, int]:
        """(running, waiting)."""
        return len(self._scheduler.running), len(self._scheduler.waiting)

    def _add(self) -> None:
        length = int(np.clip(self._rng.lognormal(5.5, 1.0), 2, MAX_TOKENS))
        sampling = SamplingParams(max_tokens=length, temperature=0.0)
        sampling.update_from_generation_config({}, 1)
        name = f"r{self._num_requests}"
        self._num_requests += 1
        self._predictions.lengths[name] = length
        self._scheduler.add_request(Request(name, [5] * PROMPT_TOKENS, sampling, None))


def measured(options: argparse.Namespace) -> None:
    """Prints a row for each scheduler, all in this process, and exits."""
    model = Path(sys.executable).parents[1] / "models" / NAME
    packaged_model(model)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        sides = {name: Side(None if name == VLLM else name, model, options) for name in options.policies}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        gc.disable()
        for number in range(options.steps + WARM_UP):
            for name, side in sides.items():
                spent = side.step()
                if number >= WARM_UP:
                    seconds[name].append(spent)
        gc.enable()
        for name, values in seconds.items():
            running, waiting = sides[name].counts()
            row = {"scheduler": name, "running": running, "waiting": waiting}
            row |= {
                "mean_ms": 1e3 * float(np.mean(values)),
                "p99_ms": 1e3 * float(np.percentile(values, 99)),
                "ended_per_step": sides[name].num_ended / (options.steps + WARM_UP),
            }
            sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()
    os._exit(0)


def rows_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one round."""
    rows: list[dict[str, Any]] = []
    for name in options.policies:
        command = [sys.executable, "-m", "benchmarks.vllm.scheduler", "--measure", "--policies", name]
        for option in ("running", "waiting", "steps"):
            command += [f"--{option}", str(getattr(options, option))]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows += [json.loads(line) for line in output.splitlines() if line.startswith('{"scheduler"')]
    return rows


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--policies", nargs="+", default=[VLLM, "bounded_shortest", "tie", "ssjf"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measured(options)
    rounds = [{row["scheduler"]: row for row in rows_of(options)} for _ in range(options.rounds)]
    lines = []
    for name in options.policies:
        values = {key: [one[name][key] for one in rounds] for key in ("mean_ms", "p99_ms", "ended_per_step")}
        extra = [one[name]["mean_ms"] - one[options.policies[0]]["mean_ms"] for one in rounds]
        more = "-" if name == options.policies[0] else f"{min(extra):.2f} to {max(extra):.2f}"
        cells = (f"{np.mean(one):.2f}" for one in values.values())
        lines.append((name, *cells, more))
    header = ("scheduler", "mean, ms", "P99, ms", "ended per step", f"more than {options.policies[0]}, ms")
    print(f"{options.running} running, {options.waiting:,} waiting, {options.rounds} rounds:\n")
    print(markdown_table(header, lines))


if __name__ == "__main__":
    main()
