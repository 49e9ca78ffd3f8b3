"""LTR: a request waits for at most the starvation time and the quanta of those promoted before it."""

import numpy as np
import pytest

from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.trace_predictions import oracle_predictions
from tests.scheduler_core.helpers import trace_row
from tests.scheduler_core.invariants.helpers import Step, steps_of

pytestmark = pytest.mark.mend

STARVATION, QUANTUM, SLOTS = 40, 5, 4
STEP = LinearStepTime(base_s=0.05, per_prefill_token_s=0, per_decode_s=0, per_context_token_s=0)
LIMITS = SchedulerConfig(max_num_seqs=SLOTS, max_num_batched_tokens=1024, num_kv_blocks=2000)


def trace_of(num: int, seed: int) -> Trace:
    """Short requests at 1.5 times the rate that the slots sustain, and some long ones. A prompt takes one step."""
    rng = np.random.default_rng(seed)
    lengths = np.where(rng.random(num) < 0.1, rng.integers(60, 150, num), rng.integers(2, 12, num))
    rate = 1.5 * SLOTS / (0.05 * float(np.mean(lengths)))
    times = np.cumsum(rng.exponential(1.0 / rate, num)).tolist()
    return Trace(tuple(trace_row(f"r{i}", times[i], 20, int(lengths[i]), 200) for i in range(num)))


def run(trace: Trace, **parameters: float) -> list[Step]:
    return steps_of(
        trace, "ltr", scheduler=LIMITS, step_time=STEP, policy_parameters=parameters,
        predictions=oracle_predictions(trace),
    )  # fmt: skip


def longest_idle(steps: list[Step]) -> int:
    """Maximum number of steps in a row in which a request in the system was not served."""
    idle: dict[str, int] = {}
    longest = 0
    for step in steps:
        for name in step.waiting | step.running:
            idle[name] = 0 if name in step.served else idle.get(name, 0) + 1
            longest = max(longest, idle[name])
    return longest


@pytest.mark.parametrize(
    ("num", "seed"),
    [(200, 0), (200, 1), *(pytest.param(2000, seed, marks=pytest.mark.slow) for seed in range(3))],
)
def test_a_starved_request_waits_only_for_those_promoted_before_it(num: int, seed: int) -> None:
    """From `starvation_steps` steps without service on, no request that is not promoted is served before it; it keeps its slot
    for `quantum_steps` steps or to its end. So it waits for the quanta in progress and at most the work of earlier arrivals."""
    trace = trace_of(num, seed)
    lengths = {row.request_id: row.output_tokens for row in trace.requests}
    steps = run(trace, starvation_steps=STARVATION, quantum_steps=QUANTUM)
    idle: dict[str, int] = {}
    quantum: dict[str, int] = {}  # of promoted requests: remaining steps
    latest: dict[str, float] = {}  # of starved requests: step by which they are served
    num_promoted = 0
    for number, step in enumerate(steps):
        starved = {name for name in quantum if name not in step.served}
        if starved:
            assert step.served <= {*quantum}, "served before a starved request"
            assert len(step.served) == SLOTS
        for name in step.served:
            idle[name] = 0
            assert number <= latest.pop(name, number)
            if name in quantum:
                quantum[name] -= 1
                if not quantum[name]:
                    del quantum[name]
        later = steps[min(number + 1, len(steps) - 1)]
        for name in step.waiting | (later.waiting - step.running):
            idle[name] = idle.get(name, 0) + 1
            if name not in quantum and idle[name] >= STARVATION:
                quantum[name], idle[name] = QUANTUM, 0
                num_promoted += 1
                earlier = [other for other in step.running | step.waiting if int(other[1:]) < int(name[1:])]
                work = sum(lengths[other] - step.tokens.get(other, 0) for other in earlier)
                latest[name] = number + 1 + QUANTUM + work / SLOTS
        quantum = {name: left for name, left in quantum.items() if name not in step.ended}
    assert num_promoted > 10


def test_without_promotion_long_requests_wait_longer() -> None:
    trace = trace_of(200, 0)
    bounded, never = (
        longest_idle(run(trace, starvation_steps=steps, quantum_steps=QUANTUM)) for steps in (STARVATION, 1e9)
    )
    assert never > 2 * bounded
