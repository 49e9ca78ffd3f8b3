"""Sweeps: many configurations, simulated in this process or in several.

Every result is a file, named by a hash of all its inputs and written atomically, so that an interrupted sweep
can be resumed.
"""

import hashlib
import itertools
import json
import math
import signal
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, get_type_hints

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.shell.command import user_code_message
from scheduler_core.shell.files import sha256_file, writable_target, write_json
from scheduler_core.shell.options import check_type
from scheduler_core.shell.processes import worker_processes
from scheduler_core.simulator.config import SimulationConfig
from scheduler_core.simulator.run import SimulationResult, run_simulation

SCHEMA = "tailcast.cell/4"
#: Names of settings that must be equal: workload and cluster both have K of the multi-tier paper.
JOINT = {"num_tiers": ("workload.tiers.num_tiers", "cluster.num_tiers")}
#: Maximum number of simulations of one sweep, because all are listed before the first starts.
MAX_CELLS = 1_000_000
#: Settings that change the capacity and thus the rate at a load of 1.
_CAPACITY_SETTINGS = (
    "scheduler.max_num", "scheduler.num_kv_blocks", "scheduler.kv_", "cluster.num_replicas", "step_time"
)  # fmt: skip
#: Maximum number of worker processes.
MAX_PROCESSES = 1024

Point = tuple[tuple[str, Any], ...]
Simulated = Generator[tuple[str, SimulationResult], None, None]


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation of a sweep; `settings` are the varied settings by dotted name, including the seed."""

    config: SimulationConfig
    settings: Mapping[str, Any]

    def key(self) -> str:
        """SHA-256 of the configuration, the contents of its input files, and the version of tailcast."""
        return hashlib.sha256(json.dumps(self.inputs(), sort_keys=True).encode()).hexdigest()

    def inputs(self) -> dict[str, Any]:
        """What determines the result, as JSON content."""
        config = asdict(self.config)
        return {
            "config": config,
            "files": {name: sha256_file(name) for name in sorted(_files(config))},
            "version": metadata.version("tailcast"),
        }

    def simulate(self) -> SimulationResult:
        """Runs the simulation."""
        return run_simulation(self.config)


def point_of(settings: Mapping[str, Any]) -> Point:
    """The settings without the seed; cells of the same point only differ in the seed."""
    return tuple((name, value) for name, value in settings.items() if name != "seed")


def _files(tree: Any) -> Iterator[str]:
    """Input files of a configuration: the trace, a calibration, and files of lengths."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            if name in ("trace", "file", "step_time_parameters") and isinstance(value, str):
                yield value
            else:
                yield from _files(value)
    elif isinstance(tree, Sequence) and not isinstance(tree, str):
        for item in tree:
            yield from _files(item)


def with_setting(config: Any, name: str, value: Any) -> Any:
    """A copy of a dataclass (or mapping) with one changed setting, such as `scheduler.max_num_seqs`;
    `InputError` if the setting does not exist, or the value is outside its range."""
    head, _, tail = name.partition(".")
    is_mapping = isinstance(config, Mapping)
    if not is_mapping and head not in (names := [item.name for item in fields(config)]):
        raise InputError(f"setting {name}", head, ", ".join(names))
    if tail:
        part = config.get(head) if is_mapping else getattr(config, head)
        if not isinstance(part, Mapping) and (is_mapping or not is_dataclass(part)):
            raise InputError(f"setting {name}", head, "a group of settings that is not unset")
        value = with_setting(part, tail, value)
    elif not is_mapping:
        check_type(head, value, get_type_hints(type(config))[head])
    return {**config, head: value} if is_mapping else replace(config, **{head: value})


def grid(base: SimulationConfig, vary: Mapping[str, Sequence[Any]], seeds: Sequence[int]) -> list[Cell]:
    """All combinations of the settings `vary` (values by dotted name, or by a name in `JOINT`), each with
    every seed. `InputError` if a setting is unknown or has no values, or a combination is invalid."""
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
        # Without a file of step times, which is read when a simulation starts.
        replace(config, step_time_model=None, step_time_parameters={}).make_scheduler()
        scalars = {  # lists and mappings as JSON, for tables
            name: value if isinstance(value, str | int | float | None) else json.dumps(value, sort_keys=True)
            for name, value in settings.items()
        }
        cells += [Cell(replace(config, seed=seed), {**scalars, "seed": seed}) for seed in seeds]
    return cells


