"""Semantic scheduling in full simulations: the order of levels, and the work of an iteration (sections 3.2 and 3.3)."""

import math
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
import pytest

from scheduler_core.engine import queues
from scheduler_core.engine.plan import StepPlan
from scheduler_core.policies import make_policy
from scheduler_core.policies.semantic import Semantic
from scheduler_core.prediction.predictions import BucketPrediction, Prediction, UrgencyPrediction
from scheduler_core.request import RequestState, Status
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.loop import Simulation
from scheduler_core.simulator.records import RequestRecord
from scheduler_core.simulator.step_time.quadratic import QuadraticStepTime
from scheduler_core.simulator.trace import Trace, TraceRequest
from scheduler_core.simulator.trace_predictions import Predictions

pytestmark = pytest.mark.mend

LEVELS, LONGEST, BLOCK = 5, 120, 16
EDGES = (30.0, 60.0, 90.0)
#: Blocks of an engine that never evicts; with short memory it has those of the longest request, and a few for each other.
AMPLE, LONGEST_BLOCKS, FEW = 10_000, 2 * LONGEST // BLOCK + 1, 6
#: Requests, and the size of a batch; the paper's spikes have up to 100 requests, its released code batches of 16.
SIZES = [
    (60, 1),
    (60, 4),
    pytest.param(200, 1, marks=pytest.mark.slow),
    pytest.param(600, 16, marks=pytest.mark.slow),
]


class View(NamedTuple):
    """A request before a step."""

    key: tuple[float, float, int]
    level: int
    is_running: bool
    is_decode: bool


class Watched(Scheduler):
    """A scheduler that counts its work, and checks each step against Algorithm 2 unless `checks` is false."""

    checks = True

    def __init__(self, levels: dict[str, int], batch: int, is_short: bool) -> None:
        limits = SchedulerConfig(
            batching="stage_aware",
            max_num_seqs=batch,
            max_num_batched_tokens=batch * LONGEST * 2,
            num_kv_blocks=LONGEST_BLOCKS + FEW * (batch - 1) if is_short else AMPLE,
            kv_block_tokens=BLOCK,
            preemption="swap",
        )
        super().__init__(limits, make_policy("semantic", {"max_promotion": LEVELS}))
        self.levels, self.batch = levels, batch
        #: By request: the start of its latest step.
        self.start_s: dict[str, float] = {}
        self.num_steps = self.num_resident = self.num_evictions = self.num_compared = 0

    def _view(self, state: RequestState, now: float) -> View:
        key = (self.pool.policy.key(state, now), state.request.arrival_s, state.order)
        decodes = state.num_computed_tokens >= state.prefill_target_tokens
        return View(key, self.levels[state.request_id], state.status is Status.RUNNING, decodes)

    def schedule(self, now: float) -> StepPlan | None:
        num_resident = self.pool.num_running
        before = (
            {name: self._view(state, now) for name, state in self.pool.states.items()} if self.checks else {}
        )
        plan = super().schedule(now)
        if plan is not None:
            chosen = {*plan.decodes, *(chunk.request_id for chunk in plan.prefills)}
            if self.checks:
                self._check(before, chosen)
            self.start_s |= dict.fromkeys(chosen, now)
            self.num_steps += 1
            self.num_resident += num_resident
            self.num_evictions += len(plan.preempted)
            self.num_compared += len(plan.preempted) * (num_resident + self.batch)
        return plan

    def _check(self, before: dict[str, View], chosen: set[str]) -> None:
        first = min(before, key=lambda name: before[name].key)
        assert first in chosen
        assert before[first].level == min(view.level for view in before.values())
        assert len(chosen) <= self.batch
        others = {name: view for name, view in before.items() if name not in chosen}
        if before[first].is_decode:
            assert all(before[name].is_decode for name in chosen)
            others = {name: view for name, view in others.items() if view.is_running and view.is_decode}
        elif len(chosen) < self.batch:
            others = {}
        if others:
            assert max(before[name].level for name in chosen) <= min(view.level for view in others.values())


