"""Who may lose a slot under policies that limit displacement, and under batch formers that have none."""

import numpy as np
import pytest

from scheduler_core.policies import make_policy
from scheduler_core.policies.shortest_remaining import Trail
from scheduler_core.request import RequestState
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.trace_predictions import Predictions, oracle_predictions
from tests.scheduler_core.helpers import NEVER_PREEMPT, trace_row
from tests.scheduler_core.invariants.helpers import Step, steps_of

pytestmark = pytest.mark.mend

STEP = LinearStepTime(base_s=0.05, per_prefill_token_s=0, per_decode_s=0, per_context_token_s=0)
SIZES = pytest.mark.parametrize(
    ("num", "seed"), [(80, 0), *(pytest.param(300, seed, marks=pytest.mark.slow) for seed in range(3))]
)


def trace_of(num: int, seed: int) -> Trace:
    """Log-normal lengths at 1.2 times the rate that four slots sustain; prompts take up to three steps."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(3.5, 1.0, num), 1, 400).astype(int)
    times = np.cumsum(rng.exponential(0.05 * float(lengths.mean()) / 4 / 1.2, num)).tolist()
    rows = [trace_row(f"r{i}", times[i], int(rng.integers(1, 190)), int(lengths[i]), 400) for i in range(num)]
    return Trace(tuple(rows))


def run(trace: Trace, policy: str, num_kv_blocks: int = 4000, **limits: str) -> list[Step]:
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=64, num_kv_blocks=num_kv_blocks, kv_watermark=0.0, **limits
    )
    return steps_of(trace, policy, scheduler=config, step_time=STEP, predictions=predictions_of(trace))


def predictions_of(trace: Trace) -> Predictions:
    return oracle_predictions(trace, 0.5, np.random.default_rng(5))


@SIZES
def test_trail_displaces_none_beyond_its_fraction(num: int, seed: int) -> None:
    """g < C r of every displaced request, with r its expected length."""
    trace = trace_of(num, seed)
    predictions = predictions_of(trace)
    policy = make_policy("trail")
    assert isinstance(policy, Trail)
    limit_tokens = {}
    for row in trace.requests:
        state = RequestState(row.request(), order=0)
        prediction = predictions.by_id[row.request_id]
        assert prediction is not None
        state.apply_prediction(prediction)
        policy.on_arrival(state, 0.0)
        policy.on_prediction(state)
        limit_tokens[row.request_id] = policy.limit * policy.key(state, 0.0)
    displaced = [(step.tokens.get(name, 0), name) for step in run(trace, "trail") for name in step.preempted]
    assert len(displaced) > 10
    assert all(generated < limit_tokens[name] for generated, name in displaced)


@SIZES
def test_elis_displaces_at_windows_only_and_mlfq_never_in_a_prompt(num: int, seed: int) -> None:
    trace = trace_of(num, seed)
    displaced = [step.tokens.get(name, 0) for step in run(trace, "elis") for name in step.preempted]
    assert len(displaced) > 10
    assert all(generated % 50 == 0 for generated in displaced)
    displaced = [step.tokens.get(name, 0) for step in run(trace, "mlfq") for name in step.preempted]
    assert len(displaced) > 10
    assert min(displaced) > 0


@SIZES
@pytest.mark.parametrize("former", sorted(NEVER_PREEMPT))
def test_reserved_memory_never_runs_out(former: str, num: int, seed: int) -> None:
    trace = trace_of(num, seed)
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=256, num_kv_blocks=50, kv_watermark=0.0, batching=former
    )
    steps = steps_of(trace, "fcfs", scheduler=config, step_time=STEP)
    assert not any(step.preempted for step in steps)
    free = [step for step in steps if step.waiting and len(step.running) < 4]
    assert free, "memory, not slots, keeps requests waiting"


@SIZES
def test_chunked_prefill_stalls_no_decode_and_takes_memory_from_the_youngest(num: int, seed: int) -> None:
    """Under an order that is not preemptive every request with a token decodes in every step until it ends or memory runs
    out; then the one admitted last loses its memory, and none is admitted."""
    steps = run(trace_of(num, seed), "ssjf", num_kv_blocks=40)
    admitted_at: dict[str, int] = {}
    sampled: frozenset[str] = frozenset()
    num_evicted = 0
    for number, step in enumerate(steps):
        assert sampled & step.running <= step.served
        if step.preempted:
            num_evicted += 1
            assert not step.admitted
            oldest = min(admitted_at[name] for name in step.preempted)
            assert oldest >= max((admitted_at[name] for name in step.running), default=0)
        admitted_at.update(dict.fromkeys(step.admitted, number))
        sampled = step.sampled
    assert num_evicted > 3
