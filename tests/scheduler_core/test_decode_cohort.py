"""Requests counted together: the same as counted one by one, whoever looks and whenever."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_core.batching import BATCH_FORMERS
from scheduler_core.plan import StepResult
from scheduler_core.policies import make_policy
from scheduler_core.request import Request
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.endings import Endings

FORMERS = [name for name, kind in BATCH_FORMERS.items() if kind.decodes_all]


def limits(former: str, blocks: int, preemption: str) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=6,
        max_num_batched_tokens=200 if former != "chunked_prefill" else 24,
        num_kv_blocks=blocks,
        kv_block_tokens=4,
        num_swap_blocks=12 if preemption == "swap" else None,
        preemption=preemption,  # type: ignore[arg-type]
        batching=former,
    )


def drive(core: Scheduler, rng: np.random.Generator, look: bool, most: int) -> list[object]:
    """Arrivals, stops and aborts at random; everything that comes out. At most `most` steps are taken at once; with `look` every state is read in every step."""
    seen: list[object] = []
    arrived, now = 0, 0.0
    while arrived < 35 or core.num_running or core.num_waiting:
        while arrived < 35 and rng.random() < 0.4:
            prompt, cap = int(rng.integers(1, 90)), int(rng.integers(1, 40))
            core.add(
                Request(request_id=f"r{arrived}", arrival_s=now, prompt_tokens=prompt, max_tokens=cap), now
            )
            arrived += 1
        plan = core.schedule(now)
        now += 1.0
        if plan is None:
            continue
        if look:
            seen_now = [(one.request_id, one.num_computed_tokens, one.last_token_s) for one in core.decoding]
            assert (
                sum(tokens for _, tokens, _ in seen_now) + sum(chunk.start_token for chunk in plan.prefills)
                == plan.num_context_tokens
            )
        promised = core.steady_steps(int(rng.integers(1, most + 1)))
        steps = int(rng.integers(1, promised + 1))
        stopped = [name for name in plan.decodes if rng.random() < 0.02]
        if rng.random() < 0.05 and plan.decodes:
            core.abort(plan.decodes[int(rng.integers(len(plan.decodes)))], now)
        seen.append((plan, steps, core.complete(StepResult(plan.step, tuple(stopped), steps), now)))
        if look:
            core.validate()
    seen.append((core.counters, core.peak_kv_blocks, core.num_free_kv_blocks))
    return seen


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("blocks", [34, 200])
@pytest.mark.parametrize("former", FORMERS)
def test_counting_together_is_counting_one_by_one(former: str, blocks: int, preemption: str) -> None:
    def run(look: bool, singly: bool, most: int) -> list[object]:
        core = Scheduler(limits(former, blocks, preemption), make_policy("fcfs"))
        assert core.num_common_steps == 0
        if singly:
            core._pool.count_singly()
            assert core.num_common_steps is None
        return drive(core, np.random.default_rng(7), look, most)

    together = run(look=False, singly=False, most=30)
    assert together == run(look=True, singly=False, most=30)
    # One by one, chunks are not taken several at once: then the draws would be others.
    most = 1 if former == "chunked_prefill" else 30
    assert run(look=False, singly=False, most=most) == run(look=True, singly=True, most=most)


def test_chunks_of_one_prompt_may_be_taken_at_once() -> None:
    """100 tokens in chunks of 24: three times 24 and three times more would be the fourth, so 4 steps, then the last 4."""

    def core() -> Scheduler:
        made = Scheduler(limits("chunked_prefill", 200, "recompute"), make_policy("fcfs"))
        made.add(Request(request_id="a", arrival_s=0.0, prompt_tokens=100, max_tokens=3), 0.0)
        return made

    bulk, single = core(), core()
    plan = bulk.schedule(0.0)
    assert plan is not None
    assert bulk.steady_steps(100) == 4
    bulk.complete(StepResult(plan.step, (), 4), 4.0)
    for step in range(4):
        one = single.schedule(float(step))
        assert one is not None
        single.complete(StepResult(one.step), step + 1.0)
    last, other = bulk.schedule(4.0), single.schedule(4.0)
    assert last is not None
    assert other is not None
    assert (last.prefills, last.num_context_tokens) == (other.prefills, other.num_context_tokens)
    assert last.prefills[0].is_last
    assert bulk.steady_steps(100) == 1


def test_a_policy_that_looks_at_running_requests_finds_them_counted_one_by_one() -> None:
    for name in ("srpt", "vtc", "uniboost"):
        core = Scheduler(SchedulerConfig(), make_policy(name))
        assert core.num_common_steps is None


def test_endings_pass_over_those_who_left_and_came_back() -> None:
    endings = Endings()
    assert endings.next_step() is None
    for name, step in (("a", 5), ("b", 3), ("c", 9)):
        endings.add(name, step)
    endings.drop("b")
    endings.drop("nobody")
    assert endings.next_step() == 5
    endings.add("b", 7)
    assert sorted(endings.pop_until(8)) == ["a", "b"]
    assert endings.pop_until(8) == []
    for step in range(1000):  # a request that moves again and again does not fill the heap
        endings.add("d", 100 + step)
    assert len(endings._heap) < 200
    assert endings.next_step() == 9
    assert sorted(endings.pop_until(2000)) == ["c", "d"]
