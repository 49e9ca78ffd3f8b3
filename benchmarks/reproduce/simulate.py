"""Simulations as the studies need them: systems with a step-time model of their own, and means over seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scheduler_core.policies import make_policy
from scheduler_core.routing import Router
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.config import ClusterConfig
from scheduler_core.simulator.loop import Simulation
from scheduler_core.simulator.predictions import Predictions, no_predictions
from scheduler_core.simulator.records import RequestRecord
from scheduler_core.simulator.step_time import LinearStepTime, StepTime
from scheduler_core.simulator.token_gaps import GapHistogram
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.watch import RunWatch


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A scheduler on an engine.

    Attributes:
        policy: Order of the requests.
        parameters: Of the policy.
        scheduler: Limits and batch former.
        step_time: Durations of steps.
        cluster: Replicas and router.
        router: Makes the router instead of that of `cluster`, with parameters that `cluster` has no field for.
    """

    policy: str = "fcfs"
    parameters: Mapping[str, float] = field(default_factory=dict)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    step_time: StepTime = field(default_factory=LinearStepTime)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    router: Callable[[], Router] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one simulation yields.

    Attributes:
        records: Of all finished requests.
        watch: Gaps between tokens, load over time.
        num_refused: Requests that never fitted.
        num_migrations: Requests that changed their replica.
        most_resident_tokens: Most tokens held at the same time on one replica, as blocks.
        end_s: End of the last step.
    """

    records: list[RequestRecord]
    watch: RunWatch
    num_refused: int
    num_migrations: int
    most_resident_tokens: int
    end_s: float

    def gaps(self, tenant: str | None = None) -> GapHistogram:
        """Times between tokens, of one tenant or of all."""
        assert self.watch.gaps is not None
        return GapHistogram.merged(
            part for kind, part in self.watch.gaps.by_class.items() if tenant is None or kind[1] == tenant
        )


def simulate(
    system: System,
    trace: Trace,
    predictions: Predictions | None = None,
    delays_s: dict[str, float] | None = None,
    seed: int = 0,
    *,
    segments: bool = False,
) -> Outcome:
    """Runs a trace to its end; with `segments` its watch says who ran when."""
    watch = RunWatch(segments=[] if segments else None)
    schedulers = {
        name: Scheduler(system.scheduler, make_policy(system.policy, system.parameters))
        for name in system.cluster.replica_ids
    }
    arguments: dict[str, Any] = dict(system.cluster.simulation_arguments(seed))
    if system.router is not None:
        arguments["router"] = system.router()
    done = Simulation(
        trace,
        schedulers,
        system.step_time,
        predictions or no_predictions(),
        delays_s=delays_s,
        watch=watch,
        **arguments,
    ).run()
    block = system.scheduler.kv_block_tokens
    resident = max(core.peak_kv_blocks for core in schedulers.values()) * block
    return Outcome(done.records, watch, len(done.refused), done.num_migrations, resident, done.end_s)


def over_seeds(seeds: Sequence[int], compute: Callable[[int], Mapping[str, float]]) -> dict[str, float]:
    """Mean over seeds of every number that `compute` gives for a seed."""
    found = [compute(seed) for seed in seeds]
    return {name: float(np.mean([one[name] for one in found])) for name in found[0]}


def percentile(values: Sequence[float], share: float) -> float:
    """Linearly interpolated, share in percent."""
    return float(np.percentile(np.asarray(values, float), share))
