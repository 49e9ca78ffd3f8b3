"""Victims of policies that do not evict by key: their order, its bound, and what it saves."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, get_args
from unittest.mock import patch

import numpy as np
import pytest

from benchmarks.scheduling.memory_victims import OURS, VLLM, Regime, run
from scheduler_core.engine import memory_victim
from scheduler_core.engine.memory_victim import PREEMPTIONS_PER_ROUND, MemoryVictims, cheapest_last
from scheduler_core.errors import InputError
from scheduler_core.request import RequestState
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.trace_predictions import oracle_predictions
from tests.scheduler_core.helpers import request, trace_row
from tests.scheduler_core.invariants.helpers import steps_of


def order_of(*running: tuple[str, int, int]) -> list[str]:
    """Ids in the order of preemption of (id, tokens in the KV cache, preemptions), given in order of admission."""
    states = []
    for name, num_computed_tokens, num_preemptions in running:
        state = RequestState(request(name), order=0)
        state.num_computed_tokens, state.num_preemptions = num_computed_tokens, num_preemptions
        states.append(state)
    return [state.request_id for state in reversed(cheapest_last(states))]


def test_order_by_hand() -> None:
    assert order_of(("a", 30, 0), ("b", 10, 3), ("c", 20, 0)) == ["b", "c", "a"]
    assert order_of(("first", 60, 0), ("last", 60, 1)) == ["last", "first"]
    num = PREEMPTIONS_PER_ROUND
    assert order_of(("often", 1, num), ("less", 900, num - 1), ("most", 1, 2 * num)) == [
        "less",
        "often",
        "most",
    ]


def trace_of(num: int, seed: int) -> Trace:
    """Chats at a rate at which memory runs out again and again."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(0.1, num)).tolist()
    rows = [
        trace_row(f"r{index}", times[index], int(rng.integers(5, 60)), int(rng.integers(10, 120)), 120)
        for index in range(num)
    ]
    return Trace(tuple(rows))


def limits(**more: Any) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=12, max_num_batched_tokens=192, num_kv_blocks=40, kv_watermark=0.0, **more
    )


def preempted(trace: Trace, policy: str, scheduler: SchedulerConfig) -> Iterator[tuple[str, list[str]]]:
    """Each request that loses its memory, in order, with those that keep theirs in the same step."""
    running: frozenset[str] = frozenset()
    predictions = oracle_predictions(trace)
    for step in steps_of(
        trace, policy, predictions=predictions, scheduler=scheduler, step_time=LinearStepTime()
    ):
        for name in step.preempted:
            yield name, sorted(step.running & running)
        running = step.running - step.ended


@pytest.mark.mend
@pytest.mark.parametrize("policy", ["fcfs", "ssjf"])
@pytest.mark.parametrize("former", ["chunked_prefill", "vllm"])
@pytest.mark.parametrize(("num", "seed"), [(150, 0), pytest.param(600, 1, marks=pytest.mark.slow)])
def test_no_request_is_preempted_again_and_again(policy: str, former: str, num: int, seed: int) -> None:
    """The cheapest request was preempted whenever it had returned, one of them 13 times."""
    trace, cheapest = trace_of(num, seed), limits(batching=former, memory_victims="cheapest")
    counts: Counter[str] = Counter()
    for name, others in preempted(trace, policy, cheapest):
        rounds = [counts[other] // PREEMPTIONS_PER_ROUND for other in others]
        assert counts[name] // PREEMPTIONS_PER_ROUND <= min(rounds, default=0)
        counts[name] += 1
    with patch.object(memory_victim, "PREEMPTIONS_PER_ROUND", 10**9):
        unbounded = Counter(name for name, _ in preempted(trace, policy, cheapest))
    assert PREEMPTIONS_PER_ROUND <= max(counts.values()) < max(unbounded.values())


def test_a_policy_that_evicts_by_key_keeps_its_victims() -> None:
    trace = trace_of(60, 0)
    runs = [
        list(preempted(trace, policy, limits(memory_victims=rule)))
        for policy in ("priority", "fcfs")
        for rule in get_args(MemoryVictims)
    ]
    assert runs[0] == runs[1] != []
    assert runs[2] != runs[3]
    with pytest.raises(InputError, match="memory_victims: got 'oldest'; allowed: last_admitted, cheapest"):
        limits(memory_victims="oldest")


def test_fewer_tokens_are_recomputed_than_with_the_rule_of_vllm() -> None:
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(0.15, 150)).tolist()
    prompts, outputs = (rng.lognormal(4.5, sigma, 150).astype(int) + 1 for sigma in (1.5, 0.8))
    pairs = zip(times, prompts.clip(max=2000).tolist(), outputs.clip(max=500).tolist(), strict=True)
    trace = Trace(tuple(trace_row(f"r{index}", *row, 500) for index, row in enumerate(pairs)))
    regime, lengths = Regime("sharegpt", "fcfs", 300, 1.0, "off"), oracle_predictions(trace)
    ours, vllm = (run(regime, rule, trace, lengths)["recomputed"] for rule in (OURS, VLLM))
    assert 0.0 < ours < 0.8 * vllm
