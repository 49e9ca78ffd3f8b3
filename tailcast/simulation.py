"""Python API of the simulator."""

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
        trace: A trace of `read_trace`, or the path of a trace. For a path, the options `rate` or `load`
            replace the arrivals.
        policy: Name of a policy, or package.module:Class.
        options: Other fields of `SimulationConfig`, such as predictor, scheduler, cluster, seed.

    Raises:
        InputError: The trace or an option is invalid.
    """
    if not isinstance(trace, Trace):
        return run_simulation(SimulationConfig(trace=str(trace), policy=policy, **options))
    for name in ("rate", "load"):
        if options.get(name) is not None:
            allowed = "unset for a trace that is already loaded; see Trace.with_poisson_arrivals"
            raise InputError(name, options[name], allowed)
    return run_simulation(SimulationConfig(trace=trace.source, policy=policy, **options), trace=trace)
