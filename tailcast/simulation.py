"""One simulated run, from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scheduler_core.errors import InputError
from scheduler_core.simulator.config import SimulationConfig
from scheduler_core.simulator.run import SimulationResult, run_simulation
from scheduler_core.simulator.trace import Trace


def simulate(trace: Trace | str | Path, policy: str, **options: Any) -> SimulationResult:
    """Simulates a policy on a trace until every request has finished; see `simulate run --help`.

    Args:
        trace: As `read_trace` gives it, used as it is; or the path of one, with `rate` or `load` among the options for other
            arrivals.
        policy: Name of a policy, or package.module:Class.
        options: Further fields of `SimulationConfig`, such as predictor, scheduler, cluster, seed.

    Raises:
        InputError: The trace or an option cannot be used.
    """
    if not isinstance(trace, Trace):
        return run_simulation(SimulationConfig(trace=str(trace), policy=policy, **options))
    for name in ("rate", "load"):
        if options.get(name) is not None:
            allowed = "unset for a trace that was read; see Trace.with_poisson_arrivals"
            raise InputError(name, options[name], allowed)
    return run_simulation(SimulationConfig(trace=trace.source, policy=policy, **options), trace=trace)
