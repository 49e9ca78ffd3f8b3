"""Cost of the scheduler's operations; all implementations are interleaved in one process.

    python -m benchmarks.scheduling.operations [--repeats 7] [--largest 100000]

1. The waiting queue, bare heapq and, if vLLM is installed, vLLM's PriorityRequestQueue on the same stream: n
   requests wait, then some are added, some get a new key, some are aborted, some are taken. All use the same
   keys; the queue and heapq get them from the policy (SSJF). heapq and vLLM can only move or abort a request
   by a search and a heapify, O(n). All implementations perform an operation before the next one starts, in
   changing order. Ratios are computed within a repeat; their quartiles over the repeats are in brackets.
2. A key that does not change with time, and a list sorted by score before each take (TIE's decay).
3. One schedule() and one complete() with 256 running requests and n waiting.

The cost of the score is in `length_scores.py`. Times are medians over the repeats of CPU time per operation.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from scheduler_core.engine.plan import StepPlan, StepResult
from scheduler_core.engine.queues import WaitingQueue
from scheduler_core.policies import make_policy
from scheduler_core.policies.base import Policy
from scheduler_core.policies.tie import Tie
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.request import Request, RequestState
from scheduler_core.scheduler import Scheduler, SchedulerConfig

OPERATIONS = ("add", "re-key", "abort", "take")
CAP = 1024


def states(first: int, count: int, rng: np.random.Generator) -> list[RequestState]:
    """Requests with predictions, in order of arrival."""
    items = []
    for index in range(first, first + count):
        request = Request(request_id=f"r{index}", arrival_s=index * 0.01, prompt_tokens=50, max_tokens=CAP)
        items.append(RequestState(request, order=index, prediction=predicted(rng)))
    return items


def predicted(rng: np.random.Generator) -> LengthPrediction:
    """A random prediction."""
    return LengthPrediction(float(rng.normal(4.6, 0.9)), float(rng.uniform(0.2, 0.9)), 3.5)


class Side(ABC):
    """A queue under test."""

    @abstractmethod
    def add(self, state: RequestState) -> None:
        """Adds a request."""

    @abstractmethod
    def rekey(self, state: RequestState) -> None:
        """Updates the key of a request whose prediction has changed."""

    @abstractmethod
    def abort(self, state: RequestState) -> None:
        """Removes a request."""

    @abstractmethod
    def take(self) -> str:
        """Removes the first request and returns its id."""


class Ours(Side):
    """The queue of the scheduler."""

    def __init__(self, policy: Policy) -> None:
        self.queue = WaitingQueue(policy)

    def add(self, state: RequestState) -> None:
        self.queue.push(state, 0.0)

    rekey = add

    def abort(self, state: RequestState) -> None:
        self.queue.remove(state)

    def take(self) -> str:
        head = self.queue.peek()
        assert head is not None
        self.queue.remove(head)
        return head.request_id


class Bare(Side):
    """heapq on tuples."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.heap: list[tuple[float, float, int, RequestState]] = []
        self.entries: dict[str, tuple[float, float, int, RequestState]] = {}

    def _entry(self, state: RequestState) -> tuple[float, float, int, RequestState]:
        return (self.policy.key(state, 0.0), state.request.arrival_s, state.order, state)

    def add(self, state: RequestState) -> None:
        heapq.heappush(self.heap, self._entry(state))

    def remember(self) -> None:
        """Snapshots the entries, because a user of heapq would compare whole entries in the search."""
        self.entries = {entry[3].request_id: entry for entry in self.heap}

    def rekey(self, state: RequestState) -> None:
        self.abort(state)
        self.add(state)

    def abort(self, state: RequestState) -> None:
        self.heap.remove(self.entries[state.request_id])
        heapq.heapify(self.heap)

    def take(self) -> str:
        return heapq.heappop(self.heap)[3].request_id


class Vllm(Side):
    """vLLM's priority queue; its priorities are integers."""

    def __init__(self, every: Sequence[RequestState]) -> None:
        from vllm import SamplingParams
        from vllm.v1.core.sched import request_queue
        from vllm.v1.request import Request as VllmRequest

        new_queue: Any = request_queue.PriorityRequestQueue
        new_request: Any = VllmRequest
        self.queue = new_queue()
        self.requests = {
            state.request_id: new_request(
                request_id=state.request_id,
                prompt_token_ids=[1],
                sampling_params=SamplingParams(max_tokens=CAP),
                pooling_params=None,
                arrival_time=state.request.arrival_s,
            )
            for state in every
        }
        for state in every:
            self._set_priority(state)

    def _set_priority(self, state: RequestState) -> None:
        assert state.prediction is not None
        self.requests[state.request_id].priority = int(1e9 * state.prediction.mu)

    def add(self, state: RequestState) -> None:
        self.queue.add_request(self.requests[state.request_id])

    def rekey(self, state: RequestState) -> None:
        request = self.requests[state.request_id]
        self.queue.remove_request(request)
        self._set_priority(state)
        self.queue.add_request(request)

    def abort(self, state: RequestState) -> None:
        self.queue.remove_request(self.requests[state.request_id])

    def take(self) -> str:
        return str(self.queue.pop_request().request_id)


