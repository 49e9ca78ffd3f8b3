"""Sweeps: many configurations, simulated here, in several processes or on a Ray cluster; every result is a file.

A result is named by a hash of everything that it depends on and written atomically, so that a killed sweep continues
where it was.
"""

import hashlib
import itertools
import json
import math
import os
import signal
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.files import sha256_file, writable_target, write_json
from scheduler_core.processes import worker_processes
from scheduler_core.ranges import check_ranges
from scheduler_core.ray_cluster import LOCAL, fetch_result, ray_cluster
from scheduler_core.simulator.config import SimulationConfig
from scheduler_core.simulator.run import SimulationResult, run_simulation

SCHEMA = "tailcast.cell/3"
#: Names for settings that make sense only together: K of the multi-tier paper is of the workload and of the cluster.
JOINT = {"num_tiers": ("workload.tiers.num_tiers", "cluster.num_tiers")}
#: Maximum number of simulations of one sweep: all are laid out before the first begins.
MAX_CELLS = 1_000_000
#: Settings whose change changes what a load of 1 is.
_CAPACITY_SETTINGS = (
    "scheduler.max_num", "scheduler.num_kv_blocks", "scheduler.kv_", "cluster.num_replicas", "step_time"
)  # fmt: skip
#: How often a simulation is repeated whose worker or node was lost.
RETRIES = 2
#: More than any machine has cores.
MAX_PROCESSES = 1024

Point = tuple[tuple[str, Any], ...]
Simulated = Generator[tuple[str, SimulationResult], None, None]


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation of a sweep; `settings` distinguish it from the others, by dotted name, the seed among them."""

    config: SimulationConfig
    settings: Mapping[str, Any]

    def key(self) -> str:
        """SHA-256 of the configuration, the contents of the files it reads, and the version of tailcast."""
        config = asdict(self.config)
        content = {
            "config": config,
            "files": {name: sha256_file(name) for name in sorted(_files(config))},
            "version": metadata.version("tailcast"),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def point_of(settings: Mapping[str, Any]) -> Point:
    """The settings without the seed: cells of the same point differ in nothing else."""
    return tuple((name, value) for name, value in settings.items() if name != "seed")


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
    """A copy of a dataclass (or mapping) with one setting changed, `scheduler.max_num_seqs` for instance; `InputError` if
    there is no such setting, or the value is outside its range."""
    head, _, rest = name.partition(".")
    is_mapping = isinstance(config, Mapping)
    if not is_mapping and head not in (names := [item.name for item in fields(config)]):
        raise InputError(f"setting {name}", head, ", ".join(names))
    if rest:
        part = config.get(head) if is_mapping else getattr(config, head)
        if not isinstance(part, Mapping) and (is_mapping or not is_dataclass(part)):
            raise InputError(f"setting {name}", head, "a setting that is set and has parts")
        value = with_setting(part, rest, value)
    elif not is_mapping:
        _check_type(head, value, get_type_hints(type(config))[head])
    return {**config, head: value} if is_mapping else replace(config, **{head: value})


def _check_type(name: str, value: Any, hint: Any) -> None:
    """Raises `InputError` where a value of a setting is not of its type; options are checked by the command line."""
    types = {get_origin(member) or member for member in get_args(hint) or (hint,)}
    if float in types:
        types.add(int)
    if types <= {int, float, str, bool, type(None)} and type(value) not in types:
        names = sorted("unset" if kind is type(None) else kind.__name__ for kind in types)
        raise InputError(name, value, " or ".join(names))


def grid(base: SimulationConfig, vary: Mapping[str, Sequence[Any]], seeds: Sequence[int]) -> list[Cell]:
    """All combinations of the settings `vary` (values by dotted name, or by a name in `JOINT`), each with every seed;
    `InputError` if a setting is unknown or has no values, or a combination makes no sense."""
    for name, values in vary.items():
        if not values:
            raise InputError(f"values of {name}", values, "at least one")
    if "seed" in vary:
        raise InputError("vary", "seed", "num_seeds instead")
    num_cells = math.prod(map(len, vary.values())) * len(seeds)
    if num_cells > MAX_CELLS:
        raise InputError("vary, num_seeds", f"{num_cells} simulations", f"at most {MAX_CELLS}")
    _check_load(base, vary)
    cells = []
    for combination in itertools.product(*vary.values()):
        settings = dict(zip(vary, combination, strict=True))
        config = base
        for name, value in settings.items():
            for part in JOINT.get(name, (name,)):
                config = with_setting(config, part, value)
        config.make_scheduler()
        scalars = {  # lists and mappings as JSON, for tables
            name: value if isinstance(value, str | int | float | None) else json.dumps(value, sort_keys=True)
            for name, value in settings.items()
        }
        cells += [Cell(replace(config, seed=seed), {**scalars, "seed": seed}) for seed in seeds]
    return cells


def _check_load(base: SimulationConfig, vary: Mapping[str, Sequence[Any]]) -> None:
    """A load is a fraction of a capacity: where that differs from cell to cell, cells would get different arrivals."""
    if base.load is None and "load" not in vary:
        return
    for name in vary:
        if name.startswith(_CAPACITY_SETTINGS):
            allowed = f"rate instead, as {name} changes what a load is"
            raise InputError("load", base.load or list(vary["load"]), allowed)


class CellStore:
    """Results by key in a folder, which is made if it is missing; `InputError` if it cannot be made."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = writable_target(Path(folder) / "cell", "out").parent

    def path(self, key: str) -> Path:
        """Path of the result of the cell with this key."""
        return self._folder / f"{key[:24]}.json"

    def read(self, key: str) -> dict[str, Any] | None:
        """The result; None if it is not there yet, `InputError` if what is there was not written by a sweep."""
        path = self.path(key)
        if not path.exists():
            return None
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            matches = content["key"] == key and content["schema"] == SCHEMA
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError("out", str(path), "a folder with files of sweeps alone") from error
        if not matches:
            raise InputError("out", str(path), f"a result of schema {SCHEMA} with key {key}")
        return content

    def write(self, key: str, cell: Cell, result: SimulationResult) -> dict[str, Any]:
        """Writes a result, atomically; returns what `read` will."""
        content = {"schema": SCHEMA, "key": key, "settings": dict(cell.settings)}
        content |= {name: getattr(result, name) for name in ("config", "versions", "trace", "metrics")}
        write_json(self.path(key), content)
        return self.read(key) or {}


