"""A former's plans for an engine are those of the simulator's scheduler, if the engine executes them."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from scheduler_core.adapters.live_batches import LiveBatches
from scheduler_core.adapters.live_order import declared_level
from scheduler_core.adapters.vllm_queue import PlannedQueue
from scheduler_core.batching import BATCH_FORMERS, make_former
from scheduler_core.engine.kv_cache import KVCache
from scheduler_core.engine.memory_victim import MemoryVictims
from scheduler_core.engine.plan import StepPlan, StepResult
from scheduler_core.engine.step_costs import StepCosts
from scheduler_core.policies import make_policy
from scheduler_core.prediction.predictions import LengthPrediction, Prediction
from scheduler_core.request import Request, Status
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from tests.scheduler_core.adapters.stand_in import FakeRequest

RAD = {"t_row": 16, "t_col": 4, "t_red": 8}
PARAMETERS: dict[str, dict[str, Any]] = {"rad": RAD, "rad_prefill_first": RAD, "slai": {"max_decodes": 4}}
POLICIES = {"uniboost": "uniboost", "stage_aware": "semantic", "chunked_prefill": "trail", "vllm": "srpt"}
SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 128, "num_kv_blocks": 17}


class Engine:
    """Executes plans of a `LiveBatches` and reports as an adapter does."""

    def __init__(self, batches: LiveBatches) -> None:
        self.batches = batches
        self.running: dict[str, int] = {}
        self.outputs: dict[str, int] = {}

    def plan(self, now: float) -> StepPlan:
        batches = self.batches
        batches.start_step(now)
        for name, computed in self.running.items():
            batches.states[name].num_computed_tokens = computed
        batch = batches.form(now)
        for name in batch.preempted:
            del self.running[name]
        for name in batch.admitted:
            self.running[name] = batches.states[name].num_computed_tokens
        return batch.plan(0, None)

    def execute(self, plan: StepPlan, stopped: Sequence[str], start: float, now: float) -> None:
        batches = self.batches
        batches.schedule(plan.admitted, start)
        tokens = {chunk.request_id: chunk.num_tokens for chunk in plan.prefills} | dict.fromkeys(
            plan.decodes, 1
        )
        sampled = {chunk.request_id for chunk in plan.prefills if chunk.is_last} | set(plan.decodes)
        for name, num in tokens.items():
            self.running[name] += num
            self.outputs[name] = self.outputs.get(name, 0) + (name in sampled)
            batches.progress(name, num, self.running[name], self.outputs[name], now)
            if name in stopped or self.outputs[name] == batches.states[name].request.max_tokens:
                del self.running[name]
                batches.leave(name)
        batches.policy.on_step(now, now - start)
        batches.former.on_step(now - start)


@pytest.mark.parametrize(("seed", "num_levels"), [(0, 1), (1, 1), (1, 3)])
@pytest.mark.parametrize("name", sorted(BATCH_FORMERS))
def test_plans_are_those_of_the_scheduler(name: str, seed: int, num_levels: int) -> None:
    policy, parameters = POLICIES.get(name, "ssjf"), PARAMETERS.get(name, {})
    config = SchedulerConfig(batching=name, batching_parameters=parameters, prefix_caching=False, **SIZES)
    scheduler = Scheduler(config, make_policy(policy))
    kv = KVCache(config.num_kv_blocks, config.kv_block_tokens, config.kv_watermark)
    former = make_former(name, parameters)
    batches = LiveBatches(
        make_policy(policy), former, kv, config, StepCosts(), lambda state: state.request.priority
    )
    engine, chance, now, at = Engine(batches), random.Random(seed), 0.0, 0
    num_plans = num_preempted = 0
    while at < 40 or batches.states:
        while at < 40 and chance.random() < 0.5:
            request = Request(
                request_id=f"r{at}",
                arrival_s=now,
                prompt_tokens=chance.randrange(1, 90),
                max_tokens=chance.randrange(1, 38),
                tier=at % 5,
                priority=at * at % num_levels,
                tbt_slo_s=chance.choice((0.05, 2.0)),
            )
            prediction = Prediction(length=LengthPrediction(math.log(chance.randrange(2, 60)), 0.5, 4.0))
            scheduler.add(request, now)
            scheduler.update(request.request_id, prediction, now)
            batches.arrive(request, now)
            batches.enqueue(request.request_id, now)
            batches.predict(request.request_id, prediction, now)
            at += 1
        planned = scheduler.schedule(now)
        ours = engine.plan(now)
        if planned is None:
            assert not ours.prefills
            assert not ours.decodes
            now += 0.1
            continue
        fields = ("prefills", "decodes", "admitted", "preempted")
        assert {f: getattr(ours, f) for f in fields} == {f: getattr(planned, f) for f in fields}, num_plans
        start, now = now, now + chance.choice((0.05, 0.1, 0.3))
        stopped = [name for name in planned.decodes if chance.random() < 0.03]
        scheduler.complete(StepResult(planned.step, stopped=tuple(stopped)), now)
        engine.execute(ours, stopped, start, now)
        num_plans += 1
        num_preempted += len(planned.preempted)
        batches.pool.validate(now, keys_are_fresh=False)
    assert num_plans > 40
    assert num_preempted or BATCH_FORMERS[name].__name__ in ("Orca", "RequestLevel", "QuantileReserve"), (
        "memory never ran out"
    )


@pytest.mark.mend
@pytest.mark.parametrize("name", sorted(BATCH_FORMERS))
def test_what_the_engine_does_not_execute_is_planned_again(name: str) -> None:
    """Orca's and vLLM's own former never planned the rest of a prompt, which they had planned as a whole."""
    batches = simple(name)
    for request_id in ("a", "b"):
        arrive(batches, request_id)
    first = batches.form(0.0)
    assert "a" in first.admitted
    planned = {chunk.request_id: chunk.num_tokens for _, chunk in first.prefills}
    batches.schedule(["a"], 0.0)
    assert batches.unexecuted == {*first.admitted} - {"a"}
    done = planned["a"] // 2
    batches.states["a"].num_computed_tokens = done
    batches.progress("a", done, done, 0, 0.1)
    rest = {"a": 40 - done, "b": 40}
    for _ in range(40):  # RAD plans tile by tile
        for state, chunk in batches.form(0.1).prefills:
            rest[chunk.request_id] -= chunk.num_tokens
            state.num_computed_tokens += chunk.num_tokens
            num = int(chunk.is_last)
            batches.progress(chunk.request_id, chunk.num_tokens, state.num_computed_tokens, num, 0.1)
    assert rest == {"a": 0, "b": 0}
    batches.schedule(["b"], 0.1)
    batches.leave("b")
    assert batches.unexecuted == set()
    batches.pool.validate(0.1, keys_are_fresh=False)


def test_a_request_that_the_engine_admits_alone_runs_in_the_plans() -> None:
    batches = simple("chunked_prefill")
    arrive(batches, "a")
    state = batches.states["a"]
    batches.pool.kv.admit("a", 40, waive_watermark=True)
    batches.pool.adopt(state, 0.0)
    assert state.status is Status.RUNNING
    assert [chunk.request_id for _, chunk in batches.form(0.0).prefills] == ["a"]
    assert len(batches.waiting) == 0


def test_a_preempted_request_waits_with_its_prediction() -> None:
    batches = simple("uniboost")
    arrive(batches, "a")
    batches.form(0.0)
    batches.schedule(["a"], 0.0)
    batches.preempt("a", 0.1)
    batches.preempt("a", 0.1)
    state = batches.states["a"]
    assert (state.status, state.num_preemptions, len(batches.waiting)) == (Status.WAITING, 1, 1)
    batches.predict("a", Prediction(length=LengthPrediction(2.0, 0.5, 4.0)), 0.2)
    assert state.prediction is not None
    assert batches.form(0.2).admitted == ["a"]


def test_a_blocked_request_is_in_no_plan_until_it_is_ready() -> None:
    batches = simple("chunked_prefill")
    queue = PlannedQueue(batches, lambda: 0.0, lambda request: request.status == "blocked")
    for name in ("a", "b"):
        batches.arrive(Request(request_id=name, arrival_s=0.0, prompt_tokens=40, max_tokens=10), 0.0)
        queue.add_request(FakeRequest(name, 1, status="blocked" if name == "a" else "waiting"))
    assert batches.form(0.0).admitted == ["b"]
    queue.plan(["b"])
    assert queue.pop_request().request_id == "b"
    assert (len(queue), bool(queue), queue.holds("a")) == (1, False, True)
    queue.release(lambda request: False)
    assert batches.form(0.1).admitted == []

    def is_ready(request: FakeRequest) -> bool:
        request.status = "waiting"  # as vLLM does
        return True

    queue.release(is_ready)
    assert batches.form(0.2).admitted == ["a"]
    queue.remove_requests(list(queue))
    assert len(queue) == 0


@pytest.mark.mend
@pytest.mark.parametrize("victims", ["last_admitted", "cheapest"])
def test_memory_is_taken_from_the_less_urgent_level(victims: MemoryVictims) -> None:
    config = SchedulerConfig(prefix_caching=False, **SIZES)
    kv = KVCache(7, config.kv_block_tokens, 0.0)
    policy = make_policy("fcfs")
    batches = LiveBatches(
        *(policy, make_former("chunked_prefill"), kv, config, StepCosts(), declared_level(policy)),
        memory_victims=victims,
    )
    size = config.kv_block_tokens
    # The less urgent one is admitted first, and has more to be computed again.
    for name, priority, tokens in (("late", 5, 4 * size), ("urgent", 0, 2 * size)):
        batches.arrive(
            Request(request_id=name, arrival_s=0.0, prompt_tokens=tokens, max_tokens=90, priority=priority),
            0.0,
        )
        batches.enqueue(name, 0.0)
        assert batches.form(0.0).admitted == [name]
        batches.schedule([name], 0.0)
        batches.states[name].num_computed_tokens = tokens
        batches.progress(name, tokens, tokens, 1, 0.1)
    batch = batches.form(0.2)  # the urgent one needs a block, and none is free
    assert batch.preempted == ["late"]
    assert [state.request_id for state in batch.decodes] == ["urgent"]


def simple(former: str) -> LiveBatches:
    config = SchedulerConfig(prefix_caching=False, **SIZES)
    kv = KVCache(config.num_kv_blocks, config.kv_block_tokens, 0.0)
    return LiveBatches(
        make_policy("fcfs"), make_former(former, PARAMETERS.get(former, {})), kv, config, StepCosts()
    )


def arrive(batches: LiveBatches, name: str) -> None:
    batches.arrive(Request(request_id=name, arrival_s=0.0, prompt_tokens=40, max_tokens=10), 0.0)
    batches.enqueue(name, 0.0)
