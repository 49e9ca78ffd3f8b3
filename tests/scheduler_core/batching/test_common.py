"""What every batch former owes to every request, whatever the policy."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from scheduler_core.batching import BATCH_FORMERS
from scheduler_core.engine.plan import StepResult
from scheduler_core.policies import POLICIES
from scheduler_core.policies.static import Fcfs
from scheduler_core.request import Phase, Request, Segment
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.config import SimulationConfig
from scheduler_core.simulator.run import run_simulation
from tests.scheduler_core import helpers

PAIRS = helpers.compatible_pairs(POLICIES, BATCH_FORMERS)
#: A static order, one that changes with time, and three ways to preempt.
FEW = [pair for pair in PAIRS if pair[0] in ("fcfs", "hrrn", "srpt", "las", "semantic")]
TIGHT = {"max_num_seqs": 4, "max_num_batched_tokens": 40, "num_kv_blocks": 20, "kv_block_tokens": 2}
#: Keeping a copy costs nothing, so that all of the cache is kept.
KEEP: dict[str, dict[str, Any]] = {"stage_aware": {"batching_parameters": {"beta": 0.0}}}
STATES = ("waiting", "prefill", "decode", "preempted", "offloaded")


def rows(
    num: int = 25, seed: int = 3, gap_s: float = 0.7, num_levels: int = 1, **fields: Any
) -> list[tuple[Request, int]]:
    """Requests with short prompts and answers, a few arriving together."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(num):
        length = int(rng.integers(1, 16))
        item = helpers.request(
            f"r{index}", gap_s * float(rng.integers(0, num)), prompt=int(rng.integers(1, 16)), cap=16,
            priority=int(rng.integers(0, 3)) % num_levels, tier=int(rng.integers(0, 5)), tenant=str(rng.integers(0, 2)),
            tbt_slo_s=float(rng.choice([0.5, 4.0])), **fields,
        )  # fmt: skip
        made.append((item, length))
    return made


def drive(pair: tuple[str, str], given: list[tuple[Request, int]]) -> helpers.Drive:
    policy, former = pair
    predictions = {item.request_id: helpers.full_prediction(length) for item, length in given}
    return helpers.Drive(core_of(former, policy), given, predictions=predictions)


def core_of(former: str, policy: str = "fcfs", **more: Any) -> Scheduler:
    """On a tight engine, parameters of the former such that it works there."""
    parameters = {"batching_parameters": helpers.SMALL_PARAMETERS.get(former, {})}
    return helpers.scheduler(policy, batching=former, **{**TIGHT, **parameters, **more})


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_every_request_is_served_once_and_in_full_when_memory_is_short(pair: tuple[str, str]) -> None:
    """The scheduler itself asserts that it is never idle with requests around, `Drive` validates after every call."""
    given = rows(num_levels=1 if pair[0] == "fcfs" else 3)
    run = drive(pair, given)
    run.run()
    found = {name: item.output_tokens for name, item in run.finished.items()}
    assert found == {item.request_id: length for item, length in given}
    counters = run.core.counters
    assert counters.num_finished == counters.num_added == len(given)
    assert run.core.pool.kv.peak_blocks <= TIGHT["num_kv_blocks"]
    assert run.core.pool.kv.num_free_blocks == TIGHT["num_kv_blocks"]
    assert sum(item.num_preemptions for item in run.finished.values()) == counters.num_preemptions
    if pair[0] == "fcfs" or pair[1] in helpers.NEVER_PREEMPT:
        assert (counters.num_preemptions > 0) == (pair[1] not in helpers.NEVER_PREEMPT)
    for field in fields(run.core.policy):  # type: ignore[arg-type]
        kept = getattr(run.core.policy, field.name)
        assert field.init or not isinstance(kept, dict | set) or not {"r0", "r9"} & set(kept), field.name
    for item, _ in given:
        recomputed = run.prefill_tokens[item.request_id] - item.prompt_tokens
        assert recomputed >= 0
        assert (recomputed > 0) <= (run.finished[item.request_id].num_preemptions > 0)