@dataclass(frozen=True, kw_only=True)
class SweepWorkers:
    """Processes that simulate cells."""

    workers: int = 1
    """Processes on this machine."""
    ray: bool = False
    """Use a Ray cluster instead (extra: ray). Every node needs this version of tailcast, and the input files under the same
    path."""
    ray_address: str | None = None
    """Address of the Ray cluster (HOST:PORT, ray://HOST:PORT or auto). Unset: that of the environment variable
    RAY_ADDRESS, or a new one on this machine."""

    def __post_init__(self) -> None:
        check_ranges(self, workers=(1, MAX_PROCESSES))
        if self.ray and self.workers > 1:
            raise InputError("workers", self.workers, "1 with ray, whose cluster has workers of its own")
        if self.ray_address is not None and not self.ray:
            raise InputError("ray_address", self.ray_address, "unset without ray")

    def ready(self) -> AbstractContextManager[Any]:
        """Keeps the Ray cluster for several calls of `run_cells`; see `ray_cluster` for errors."""
        if not self.ray:
            return nullcontext()
        return ray_cluster(self.ray_address or os.environ.get("RAY_ADDRESS") or LOCAL, "ray_address")


def simulate_cell(cell: Cell) -> SimulationResult:
    """One cell, without the records of its requests."""
    result = run_simulation(cell.config)
    result.records.clear()
    return result


def run_cells(
    cells: Sequence[Cell],
    store: CellStore,
    workers: SweepWorkers = SweepWorkers(),
    progress: Callable[[int], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Results of all cells in their order; those in the store are read, the others simulated, by default in this process, and
    stored at once. `progress` is called with the number of cells that are done since the last call.

    Raises:
        InputError: A cell cannot be simulated, or there is no cluster at the address; finished cells stay in the store.
        MissingExtraError: Ray is requested and not installed.
        TailcastError: A cell was lost on the Ray cluster again and again, or a node has another version of tailcast.
    """
    keys = [cell.key() for cell in cells]
    results = {key: stored for key in dict.fromkeys(keys) if (stored := store.read(key)) is not None}
    progress(sum(key in results for key in keys))
    todo = {key: cell for key, cell in zip(keys, cells, strict=True) if key not in results}
    if todo:
        with workers.ready(), closing(_simulate(todo, workers)) as simulated:
            for key, result in simulated:
                results[key] = store.write(key, todo[key], result)
                progress(keys.count(key))
    return [results[key] for key in keys]


def _simulate(todo: dict[str, Cell], workers: SweepWorkers) -> Simulated:
    """(key, result) of every cell as it is done."""
    if workers.ray:
        yield from _on_ray(todo)
    elif workers.workers == 1:
        for key, cell in todo.items():
            yield key, simulate_cell(cell)
    else:
        yield from _in_processes(todo, min(workers.workers, len(todo)))


def _in_processes(todo: dict[str, Cell], num: int) -> Simulated:
    dead = (
        "a process that simulated died, killed or out of memory; simulations that are done are kept, the same "
        "command continues from there; fewer --workers need less memory"
    )
    with worker_processes(num, dead) as pool:
        with _interrupts_blocked():
            futures = {pool.submit(simulate_cell, cell): key for key, cell in todo.items()}
        for future in as_completed(futures):
            yield futures[future], future.result()


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Started processes inherit it: Ctrl-C, which reaches the whole group, is handled by the parent."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _on_ray(todo: dict[str, Cell]) -> Simulated:
    """On the cluster that this process is connected to."""
    import ray

    remote = ray.remote(num_cpus=1, max_retries=RETRIES)(simulate_cell)
    waiting = {remote.remote(cell): key for key, cell in todo.items()}
    local = metadata.version("tailcast")
    while waiting:
        (done,), _ = ray.wait(list(waiting), num_returns=1)
        key, consequence = waiting.pop(done), "those that are done are kept"
        result: SimulationResult = fetch_result(ray, done, "a simulation", RETRIES, consequence)
        version = result.versions["tailcast"]
        if version != local:
            raise TailcastError(f"a node of the Ray cluster has tailcast {version}, this process {local}")
        yield key, result
