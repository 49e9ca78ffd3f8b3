"""`simulate workload`: draws a trace from the description of a workload."""

import logging
from dataclasses import dataclass

from scheduler_core.ranges import INTEGERS, check_ranges
from scheduler_core.simulator.trace import write_trace
from scheduler_core.simulator.workloads.workload import Workload

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig(Workload):
    """Draw requests from the description of a workload and write them as a trace."""

    INPUTS = ("lengths", "classes", "agents")
    OUTPUTS = ("out",)

    out: str
    """Path of the trace (.parquet, .csv or .jsonl)."""
    overwrite: bool = False
    """Replace existing output files."""
    seed: int = 0
    """Seed of all random numbers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, seed=(0, INTEGERS))


def run(config: WorkloadConfig) -> None:
    """Runs `simulate workload`."""
    trace = config.trace(config.seed)
    if trace.problem:
        logger.warning("%s", trace.problem)
    write_trace(trace, config.out)
