"""Work of a logged step, for the simulator."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_core.engine.plan import PrefillChunk
from scheduler_core.simulator.step_time.base import StepWork


def step_work(step: Sequence[float]) -> StepWork:
    """Work of a row of `step_log.StepLog`; all decodes are assumed to have the same context length."""
    prefill, decodes, context = (int(value) for value in step[2:5])
    chunks = (PrefillChunk("", 0, prefill, True),) if prefill else ()
    each, rest = divmod(context, decodes) if decodes else (0, 0)
    return StepWork(chunks, [each + (index < rest) for index in range(decodes)])
