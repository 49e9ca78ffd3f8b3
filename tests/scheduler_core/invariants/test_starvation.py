"""Policies that promise that no request starves, and what may overtake one."""

import numpy as np
import pytest

from scheduler_core.policies import POLICIES
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.trace_predictions import Predictions, oracle_predictions
from tests.scheduler_core.helpers import full_prediction, simulate, trace_row
from tests.scheduler_core.invariants.helpers import Step, steps_of

pytestmark = pytest.mark.mend

#: Policies that promise it, with parameters that make the wait short enough for a test.
FAIR: dict[str, dict[str, float]] = {
    "fcfs": {}, "ltr": {}, "tie": {"tau_s": 1.0}, "hrrn": {}, "edf": {}, "mlfq": {},
    "distboost": {"gamma_per_s": 1.0},
    "uniboost": {"bin_tokens": 1, "gamma_per_s": 1.0, "gamma_min_per_s": 0.5}, "bounded_shortest": {}, "vtc": {},
    "uniboost_uncached": {"gamma_per_s": 1.0, "gamma_min_per_s": 0.5},
    "boost_gittins": {"gamma_per_s": 1.0}, "llumlet": {"quota_s": 5.0},
}  # fmt: skip
STEP_S, NUM_STEPS = 0.05, 800
STEP = LinearStepTime(base_s=STEP_S, per_prefill_token_s=0, per_decode_s=0, per_context_token_s=0)


def first_token_s(policy: str, parameters: dict[str, float]) -> float:
    """When a long request gets its first token. Short ones keep the only slot busy for 40 s: three steps of work in every three
    steps. Short: 4 prompt and 3 output tokens, predicted well; long: 40 and 50 tokens, arrives in the tenth step."""
    times = [step * STEP_S for step in range(NUM_STEPS) if step % 3 == 0 or step < 5]
    rows = [
        trace_row(f"s{i}", at_s, 4, 3, 60, tenant="a", tier=0, ttlt_slo_s=1.0) for i, at_s in enumerate(times)
    ]
    # A declared priority comes before every policy.
    priority = 9 if policy == "priority" else 0
    long = trace_row("long", 10 * STEP_S, 40, 50, 60, tenant="b", tier=4, priority=priority, ttlt_slo_s=20.0)
    trace = Trace(tuple(sorted([*rows, long], key=lambda row: row.arrival_s)))
    predictions = {row.request_id: full_prediction(float(row.output_tokens), 0.1) for row in trace.requests}
    limits = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, num_kv_blocks=4000)
    result = simulate(
        trace, policy, policy_parameters=parameters, scheduler=limits, step_time=STEP, predictions=Predictions("test", predictions)
    )  # fmt: skip
    (record,) = [record for record in result.records if record.request_id == "long"]
    return record.first_token_s


@pytest.mark.parametrize("policy", FAIR)
def test_no_request_starves_where_that_is_promised(policy: str) -> None:
    assert first_token_s(policy, FAIR[policy]) < NUM_STEPS * STEP_S


@pytest.mark.parametrize("policy", ["ssjf", "spf", "srpt", "priority", "hpjf"])
def test_others_let_it_wait_for_all_short_ones(policy: str) -> None:
    assert first_token_s(policy, {}) >= NUM_STEPS * STEP_S - 1.0


def test_the_promise_is_tested_for_every_policy_that_makes_it() -> None:
    texts = {name: " ".join((kind.__doc__ or "").split()) for name, kind in POLICIES.items()}
    promised = {name for name, text in texts.items() if "No starvation" in text}
    assert promised <= {*FAIR}


def trace_of(num: int, seed: int) -> Trace:
    """Log-normal lengths and deadlines up to 10 s, at 1.3 times the rate that four slots sustain."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(3.0, 1.0, num), 1, 400).astype(int)
    times = np.cumsum(rng.exponential(STEP_S * float(lengths.mean()) / 4 / 1.3, num)).tolist()
    rows = [
        trace_row(f"r{i}", times[i], int(rng.integers(1, 60)), int(lengths[i]), 400, ttlt_slo_s=float(rng.uniform(1.0, 10.0)))
        for i in range(num)
    ]  # fmt: skip
    return Trace(tuple(rows))


def run(trace: Trace, policy: str) -> list[Step]:
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, num_kv_blocks=4000)
    return steps_of(trace, policy, scheduler=limits, step_time=STEP, predictions=oracle_predictions(trace))


@pytest.mark.parametrize(
    ("num", "seed"), [(300, 0), *(pytest.param(1000, seed, marks=pytest.mark.slow) for seed in range(3))]
)
def test_only_requests_within_the_largest_deadline_overtake_under_edf(num: int, seed: int) -> None:
    trace = trace_of(num, seed)
    arrival_s = {row.request_id: row.arrival_s for row in trace.requests}
    largest_s = max(row.ttlt_slo_s or 0.0 for row in trace.requests)
    overtaken = 0
    for step in run(trace, "edf"):
        for name in step.admitted:
            lead_s = [arrival_s[name] - arrival_s[other] for other in step.waiting]
            overtaken += sum(lead > 0 for lead in lead_s)
            assert max(lead_s, default=0.0) < largest_s
    assert overtaken > 100


@pytest.mark.parametrize(
    ("num", "seed"), [(300, 0), *(pytest.param(1000, seed, marks=pytest.mark.slow) for seed in range(3))]
)
def test_only_shorter_prompts_overtake_under_hrrn(num: int, seed: int) -> None:
    trace = trace_of(num, seed)
    rows = {row.request_id: row for row in trace.requests}
    overtaken = 0
    for step in run(trace, "hrrn"):
        for name in step.admitted:
            earlier = [rows[other] for other in step.waiting if rows[other].arrival_s < rows[name].arrival_s]
            overtaken += len(earlier)
            assert all(other.prompt_tokens > rows[name].prompt_tokens for other in earlier)
    assert overtaken > 100


@pytest.mark.parametrize(
    ("num", "seed"), [(300, 0), *(pytest.param(1000, seed, marks=pytest.mark.slow) for seed in range(3))]
)
def test_a_request_in_mlfqs_first_queue_is_not_overtaken_by_later_ones(num: int, seed: int) -> None:
    """After alpha = 3 s without a step it is there: only requests that arrived before it are admitted before it."""
    trace = trace_of(num, seed)
    arrival_s = {row.request_id: row.arrival_s for row in trace.requests}
    served_s = dict(arrival_s)
    promoted = 0
    for step in run(trace, "mlfq"):
        starved = [name for name in step.waiting if step.start_s - served_s[name] >= 3.0 + STEP_S]
        promoted += len(starved)
        for name in step.admitted:
            assert all(arrival_s[name] < arrival_s[other] for other in starved)
        served_s.update(dict.fromkeys(step.served, step.end_s))
    assert promoted > 100