def _check_load(base: SimulationConfig, vary: Mapping[str, Sequence[Any]]) -> None:
    """Raises InputError for loads with varying capacity, because cells would then differ in arrivals."""
    if base.load is None and "load" not in vary:
        return
    for name in vary:
        if name.startswith(_CAPACITY_SETTINGS):
            allowed = f"unset; use rate, because {name} changes the capacity that a load refers to"
            raise InputError("load", base.load or list(vary["load"]), allowed)


class CellStore:
    """Results by key in a folder, which is created if missing; `InputError` if it cannot be created."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = writable_target(Path(folder) / "cell", "out").parent

    def path(self, key: str) -> Path:
        """Path of the result of the cell with this key."""
        return self._folder / f"{key[:24]}.json"

    def read(self, key: str) -> dict[str, Any] | None:
        """The result; None if it does not exist yet, `InputError` if the file was not written by a sweep."""
        path = self.path(key)
        if not path.exists():
            return None
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            matches = content["key"] == key and content["schema"] == SCHEMA
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError("out", str(path), "a folder that only has files of sweeps") from error
        if not matches:
            raise InputError("out", str(path), f"a result of schema {SCHEMA} with key {key}")
        return content

    def write(self, key: str, cell: Cell, result: SimulationResult) -> dict[str, Any]:
        """Writes a result atomically; returns the content, as `read` does."""
        content = {"schema": SCHEMA, "key": key, "settings": dict(cell.settings)}
        content |= {
            name: getattr(result, name) for name in ("config", "versions", "trace", "metrics", "warnings")
        }
        write_json(self.path(key), content)
        return self.read(key) or {}


def simulate_cell(cell: Cell) -> SimulationResult:
    """Simulates one cell; drops the records of its requests. `TailcastError` for an error in the code of a user, whose place
    is lost between processes."""
    try:
        result = cell.simulate()
    except Exception as error:
        message = None if isinstance(error, TailcastError) else user_code_message(error)
        if message is None:
            raise
        raise TailcastError(message) from error
    result.records.clear()
    result.unserved.clear()
    return result


def run_cells(
    cells: Sequence[Cell],
    store: CellStore,
    workers: int = 1,
    progress: Callable[[int], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Results of all cells in order. Cells in the store are read; the others are simulated, by `workers` processes
    or in this one, and stored at once. `progress` is called with the number of cells finished since the last call.

    Raises:
        InputError: A cell is invalid; finished cells stay in the store.
        TailcastError: A worker process died.
    """
    keys = [cell.key() for cell in cells]
    results = {key: stored for key in dict.fromkeys(keys) if (stored := store.read(key)) is not None}
    progress(sum(key in results for key in keys))
    todo = {key: cell for key, cell in zip(keys, cells, strict=True) if key not in results}
    if todo:
        with closing(_simulate(todo, workers)) as simulated:
            for key, result in simulated:
                results[key] = store.write(key, todo[key], result)
                progress(keys.count(key))
    return [results[key] for key in keys]


def _simulate(todo: dict[str, Cell], workers: int) -> Simulated:
    """(key, result) of every cell when it is finished."""
    if workers == 1:
        for key, cell in todo.items():
            yield key, simulate_cell(cell)
    else:
        yield from _in_processes(todo, min(workers, len(todo)))


def _in_processes(todo: dict[str, Cell], num: int) -> Simulated:
    dead = (
        "a worker process died (killed or out of memory); finished simulations are kept, run the same command "
        "again to continue; fewer --workers need less memory"
    )
    with worker_processes(num, dead) as pool:
        with interrupts_blocked():
            futures = {pool.submit(simulate_cell, cell): key for key, cell in todo.items()}
        for future in as_completed(futures):
            yield futures[future], future.result()


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Blocks SIGINT in processes started meanwhile, so that only the parent handles Ctrl-C."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
