"""Workloads: what arrives, drawn from a description by a seed."""

from __future__ import annotations

from scheduler_core.simulator.workloads.arrivals import Arrivals, at_rate, check_rate
from scheduler_core.simulator.workloads.classes import RequestClass, Tiers, paying_and_free, tier_weights
from scheduler_core.simulator.workloads.lengths import Law, Lengths
from scheduler_core.simulator.workloads.sessions import Sessions
from scheduler_core.simulator.workloads.workload import Workload

__all__ = [
    "Arrivals",
    "Law",
    "Lengths",
    "RequestClass",
    "Sessions",
    "Tiers",
    "Workload",
    "at_rate",
    "check_rate",
    "paying_and_free",
    "tier_weights",
]