@pytest.mark.parametrize("former", BATCH_FORMERS)
def test_under_fcfs_requests_start_in_the_order_they_came(former: str) -> None:
    """The condition under which nobody starves: whoever came before is started before."""
    requests = [helpers.request(f"r{k}", arrival_s=0.3 * k, prompt=1 + k % 7, cap=12) for k in range(20)]
    run = drive(("fcfs", former), [(each, 1 + (5 * k) % 12) for k, each in enumerate(requests)])
    run.run()
    starts = [run.finished[each.request_id].first_scheduled_s for each in requests]
    assert starts == sorted(starts)


@pytest.mark.parametrize("former", [name for name in BATCH_FORMERS if name not in helpers.NEVER_PREEMPT])
def test_what_is_swapped_is_not_computed_again(former: str) -> None:
    given = rows()
    run = helpers.Drive(core_of(former, preemption="swap", **KEEP.get(former, {})), given)
    run.run()
    assert run.core.counters.num_swaps > 0
    assert run.core.counters.num_swaps == sum(len(plan.swapped_out) for plan in run.plans)
    assert run.prefill_tokens == {item.request_id: item.prompt_tokens for item, _ in given}
    out = {moved.request_id for plan in run.plans for moved in plan.swapped_out}
    assert out == {moved.request_id for plan in run.plans for moved in plan.swapped_in}


@pytest.mark.parametrize("former", BATCH_FORMERS)
def test_what_an_earlier_request_has_computed_is_not_computed_again(former: str) -> None:
    content = (Segment("s", 7),)
    earlier = helpers.request("a", prompt=7, cap=4, content=content)
    later = helpers.request("b", 100.0, prompt=10, cap=4, content=(*content, Segment("t", 3)))
    run = helpers.Drive(core_of(former), [(earlier, 4), (later, 4)])
    run.run()
    assert run.prefill_tokens == {"a": 7, "b": 4}, "three whole blocks of 2 are found"
    chunk = next(
        plan.prefills[0] for plan in run.plans if plan.prefills and plan.prefills[0].request_id == "b"
    )
    assert chunk.start_token == 6
    run.core.validate()


@pytest.mark.parametrize("in_step", [False, True], ids=["between steps", "in a step"])
@pytest.mark.parametrize("former", BATCH_FORMERS)
def test_a_request_may_be_aborted_in_every_state(former: str, in_step: bool) -> None:
    """Runs until a request is in the wanted state, aborts it there, and goes on: the others are served in full."""
    reached = set()
    for wanted in STATES:
        preemption = "swap" if wanted == "offloaded" else "recompute"
        limits = {"max_num_batched_tokens": 31, "preemption": preemption, **KEEP.get(former, {})}
        core = core_of(former, **limits)
        run = helpers.Drive(core, rows(15, gap_s=0.3))
        victim = None
        while victim is None and (run.coming or core.num_waiting + core.num_running or not run.plans):
            if run.step() is None:
                run.now = run.coming[0].arrival_s
            victim = next((name for name in run.lengths if name in core and kind(core, name) == wanted), None)
        if victim is None:
            continue
        reached.add(wanted)
        plan = core.schedule(run.now) if in_step else None
        assert core.abort(victim, run.now)
        core.validate()
        if plan is not None:
            finished = core.complete(StepResult(plan.step), run.now)
            run.finished.update({item.request_id: item for item in finished})
        run.run()
        assert set(run.finished) | {victim} == set(run.lengths)
        assert victim not in run.finished
        assert core.pool.kv.num_free_blocks == core.config.capacity_blocks
    assert {"waiting", "decode"} <= reached
    assert ("prefill" in reached) == (former not in helpers.WHOLE_PROMPTS), "prompts are split"
    assert ("preempted" in reached) == ("offloaded" in reached) == (former not in helpers.NEVER_PREEMPT)


