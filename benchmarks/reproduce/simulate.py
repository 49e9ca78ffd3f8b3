"""Simulations for the studies: systems with their own step-time model, and means over seeds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from scheduler_core.engine.plan import Finished, StepPlan, StepResult
from scheduler_core.policies import make_policy
from scheduler_core.routing.base import Router
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.config import ClusterConfig
from scheduler_core.simulator.loop import Simulation
from scheduler_core.simulator.records import RequestRecord
from scheduler_core.simulator.step_time.base import LinearStepTime, StepTime
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.trace_predictions import Predictions
from scheduler_core.simulator.watch import GapHistogram, RunWatch, StepTable
from scheduler_core.simulator.workloads.lengths import TokenDistribution

Results = TypeVar("Results", bound=Mapping[Any, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A scheduler on an engine.

    Attributes:
        policy: Order policy of the requests.
        parameters: Parameters of the policy.
        scheduler: Limits and batch former.
        step_time: Durations of steps.
        cluster: Replicas and router.
        router: Factory that replaces the router of `cluster`, for parameters that `cluster` has no field for.
    """

    policy: str = "fcfs"
    parameters: Mapping[str, float] = field(default_factory=dict)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    step_time: StepTime = field(default_factory=LinearStepTime)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    router: Callable[[], Router] | None = None


class TimedScheduler(Scheduler):
    """A scheduler that sums the time of the steps in which each request runs; replicas share `ran_s`."""

    def __init__(self, system: System, ran_s: defaultdict[str, float]) -> None:
        super().__init__(system.scheduler, make_policy(system.policy, system.parameters))
        self._ran_s = ran_s
        self._start_s = 0.0
        self._names: list[str] = []

    def schedule(self, now: float) -> StepPlan | None:
        plan = super().schedule(now)
        if plan is not None:
            self._start_s = now
            self._names = [*plan.decodes, *(chunk.request_id for chunk in plan.prefills)]
        return plan

    def complete(self, result: StepResult, now: float) -> tuple[Finished, ...]:
        for name in self._names:
            self._ran_s[name] += now - self._start_s
        return super().complete(result, now)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of one simulation.

    Attributes:
        records: Records of all finished requests.
        watch: Gaps between tokens, at every step.
        num_refused: Requests that exceed the limits.
        num_migrations: Requests that moved to another replica.
        most_resident_tokens: Maximum number of tokens held at the same time on one replica, in whole blocks.
        end_s: End of the last step.
        ran_s: By request id: total time of the steps in which it ran; empty unless measured.
    """

    records: list[RequestRecord]
    watch: RunWatch
    num_refused: int
    num_migrations: int
    most_resident_tokens: int
    end_s: float
    ran_s: defaultdict[str, float]

    def gaps(self, tenant: str | None = None) -> GapHistogram:
        """Times between tokens, of one tenant or of all."""
        return self.watch.gaps.merged(None if tenant is None else "tenant", tenant)


def simulate(
    system: System,
    trace: Trace,
    predictions: Predictions | None = None,
    seed: int = 0,
    *,
    measure_ran: bool = False,
) -> Outcome:
    """Runs a trace to its end; with `measure_ran` the outcome has `ran_s`."""
    watch, ran_s = RunWatch(steps=StepTable()), defaultdict[str, float](float)
    schedulers = {
        name: TimedScheduler(system, ran_s)
        if measure_ran
        else Scheduler(system.scheduler, make_policy(system.policy, system.parameters))
        for name in system.cluster.replica_ids
    }
    arguments: dict[str, Any] = dict(system.cluster.simulation_arguments(seed, system.step_time))
    if system.router is not None:
        arguments["router"] = system.router()
    done = Simulation(
        trace, schedulers, system.step_time, predictions or Predictions(), watch=watch, **arguments
    ).run()
    block = system.scheduler.kv_block_tokens
    resident = max(core.pool.kv.peak_blocks for core in schedulers.values()) * block
    return Outcome(done.records, watch, len(done.refused), done.num_migrations, resident, done.end_s, ran_s)


def over_seeds(seeds: Sequence[int], compute: Callable[[int], Results]) -> Results:
    """Mean over seeds of each number in the mapping, or mapping of mappings, that `compute` returns for a seed."""

    def mean(values: list[Any]) -> Any:
        if isinstance(values[0], Mapping):
            return {name: mean([one[name] for one in values]) for name in values[0]}
        return float(np.mean(values))

    return mean([compute(seed) for seed in seeds])  # type: ignore[no-any-return]


def log_normal(median: float, p90: float, high: int) -> TokenDistribution:
    """Log-normal with a given median and P90, at most `high`."""
    sigma = math.log(p90 / median) / 1.2815515655446004
    return TokenDistribution(kind="log_t", mu=math.log(median), sigma=sigma, nu=1e6, high=high)


def percentile(values: Sequence[float], share: float) -> float:
    """Percentile with linear interpolation; `share` is in percent."""
    return float(np.percentile(np.asarray(values, float), share))
