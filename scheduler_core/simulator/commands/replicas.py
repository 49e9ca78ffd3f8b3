"""`simulate replicas`: smallest number of replicas that meets targets at the rate of a trace or workload."""

from dataclasses import dataclass, replace
from typing import Any

from scheduler_core.errors import InputError
from scheduler_core.ranges import check_ranges
from scheduler_core.simulator.commands.capacity import SearchConfig, advice_of, run_search
from scheduler_core.simulator.config import MAX_REPLICAS
from scheduler_core.simulator.planning.search import (
    Search,
    Simulate,
    drive,
    means_of,
    probe_level,
    smallest_level,
)
from scheduler_core.simulator.sweep import Cell


@dataclass(frozen=True, kw_only=True)
class ReplicasConfig(SearchConfig):
    """Find the smallest number of replicas that meets targets, by bisection.

    The requests arrive as in the trace, at --rate (Poisson), or as the workload describes. cluster.router chooses the
    replica of each request. At every number, seeds are added until the confidence intervals show whether the targets are
    met; with the arrivals of a trace all seeds have the same requests, so the intervals do not include other traffic.
    """

    max_replicas: int = 64
    """Largest number to try."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, max_replicas=(1, MAX_REPLICAS))
        if self.load is not None:
            allowed = "unset; use rate, because a load is a fraction of the capacity of all replicas"
            raise InputError("load", self.load, allowed)

    def cell(self, level: float, seed: int) -> Cell:
        cluster = replace(self.cluster, num_replicas=int(level))
        return Cell(
            replace(self.simulation(), cluster=cluster, seed=seed), {"replicas": int(level), "seed": seed}
        )


def find_replicas(config: ReplicasConfig, simulate: Simulate) -> dict[str, Any]:
    """Doubles the number of replicas until the targets are met, then bisects; assumes that more replicas are never worse.
    `InputError` if `max_replicas` do not meet them.

    The result has `num_replicas`, the smallest number that meets the targets; `failing`, the number below it, None for one
    replica; `estimates` and `clear` of its probe; and `probes`, see `search.probe_level`.
    """
    return drive(_search_replicas(config), simulate)


def _search_replicas(config: ReplicasConfig) -> Search[dict[str, Any]]:
    best, probes = yield from smallest_level(lambda level: probe_level(config, level), config.max_replicas)
    if best is None:
        probe = probes[-1]
        allowed = f"more; with {probe['level']}: {means_of(probe)}{advice_of(probe)}"
        raise InputError("max_replicas", probe["level"], allowed)
    failing = max((probe["level"] for probe in probes if not probe["meets"]), default=None)
    result = {"num_replicas": best["level"], "failing": failing, "clear": best["clear"]}
    return result | {"estimates": best["estimates"], "probes": probes}


def run(config: ReplicasConfig) -> int:
    """Runs `simulate replicas`."""
    text = "replicas: {num_replicas}, with {means}"
    return run_search(
        config,
        "tailcast.replicas/1",
        lambda simulate: find_replicas(config, simulate),
        "num_replicas",
        text,
    )
