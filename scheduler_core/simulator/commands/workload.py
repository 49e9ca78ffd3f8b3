"""`simulate workload`: a trace drawn from a description, to look at or to use elsewhere."""

from dataclasses import dataclass

from scheduler_core.ranges import INTEGERS, check_ranges
from scheduler_core.simulator.trace import write_trace
from scheduler_core.simulator.workloads.workload import Workload


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig(Workload):
    """Draw requests from the description of a workload and write them as a trace."""

    INPUTS = ("lengths", "classes")
    OUTPUTS = ("out",)

    out: str
    """Where to write the trace (.parquet, .csv or .jsonl)."""
    overwrite: bool = False
    """Replace files at the outputs."""
    seed: int = 0
    """Seed of everything that is drawn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, seed=(0, INTEGERS))


def run(config: WorkloadConfig) -> None:
    """Carries out `simulate workload`."""
    write_trace(config.trace(config.seed), config.out)