def kind(core: Any, name: str) -> str:
    """Which of `STATES` a request is in."""
    state = core.state(name)
    if name in core.pool.running:
        return "prefill" if state.phase is Phase.PREFILL else "decode"
    if state.num_computed_tokens:
        return "offloaded"
    return "preempted" if state.num_preemptions else "waiting"


@pytest.mark.parametrize("pair", [*FEW, ("tie", "stage_aware"), ("tie", "rad")], ids="-".join)
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_many_steps_at_once_equal_single_ones_to_the_last_bit(pair: tuple[str, str], preemption: str) -> None:
    policy, former = pair
    limits = SchedulerConfig(
        max_num_seqs=5, max_num_batched_tokens=600, num_kv_blocks=40, kv_block_tokens=16, batching=former,
        batching_parameters=helpers.SMALL_PARAMETERS.get(former, {}),
        preemption=preemption,  # type: ignore[arg-type]
    )  # fmt: skip
    trace = helpers.random_trace(25, seed=5, rate_rps=4.0)
    config = {"trace": "", "policy": policy, "scheduler": limits, "predictor_delay_s": 0.05}
    configs = (SimulationConfig(**config, exact_steps=exact) for exact in (True, False))
    single, many = (run_simulation(config, trace=trace) for config in configs)
    assert single.records == many.records
    assert single.metrics["num_steps"] == many.metrics["num_steps"]
    assert single.metrics["num_preemptions"] == many.metrics["num_preemptions"]


#: Policies with declared urgency, and fields of the less urgent and the more urgent request.
URGENCY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "priority": ({"priority": 9}, {"priority": -3}),
    "hpjf": ({"tier": 4}, {"tier": 0}),
    "edf": ({"ttlt_slo_s": 900.0}, {"ttlt_slo_s": 9.0}),
}


@pytest.mark.mend  # The urgent request was preempted by memory pressure, as the one admitted last, and the other one kept.
@pytest.mark.parametrize("former", [name for name in BATCH_FORMERS if name not in helpers.NEVER_PREEMPT])
@pytest.mark.parametrize("policy", URGENCY)
@pytest.mark.parametrize("first", ["low", "high"])
def test_memory_pressure_evicts_the_least_urgent(policy: str, former: str, first: str) -> None:
    fields = dict(zip(("low", "high"), URGENCY[policy], strict=True))
    names = [first, "high" if first == "low" else "low"]
    given = [
        (helpers.request(name, 0.01 * at, prompt=8, cap=16, **fields[name]), 16)
        for at, name in enumerate(names)
    ]
    parameters = {"batching_parameters": {**helpers.SMALL_PARAMETERS.get(former, {})}}
    core = helpers.scheduler(policy, batching=former, **{**TIGHT, "num_kv_blocks": 16, **parameters})
    run = helpers.Drive(core, given)
    run.run()
    assert run.finished["high"].num_preemptions == 0
    waits = former == "stage_aware" and first == "high"  # low is not admitted while high decodes
    assert (run.finished["low"].num_preemptions == 0) == waits


def test_a_preemptive_policy_evicts_by_key() -> None:
    class Own(Fcfs):
        preemptive = True

    class Patient(Own):
        preemptive = False

    assert (Own.evicts_by_key, Patient.evicts_by_key, Fcfs.evicts_by_key) == (True, False, False)
    with pytest.raises(TypeError, match="evicts by key"):
        type("Wrong", (Own,), {"evicts_by_key": False})


@pytest.mark.parametrize("former", ["chunked_prefill", "vllm"])
def test_a_policy_that_evicts_by_key_does_not_displace_for_a_slot(former: str) -> None:
    core = helpers.scheduler("priority", batching=former, max_num_seqs=1)
    core.add(helpers.request("low", priority=9, cap=4), 0.0)
    helpers.run_step(core, 0.0)
    core.add(helpers.request("high", 1.0, priority=0), 1.0)
    helpers.run_step(core, 1.0)
    assert core.state("low").num_preemptions == 0
    assert core.num_waiting == 1