def has_vllm() -> bool:
    """Whether vLLM can be imported here."""
    try:
        from vllm.v1.core.sched.request_queue import PriorityRequestQueue
    except ImportError:
        return False
    return PriorityRequestQueue is not None


def cpu_s(operation: Callable[..., object], *args: object) -> float:
    """CPU seconds of one call."""
    gc.disable()
    start = time.process_time()
    operation(*args)
    spent = time.process_time() - start
    gc.enable()
    return spent


def for_each(operation: Callable[[RequestState], None], every: Sequence[RequestState]) -> None:
    """Calls `operation` for every request."""
    for state in every:
        operation(state)


def take_many(side: Side, count: int, taken: list[str]) -> None:
    """Takes the first `count` requests one by one."""
    for _ in range(count):
        taken.append(side.take())  # noqa: PERF401, the list is the caller's


def one_stream(size: int, seed: int, names: Sequence[str]) -> dict[tuple[str, str], float]:
    """Microseconds per operation of each side; checks that all take the same requests in the end."""
    rng = np.random.default_rng(seed)
    policy = make_policy("ssjf")
    num = 300 if size <= 10_000 else 60
    few = min(num, 5) if size > 10_000 else min(num, 50)
    every = states(0, size + num, rng)
    waiting, arriving = every[:size], every[size:]
    chosen = rng.permutation(size)
    moved = [waiting[i] for i in chosen[: min(few, size // 3)]]
    aborted = [waiting[i] for i in chosen[len(moved) : len(moved) + min(few, size // 3)]]
    after = [predicted(rng) for _ in moved]
    sides: dict[str, Side] = {}
    for name in names:
        sides[name] = Ours(policy) if name == "tailcast" else Bare(policy) if name == "heapq" else Vllm(every)
        for state in waiting:
            sides[name].add(state)
    seconds: dict[tuple[str, str], float] = {}
    taken: dict[str, list[str]] = {name: [] for name in names}
    for name, side in sides.items():
        seconds[name, "add"] = cpu_s(for_each, side.add, arriving) / num
        if isinstance(side, Bare):
            side.remember()
    for state, new in zip(moved, after, strict=True):
        state.prediction = new
    for name, side in sides.items():
        seconds[name, "re-key"] = cpu_s(for_each, side.rekey, moved) / len(moved)
    for name, side in sides.items():
        seconds[name, "abort"] = cpu_s(for_each, side.abort, aborted) / len(aborted)
    for name, side in sides.items():
        seconds[name, "take"] = cpu_s(take_many, side, num // 2, taken[name]) / (num // 2)
    assert all(order == taken["tailcast"] for order in taken.values()), "the sides differ"
    return seconds


def queue_table(repeats: int, largest: int) -> None:
    """Prints table 1."""
    names = ("tailcast", "heapq", "vllm") if has_vllm() else ("tailcast", "heapq")
    print("\n1. waiting queue: microseconds per operation\n")
    print(
        f"| waiting | operation | {' | '.join(names)} | {' | '.join(f'tailcast / {n}' for n in names[1:])} |"
    )
    print("| ---: | --- |" + " ---: |" * (2 * len(names) - 1))
    size = 10
    while size <= largest:
        runs = [one_stream(size, seed, names[seed % len(names) :] + names[: seed % len(names)]) for seed in range(repeats)]  # fmt: skip
        for operation in OPERATIONS:
            cost = [median(run[name, operation] for run in runs) * 1e6 for name in names]
            ratios = " | ".join(
                spread([run[names[0], operation] / run[name, operation] for run in runs])
                for name in names[1:]
            )
            print(f"| {size} | {operation} | {' | '.join(f'{c:.2f}' for c in cost)} | {ratios} |")
        size *= 10


def spread(ratios: Sequence[float]) -> str:
    """Median, and quartiles in brackets."""
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def decay_table(repeats: int, largest: int) -> None:
    """Prints table 2."""
    print("\n2. TIE's decay with waiting: microseconds per (arrive + take)\n")
    print("| waiting | static key in the queue | re-sort before each take | ratio |")
    print("| ---: | ---: | ---: | ---: |")
    size = 100
    while size <= min(largest, 10_000):
        static, resort = [], []
        for seed in range(repeats):
            rng = np.random.default_rng(seed)
            every = states(0, size + 20, rng)
            policy = Tie()
            for state in every:
                policy.on_prediction(state)
            queue = WaitingQueue(policy)
            for state in every[:size]:
                queue.push(state, 0.0)
            static.append(cpu_s(_through_queue, queue, every[size:]) / 20)
            resort.append(cpu_s(_through_list, policy, every[:size], every[size:]) / 20)
        ours, theirs = median(static) * 1e6, median(resort) * 1e6
        print(f"| {size} | {ours:.2f} | {theirs:.1f} | {theirs / ours:.0f} |")
        size *= 10


def _through_queue(queue: WaitingQueue, arriving: Sequence[RequestState]) -> None:
    for state in arriving:
        queue.push(state, 0.0)
        head = queue.peek()
        assert head is not None
        queue.remove(head)


def _through_list(policy: Tie, waiting: list[RequestState], arriving: Sequence[RequestState]) -> None:
    scores = {state.order: policy.score(state) for state in [*waiting, *arriving]}
    now = arriving[-1].request.arrival_s
    for state in arriving:
        waiting.append(state)
        now += 0.01
        waiting.sort(
            key=lambda s: scores[s.order] * 0.9 ** ((now - s.request.arrival_s) / 30.0), reverse=True
        )
        waiting.pop()


#: Policy, batch former and its parameters.
STEPS: tuple[tuple[str, str, dict[str, bool | int | float | str]], ...] = (
    ("fcfs", "chunked_prefill", {}),
    ("tie", "chunked_prefill", {}),
    ("spf", "slai", {"max_decodes": 256}),
    ("uniboost", "chunked_prefill", {}),
    ("las", "chunked_prefill", {}),
    ("fcfs", "vllm", {}),
    ("fcfs", "orca", {}),
    ("semantic", "stage_aware", {}),
)


def step_table(repeats: int) -> None:
    """Prints table 3."""
    sizes = (0, 100, 1000, 10_000)
    print("\n3. one step with 256 running requests that all decode: microseconds, schedule() / complete()\n")
    print("| policy | batching | " + " | ".join(f"{size} waiting" for size in sizes) + " |")
    print("| --- | --- |" + " ---: |" * len(sizes))
    for policy, former, parameters in STEPS:
        cells = []
        for size in sizes:
            core, now = _busy(policy, former, parameters, size)
            plans, results = [], []
            for _ in range(15 * repeats):
                now += 0.03
                items: list[StepPlan | None] = []
                plans.append(cpu_s(lambda c, t, into: into.append(c.schedule(t)), core, now, items))
                plan = items[0]
                assert plan is not None
                assert len(plan.decodes) == 256, "all requests decode"
                now += 0.03
                results.append(cpu_s(core.complete, StepResult(plan.step), now))
            cells.append(f"{median(plans) * 1e6:.0f} / {median(results) * 1e6:.0f}")
        print(f"| {policy} | {former} | " + " | ".join(cells) + " |")


def _busy(
    policy: str, former: str, parameters: dict[str, bool | int | float | str], num_waiting: int
) -> tuple[Scheduler, float]:
    """A scheduler with 256 decoding requests and some waiting ones, and the current time."""
    config = SchedulerConfig(
        max_num_seqs=256,
        max_num_batched_tokens=16_384,
        num_kv_blocks=100_000,
        batching=former,
        batching_parameters=parameters,
    )
    core = Scheduler(config, make_policy(policy))
    for index in range(num_waiting + 256):
        core.add(
            Request(request_id=f"r{index}", arrival_s=index * 1e-3, prompt_tokens=50, max_tokens=2048),
            index * 1e-3,
        )
    now = (num_waiting + 256) * 1e-3
    for _ in range(3):
        plan = core.schedule(now)
        assert plan is not None
        now += 0.03
        core.complete(StepResult(plan.step), now)
    return core, now


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--largest", type=int, default=100_000, help="maximum waiting requests, tables 1, 2")
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}, seeds from 0")
    queue_table(options.repeats, options.largest)
    decay_table(options.repeats, options.largest)
    step_table(options.repeats)


if __name__ == "__main__":
    main()
