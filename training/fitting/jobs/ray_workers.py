"""Fitting blocks on a Ray cluster: one that runs already, or a local one for this run alone."""

from __future__ import annotations

import pickle
from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import Any

from scheduler_core.ray_cluster import fetch_result, ray_cluster
from training.fitting.jobs.workers import TASKS_FOR_EACH_PROCESS, Fit, Result, Task, fit_shard

#: How often a task is tried again whose worker or node was lost.
RETRIES = 3


def run_ray(
    fit: Fit, tasks: Iterable[Task], *, address: str, processes: int
) -> Generator[Result, None, None]:
    """Fits tasks on a Ray cluster, as many at a time as keep its processors busy.

    Every node needs the same version of tailcast installed. A cluster this process is connected to already is used
    whatever the address, and left as it is.

    Args:
        fit: What to do with each.
        tasks: Taken as there is room for them.
        address: Of a running cluster (HOST:PORT, ray://HOST:PORT, auto), or `local` to start one on this machine.
        processes: Processors of the local cluster.

    Raises:
        InputError: There is no cluster at the address.
        MissingExtraError: Ray is not installed.
        TailcastError: A task was lost again and again.
    """
    with ray_cluster(address, "ray", processes) as ray:
        yield from _through_ray(ray, fit, iter(tasks))


def _through_ray(ray: Any, fit: Fit, tasks: Iterator[Task]) -> Generator[Result, None, None]:
    remote = ray.remote(max_retries=RETRIES)(_fit_pickled)
    shared = ray.put(fit)
    running: dict[Any, int] = {}
    while True:
        # Nodes may come and go while the tasks last.
        most = TASKS_FOR_EACH_PROCESS * max(int(ray.cluster_resources().get("CPU", 1)), 1)
        for number, groups in islice(tasks, max(most - len(running), 0)):
            running[remote.remote(shared, pickle.dumps(groups, protocol=5))] = number
        if not running:
            return
        done, _ = ray.wait(list(running), num_returns=1)
        for reference in done:
            result = fetch_result(ray, reference, "a block", RETRIES, "finished blocks are kept")
            yield running.pop(reference), bytes(result)


def _fit_pickled(fit: Fit, groups: bytes) -> bytes:
    # Pickled, because arrays that Ray itself brings cannot be written to.
    return fit_shard(fit, pickle.loads(groups))
