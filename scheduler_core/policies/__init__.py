"""Scheduling policies and the registry of their names."""

import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from importlib import import_module, metadata

from scheduler_core.errors import InputError, unknown_name
from scheduler_core.policies.attained_service import Las, Mlfq
from scheduler_core.policies.base import Policy
from scheduler_core.policies.bounded_shortest import BoundedShortest
from scheduler_core.policies.continuum import Continuum
from scheduler_core.policies.deadlines import Edf, SloTie
from scheduler_core.policies.gittins import BoostGittins, Gittins
from scheduler_core.policies.llumlet import Llumlet
from scheduler_core.policies.ltr import Ltr
from scheduler_core.policies.prefix_order import DepthFirst, LongestPrefix
from scheduler_core.policies.s3 import S3
from scheduler_core.policies.semantic import Hpjf, Semantic
from scheduler_core.policies.shortest_first import Hrrn, Sept, Srpt, Ssjf
from scheduler_core.policies.shortest_remaining import Elis, Trail
from scheduler_core.policies.static import Fcfs, Priority, Spf
from scheduler_core.policies.thunder_agent import ThunderAgent
from scheduler_core.policies.tie import Tie
from scheduler_core.policies.uniboost import DistBoost, UniBoost, UniBoostUncached
from scheduler_core.policies.vtc import Vtc
from scheduler_core.policies.working_set import WorkingSet
from scheduler_core.ranges import construct

#: Every policy of this package by name.
POLICIES: dict[str, type[Policy]] = {
    "fcfs": Fcfs,
    "bounded_shortest": BoundedShortest,
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
    "gittins": Gittins,
    "boost_gittins": BoostGittins,
    "hpjf": Hpjf,
    "semantic": Semantic,
    "llumlet": Llumlet,
    "distboost": DistBoost,
    "uniboost": UniBoost,
    "uniboost_uncached": UniBoostUncached,
    "vtc": Vtc,
    "slo_tie": SloTie,
    "longest_prefix": LongestPrefix,
    "depth_first": DepthFirst,
    "thunder_agent": ThunderAgent,
    "continuum": Continuum,
    "working_set": WorkingSet,
}

#: Entry points of this group are policies of other packages.
ENTRY_POINT_GROUP = "tailcast.policies"


def policy_class(name: str) -> type[Policy]:
    """The policy class for a name: a key of `POLICIES`, an entry point of "tailcast.policies", or
    package.module:Class, also in the current folder. `InputError` if it does not exist, or is not a policy."""
    if name in POLICIES:
        return POLICIES[name]
    paths = {point.name: point.value for point in metadata.entry_points(group=ENTRY_POINT_GROUP)}
    module, colon, attribute = paths.get(name, name).partition(":")
    if not colon:
        raise unknown_name("policy", name, [*POLICIES, *paths, "package.module:Class"])
    try:
        with _importable_current_folder():
            kind = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError, SyntaxError) as error:
        raise InputError("policy", name, f"package.module:Class that can be imported ({error})") from error
    if not (inspect.isclass(kind) and issubclass(kind, Policy) and is_dataclass(kind)):
        raise InputError("policy", name, "a dataclass derived from scheduler_core.policies.Policy")
    if inspect.isabstract(kind):
        missing = ", ".join(sorted(kind.__abstractmethods__))
        raise InputError("policy", name, f"a policy that implements {missing}")
    for method, signature in _signatures(kind):
        raise InputError(
            "policy", name, f"a policy whose method {method} can be called as {method}{signature}"
        )
    return kind


def _signatures(kind: type[Policy]) -> Iterator[tuple[str, inspect.Signature]]:
    """Methods that cannot be called like those of `Policy` that they replace, and the signatures of those."""
    for name, base in vars(Policy).items():
        own = inspect.getattr_static(kind, name)
        if inspect.isfunction(base) and inspect.isfunction(own) and own is not base:
            signature = inspect.signature(base)
            try:
                inspect.signature(own).bind(*signature.parameters)
            except TypeError:
                yield name, signature


@contextmanager
def _importable_current_folder() -> Iterator[None]:
    """Makes modules in the current folder importable, after all others; console scripts do not include it."""
    folder = os.getcwd()
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.reverse()
        sys.path.remove(folder)
        sys.path.reverse()


def make_policy(name: str, parameters: Mapping[str, float] | None = None) -> Policy:
    """A new policy, see `policy_class`. `InputError` if a name or parameter is unknown, or a value is invalid."""
    return construct("policy", name, policy_class(name), parameters)


def policy_name(policy: Policy) -> str:
    """The name with which `policy_class` returns the policy's class."""
    kind = type(policy)
    names = [name for name, registered in POLICIES.items() if registered is kind]
    return names[0] if names else f"{kind.__module__}:{kind.__qualname__}"


def policy_parameters(policy: Policy) -> dict[str, float]:
    """The policy's parameters and their values."""
    return {field.name: getattr(policy, field.name) for field in fields(policy) if field.init}  # type: ignore[arg-type]
