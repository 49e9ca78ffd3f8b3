"""Python API of the simulator."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from scheduler_core.errors import InputError, unknown_name
from scheduler_core.shell.options import from_mapping
from scheduler_core.simulator.config import SimulationConfig
from scheduler_core.simulator.run import SimulationResult, run_simulation
from scheduler_core.simulator.trace import Trace

logger = logging.getLogger(__name__)

#: Groups of options whose members may be given without the name of their group.
_GROUPS = ("scheduler", "cluster", "step_time")


def simulate(trace: Trace | str | Path, policy: str, **options: Any) -> SimulationResult:
    """Simulates a policy on a trace until every request has finished; see `simulate run --help`.

        result = tailcast.simulate("trace.parquet", "fcfs", max_num_seqs=8, cluster={"num_replicas": 2})
        print(result.table())
        result.plot().savefig("latencies.png")

    What may mislead in the result is logged as warnings, and is in `result.warnings`.

    Args:
        trace: A trace of `read_trace`, or the path of a trace. For a path, the options `rate` or `load`
            replace the arrivals.
        policy: Name of a policy, or package.module:Class.
        options: Other fields of `SimulationConfig`, such as predictor, repeat, seed; scheduler, cluster and step_time as
            dictionaries or objects. Members of these three may also be given directly, such as max_num_seqs.

    Raises:
        InputError: The trace or an option is invalid.
    """
    loaded = trace if isinstance(trace, Trace) else None
    if loaded is not None:
        for name in ("rate", "load"):
            if options.get(name) is not None:
                allowed = "unset for a trace that is already loaded; see Trace.with_poisson_arrivals"
                raise InputError(name, options[name], allowed)
    source = str(trace) if loaded is None else loaded.source
    values = _grouped({"trace": source, "policy": policy, **options})
    config = from_mapping(SimulationConfig, values)
    if loaded is not None and config.repeat > 1:
        loaded = loaded.repeated(config.repeat)
    result = run_simulation(config, trace=loaded)
    for warning in result.warnings.values():
        logger.warning(warning)
    return result


def _grouped(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with members of groups moved into their group. `InputError` if a name is unknown, or is both a member
    and in its group."""
    hints = get_type_hints(SimulationConfig)
    pairs = [(member.name, group) for group in _GROUPS for member in fields(hints[group])]
    counts = Counter(name for name, _ in pairs)
    members = {name: group for name, group in pairs if name not in hints and counts[name] == 1}
    values = {name: value for name, value in options.items() if name in hints}
    for name, value in options.items():
        if name in hints:
            continue
        if name not in members:
            raise unknown_name("option", name, [*hints, *members])
        group = values.get(members[name], {})
        if is_dataclass(group) and not isinstance(group, type):
            values[members[name]] = replace(group, **{name: value})
        elif isinstance(group, Mapping) and name not in group:
            values[members[name]] = {**group, name: value}
        else:
            raise InputError(name, value, f"unset, because it is also in {members[name]}")
    return values