def simulated(
    num: int, batch: int, is_short: bool, seed: int = 0, load: float = 1.2
) -> tuple[Watched, list[RequestRecord]]:
    """Spikes of 5 requests with predicted levels, of which the most probable one is not that of least expected cost.

    The load is relative to the 0.72 s in which one slot serves a request of average length.
    """
    rng = np.random.default_rng(seed)
    gap_s = 5 * 0.72 / (batch * load)
    rows, by_id, levels = [], {}, {}
    for number in range(num):
        name, level, output = f"r{number}", int(rng.integers(LEVELS)), int(rng.integers(1, LONGEST))
        arrival_s = gap_s * (number // 5) + 0.01 * rng.random()
        rows.append(
            TraceRequest(
                request_id=name,
                arrival_s=arrival_s,
                prompt_tokens=int(rng.integers(1, LONGEST)),
                output_tokens=output,
                max_tokens=LONGEST,
                tier=int(rng.integers(LEVELS)),
            )
        )
        probabilities = [0.15] * LEVELS
        probabilities[level] = 0.4
        bucket = [0.0] * (len(EDGES) + 1)
        bucket[sum(output >= edge for edge in EDGES)] = 1.0
        by_id[name] = Prediction(
            urgency=UrgencyPrediction(tuple(probabilities)), bucket=BucketPrediction(tuple(bucket), EDGES)
        )
        levels[name] = level
    core = Watched(levels, batch, is_short)
    rows.sort(key=lambda row: row.arrival_s)
    simulation = Simulation(Trace(tuple(rows)), core, QuadraticStepTime(), Predictions("told", by_id))
    records = simulation.run().records
    assert len(records) == num
    return core, records


@pytest.mark.parametrize("is_short", [False, True], ids=["ample", "short"])
@pytest.mark.parametrize(("num", "batch"), SIZES)
def test_each_step_runs_the_most_urgent_requests_of_its_stage(num: int, batch: int, is_short: bool) -> None:
    """Algorithm 2, lines 4 to 15; `Watched` checks each step. Memory is short in half of the cases."""
    core, _ = simulated(num, batch, is_short)
    assert core.num_steps > num
    assert (core.num_evictions > 0) == is_short


@pytest.mark.parametrize("is_short", [False, True], ids=["ample", "short"])
@pytest.mark.parametrize("num", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_no_request_ends_before_a_more_urgent_one_that_was_there(num: int, is_short: bool) -> None:
    """The constraint of Eq. 2 with a batch of one: a request that ends first was in its last step when the more urgent one
    arrived. In larger batches less urgent requests use the slots beside an urgent one."""
    core, records = simulated(num, 1, is_short)
    for one, other in permutations(records, 2):
        if one.finish_s < other.finish_s and other.arrival_s <= core.start_s[one.request_id]:
            assert core.levels[one.request_id] <= core.levels[other.request_id]


@pytest.mark.parametrize("is_short", [False, True], ids=["ample", "short"])
@pytest.mark.parametrize("num", [100, pytest.param(800, marks=pytest.mark.slow)])
def test_the_work_of_an_iteration_does_not_grow_with_the_queue(
    num: int, is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Section 3.3: an arrival costs one insertion, O(log n); an iteration takes the b first of the heap and returns the
    others, without a new order of the n waiting requests. Here an iteration also compares the requests in memory, and
    each eviction all of them, for which the paper has a second heap."""
    counts = dict.fromkeys(("key", "heappush", "heappop", "heapify"), 0)

    def counted(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            counts[name] += len(arguments[0]) if name == "heapify" else 1
            return function(*arguments)

        return call

    for name in ("heappush", "heappop", "heapify"):
        monkeypatch.setattr(queues, name, counted(name, getattr(queues, name)))
    monkeypatch.setattr(Semantic, "key", counted("key", Semantic.key))
    monkeypatch.setattr(Watched, "checks", False)
    core, _ = simulated(num, 4, is_short, load=math.inf)
    moves = num + core.num_evictions + 5 * core.num_steps
    assert counts["key"] <= 2 * moves + core.num_resident + core.num_compared
    assert counts["heappush"] + counts["heappop"] <= 2 * moves
    assert counts["heapify"] <= counts["heappush"]
