"""Scheduling policies, one short file each, and the list of their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from scheduler_core.errors import InputError
from scheduler_core.policies.base import Policy
from scheduler_core.policies.distboost import DistBoost
from scheduler_core.policies.edf import Edf
from scheduler_core.policies.elis import Elis
from scheduler_core.policies.fcfs import Fcfs
from scheduler_core.policies.gittins import Gittins
from scheduler_core.policies.hpjf import Hpjf
from scheduler_core.policies.hrrn import Hrrn
from scheduler_core.policies.las import Las
from scheduler_core.policies.ltr import Ltr
from scheduler_core.policies.mlfq import Mlfq
from scheduler_core.policies.predicted_boost import PredictedBoost
from scheduler_core.policies.priority import Priority
from scheduler_core.policies.s3 import S3
from scheduler_core.policies.semantic import Semantic
from scheduler_core.policies.sept import Sept
from scheduler_core.policies.sjf import Ssjf
from scheduler_core.policies.slo_tie import SloTie
from scheduler_core.policies.spf import Spf
from scheduler_core.policies.srpt import Srpt
from scheduler_core.policies.tail_guard import TailGuard
from scheduler_core.policies.tie import Tie
from scheduler_core.policies.trail import Trail
from scheduler_core.policies.uniboost import UniBoost
from scheduler_core.policies.vtc import Vtc

#: Every policy by name.
POLICIES: dict[str, type[Policy]] = {
    "fcfs": Fcfs,
    "priority": Priority,
    "spf": Spf,
    "ssjf": Ssjf,
    "sept": Sept,
    "ltr": Ltr,
    "s3": S3,
    "tie": Tie,
    "hrrn": Hrrn,
    "edf": Edf,
    "las": Las,
    "mlfq": Mlfq,
    "srpt": Srpt,
    "trail": Trail,
    "elis": Elis,
    "hpjf": Hpjf,
    "semantic": Semantic,
    "distboost": DistBoost,
    "uniboost": UniBoost,
    "vtc": Vtc,
    "gittins": Gittins,
    "predicted_boost": PredictedBoost,
    "slo_tie": SloTie,
    "tail_guard": TailGuard,
}


def make_policy(name: str, parameters: Mapping[str, float] | None = None) -> Policy:
    """A new policy object.

    Args:
        name: One of `POLICIES`.
        parameters: Values for fields of the policy; the others keep their defaults.

    Raises:
        InputError: The name or a parameter is unknown, or a value is outside its range.
    """
    if name not in POLICIES:
        raise InputError("policy", name, ", ".join(POLICIES))
    given = dict(parameters or {})
    known = set(policy_parameters(POLICIES[name]()))
    for parameter in given:
        if parameter not in known:
            allowed = ", ".join(sorted(known)) or "none"
            raise InputError(f"parameter of policy {name}", parameter, allowed)
    return POLICIES[name](**given)


def policy_name(policy: Policy) -> str:
    """The name under which the policy's class is listed."""
    for name, kind in POLICIES.items():
        if type(policy) is kind:
            return name
    raise InputError("policy", type(policy).__name__, ", ".join(POLICIES))


def policy_parameters(policy: Policy) -> dict[str, float]:
    """The policy's parameters and their values."""
    return {item.name: getattr(policy, item.name) for item in fields(policy) if item.init}  # type: ignore[arg-type]


__all__ = [
    "POLICIES",
    "S3",
    "DistBoost",
    "Edf",
    "Elis",
    "Fcfs",
    "Gittins",
    "Hpjf",
    "Hrrn",
    "Las",
    "Ltr",
    "Mlfq",
    "Policy",
    "PredictedBoost",
    "Priority",
    "Semantic",
    "Sept",
    "SloTie",
    "Spf",
    "Srpt",
    "Ssjf",
    "TailGuard",
    "Tie",
    "Trail",
    "UniBoost",
    "Vtc",
    "make_policy",
    "policy_name",
    "policy_parameters",
]
