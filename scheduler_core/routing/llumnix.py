"""Multi-tier Llumnix: headroom, freeness and dispatch (Vestrum et al., "Beyond Binary Priorities: Multi-Tier SLA
Scheduling", section 3; Sun et al. 2024, "Llumnix", OSDI)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from scheduler_core.errors import InputError
from scheduler_core.routing.base import Router, RoutingRequest
from scheduler_core.routing.snapshot import ReplicaSnapshot, ReplicaStatus
from scheduler_core.urgency import LEVELS


@dataclass(frozen=True, slots=True)
class Headroom:
    """KV memory counted as used on a replica for each tier that is present (multi-tier, section 3.3).

    Attributes:
        fractions: H_p / M by tier, the most urgent first; each in [0, 1].

    Raises:
        InputError: No tier, or a fraction outside its range.
    """

    fractions: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.fractions:
            raise InputError("headroom fractions", self.fractions, "at least one tier")
        for fraction in self.fractions:
            if not 0 <= fraction <= 1:
                raise InputError("headroom fraction", fraction, "numbers in [0, 1]")

    def blocks(self, tiers: Iterable[int], num_kv_blocks: int) -> float:
        """V_headroom = sum of H_p over the tiers that are present, each once (Eq. 4), of M blocks.

        Raises:
            InputError: There is no such tier.
        """
        present = set(tiers)
        for tier in present:
            if not 0 <= tier < len(self.fractions):
                raise InputError("tier", tier, f"0 to {len(self.fractions) - 1}")
        return num_kv_blocks * math.fsum(self.fractions[tier] for tier in present)


def exponential_headroom(
    num_tiers: int = len(LEVELS), max_fraction: float = 0.20, decay: float = 1.0
) -> Headroom:
    """H_p = M h_max exp(-lambda p) (Eq. 3) for K tiers, without rounding; `decay` is lambda: 1 in figure 3, 2.5/(K - 1) in
    the paper's released code, which rounds the blocks down.

    Raises:
        InputError: No tier, or an argument outside its range.
    """
    if not 0 <= max_fraction <= 1:
        raise InputError("max_fraction", max_fraction, "numbers in [0, 1]")
    if not 0 <= decay < math.inf:
        raise InputError("decay", decay, "numbers >= 0")
    return Headroom(tuple(max_fraction * math.exp(-decay * tier) for tier in range(num_tiers)))


def virtual_usage_blocks(replica: ReplicaSnapshot) -> float:
    """Sum of V(r) without headroom (Eq. 2), in blocks.

    Running: the blocks held. Head of the queue: the blocks it needs to be admitted. A draining replica: infinite.
    """
    if replica.status is ReplicaStatus.DRAINING:
        return math.inf
    return float(replica.used_blocks + replica.head_demand_blocks)


def normal_freeness(replica: ReplicaSnapshot) -> float:
    """F_normal = (M - sum V) / B, without headroom, in blocks per running request: for auto-scaling, where isolation must
    not look like load.

    The paper leaves B = 0 open: an idle replica counts as B = 1, so that F = M - sum V, more than with any batch.
    """
    return (replica.num_kv_blocks - virtual_usage_blocks(replica)) / (replica.num_running or 1)


def full_freeness(replica: ReplicaSnapshot, headroom: Headroom) -> float:
    """F_full, with headroom: for dispatch and migration (Eqs. 1, 2, 4); minus infinity for a draining replica.

    Differs from the paper's Eq. 2, which adds H for each running request: as its text and Eq. 4 say, H_p is charged once
    for each tier that has a running or waiting request on the replica.
    """
    reserved = headroom.blocks(replica.tiers, replica.num_kv_blocks)
    used = virtual_usage_blocks(replica) + reserved
    return (replica.num_kv_blocks - used) / (replica.num_running or 1)


def queue_freeness(replica: ReplicaSnapshot, headroom: Headroom) -> float:
    """Freeness that counts the whole queue (not in the paper): F_full with the demand of every waiting request.

    F = R / B if R >= 0 else R,  R = M - blocks held - blocks that all waiting requests need - headroom

    F_full counts the head of the queue only, so in a burst a replica with a thousand waiting requests is as free as one with
    one. R < 0, a queue, is not divided by B: else the larger batch would be the freer. Llumnix's public code dispatches by
    the demand of all waiting requests, too.
    """
    if replica.status is ReplicaStatus.DRAINING:
        return -math.inf
    waiting = replica.blocks_for(replica.waiting_prefill_tokens)
    reserved = headroom.blocks(replica.tiers, replica.num_kv_blocks)
    remaining = replica.num_kv_blocks - replica.used_blocks - waiting - reserved
    return remaining / (replica.num_running or 1) if remaining >= 0 else float(remaining)


@dataclass(kw_only=True, slots=True)
class Llumnix(Router):
    """Dispatches strictly by tier, first come first served within a tier, to the replica of greatest freeness.

    r* = argmax F_full(r),   F_full = (M - sum V - sum_p H_p [tier p is present]) / B

    | symbol | meaning | unit |
    | --- | --- | --- |
    | M, B | KV blocks; running requests of the replica | blocks, - |
    | V | virtual usage, see `virtual_usage_blocks` | blocks |
    | H_p | headroom of tier p, see `Headroom` | blocks |

    With draining replicas only: the one with the fewest requests (section 3.4). Migration and scaling are
    `migration_planner`, `migration` and `autoscaling`.

    Differs from the paper: ties of freeness go to the replica with fewer requests, so that a burst onto equal replicas
    is distributed. `whole_queue` dispatches by `queue_freeness`, which is better in bursts.
    """

    name: ClassVar[str] = "llumnix"
    sees_tokens: ClassVar[bool] = True
    when_all_draining: ClassVar[Literal["wait", "least_loaded"]] = "least_loaded"

    headroom: Headroom = field(default_factory=exponential_headroom)
    whole_queue: bool = False

    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        self.headroom.blocks((item.tier,), 1)  # an unknown tier is refused here, not on the replica
        freeness = queue_freeness if self.whole_queue else full_freeness
        return max(
            replicas, key=lambda replica: (freeness(replica, self.headroom), -replica.num_requests)
        ).replica_id

    def dispatch_key(self, item: RoutingRequest, now: float) -> tuple[float, ...]:
        return (float(item.tier), item.request.arrival_s)
