"""VTC: the service of tenants that always have waiting requests differs by at most the bound of its theorem 4.4."""

from collections import Counter

import numpy as np
import pytest

from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.trace import Trace
from tests.scheduler_core.helpers import trace_row
from tests.scheduler_core.invariants.helpers import Step, steps_of

pytestmark = pytest.mark.mend

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
#: Largest prompt and output of a tenant.
SIZES = {"chat": (60, 120), "long prompts": (400, 20), "long outputs": (20, 250)}
SLOTS, NUM_BLOCKS = 8, 120


def trace_of(num: int, seed: int) -> Trace:
    """Requests of all tenants at once, those of each tenant after those of the one before."""
    rng = np.random.default_rng(seed)
    rows = [
        trace_row(
            f"{tenant} {index}", 0.001 * order, int(rng.integers(1, prompt, endpoint=True)),
            int(rng.integers(1, output, endpoint=True)), output, tenant=tenant,
        )
        for order, (tenant, (prompt, output)) in enumerate(SIZES.items())
        for index in range(num)
    ]  # fmt: skip
    return Trace(tuple(rows))


def largest_difference(trace: Trace, steps: list[Step]) -> float:
    """Maximum over all intervals, while every tenant has waiting requests, and all pairs of tenants, of the difference
    between what both were served in the interval, in weighted tokens."""
    rows = {row.request_id: row for row in trace.requests}
    service: Counter[str] = Counter()
    history = [[0.0] * len(SIZES)]
    charged: set[str] = set()
    for step in steps:
        if {rows[name].tenant for name in step.waiting} != {*SIZES}:
            if len(history) > 1:
                break
            continue
        for name in step.admitted:
            if name not in charged:
                charged.add(name)
                service[rows[name].tenant] += PROMPT_WEIGHT * rows[name].prompt_tokens
        for name in step.sampled:
            service[rows[name].tenant] += OUTPUT_WEIGHT
        history.append([service[tenant] for tenant in SIZES])
    served = np.array(history)
    assert len(served) > 50
    first, second = np.triu_indices(len(SIZES), 1)
    difference = served[:, first] - served[:, second]
    return float((difference.max(axis=0) - difference.min(axis=0)).max())


@pytest.mark.parametrize("batching", ["chunked_prefill", "vllm"])
@pytest.mark.parametrize(
    ("num", "seed"),
    [(60, 0), (60, 1), *(pytest.param(250, seed, marks=pytest.mark.slow) for seed in range(3))],
)
def test_backlogged_tenants_are_served_alike(batching: str, num: int, seed: int) -> None:
    """2 U, U = max(w_p L_input, w_q M), with M the tokens that fit into the memory of a batch."""
    trace = trace_of(num, seed)
    limits = SchedulerConfig(
        max_num_seqs=SLOTS, max_num_batched_tokens=512, num_kv_blocks=NUM_BLOCKS, batching=batching
    )
    longest_prompt = max(row.prompt_tokens for row in trace.requests)
    bound = 2 * max(PROMPT_WEIGHT * longest_prompt, OUTPUT_WEIGHT * NUM_BLOCKS * limits.kv_block_tokens)
    differences = {
        policy: largest_difference(trace, steps_of(trace, policy, scheduler=limits))
        for policy in ("vtc", "spf")
    }
    assert differences["vtc"] <= bound < differences["spf"]
