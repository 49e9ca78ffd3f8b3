"""Fitting blocks in this process, in several, or on a Ray cluster; results come as they finish.

All three take the same tasks, hold a bounded number of them, and give the same bytes for each, so a file of fits does
not depend on where it was made.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice

import pyarrow as pa

from scheduler_core.errors import InputError, TailcastError
from training.fitting.jobs.parts import encode_shard
from training.fitting.reading.table import GroupedLengths

#: Fits of a block as a table; a function that can be sent to another process.
Fit = Callable[[GroupedLengths], pa.Table]
#: A block's number and groups.
Task = tuple[int, GroupedLengths]
#: A block's number and its shard.
Result = tuple[int, bytes]
#: Fits tasks.
Runner = Callable[[Fit, Iterable[Task]], Generator[Result, None, None]]

TASKS_FOR_EACH_PROCESS = 2


def usable_cores() -> int:
    """Number of processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def fit_shard(fit: Fit, groups: GroupedLengths) -> bytes:
    """One block's shard."""
    return encode_shard(groups, fit(groups))


def run_here(fit: Fit, tasks: Iterable[Task]) -> Generator[Result, None, None]:
    """Fits one task after another in this process."""
    for number, groups in tasks:
        yield number, fit_shard(fit, groups)


def run_processes(fit: Fit, tasks: Iterable[Task], *, processes: int) -> Generator[Result, None, None]:
    """Fits tasks in several processes; in this one if there is one process or one task.

    Args:
        fit: What to do with each.
        tasks: Taken as there is room for them.
        processes: How many.

    Raises:
        TailcastError: A process died.
    """
    tasks = iter(tasks)
    first = list(islice(tasks, processes))
    tasks = chain(first, tasks)
    if len(first) < 2:
        yield from run_here(fit, tasks)
        return
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(len(first), mp_context=context, initializer=_start_worker)
    finished = False
    try:
        yield from _through_pool(pool, fit, tasks, len(first) * TASKS_FOR_EACH_PROCESS)
        finished = True
    except BrokenProcessPool as error:
        raise TailcastError(
            "a process that fitted a block died, killed or out of memory; finished blocks are kept, the same command "
            "goes on from there; fewer --processes or a smaller --block-groups need less memory"
        ) from error
    finally:
        if not finished:
            for child in set(multiprocessing.active_children()) - before:
                child.terminate()
        pool.shutdown(wait=True, cancel_futures=True)


def _through_pool(
    pool: ProcessPoolExecutor, fit: Fit, tasks: Iterator[Task], most: int
) -> Generator[Result, None, None]:
    running: dict[Future[bytes], int] = {}
    while True:
        for number, groups in islice(tasks, most - len(running)):
            running[pool.submit(fit_shard, fit, groups)] = number
        if not running:
            return
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            yield running.pop(future), future.result()


def _start_worker() -> None:
    """An interrupt is the parent's to handle; a worker whose parent has been killed ends too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pa.set_cpu_count(1)
    parent = multiprocessing.parent_process()
    if parent is not None:

        def end_with_parent() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=end_with_parent, daemon=True).start()


def check_processes(processes: int | None, *, slow: bool) -> int:
    """The number of processes: as given, by default one for each usable core where fits are slow, else one.

    A fit of microseconds costs less than bringing its answers to another process.

    Raises:
        InputError: It is below 1.
    """
    if processes is not None and processes < 1:
        raise InputError("processes", processes, "a whole number of at least 1, or unset")
    return processes or (usable_cores() if slow else 1)
