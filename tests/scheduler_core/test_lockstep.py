"""Requests in lockstep: the same decisions as for requests advanced one by one, whatever is read and whenever."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest

from scheduler_core.batching import BATCH_FORMERS
from scheduler_core.plan import StepResult
from scheduler_core.policies import POLICIES, make_policy
from scheduler_core.policies.base import KeyChanges, Policy, Progress
from scheduler_core.request import Request, RequestState
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from tests.scheduler_core.helpers import full_prediction

FORMERS = [name for name, kind in BATCH_FORMERS.items() if kind.lockstep]


def limits(former: str, blocks: int, preemption: str) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=6, max_num_batched_tokens=200 if former != "chunked_prefill" else 24,
        num_kv_blocks=blocks, kv_block_tokens=4, num_swap_blocks=12 if preemption == "swap" else None,
        preemption=preemption,  # type: ignore[arg-type]
        batching=former,
    )  # fmt: skip


def drive(core: Scheduler, *, read: bool = False, max_steps: int = 1, predict: bool = False) -> list[object]:
    """Arrivals, predictions, stops and aborts at random; all that comes out.

    At most `max_steps` steps are taken at once; with `read` every state is read in every step.
    """
    rng = np.random.default_rng(7)
    outcomes: list[object] = []
    arrived, now = 0, 0.0
    while arrived < 35 or core.num_running or core.num_waiting:
        while arrived < 35 and rng.random() < 0.4:
            request = Request(
                request_id=f"r{arrived}", arrival_s=now, prompt_tokens=int(rng.integers(1, 90)),
                max_tokens=int(rng.integers(1, 40)), priority=int(rng.integers(9)),
                tier=int(rng.integers(5)), tenant=f"t{arrived % 3}",
            )  # fmt: skip
            core.add(request, now)
            arrived += 1
        if predict and rng.random() < 0.5:
            core.update(f"r{int(rng.integers(35))}", full_prediction(float(rng.uniform(2, 40))), now)
        plan = core.schedule(now)
        now += 1.0
        if plan is None:
            continue
        if read:
            decoded = sum(state.num_computed_tokens for state in core.decoding)
            assert decoded + sum(chunk.start_token for chunk in plan.prefills) == plan.num_context_tokens
        promised = core.steady_steps(int(rng.integers(1, max_steps + 1)))
        steps = int(rng.integers(1, promised + 1))
        stopped = [name for name in plan.decodes if rng.random() < 0.02]
        if rng.random() < 0.05 and plan.decodes:
            core.abort(plan.decodes[int(rng.integers(len(plan.decodes)))], now)
        outcomes.append((plan, steps, core.complete(StepResult(plan.step, tuple(stopped), steps), now)))
        if read:
            core.validate()
    outcomes.append((core.counters, core.pool.kv.peak_blocks, core.pool.kv.num_free_blocks))
    return outcomes


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("blocks", [34, 200])
@pytest.mark.parametrize("former", FORMERS)
def test_lockstep_equals_single_requests(former: str, blocks: int, preemption: str) -> None:
    def run(read: bool, individually: bool, max_steps: int) -> list[object]:
        core = Scheduler(limits(former, blocks, preemption), make_policy("fcfs"))
        assert core.num_common_steps == 0
        if individually:
            core.pool.end_lockstep()
            assert core.num_common_steps is None
        return drive(core, read=read, max_steps=max_steps)

    together = run(read=False, individually=False, max_steps=30)
    assert together == run(read=True, individually=False, max_steps=30)
    # Individually, chunks are not taken several at once: then the draws would be others.
    max_steps = 1 if former == "chunked_prefill" else 30
    assert run(False, False, max_steps) == run(True, True, max_steps)


@dataclass(kw_only=True, slots=True)
class WrongDeclaration(Policy):
    """Reads running requests although it declares that it does not."""

    key_changes: ClassVar[KeyChanges] = "with_time"
    progress: ClassVar[Progress] = "unused"
    _running: list[RequestState] = field(default_factory=list, init=False, repr=False)

    def on_admit(self, state: RequestState, now: float) -> None:
        self._running.append(state)

    def key(self, state: RequestState, now: float) -> float:
        return (sum(other.num_output_tokens for other in self._running) * (1 + state.order)) % 7


def both_ways(config: SchedulerConfig, make: type[Policy]) -> list[list[object]]:
    outcomes = []
    for individually in (False, True):
        core = Scheduler(config, make())
        if individually:
            core.pool.end_lockstep()
        outcomes.append(drive(core, predict=True))
    return outcomes


PAIRS = [
    (policy, former)
    for policy, kind in POLICIES.items()
    for former in FORMERS
    if BATCH_FORMERS[former].allows_preemptive or not kind.preemptive
]


@pytest.mark.parametrize(("policy", "former"), PAIRS)
def test_every_policy_decides_the_same_both_ways(policy: str, former: str) -> None:
    in_lockstep, individually = both_ways(limits(former, 40, "recompute"), POLICIES[policy])
    assert in_lockstep == individually


def test_a_wrong_declaration_would_be_seen() -> None:
    in_lockstep, individually = both_ways(limits("vllm", 40, "recompute"), WrongDeclaration)
    assert in_lockstep != individually
