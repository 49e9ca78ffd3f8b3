"""Depth-first order: with all requests present, each shared prefix is computed once (SGLang, theorem 3.1)."""

import numpy as np
import pytest

from scheduler_core.policies import make_policy
from scheduler_core.request import Segment
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.loop import Simulation
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.trace_predictions import Predictions
from tests.scheduler_core.helpers import trace_row

pytestmark = pytest.mark.mend

BLOCK = 16


def tree_of(num_leaves: int, seed: int) -> tuple[Trace, int]:
    """Requests at the leaves of a tree of three levels, in random order; and the number of its tokens."""
    rng = np.random.default_rng(seed)
    contents = []
    total = 0
    for root in range(3):
        first = Segment(f"{root}", BLOCK * int(rng.integers(1, 8)))
        total += first.num_tokens
        for branch in range(3):
            second = Segment(f"{root} {branch}", BLOCK * int(rng.integers(1, 8)))
            total += second.num_tokens
            for leaf in range(num_leaves):
                last = Segment(f"{root} {branch} {leaf}", BLOCK * int(rng.integers(1, 4)))
                total += last.num_tokens
                contents.append((first, second, last))
    rows = [
        trace_row(
            f"r{i}", 0.0, sum(part.num_tokens for part in contents[index]), 2, 4, content=contents[index]
        )
        for i, index in enumerate(rng.permutation(len(contents)).tolist())
    ]
    return Trace(tuple(rows)), total


@pytest.mark.parametrize(
    ("num_leaves", "seed"),
    [(5, 0), (5, 1), *(pytest.param(60, seed, marks=pytest.mark.slow) for seed in range(3))],
)
def test_each_shared_prefix_is_computed_once(num_leaves: int, seed: int) -> None:
    """One request at a time, memory for hardly more than the longest one."""
    trace, total = tree_of(num_leaves, seed)
    longest = max(row.prompt_tokens for row in trace.requests)
    limits = SchedulerConfig(
        max_num_seqs=1, num_kv_blocks=longest // BLOCK + 2, kv_block_tokens=BLOCK, kv_watermark=0.0
    )
    computed = {}
    for policy in ("depth_first", "fcfs"):
        core = Scheduler(limits, make_policy(policy))
        outcome = Simulation(trace, core, LinearStepTime(), Predictions()).run()
        assert len(outcome.records) == len(trace)
        computed[policy] = core.pool.num_admitted_tokens - core.pool.num_cached_tokens
    assert computed["depth_first"] == total
    assert computed["fcfs"] > 1.3 * total
