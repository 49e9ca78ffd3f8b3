"""Cost of a step in vLLM's scheduler and in ours, without a model.

    PYTHONPATH=. .venv-vllm/bin/python -m benchmarks.vllm.scheduler [--policies vllm bounded_shortest tie ssjf fcfs+slai ...]
                            [--rounds 3] [--running 256] [--waiting 2000] [--parts 3] [--part_steps 200] [--turn_steps 20]
                            [--request_tokens 2048]

Run by vLLM's Python (`make vllm-env`). Every scheduler is vLLM's real AsyncScheduler with its KV cache
manager. Ours also has a policy, a prediction for each request that arrives one step later, and online
calibration in its own thread. Every finished request is replaced by a new one, so that the numbers of running
and waiting requests are constant. With shortest-first policies more requests finish per step, so vLLM's own
code has more work too. With fcfs+slai the batch former slai plans the steps. The KV cache has memory for `request_tokens` of
each running request: formers that hold more requests in memory than run do so up to this. Per step: CPU time of `schedule`,
`update_from_output` and the arrivals, in the calling thread, without garbage collection. Each scheduler runs in its own
process, as in an engine. They take turns of `turn_steps`: few, and the machine has the same speed in all of them; many, and
a scheduler keeps its data in the processor's cache. Each turn is compared with that of the first scheduler, because the speed
of a shared machine changes from second to second. The share of our own methods is measured within each step, so the machine's
speed does not change it; it does not have our queue, which vLLM's code calls. All requests come at once, and a step with fewer of them is cheaper, so each
part of the steps has its own row, with how many requests were in a step and in memory.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.v1.request import Request

from benchmarks.shared.command import Parser
from benchmarks.vllm.real_scheduler import BLOCK_TOKENS, VLLM, outputs_of, own_process, real_scheduler
from scheduler_core.prediction.predictions import LengthPrediction, Prediction
from scheduler_core.prediction.predictor import PredictionEvent, PredictionStatus
from scheduler_core.report.page import markdown_table

PROMPT_TOKENS, MAX_TOKENS, SIGMA, NU = 100, 1500, 0.5, 3.5
#: Without a former, and each former with a policy.
POLICIES = [
    VLLM, "bounded_shortest", "tie", "ssjf", "fcfs+chunked_prefill", "fcfs+slai", "uniboost+uniboost", "semantic+stage_aware",
    "fcfs+rad", "fcfs+rad_prefill_first", "ssjf+quantile_reserve", "fcfs+orca", "fcfs+request_level", "fcfs+vllm",
]  # fmt: skip


#: Our methods that take a step's time; none of them calls another one.
OURS = (
    "_tailcast_start_step", "_tailcast_plan", "_tailcast_end_planning", "_tailcast_report", "_tailcast_end_step",
    "_tailcast_arrive", "_tailcast_end",
)  # fmt: skip


class Predictions:
    """Replaces the plugin's thread: a prediction for each submitted request, one step later."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._events: list[PredictionEvent] = []
        self.lengths: dict[str, int] = {}

    def submit(self, query: Any, *_: Any) -> None:
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
        name, _, batching = (policy or "").partition("+")
        settings: dict[str, Any] = {"predictor": "tiny"} | ({"batching": batching} if batching else {})
        if batching.startswith("rad"):
            settings["batching_parameters"] = {"t_row": 128, "t_col": options.running, "t_red": 32}
        num_blocks = options.running * options.request_tokens // BLOCK_TOKENS
        self._scheduler = real_scheduler(
            name or None, model, num_blocks, settings, max_model_len=2048,
            max_num_seqs=options.running, max_num_batched_tokens=8192, enable_prefix_caching=False,
            async_scheduling=True,
        )  # fmt: skip
        if policy is not None:
            self._scheduler._tailcast_thread.close()
            self._scheduler._tailcast_thread = self._predictions
        self._ours_s = 0.0
        for name in OURS if policy is not None else ():
            setattr(self._scheduler, name, self._timed(getattr(self._scheduler, name)))
        for _ in range(options.running + options.waiting):
            self._add()

    def step(self) -> tuple[float, int, int, int, float]:
        """Runs one step; its seconds, the requests in it, in memory, and that ended, and the seconds of our methods."""
        self._ours_s = 0.0
        begin = time.thread_time()
        plan = self._scheduler.schedule()
        planned = time.thread_time()
        result = outputs_of(self._scheduler, plan)
        generated = time.thread_time()
        self._scheduler.update_from_output(plan, result)
        ended = self._num_requests - len(self._scheduler.requests) - self.num_ended
        for _ in range(ended):
            self._add()
        self.num_ended += ended
        step_s = time.thread_time() - generated + planned - begin
        return step_s, len(plan.num_scheduled_tokens), len(self._scheduler.running), ended, self._ours_s

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begin = time.thread_time()
            try:
                return method(*args)
            finally:
                self._ours_s += time.thread_time() - begin

        return call

    def _add(self) -> None:
        length = int(np.clip(self._rng.lognormal(5.5, 1.0), 2, MAX_TOKENS))
        sampling = SamplingParams(max_tokens=length, temperature=0.0)
        sampling.update_from_generation_config({}, 1)
        name = f"r{self._num_requests}"
        self._num_requests += 1
        self._predictions.lengths[name] = length
        self._scheduler.add_request(Request(name, [5] * PROMPT_TOKENS, sampling, None))


