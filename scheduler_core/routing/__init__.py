"""Routing over several replicas: choice of the replica of each request, migration, scaling signals.

`Router` chooses, `Dispatcher` keeps track, `MigrationPlanner` and `Migrations` move requests, `AutoScaler` signals.
No I/O, no clock, no randomness but a generator that is passed in. README.md compares the routers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.routing.autoscaling import AutoScaler, ScaleIn, ScaleOut
from scheduler_core.routing.base import Router, RoutingRequest
from scheduler_core.routing.baselines import Jsq, LeastKv, PowerOfTwo, RandomChoice, RoundRobin
from scheduler_core.routing.disaggregated import Disaggregated
from scheduler_core.routing.dispatcher import Dispatcher
from scheduler_core.routing.infaas import Infaas
from scheduler_core.routing.llumnix import Headroom, Llumnix, exponential_headroom, released_decay
from scheduler_core.routing.migration_planner import MigrationPlanner
from scheduler_core.routing.predicted_work import PredictedWork
from scheduler_core.routing.prefix_affine import PrefixAffine
from scheduler_core.routing.snapshot import ReplicaRole, ReplicaSnapshot, ReplicaStatus, SchedulerView

#: Every router by name.
ROUTERS: dict[str, type[Router]] = {
    "round_robin": RoundRobin,
    "random": RandomChoice,
    "jsq": Jsq,
    "least_kv": LeastKv,
    "power_of_two": PowerOfTwo,
    "prefix_affine": PrefixAffine,
    "predicted_work": PredictedWork,
    "infaas": Infaas,
    "llumnix": Llumnix,
    "disaggregated": Disaggregated,
}


def make_router(
    name: str, parameters: Mapping[str, Any] | None = None, rng: np.random.Generator | None = None
) -> Router:
    """A router of the registry.

    Args:
        name: Name in `ROUTERS`.
        parameters: Overrides of the router's fields.
        rng: Source of randomness, for routers that draw.

    Raises:
        InputError: There is no such router or parameter, a parameter is outside its range, or a generator is missing.
    """
    if name not in ROUTERS:
        raise InputError("router", name, ", ".join(ROUTERS))
    kind = ROUTERS[name]
    arguments = dict(parameters or {})
    allowed = [item.name for item in fields(kind) if item.init and item.name != "rng"]
    for parameter in arguments:
        if parameter not in allowed:
            raise InputError(f"parameter of router {name}", parameter, ", ".join(allowed) or "none")
    if kind.needs_generator:
        if rng is None:
            raise InputError("rng", rng, f"a numpy Generator: router {name} draws")
        arguments["rng"] = rng
    return kind(**arguments)


__all__ = [
    "ROUTERS",
    "AutoScaler",
    "Disaggregated",
    "Dispatcher",
    "Headroom",
    "Llumnix",
    "MigrationPlanner",
    "ReplicaRole",
    "ReplicaSnapshot",
    "ReplicaStatus",
    "Router",
    "RoutingRequest",
    "ScaleIn",
    "ScaleOut",
    "SchedulerView",
    "exponential_headroom",
    "make_router",
    "released_decay",
]
