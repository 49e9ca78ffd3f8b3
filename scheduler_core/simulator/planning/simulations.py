"""Simulations of a plan: cells with changed traffic, and worker processes that many searches share."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Self, TypeVar

import numpy as np

from scheduler_core.shell.processes import worker_processes
from scheduler_core.simulator.clients import GAVE_UP
from scheduler_core.simulator.metrics import TARGETS, summary
from scheduler_core.simulator.planning.search import Search
from scheduler_core.simulator.planning.targets import MissedTargets, Target
from scheduler_core.simulator.planning.traffic import Traffic
from scheduler_core.simulator.records import LATENCIES, has_slo, meets_slo, request_columns
from scheduler_core.simulator.run import SimulationResult, run_simulation
from scheduler_core.simulator.sweep import Cell, CellStore, interrupts_blocked, simulate_cell
from scheduler_core.simulator.trace import Trace, load_trace

T = TypeVar("T")

#: Part of the arrivals that is not measured if sessions are under way at the start, whose caches are cold.
_WARM_UP = 0.2
#: Metric: fraction of requests that their clients gave up for good, with `timeout_s`.
GIVEN_UP = "given_up_fraction"


@dataclass(frozen=True, slots=True)
class TrafficCell(Cell):
    """The simulation of a changed log. It stops when one of the targets is certainly missed; `metrics` are then those of the
    requests so far, and `metrics.missed` is that target. Latencies are those of arrivals after `measured_from_s`; a request that
    failed counts as if it had taken the whole run (`LATENCIES`), and as one that missed its targets.
    """

    traffic: Traffic
    targets: tuple[Target, ...] = ()

    def inputs(self) -> dict[str, Any]:
        targets = [str(target) for target in self.targets]
        return {**Cell.inputs(self), "traffic": asdict(self.traffic), "targets": targets}

    def simulate(self) -> SimulationResult:
        assert self.config.trace is not None
        trace = self.traffic.apply(read_log(self.config.trace))
        from_s = measured_from_s(trace)
        if (cluster := self.config.cluster).min_replicas is not None:  # the first replicas start
            from_s = max(from_s, trace.requests[0].arrival_s + 2 * cluster.startup_s)
        missed = MissedTargets(self.targets, len(trace), from_s)
        result = run_simulation(self.config, trace=trace, is_decided=missed if self.targets else None)
        records = [record for record in result.records if record.arrival_s >= from_s]
        unserved = [row for row in result.unserved if row.arrival_s >= from_s]
        failed = [row for row in unserved if row.request_id in result.failed]
        if (from_s > -math.inf or failed) and records:
            columns, never_s = request_columns(records), [result.metrics["makespan_s"]] * len(failed)
            for name in LATENCIES:
                result.metrics[name] = summary(np.concatenate([columns[name], never_s]))
            with_target = has_slo(columns)
            num_with = int(with_target.sum()) + sum(
                any(getattr(row, name) is not None for name in TARGETS) for row in unserved
            )
            if num_with:
                result.metrics["slo_attainment"] = float((meets_slo(columns) & with_target).sum()) / num_with
        if self.config.clients.timeout_s is not None:
            num = sum(result.failed[row.request_id].startswith(GAVE_UP) for row in failed)
            result.metrics[GIVEN_UP] = num / max(1, len(records) + len(failed))
        if missed.missed is not None:
            result.metrics["missed"] = str(missed.missed)
        return result


def measured_from_s(trace: Trace) -> float:
    """Time from which arrivals are measured: after the warm-up if a session is under way at the start, which then would have
    had a warm cache; else minus infinity."""
    first: dict[str, int] = {}
    for row in trace.requests:
        if row.session_id is not None:
            first.setdefault(row.session_id, row.turn)
    if not any(first.values()):
        return -math.inf
    start_s, end_s = trace.requests[0].arrival_s, trace.requests[-1].arrival_s
    return start_s + _WARM_UP * (end_s - start_s)


@lru_cache(maxsize=2)
def read_log(path: str) -> Trace:
    """The trace in a file, which must not change while the process runs."""
    return load_trace(path)


class Simulations:
    """Runs searches side by side in `workers` processes (1: in this one); stored results are not simulated again.

    `progress` is called with 1 after each simulation. A context manager, which ends the processes.
    """

    def __init__(self, store: CellStore, workers: int, progress: Callable[[int], object]) -> None:
        self._store = store
        self._workers = workers
        self._progress = progress
        self._stack = ExitStack()
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        if self._workers > 1:
            dead = "a worker process died (killed or out of memory); run the same command again, with fewer --workers"
            self._pool = self._stack.enter_context(worker_processes(self._workers, dead))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def run(self, searches: Sequence[Search[T]]) -> list[T]:
        """The results of the searches, in order."""
        ends: dict[int, T] = {}
        waiting: dict[int, list[str]] = {}
        results: dict[str, dict[str, Any]] = {}
        futures: dict[Future[SimulationResult], tuple[str, Cell]] = {}

        def advance(index: int) -> None:
            """Sends the results of a search's cells, until it needs some that are not there yet."""
            search = searches[index]
            try:
                while all(key in results for key in waiting[index]):
                    cells = search.send([results[key] for key in waiting[index]])
                    waiting[index] = [self._start(cell, results, futures) for cell in cells]
            except StopIteration as end:
                del waiting[index]
                ends[index] = end.value

        for index, search in enumerate(searches):
            try:
                waiting[index] = [self._start(cell, results, futures) for cell in next(search)]
            except StopIteration as end:
                ends[index] = end.value
        for index in list(waiting):
            advance(index)
        while waiting:
            for future in wait(futures, return_when=FIRST_COMPLETED).done:
                key, cell = futures.pop(future)
                results[key] = self._stored(cell, future.result())
            for index in list(waiting):
                advance(index)
        return [ends[index] for index in range(len(searches))]

    def _start(
        self,
        cell: Cell,
        results: dict[str, dict[str, Any]],
        futures: dict[Future[SimulationResult], tuple[str, Cell]],
    ) -> str:
        """The key of a cell, whose result is there, or which a process simulates."""
        key = cell.key()
        if key in results or any(key == other for other, _ in futures.values()):
            return key
        for name in dict.fromkeys((key, _complete(cell).key())):
            if (stored := self._store.read(name)) is not None:
                results[key] = stored
                return key
        if self._pool is None:
            results[key] = self._stored(cell, simulate_cell(cell))
        else:
            with interrupts_blocked():
                futures[self._pool.submit(simulate_cell, cell)] = (key, cell)
        return key

    def _stored(self, cell: Cell, result: SimulationResult) -> dict[str, Any]:
        self._progress(1)
        if "missed" not in result.metrics:
            cell = _complete(cell)
        return self._store.write(cell.key(), cell, result)


def _complete(cell: Cell) -> Cell:
    """The cell without targets, which has the same result if none was missed."""
    return replace(cell, targets=()) if isinstance(cell, TrafficCell) else cell
