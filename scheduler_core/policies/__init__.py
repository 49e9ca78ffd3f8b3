"""Scheduling policies, one short file each, and the list of their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from scheduler_core.errors import InputError
from scheduler_core.policies.base import Policy
from scheduler_core.policies.fcfs import Fcfs
from scheduler_core.policies.sept import Sept
from scheduler_core.policies.sjf import Ssjf
from scheduler_core.policies.tie import Tie

#: Every policy by name.
POLICIES: dict[str, type[Policy]] = {"fcfs": Fcfs, "ssjf": Ssjf, "sept": Sept, "tie": Tie}


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
    "Fcfs",
    "Policy",
    "Sept",
    "Ssjf",
    "Tie",
    "make_policy",
    "policy_name",
    "policy_parameters",
]
