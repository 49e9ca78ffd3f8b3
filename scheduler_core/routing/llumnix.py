"""Multi-tier Llumnix: strict tiers, each request to the freest replica (Vestrum et al., "Beyond Binary Priorities:
Multi-Tier SLA Scheduling", section 3; Sun et al. 2024, "Llumnix", OSDI)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from scheduler_core.routing.base import DispatchKey, Router, RoutingRequest
from scheduler_core.routing.freeness import full_freeness, queue_freeness
from scheduler_core.routing.headroom import Headroom, exponential_headroom
from scheduler_core.routing.promotion import TierPromotion
from scheduler_core.routing.snapshot import ReplicaSnapshot


@dataclass(kw_only=True, slots=True)
class Llumnix(Router):
    """Dispatches strictly by tier, first come first served within a tier, to the replica of greatest freeness.

    r* = argmax F_full(r),   F_full = (M - sum V - sum_p H_p [tier p is present]) / B

    | symbol | meaning | unit |
    | --- | --- | --- |
    | M, B | KV blocks; running requests of the replica | blocks, - |
    | V | virtual usage, see `freeness` | blocks |
    | H_p | headroom of tier p, see `headroom` | blocks |

    Only draining replicas left: the one with the fewest requests (section 3.4). Migration, draining and scaling are
    `migration_planner`, `migration` and `autoscaling`.

    Differs from the paper: ties of freeness go to the replica with fewer requests, so that a burst onto equal replicas
    spreads (waiting requests other than the head do not count in F); `promotion` lets starved requests rise, its
    future work; off by default. `whole_queue` dispatches by `queue_freeness`, which counts all that wait; off by default,
    but in bursts the paper's rule is worse than round robin: it fills one replica's queue while others run dry.
    """

    name: ClassVar[str] = "llumnix"
    sees_tokens: ClassVar[bool] = True
    when_all_draining: ClassVar[Literal["wait", "least_loaded"]] = "least_loaded"

    headroom: Headroom = field(default_factory=exponential_headroom)
    promotion: TierPromotion | None = None
    whole_queue: bool = False

    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        self.headroom.blocks((item.tier,), 1)  # an unknown tier is refused here, not on the replica
        freeness = queue_freeness if self.whole_queue else full_freeness
        return max(
            replicas, key=lambda replica: (freeness(replica, self.headroom), -replica.num_requests)
        ).replica_id

    def dispatch_key(self, item: RoutingRequest, now: float) -> DispatchKey:
        tier = item.tier
        if self.promotion is not None:
            tier = self.promotion.tier(tier, now - item.request.arrival_s)
        return (float(tier), item.request.arrival_s)
