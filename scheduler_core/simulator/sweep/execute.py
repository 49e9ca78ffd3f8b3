"""Carrying out cells: here, in several processes, or on a Ray cluster; what is in the store already is not done again."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.simulator.run import SimulationResult, run_simulation
from scheduler_core.simulator.sweep.cells import Cell
from scheduler_core.simulator.sweep.store import CellStore
from scheduler_core.simulator.watch import RunWatch


@dataclass(frozen=True, slots=True)
class Workers:
    """Who carries out cells.

    Attributes:
        num_processes: Processes on this machine, at least 1; with 1 the calling process does everything itself.
        ray: Use a Ray cluster instead.
        ray_address: Its address; None: the one of the environment, or a new one on this machine.

    Raises:
        InputError: Fewer than one process.
    """

    num_processes: int = 1
    ray: bool = False
    ray_address: str | None = None

    def __post_init__(self) -> None:
        if self.num_processes < 1:
            raise InputError("workers", self.num_processes, "integers > 0")


def simulate_cell(cell: Cell) -> SimulationResult:
    """One cell, without what is needed for figures alone."""
    result = run_simulation(cell.config, watch=RunWatch())
    result.records.clear()
    result.watch.loads.clear()
    return result


def run_cells(
    cells: Sequence[Cell],
    store: CellStore,
    workers: Workers | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[dict[str, Any]]:
    """Results of all cells in their order; those that the store has are read, the others simulated and kept at once.

    Args:
        cells: What to do.
        store: Where results are kept.
        workers: Who does it; None: this process.
        progress: Called with 1 after each cell.

    Raises:
        InputError: A cell cannot be simulated; those that are done stay in the store.
        MissingExtraError: Ray is asked for and not installed.
    """
    workers = workers or Workers()
    keys = [cell.key() for cell in cells]
    found = {key: store.read(key) for key in dict.fromkeys(keys)}
    tell = progress or (lambda _: None)
    tell(sum(found[key] is not None for key in keys))
    todo = {key: cell for key, cell in zip(keys, cells, strict=True) if found[key] is None}
    for key, result in _simulated(todo, workers):
        found[key] = store.write(key, todo[key], result)
        tell(1)
    results = [found[key] for key in keys]
    return [result for result in results if result is not None]


def _simulated(todo: dict[str, Cell], workers: Workers) -> Iterator[tuple[str, SimulationResult]]:
    """(key, result) of every cell as it is done."""
    if not todo:
        return iter(())
    if workers.ray:
        return _on_ray(todo, workers.ray_address)
    if workers.num_processes == 1:
        return ((key, simulate_cell(cell)) for key, cell in todo.items())
    return _in_processes(todo, min(workers.num_processes, len(todo)))


def _in_processes(todo: dict[str, Cell], num: int) -> Iterator[tuple[str, SimulationResult]]:
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num, mp_context=context)
    try:
        futures = {pool.submit(simulate_cell, cell): key for key, cell in todo.items()}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _on_ray(todo: dict[str, Cell], address: str | None) -> Iterator[tuple[str, SimulationResult]]:
    """Files that the cells read have to be there under the same path on all machines."""
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("ray", "ray") from error
    started = not ray.is_initialized()
    if started:
        ray.init(address=address, include_dashboard=False, log_to_driver=False)
    try:
        remote = ray.remote(num_cpus=1, max_retries=2)(simulate_cell)
        waiting = {remote.remote(cell): key for key, cell in todo.items()}
        while waiting:
            (done,), _ = ray.wait(list(waiting), num_returns=1)
            yield waiting.pop(done), ray.get(done)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        raise cause if isinstance(cause, InputError) else error from error
    finally:
        if started:
            ray.shutdown()
