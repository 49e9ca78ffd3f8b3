"""Workloads: requests drawn from a description by a seed."""

from __future__ import annotations

from scheduler_core.simulator.workloads.arrivals import Arrivals
from scheduler_core.simulator.workloads.lengths import Lengths, TokenDistribution
from scheduler_core.simulator.workloads.workload import (
    RequestClass,
    Sessions,
    Tiers,
    Workload,
    paying_and_free,
    tier_weights,
)

__all__ = [
    "Arrivals",
    "Lengths",
    "RequestClass",
    "Sessions",
    "Tiers",
    "TokenDistribution",
    "Workload",
    "paying_and_free",
    "tier_weights",
]
