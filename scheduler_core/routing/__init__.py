"""Routing over several replicas: choice of a replica for each request, migration, and scaling signals.

`Router` chooses replicas, `Dispatcher` tracks requests, `MigrationPlanner` and `Migrations` move requests, `Scaler` says
how many replicas run. There is no I/O and no clock; random generators are passed in. README.md compares the routers.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from scheduler_core.errors import InputError, unknown_name
from scheduler_core.ranges import construct
from scheduler_core.routing.base import Router, Scaler
from scheduler_core.routing.baselines import Jsq, LeastKv, PowerOfTwo, RandomChoice, RoundRobin
from scheduler_core.routing.cache_aware import CacheAware
from scheduler_core.routing.disaggregated import Disaggregated
from scheduler_core.routing.endpoint_picker import EndpointPicker
from scheduler_core.routing.infaas import Infaas
from scheduler_core.routing.kv_router import KVRouter
from scheduler_core.routing.llumnix import AutoScaler, Llumnix
from scheduler_core.routing.predicted_work import PredictedWait, PredictedWork
from scheduler_core.routing.prefix_affine import PrefixAffine
from scheduler_core.routing.production_stack import PrefixAware, SessionHash
from scheduler_core.routing.session_affine import SessionAffine
from scheduler_core.routing.target_tracking import TargetTracking

#: Every router by name.
ROUTERS: dict[str, type[Router]] = {
    "round_robin": RoundRobin,
    "random": RandomChoice,
    "jsq": Jsq,
    "least_kv": LeastKv,
    "power_of_two": PowerOfTwo,
    "prefix_affine": PrefixAffine,
    "cache_aware": CacheAware,
    "endpoint_picker": EndpointPicker,
    "kv_router": KVRouter,
    "prefix_aware": PrefixAware,
    "session_hash": SessionHash,
    "session_affine": SessionAffine,
    "predicted_work": PredictedWork,
    "predicted_wait": PredictedWait,
    "infaas": Infaas,
    "llumnix": Llumnix,
    "disaggregated": Disaggregated,
}

#: Every scaler by name.
SCALERS: dict[str, type[Scaler]] = {"freeness": AutoScaler, "target_tracking": TargetTracking}


def make_router(
    name: str, parameters: Mapping[str, Any] | None = None, rng: np.random.Generator | None = None
) -> Router:
    """A new router; `rng` is for routers that use random numbers. `InputError` for an unknown router or
    parameter, a parameter outside its range, or a missing generator."""
    if name not in ROUTERS:
        raise unknown_name("router", name, ROUTERS)
    arguments = dict(parameters or {})
    if ROUTERS[name].needs_generator:
        if rng is None:
            raise InputError("rng", rng, f"a numpy Generator: router {name} uses random numbers")
        arguments["rng"] = rng
    return construct("router", name, ROUTERS[name], arguments)
