"""Freeness of a replica: room left per running request (Llumnix, Sun et al. 2024, algorithm 1; multi-tier, 3.2).

    F = (M - sum V) / B,  in blocks per running request

The paper leaves B = 0 open: an idle replica counts as B = 1, so that F = M - sum V, more than with any batch.

Of the waiting requests F counts the head alone. While requests hardly wait, and so in the paper's released code, which admits
without limit, that is all there is; in a burst it is blind: a replica with a thousand waiting requests is as free as one with
one, and where F < 0 the one with more in its batch is the freer, because less than nothing is divided among more. Hence
`queue_freeness`, which the paper does not have; Llumnix's public code dispatches by the demand of all waiting requests, too,
and keeps the head's for migration.
"""

from __future__ import annotations

import math

from scheduler_core.routing.headroom import Headroom
from scheduler_core.routing.snapshot import ReplicaSnapshot, ReplicaStatus


def virtual_usage_blocks(replica: ReplicaSnapshot) -> float:
    """Sum of V(r) without headroom (Eq. 2), in blocks.

    Running: the blocks held. Head of the queue: the blocks it needs to be admitted. Other waiting requests: 0. A
    draining replica: infinite, so that it is the fullest of all without being treated as an exception anywhere.
    """
    if replica.status is ReplicaStatus.DRAINING:
        return math.inf
    return float(replica.used_blocks + replica.head_demand_blocks)


def normal_freeness(replica: ReplicaSnapshot) -> float:
    """F_normal, without headroom: for auto-scaling, where isolation must not look like load."""
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
    """Freeness that counts the whole queue (ours): F_full with the demand of every waiting request.

    F = R / B if R >= 0 else R,  R = M - blocks held - blocks that all waiting requests need - headroom

    R < 0 is not divided: it is a queue, which is the longer the more is missing however large the batch is. The blocks of
    the waiting requests are those of the sum of their tokens.
    """
    if replica.status is ReplicaStatus.DRAINING:
        return -math.inf
    waiting = replica.blocks_for(replica.waiting_prefill_tokens)
    reserved = headroom.blocks(replica.tiers, replica.num_kv_blocks)
    room = replica.num_kv_blocks - replica.used_blocks - waiting - reserved
    return room / (replica.num_running or 1) if room >= 0 else float(room)
