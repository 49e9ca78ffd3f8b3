"""How many replicas, and what routes, moves and starts them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.routing import (
    ROUTERS,
    AutoScaler,
    Disaggregated,
    Headroom,
    Llumnix,
    MigrationPlanner,
    ReplicaRole,
    Router,
    exponential_headroom,
    make_router,
)
from scheduler_core.simulator.kv_link import KvLink
from scheduler_core.simulator.trace import MAX_TIME_S

#: Each replica has a scheduler of its own; 10,000 take about half a GB.
MAX_REPLICAS = 10_000


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Replicas of the simulated engine, all alike, and what stands in front of them.

    Raises:
        InputError: A value is outside its range, or two contradict each other.
    """

    num_replicas: int = 1
    """Replicas; 1 with no other field set needs no router."""
    router: str = "jsq"
    """Which replica gets a request: round_robin, random, jsq, least_kv, power_of_two, prefix_affine, predicted_work,
    infaas, llumnix, disaggregated; see scheduler_core/routing/README.md."""
    router_parameters: dict[str, float | bool] = field(default_factory=dict)
    """Parameters of the router that shall not have their default, such as {alpha: 2} for infaas or {whole_queue: true} for
    llumnix."""
    num_prefill_replicas: int = 0
    """disaggregated: so many of the replicas process prompts, the others generate."""
    num_tiers: int = 5
    """llumnix and migration: K, tiers with headroom of their own."""
    headroom_share: float = 0.20
    """llumnix and migration: share of the KV cache kept free for tier 0 where it is present (h_max)."""
    headroom_decay: float = 1.0
    """llumnix and migration: lambda; tier p has exp(-lambda p) of tier 0's share."""
    migration: bool = False
    """Move requests from the fullest to the freest replicas on the way (multi-tier paper, section 3.5)."""
    migration_threshold: float = 0.3
    """Migration: least difference of freeness, in blocks per running request (theta)."""
    interval_s: float = 0.05
    """Seconds between two looks at the cluster, by migration, disaggregation and auto-scaling."""
    stage_blocks: int = 64
    """Migration: KV blocks copied in one stage."""
    min_replicas: int | None = None
    """Auto-scaling: so many replicas at least; the others start when needed. Unset: all are there from the start."""
    startup_s: float = 0.0
    """Auto-scaling: seconds until a replica that is asked for is there."""
    scale_out_below: float = -0.5
    """Auto-scaling: start a replica when the mean freeness is lower."""
    scale_in_above: float = 1.5
    """Auto-scaling: drain one when it is higher."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_replicas <= MAX_REPLICAS:
            raise InputError("num_replicas", self.num_replicas, f"integers from 1 to {MAX_REPLICAS}")
        if self.router not in ROUTERS:
            raise InputError("router", self.router, ", ".join(ROUTERS))
        if (self.router == "disaggregated") != (self.num_prefill_replicas > 0):
            raise InputError(
                "num_prefill_replicas", self.num_prefill_replicas, "> 0 with router disaggregated alone"
            )
        if not 0 <= self.num_prefill_replicas < self.num_replicas:
            raise InputError("num_prefill_replicas", self.num_prefill_replicas, "fewer than num_replicas")
        if self.migration and self.router == "disaggregated":
            raise InputError(
                "migration", True, "false with router disaggregated, which moves requests itself"
            )
        if self.min_replicas is not None and not 1 <= self.min_replicas <= self.num_replicas:
            raise InputError("min_replicas", self.min_replicas, "integers from 1 to num_replicas, or unset")
        if not 0 <= self.startup_s <= MAX_TIME_S:
            raise InputError("startup_s", self.startup_s, f"seconds from 0 to {MAX_TIME_S:g}")
        self.headroom()
        self.make_router(0)

    @property
    def is_single(self) -> bool:
        """One replica, with nothing in front of it."""
        return self.num_replicas == 1

    @property
    def replica_ids(self) -> tuple[str, ...]:
        """Names of the replicas."""
        width = len(str(self.num_replicas - 1))
        return tuple(f"{index:0{width}d}" for index in range(self.num_replicas))

    def headroom(self) -> Headroom:
        """Headroom by tier."""
        return exponential_headroom(self.num_tiers, self.headroom_share, self.headroom_decay)

    def make_router(self, seed: int) -> Router:
        """A new router; one that draws does so from `seed`."""
        if self.router == "llumnix":
            whole_queue = self.router_parameters.get("whole_queue", False)
            if set(self.router_parameters) - {"whole_queue"} or not isinstance(whole_queue, bool):
                raise InputError(
                    "router_parameters",
                    self.router_parameters,
                    "whole_queue: true or false for llumnix, and headroom_share",
                )
            return Llumnix(headroom=self.headroom(), whole_queue=whole_queue)
        rng = np.random.default_rng([seed, 1]) if ROUTERS[self.router].needs_generator else None
        return make_router(self.router, self.router_parameters, rng)

    def arguments(self, seed: int, link: KvLink | None) -> Mapping[str, Any]:
        """Arguments of `ClusterSimulation` that follow from this."""
        names, router = self.replica_ids, self.make_router(seed)
        given: dict[str, Any] = {"router": router, "interval_s": self.interval_s, "link": link}
        if isinstance(router, Disaggregated):
            kinds = [ReplicaRole.PREFILL] * self.num_prefill_replicas
            kinds += [ReplicaRole.DECODE] * (self.num_replicas - len(kinds))
            given |= {"roles": dict(zip(names, kinds, strict=True)), "planner": router, "stage_blocks": None}
        elif self.migration:
            given["planner"] = MigrationPlanner(
                headroom=self.headroom(), threshold=self.migration_threshold, interval_s=self.interval_s
            )
            given["stage_blocks"] = self.stage_blocks
        if self.min_replicas is not None:
            given["scaler"] = AutoScaler(
                out_below=self.scale_out_below,
                in_above=self.scale_in_above,
                min_replicas=self.min_replicas,
                max_replicas=self.num_replicas,
            )
            given["startup_s"] = self.startup_s
            given["standby"] = frozenset(names[self.min_replicas :])
        return given
