"""Order by declared urgency under memory pressure: the smaller value goes first and is evicted last, as in vLLM."""

import numpy as np
import pytest

from scheduler_core.batching import BATCH_FORMERS
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import Trace
from tests.scheduler_core.helpers import NEVER_PREEMPT, trace_row
from tests.scheduler_core.invariants.helpers import steps_of

pytestmark = pytest.mark.mend

#: Field of the trace that each policy orders by.
FIELDS = {"priority": "priority", "hpjf": "tier"}
PARAMETERS = {"rad": {"t_row": 1, "t_red": 1}, "rad_prefill_first": {"n": 12, "t_row": 1, "t_red": 1}}
#: Batch formers that admit requests in the policy's order only: `uniboost` passes over one that lacks memory.
IN_ORDER = [name for name in BATCH_FORMERS if name not in NEVER_PREEMPT | {"uniboost"}]


def trace_of(num: int, field: str, seed: int) -> Trace:
    """All values between 0 and 4 or 9, at a rate at which memory runs out again and again."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(0.1, num)).tolist()
    most = 9 if field == "priority" else 4
    rows = [
        trace_row(
            f"r{index}", times[index], int(rng.integers(5, 60)), int(rng.integers(10, 120)), 120,
            **{field: int(rng.integers(0, most, endpoint=True))},
        )
        for index in range(num)
    ]  # fmt: skip
    return Trace(tuple(rows))


@pytest.mark.parametrize("policy", FIELDS)
@pytest.mark.parametrize("former", [name for name in BATCH_FORMERS if name not in NEVER_PREEMPT])
@pytest.mark.parametrize(
    ("num", "seed"), [(60, 0), *(pytest.param(600, seed, marks=pytest.mark.slow) for seed in range(3))]
)
def test_memory_is_taken_from_the_least_urgent(policy: str, former: str, num: int, seed: int) -> None:
    """Evicted is the largest value of those that run, the latest arrival of several (`uniboost`: the cheapest to swap);
    admitted is the smallest of those that wait. It was the request admitted last, often the most urgent one, that lost its memory."""
    trace = trace_of(num, FIELDS[policy], seed)
    limits = SchedulerConfig(
        max_num_seqs=12, max_num_batched_tokens=192, num_kv_blocks=40, kv_watermark=0.0, batching=former,
        batching_parameters=PARAMETERS.get(former, {}),
    )  # fmt: skip
    steps = steps_of(trace, policy, scheduler=limits, step_time=LinearStepTime())
    rank = {row.request_id: (getattr(row, FIELDS[policy]), row.arrival_s) for row in trace.requests}
    running: frozenset[str] = frozenset()
    num_evicted = 0
    for step in steps:
        evicted = [rank[name] for name in step.preempted if name in running]
        others = [rank[name] for name in step.running & running]
        num_evicted += len(evicted)
        if evicted and others:
            assert min(evicted)[0] >= max(others)[0]
            assert former == "uniboost" or min(evicted) > max(others)
        waiting = [rank[name] for name in step.waiting if name not in step.preempted]
        admitted = [rank[name] for name in step.admitted]
        if former in IN_ORDER and waiting and admitted:
            assert max(admitted) < min(waiting)
        running = step.running - step.ended
    assert num_evicted > 3
