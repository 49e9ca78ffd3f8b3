"""Routing over several replicas: which replica gets a request, which requests move, when to scale.

`Router` chooses, `Dispatcher` keeps the books, `MigrationPlanner` and `Migrations` move requests, `AutoScaler` signals.
Nothing in here does I/O, reads a clock or draws from anything but a generator it was given. README.md compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.routing.adaptive_headroom import AdaptiveHeadroom
from scheduler_core.routing.autoscaling import AutoScaler, ScaleIn, ScaleOut
from scheduler_core.routing.base import Router, RoutingRequest
from scheduler_core.routing.disaggregated import Disaggregated
from scheduler_core.routing.dispatcher import Assignment, Dispatcher, DispatchError
from scheduler_core.routing.headroom import Headroom, exponential_headroom, released_decay
from scheduler_core.routing.infaas import Infaas
from scheduler_core.routing.jsq import Jsq
from scheduler_core.routing.least_kv import LeastKv
from scheduler_core.routing.llumnix import Llumnix
from scheduler_core.routing.migration import Migrations
from scheduler_core.routing.migration_planner import MigrationPlanner
from scheduler_core.routing.power_of_two import PowerOfTwo
from scheduler_core.routing.predicted_work import PredictedWork
from scheduler_core.routing.prefix_affine import PrefixAffine
from scheduler_core.routing.promotion import TierPromotion
from scheduler_core.routing.random_choice import RandomChoice
from scheduler_core.routing.round_robin import RoundRobin
from scheduler_core.routing.snapshot import (
    ReplicaRole,
    ReplicaSnapshot,
    ReplicaStatus,
    RequestView,
    snapshot_from_requests,
)

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
        parameters: Fields that shall not have their default.
        rng: Source of randomness; needed by routers that draw, and not taken by others.

    Raises:
        InputError: There is no such router or parameter, a parameter is outside its range, or a generator is missing.
    """
    if name not in ROUTERS:
        raise InputError("router", name, ", ".join(ROUTERS))
    kind = ROUTERS[name]
    given = dict(parameters or {})
    known = [item.name for item in fields(kind) if item.init and item.name != "rng"]
    for parameter in given:
        if parameter not in known:
            raise InputError(f"parameter of router {name}", parameter, ", ".join(known) or "none")
    if kind.needs_generator:
        if rng is None:
            raise InputError("rng", rng, f"a numpy Generator: router {name} draws")
        given["rng"] = rng
    return kind(**given)


__all__ = [
    "ROUTERS",
    "AdaptiveHeadroom",
    "Assignment",
    "AutoScaler",
    "Disaggregated",
    "DispatchError",
    "Dispatcher",
    "Headroom",
    "Infaas",
    "Jsq",
    "LeastKv",
    "Llumnix",
    "MigrationPlanner",
    "Migrations",
    "PowerOfTwo",
    "PredictedWork",
    "PrefixAffine",
    "RandomChoice",
    "ReplicaRole",
    "ReplicaSnapshot",
    "ReplicaStatus",
    "RequestView",
    "RoundRobin",
    "Router",
    "RoutingRequest",
    "ScaleIn",
    "ScaleOut",
    "TierPromotion",
    "exponential_headroom",
    "make_router",
    "released_decay",
    "snapshot_from_requests",
]
