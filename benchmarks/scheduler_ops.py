"""Cost of the scheduler's operations, every side measured in the same run, interleaved.

    python benchmarks/scheduler_ops.py [--repeats 7] [--largest 100000]

1. The waiting queue under TIE against two others on the same stream of operations (a request arrives unpredicted, a
   prediction moves a waiting request, the first request is taken), starting from n waiting requests:
   `heapq` is bare heapq on ready-made keys without removal or re-keying (a moved request is simply pushed twice): the
   floor. `re-sort` is a list whose keys change with waiting time, sorted before each take: what a time-dependent
   score costs when it is not turned into a static key.
2. One schedule() + complete() with 256 running requests and n waiting.

What the score itself costs is in `length_scores.py`. Times are medians over the repeats of CPU time per operation.
"""

from __future__ import annotations

import argparse
import heapq
import math
import platform
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from scheduler_core.plan import StepResult
from scheduler_core.policies import Tie, make_policy
from scheduler_core.predictions import LengthPrediction
from scheduler_core.request import Request, RequestState
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.waiting_queue import WaitingQueue

NUM_OPS = 300
CAP = 1024
RATE = -math.log(0.9) / 30.0


def states(first: int, count: int, rng: np.random.Generator) -> list[RequestState]:
    """Requests that arrived one after another, with predictions ready to be applied."""
    made = []
    for index in range(first, first + count):
        request = Request(request_id=f"r{index}", arrival_s=index * 0.01, prompt_tokens=50, max_tokens=CAP)
        seen = LengthPrediction(float(rng.normal(4.6, 0.9)), float(rng.uniform(0.2, 0.9)), 3.5)
        made.append(RequestState(request, order=index, prediction=seen))
    return made


def tie_queue(waiting: list[RequestState], arriving: list[RequestState], policy: Tie) -> Callable[[], None]:
    """Arrive, predict, take through the real queue."""
    queue = WaitingQueue(policy)
    for state in waiting:
        queue.push(state, 0.0)
    risks = [policy._risks.pop(state.request_id) for state in arriving]

    def operations() -> None:
        for state, risk in zip(arriving, risks, strict=True):
            queue.push(state, 0.0)
            policy._risks[state.request_id] = risk
            queue.push(state, 0.0)
            head = queue.peek()
            assert head is not None
            queue.remove(head)

    return operations


def bare_heap(waiting: list[RequestState], arriving: list[RequestState], policy: Tie) -> Callable[[], None]:
    """The same stream on bare heapq; keys are computed beforehand."""
    heap = [(policy.key(state, 0.0), state.order) for state in waiting]
    heapq.heapify(heap)
    highest = math.log(1.5 * CAP)
    stream = [
        ((highest + s.request.arrival_s * RATE, s.order), (policy.key(s, 0.0), s.order)) for s in arriving
    ]

    def operations() -> None:
        for before, after in stream:
            heapq.heappush(heap, before)
            heapq.heappush(heap, after)
            heapq.heappop(heap)

    return operations


def sorted_list(waiting: list[RequestState], arriving: list[RequestState], policy: Tie) -> Callable[[], None]:
    """The same stream on a list sorted by the decayed score of the moment before each take."""
    scores = {state.order: policy.score(state) for state in [*waiting, *arriving]}
    queue = list(waiting)
    clock = [arriving[-1].request.arrival_s]

    def operations() -> None:
        for state in arriving:
            queue.append(state)
            clock[0] += 0.01
            now = clock[0]
            queue.sort(
                key=lambda s: scores[s.order] * 0.9 ** ((now - s.request.arrival_s) / 30.0), reverse=True
            )
            queue.pop()

    return operations


def timed(operation: Callable[[], None]) -> float:
    """CPU seconds."""
    start = time.process_time()
    operation()
    return time.process_time() - start


def queue_table(repeats: int, largest: int) -> None:
    """Table 1."""
    print("\n1. waiting queue: microseconds per (arrive + predict + take)\n")
    print("| waiting | TIE queue | bare heapq | TIE / heapq | re-sort | re-sort / TIE |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    kinds = {"tie": tie_queue, "heap": bare_heap, "sort": sorted_list}
    size = 10
    while size <= largest:
        times: dict[str, list[float]] = {name: [] for name in kinds}
        for repeat in range(repeats):
            rng = np.random.default_rng(repeat)
            waiting, arriving = states(0, size, rng), states(size, NUM_OPS, rng)
            policy = Tie()
            for state in [*waiting, *arriving]:
                policy.on_prediction(state) if size <= 1000 else _quick_risk(policy, state)
            for name, kind in kinds.items():
                few = arriving[: 10 if name == "sort" and size > 10_000 else NUM_OPS]
                times[name].append(timed(kind(waiting, few, policy)) / len(few) * 1e6)
        tie, heap, sort = (median(times[name]) for name in kinds)
        print(f"| {size} | {tie:.2f} | {heap:.2f} | {tie / heap:.1f} | {sort:.1f} | {sort / tie:.1f} |")
        size *= 10


def _quick_risk(policy: Tie, state: RequestState) -> None:
    """Fills in a made-up (E, CVaR) so that setting up 100,000 requests does not take minutes."""
    assert state.prediction is not None
    mean = math.exp(state.prediction.mu)
    policy._risks[state.request_id] = (mean, 2.5 * mean)


def step_table(repeats: int) -> None:
    """Table 2."""
    print("\n2. schedule() + complete() of one decode step, 256 running: microseconds\n")
    print("| waiting | fcfs | ssjf | sept | tie |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for size in (0, 1000, 10_000):
        row: dict[str, list[float]] = {name: [] for name in ("fcfs", "ssjf", "sept", "tie")}
        for name, values in row.items():
            config = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=16_384, num_kv_blocks=100_000)
            core = Scheduler(config, make_policy(name))
            for index in range(size + 256):
                core.add(
                    Request(request_id=f"r{index}", arrival_s=0.0, prompt_tokens=50, max_tokens=CAP), 0.0
                )
            step(core)
            values.extend(timed(lambda core=core: step(core)) * 1e6 for _ in range(20 * repeats))  # type: ignore[misc]
        print(f"| {size} | " + " | ".join(f"{median(values):.0f}" for values in row.values()) + " |")


def step(core: Scheduler) -> None:
    """One step in which nothing ends."""
    plan = core.schedule(0.0)
    assert plan is not None
    core.complete(StepResult(plan.step), 0.0)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--largest", type=int, default=100_000, help="most waiting requests in table 1")
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}, seed 0")
    queue_table(options.repeats, options.largest)
    step_table(options.repeats)


if __name__ == "__main__":
    main()
