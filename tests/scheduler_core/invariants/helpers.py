"""Steps of a full simulation, for checks of what the scheduler decided in each of them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scheduler_core.engine.plan import Finished, StepPlan, StepResult
from scheduler_core.policies import make_policy
from scheduler_core.scheduler import Scheduler
from scheduler_core.simulator.config import SimulationConfig
from scheduler_core.simulator.loop import Simulation
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.trace_predictions import Predictions


@dataclass(frozen=True)
class Step:
    """One step of the engine.

    Attributes:
        start_s, end_s: When it was planned and when it ended.
        admitted, preempted: Requests that left the waiting queue, and that returned to it.
        served: Requests that processed tokens, in prompt chunks and decodes.
        sampled: Requests that got an output token.
        running: Requests that hold memory in the step.
        waiting: Requests that wait during the step, and were there when it was planned.
        ended: Requests that ended with the step.
        tokens: Output tokens of each request before the step.
    """

    start_s: float
    end_s: float
    admitted: tuple[str, ...]
    preempted: tuple[str, ...]
    served: frozenset[str]
    sampled: frozenset[str]
    running: frozenset[str]
    waiting: frozenset[str]
    ended: frozenset[str]
    tokens: Mapping[str, int] = field(repr=False)


class RecordingScheduler(Scheduler):
    """Adds every step to `steps`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.steps: list[Step] = []
        self._tokens: Counter[str] = Counter()
        self._plan: StepPlan | None = None
        self._start_s = 0.0
        self._present: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())

    def schedule(self, now: float) -> StepPlan | None:
        self._plan, self._start_s = super().schedule(now), now
        waiting = frozenset(state.request_id for state in self.pool.waiting)
        self._present = frozenset(self.pool.running), waiting
        return self._plan

    def complete(self, result: StepResult, now: float) -> tuple[Finished, ...]:
        finished = super().complete(result, now)
        plan, (running, waiting) = self._plan, self._present
        assert plan is not None
        assert result.num_steps == 1
        served = frozenset([*plan.decodes, *(chunk.request_id for chunk in plan.prefills)])
        sampled = [*plan.decodes, *(chunk.request_id for chunk in plan.prefills if chunk.is_last)]
        self.steps.append(
            Step(
                start_s=self._start_s, end_s=now, admitted=plan.admitted, preempted=plan.preempted, served=served,
                sampled=frozenset(sampled), running=running, waiting=waiting,
                ended=frozenset(item.request_id for item in finished), tokens=dict(self._tokens),
            )
        )  # fmt: skip
        self._tokens.update(sampled)
        return finished


def steps_of(trace: Trace, policy: str, *, predictions: Predictions | None = None, **more: Any) -> list[Step]:
    """Every step of a simulation; `more` are fields of the configuration."""
    config = SimulationConfig(trace="", policy=policy, **more)
    core = RecordingScheduler(config.scheduler, make_policy(policy, config.policy_parameters))
    step_time = config.make_step_time()
    Simulation(trace, core, step_time, predictions or Predictions(), exact_steps=True).run()
    return core.steps
