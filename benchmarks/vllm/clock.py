"""Clock that counts an engine's steps, so that a change of the machine's speed during a run has no effect."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from scheduler_core.engine.plan import PrefillChunk
from scheduler_core.simulator.step_time.base import StepTime, StepWork


def step_work(step: Sequence[float]) -> StepWork:
    """Work of a row of `step_log.StepLog`; all decodes are assumed to have the same context length. The chunks are one chunk
    that starts after as many tokens as all of them together."""
    prefill, decodes, context = (int(value) for value in step[2:5])
    before = int(step[7]) if len(step) > 7 else 0
    chunks = (PrefillChunk("", before, prefill, True),) if prefill else ()
    each, rest = divmod(context, decodes) if decodes else (0, 0)
    return StepWork(chunks, [each + (index < rest) for index in range(decodes)])


class EngineClock:
    """Seconds on a machine of constant speed: the machine for which a model of step times was fitted.

    Its speed is the ratio of the modeled to the actual duration of the engine's last `recent` steps, about two
    seconds. The amount of work, queue length and policy have no effect, so that requests sent by this clock are
    an open loop. Before the first step, and without a model, it runs at wall-clock speed.
    """

    def __init__(self, step_time: StepTime | None = None, recent: int = 16) -> None:
        self._step_time = step_time
        self._steps: deque[tuple[float, float]] = deque(maxlen=recent)
        self._at_s = self._reads_s = 0.0
        self._speed = 1.0

    def update(self, now_s: float, steps: Sequence[Sequence[float]]) -> None:
        """Adds the steps that ended since the last call; times are in seconds from the start of the run."""
        self._at_s, self._reads_s = now_s, self.at(now_s)
        if self._step_time is None or not steps:
            return
        self._steps += [(self._step_time.step_s(step_work(step)), step[1]) for step in steps]
        self._speed = sum(said for said, _ in self._steps) / sum(took for _, took in self._steps)

    def at(self, now_s: float) -> float:
        """Time of this clock at `now_s`, according to the last update."""
        return self._reads_s + (now_s - self._at_s) * self._speed

    def when(self, reads_s: float) -> float:
        """Wall-clock time at which this clock shows `reads_s`, at its current speed."""
        return self._at_s + (reads_s - self._reads_s) / self._speed