def run_steps(policy: str | None, model: Path, options: argparse.Namespace, requested: Connection) -> None:
    """Runs as many steps as requested, each time, and sends what `Side.step` says of them."""
    side = Side(policy, model, options)
    while (num_steps := requested.recv()) is not None:
        requested.send([side.step() for _ in range(num_steps)])


def measured(options: argparse.Namespace) -> dict[str, np.ndarray]:
    """The steps of each scheduler [turns, turn_steps, 5], see `Side.step`."""
    turns: dict[str, list[list[tuple[float, int, int, int, float]]]] = {name: [] for name in options.policies}
    with ExitStack() as stack:
        ends = {name: stack.enter_context(own_process(run_steps, name, options)) for name in turns}
        for _ in range(options.parts * options.part_steps // options.turn_steps):
            for name, end in ends.items():
                end.send(options.turn_steps)
                turns[name].append(end.recv())
    return {name: np.array(steps, float) for name, steps in turns.items()}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=2000)
    parser.add_argument("--parts", type=int, default=3)
    parser.add_argument("--part_steps", type=int, default=200)
    parser.add_argument("--turn_steps", type=int, default=20)
    parser.add_argument("--request_tokens", type=int, default=2048)
    options = parser.parse_args()
    if options.part_steps % options.turn_steps:
        parser.error(f"--part_steps: got {options.part_steps}; allowed: multiples of --turn_steps")
    rounds = [measured(options) for _ in range(options.rounds)]
    num_turns, first, lines = options.part_steps // options.turn_steps, options.policies[0], []
    for part in range(options.parts):
        chosen = slice(part * num_turns, (part + 1) * num_turns)
        steps = f"{part * options.part_steps + 1} to {(part + 1) * options.part_steps}"
        for name in options.policies:
            own = np.concatenate([turns[name][chosen] for turns in rounds])
            others = np.concatenate([turns[first][chosen] for turns in rounds])
            fast, median, p99 = 1e3 * np.percentile(own[..., 0], (10, 50, 99))
            more = fast - 1e3 * np.percentile(others[..., 0], 10)
            _, in_step, in_memory, ended, _ = own.mean(axis=(0, 1))
            ours = np.median(own[..., 4] / (own[..., 0] - own[..., 4]))
            ratios = np.median(own[..., 0], axis=1) / np.median(others[..., 0], axis=1)
            low, middle, high = np.percentile(ratios, (25, 50, 75))
            lines.append(
                (name, steps, f"{in_step:.0f}", f"{in_memory:.0f}", f"{ended:.2f}", f"{fast:.2f}", f"{median:.2f}", f"{p99:.2f}",
                 "-" if name == first else f"{more:.2f}", "-" if name == first else f"{middle:.2f} ({low:.2f} to {high:.2f})",
                 "-" if name == VLLM else f"{ours:.2f}")
            )  # fmt: skip
    header = (
        "scheduler", "steps", "in a step", "in memory", "ended per step", "P10, ms", "median, ms", "P99, ms",
        f"P10 above {first}, ms", f"median of a turn, times that of {first} (quartiles)",
        "ours, times vLLM's own of the step",
    )  # fmt: skip
    print(f"{options.running} running, {options.waiting:,} waiting, {options.rounds} rounds:\n")
    print(markdown_table(header, lines))


if __name__ == "__main__":
    main()
