"""Pool of worker processes for a command."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from scheduler_core.errors import TailcastError


@contextmanager
def worker_processes(
    num: int, dead: str, initializer: Callable[[], None] | None = None
) -> Iterator[ProcessPoolExecutor]:
    """A pool of `num` processes, which must not write files. After an error their unfinished work is cancelled at once.

    `TailcastError` with the message `dead` if a process dies, for example because it ran out of memory.
    """
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(num, mp_context=multiprocessing.get_context("spawn"), initializer=initializer)
    finished = False
    try:
        yield pool
        finished = True
    except BrokenProcessPool as error:
        raise TailcastError(dead) from error
    finally:
        if not finished:
            for child in set(multiprocessing.active_children()) - before:
                child.terminate()
        pool.shutdown(wait=True, cancel_futures=True)
