"""Cells of a sweep: one configuration each, named by a hash of everything that its result depends on."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from importlib import metadata
from typing import Any, get_args, get_origin, get_type_hints

from scheduler_core.errors import InputError
from scheduler_core.files import sha256_file
from scheduler_core.policies import make_policy
from scheduler_core.scheduler import Scheduler
from scheduler_core.simulator.config import SimulationConfig

#: Short names for settings that sweeps vary most.
SHORT = {"batching": "scheduler.batching", "router": "cluster.router"}
#: Names for settings that make sense only together: K of the multi-tier paper is of the workload and of the cluster.
JOINT = {"num_tiers": ("workload.tiers.num_tiers", "cluster.num_tiers")}

#: Simulations of one sweep or search: all are laid out before the first begins.
MAX_CELLS = 1_000_000

#: Settings whose change changes what a load of 1 is.
_CAPACITY = (
    "scheduler.max_num_seqs",
    "scheduler.max_num_batched_tokens",
    "scheduler.num_kv_blocks",
    "scheduler.kv_block_tokens",
    "scheduler.kv_watermark",
    "cluster.num_replicas",
    "step_time",
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation of a sweep.

    Attributes:
        config: What is simulated.
        settings: What distinguishes it from the others, the seed among it: by dotted name.
    """

    config: SimulationConfig
    settings: Mapping[str, Any]

    def key(self) -> str:
        """SHA-256 of the configuration, the contents of the files it reads, and the version of tailcast."""
        content = {
            "config": asdict(self.config),
            "files": {name: sha256_file(name) for name in sorted(_files(asdict(self.config)))},
            "version": metadata.version("tailcast"),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def point(self) -> tuple[tuple[str, Any], ...]:
        """The settings without the seed: cells of the same point differ in nothing else."""
        return tuple((name, value) for name, value in self.settings.items() if name != "seed")


def _scalar(value: Any) -> Any:
    """A value that can stand in a table: lists and mappings as JSON."""
    return (
        value
        if value is None or isinstance(value, str | int | float | bool)
        else json.dumps(value, sort_keys=True)
    )


def _files(tree: Any) -> Iterator[str]:
    """Paths in a configuration: the trace, and files of lengths."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            if name in ("trace", "file") and isinstance(value, str):
                yield value
            else:
                yield from _files(value)
    elif isinstance(tree, Sequence) and not isinstance(tree, str):
        for one in tree:
            yield from _files(one)


def with_setting(config: Any, name: str, value: Any) -> Any:
    """A copy of a dataclass (or mapping) with one setting changed, `scheduler.max_num_seqs` for instance.

    Raises:
        InputError: There is no such setting, or the value is outside its range.
    """
    head, _, rest = name.partition(".")
    if isinstance(config, Mapping):
        if rest and not isinstance(config.get(head), Mapping):
            raise InputError(f"setting {name}", head, "a setting that is set and has parts")
        return {**config, head: with_setting(config[head], rest, value) if rest else value}
    known = [item.name for item in fields(config)]
    if head not in known:
        raise InputError(f"setting {name}", head, ", ".join(known))
    if not rest:
        _check_type(head, value, get_type_hints(type(config))[head])
        return replace(config, **{head: value})
    part = getattr(config, head)
    if not is_dataclass(part) and not isinstance(part, Mapping):
        raise InputError(f"setting {name}", head, "a setting that is set and has parts")
    return replace(config, **{head: with_setting(part, rest, value)})


def _check_type(name: str, value: Any, hint: Any) -> None:
    """Raises `InputError` where a value of a setting is not of its type; options are checked by the command line."""
    kinds = {get_origin(member) or member for member in get_args(hint) or (hint,)}
    if float in kinds:
        kinds.add(int)
    plain = {int, float, str, bool, type(None)}
    if kinds <= plain and type(value) not in kinds:
        names = sorted("unset" if kind is type(None) else kind.__name__ for kind in kinds)
        raise InputError(name, value, " or ".join(names))


def grid(
    base: SimulationConfig,
    vary: Mapping[str, Sequence[Any]],
    seeds: Sequence[int],
    *,
    skip_impossible: bool = False,
) -> list[Cell]:
    """All combinations of the settings, each with every seed.

    Args:
        base: What is the same everywhere.
        vary: By dotted name, or a name in `SHORT` or `JOINT`: the values of each setting.
        seeds: Seeds.
        skip_impossible: Leave out combinations that make no sense (a policy and a batch former that do not go
            together) instead of refusing the whole sweep.

    Raises:
        InputError: A setting is unknown or has no values, or a combination makes no sense.
    """
    named = {SHORT.get(name, name): list(values) for name, values in vary.items()}
    for name, values in named.items():
        if not values:
            raise InputError(f"values of {name}", values, "at least one")
    if "seed" in named:
        raise InputError("vary", "seed", "num_seeds instead")
    num_cells = math.prod(map(len, named.values())) * len(seeds)
    if num_cells > MAX_CELLS:
        raise InputError("vary, num_seeds", f"{num_cells} simulations", f"at most {MAX_CELLS}")
    _check_load(base, named)
    cells = []
    for combination in itertools.product(*named.values()):
        settings = dict(zip(named, combination, strict=True))
        try:
            config = base
            for name, value in settings.items():
                for part in JOINT.get(name, (name,)):
                    config = with_setting(config, part, value)
            Scheduler(config.scheduler, make_policy(config.order_policy, config.policy_parameters))
        except InputError:
            if skip_impossible:
                continue
            raise
        shown = {name: _scalar(value) for name, value in settings.items()}
        cells += [Cell(replace(config, seed=seed), {**shown, "seed": seed}) for seed in seeds]
    if not cells:
        raise InputError("vary", dict(named), "at least one combination that makes sense")
    return cells


def _check_load(base: SimulationConfig, vary: Mapping[str, Sequence[Any]]) -> None:
    """A load is a share of a capacity: where that differs from cell to cell, cells would get different arrivals."""
    if base.load is None and "load" not in vary:
        return
    for name in vary:
        if name.startswith(_CAPACITY):
            raise InputError(
                "load", base.load or list(vary["load"]), f"rate instead, as {name} changes what a load is"
            )
