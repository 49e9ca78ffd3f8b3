"""SLAI: no decode misses its target while the steps are as short as its offset assumes."""

import numpy as np
import pytest

from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import Trace
from tests.scheduler_core.helpers import trace_row
from tests.scheduler_core.invariants.helpers import Step, steps_of

pytestmark = pytest.mark.mend

STEP = LinearStepTime()
PAYING_S, FREE_S = 0.1, 0.5


def trace_of(num: int, seed: int) -> Trace:
    """Paying and free users, half each, at twice the rate that the engine sustains."""
    rng = np.random.default_rng(seed)
    rows = [
        trace_row(
            f"r{index}", float(at_s), int(rng.integers(50, 1500)), int(rng.integers(20, 200)), 200,
            tbt_slo_s=PAYING_S if index % 2 else FREE_S,
        )
        for index, at_s in enumerate(np.cumsum(rng.exponential(0.1, num)))
    ]  # fmt: skip
    return Trace(tuple(rows))


def limits(batching: str = "slai", num_tokens: int = 256, **parameters: float) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=32, max_num_batched_tokens=num_tokens, num_kv_blocks=32 * 110, batching=batching,
        batching_parameters=parameters,
    )  # fmt: skip


def check_deadlines(trace: Trace, steps: list[Step], delta: float) -> float:
    """Each decode is in the first batch at or after C = e + TBT - delta t_batch (Eqs. 8, 9). It ends with that batch, which
    starts before C and the step before it: the time between tokens is at most TBT + (two steps - delta t_batch).
    Returns the longest time between tokens as a multiple of TBT."""
    target_s = {row.request_id: row.tbt_slo_s or np.inf for row in trace.requests}
    last_s: dict[str, float] = {}
    due_s: dict[str, float] = {}  # by decode: latest end, of the last batch without it
    total_s, worst = 0.0, 0.0
    for number, step in enumerate(steps):
        offset_s = delta * total_s / max(number, 1)
        step_s = step.end_s - step.start_s
        next_s = 0.0 if step is steps[-1] else steps[number + 1].end_s - steps[number + 1].start_s
        for name in step.running:
            if name not in last_s:
                continue
            critical_s = last_s[name] + target_s[name] - offset_s
            if name in step.served:
                gap_s = step.end_s - last_s[name]
                assert step.end_s <= due_s.get(name, step.end_s) + 1e-9
                worst = max(worst, gap_s / target_s[name])
            else:
                assert step.start_s < critical_s, "a critical decode is not in the batch"
                due_s[name] = critical_s + step_s + next_s
        for name in step.sampled:
            last_s[name] = step.end_s
            due_s.pop(name, None)
        total_s += step_s
    return worst


@pytest.mark.parametrize("delta", [5.0, 10.0])
@pytest.mark.parametrize(
    ("num", "seed"), [(150, 0), *(pytest.param(1500, seed, marks=pytest.mark.slow) for seed in range(3))]
)
def test_every_decode_is_scheduled_when_it_is_critical(delta: float, num: int, seed: int) -> None:
    trace = trace_of(num, seed)
    steps = steps_of(trace, "spf", scheduler=limits(delta_low=delta, delta_high=delta), step_time=STEP)
    waited = sum(len(step.running - step.served) for step in steps)
    assert waited > 1000, "decodes wait for prompts"
    assert check_deadlines(trace, steps, delta) <= 1.0


def test_without_an_offset_and_under_prompts_first_targets_are_missed() -> None:
    trace = trace_of(150, 0)
    steps = steps_of(trace, "spf", scheduler=limits(delta_low=0.0, delta_high=0.0), step_time=STEP)
    assert check_deadlines(trace, steps, 0.0) > 1.0


@pytest.mark.parametrize(
    ("num", "seed"), [(150, 0), *(pytest.param(1500, seed, marks=pytest.mark.slow) for seed in range(3))]
)
def test_two_full_batches_of_the_fitted_time_are_enough(num: int, seed: int) -> None:
    """A decode that is not critical is held back for one batch, and the next one has it. Few prompts come first, so that the
    mean time of all batches, with the same delta, is too short for the batches with prompts."""
    rng = np.random.default_rng(seed)
    rows = [
        trace_row(f"r{index}", 1.5 * index, int(rng.integers(1000, 2500)), 150, 200, tbt_slo_s=PAYING_S)
        for index in range(num)
    ]
    trace = Trace(tuple(rows))
    worst = {}
    for fitted in (False, True):
        config = limits(num_tokens=512, delta_low=2.0, delta_high=2.0, fitted=fitted)
        worst[fitted] = longest_gap_s(steps_of(trace, "spf", scheduler=config, step_time=STEP)) / PAYING_S
    assert worst[True] <= 1.0
    assert worst[False] > 1.0


def longest_gap_s(steps: list[Step]) -> float:
    """Longest time between two tokens of a request."""
    last_s: dict[str, float] = {}
    worst = 0.0
    for step in steps:
        for name in step.sampled:
            worst = max(worst, step.end_s - last_s.get(name, step.end_s))
            last_s[name] = step.end_s
    return worst


@pytest.mark.parametrize("seed", range(3))
def test_the_dynamic_offset_keeps_the_targets_when_memory_runs_short(seed: int) -> None:
    """Memory for a third of the slots, so that prompts fill it and give way to decodes."""
    trace = trace_of(150, seed)
    config = SchedulerConfig(
        max_num_seqs=32, max_num_batched_tokens=256, num_kv_blocks=1100, batching="slai", kv_watermark=0.0
    )
    steps = steps_of(trace, "spf", scheduler=config, step_time=STEP)
    target_s = {row.request_id: row.tbt_slo_s for row in trace.requests}
    last_s: dict[str, float] = {}
    for step in steps:
        for name in step.preempted:
            last_s.pop(name, None)
        for name in step.sampled:
            if name in last_s:
                assert step.end_s - last_s[name] <= target_s[name]
            last_s[name] = step.end_s
