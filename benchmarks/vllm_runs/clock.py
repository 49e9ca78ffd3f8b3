"""Time counted in an engine's steps, so that a machine that gets slower or faster during a run changes nothing of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from benchmarks.vllm_runs.step_work import step_work
from scheduler_core.simulator.step_time.base import StepTime


class EngineClock:
    """Seconds of a machine of constant speed: the one that a model of step times was fitted on.

    It goes as fast as the engine's last steps went: the seconds that the model says of their work, by those they took.
    How much work there is, how long the queue is and in which order it goes does not matter, so that requests sent by this
    clock still are an open loop. Until the first step, and without a model, it goes as any other.
    """

    def __init__(self, step_time: StepTime | None = None, recent: int = 16) -> None:
        """Args:
        step_time: What steps take on that machine.
        recent: How many steps tell the speed, some two seconds of them.
        """
        self._step_time = step_time
        self._steps: deque[tuple[float, float]] = deque(maxlen=recent)
        self._at_s = self._reads_s = 0.0
        self._speed = 1.0

    def update(self, now_s: float, steps: Sequence[Sequence[float]]) -> None:
        """Takes in the steps that ended since the last call; times in seconds from the run's begin."""
        self._at_s, self._reads_s = now_s, self.at(now_s)
        if self._step_time is None or not steps:
            return
        self._steps += [(self._step_time.step_s(step_work(step)), step[1]) for step in steps]
        self._speed = sum(said for said, _ in self._steps) / sum(took for _, took in self._steps)

    def at(self, now_s: float) -> float:
        """What it reads then, as far as is known by the last update."""
        return self._reads_s + (now_s - self._at_s) * self._speed

    def when(self, reads_s: float) -> float:
        """When it read, or will read, that, at its speed of now."""
        return self._at_s + (reads_s - self._reads_s) / self._speed
