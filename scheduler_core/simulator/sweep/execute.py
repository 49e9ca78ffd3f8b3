"""Carrying out cells: here, in several processes, or on a Ray cluster; what is in the store already is not done again."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.ray_cluster import LOCAL, fetch_result, ray_cluster
from scheduler_core.simulator.run import SimulationResult, run_simulation
from scheduler_core.simulator.sweep.cells import Cell
from scheduler_core.simulator.sweep.store import CellStore
from scheduler_core.simulator.watch import RunWatch

#: How often a simulation is begun again whose worker or node was lost.
RETRIES = 2

#: More than any machine has cores.
MAX_PROCESSES = 1024

Simulated = Generator[tuple[str, SimulationResult], None, None]


@dataclass(frozen=True, slots=True)
class Workers:
    """Who carries out cells.

    Attributes:
        num_processes: Processes on this machine, at least 1; with 1 the calling process does everything itself.
        ray: Use a Ray cluster instead.
        ray_address: Its address; None: that of the environment variable RAY_ADDRESS, or a new one on this machine.

    Raises:
        InputError: Fewer than one process, several beside Ray, or an address without Ray.
    """

    num_processes: int = 1
    ray: bool = False
    ray_address: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_processes <= MAX_PROCESSES:
            raise InputError("workers", self.num_processes, f"integers from 1 to {MAX_PROCESSES}")
        if self.ray and self.num_processes > 1:
            raise InputError(
                "workers", self.num_processes, "1 with ray, whose cluster says how many there are"
            )
        if self.ray_address is not None and not self.ray:
            raise InputError("ray_address", self.ray_address, "unset without ray")

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Keeps the Ray cluster for several calls of `run_cells`; without Ray there is nothing to keep.

        Raises:
            InputError: There is no cluster at the address.
            MissingExtraError: Ray is not installed.
        """
        if self.ray:
            with ray_cluster(self._address, "ray_address"):
                yield
        else:
            yield

    @property
    def _address(self) -> str:
        return self.ray_address or os.environ.get("RAY_ADDRESS") or LOCAL


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
        InputError: A cell cannot be simulated, or there is no cluster at the address; cells that are done stay in the
            store.
        MissingExtraError: Ray is asked for and not installed.
        TailcastError: A cell was lost on the Ray cluster again and again, or a node has another version of tailcast.
    """
    workers = workers or Workers()
    keys = [cell.key() for cell in cells]
    found = {key: store.read(key) for key in dict.fromkeys(keys)}
    tell = progress or (lambda _: None)
    tell(sum(found[key] is not None for key in keys))
    todo = {key: cell for key, cell in zip(keys, cells, strict=True) if found[key] is None}
    with closing(_simulated(todo, workers)) as simulated:
        for key, result in simulated:
            found[key] = store.write(key, todo[key], result)
            tell(keys.count(key))
    results = [found[key] for key in keys]
    return [one for one in results if one is not None]


def _simulated(todo: dict[str, Cell], workers: Workers) -> Simulated:
    """(key, result) of every cell as it is done."""
    if not todo:
        return
    if workers.ray:
        with workers.ready():
            yield from _on_ray(todo)
    elif workers.num_processes == 1:
        for key, cell in todo.items():
            yield key, simulate_cell(cell)
    else:
        yield from _in_processes(todo, min(workers.num_processes, len(todo)))


def _in_processes(todo: dict[str, Cell], num: int) -> Simulated:
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(num, mp_context=multiprocessing.get_context("spawn"))
    finished = False
    try:
        with _interrupts_blocked():
            futures = {pool.submit(simulate_cell, cell): key for key, cell in todo.items()}
        for future in as_completed(futures):
            yield futures[future], future.result()
        finished = True
    except BrokenProcessPool as error:
        raise TailcastError(
            "a process that simulated died, killed or out of memory; simulations that are done are kept, the same "
            "command goes on from there; fewer --workers need less memory"
        ) from error
    finally:
        if not finished:  # they write nothing: what they do is lost anyway
            for child in set(multiprocessing.active_children()) - before:
                child.terminate()
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Processes that are started inherit it: Ctrl-C, which reaches the whole group, is the parent's to handle."""
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
    while waiting:
        (done,), _ = ray.wait(list(waiting), num_returns=1)
        yield waiting.pop(done), _fetched(ray, done)


def _fetched(ray: Any, reference: Any) -> SimulationResult:
    result: SimulationResult = fetch_result(
        ray, reference, "a simulation", RETRIES, "those that are done are kept"
    )
    there, here = result.versions["tailcast"], metadata.version("tailcast")
    if there != here:
        raise TailcastError(f"a node of the Ray cluster has tailcast {there}, this process {here}")
    return result
