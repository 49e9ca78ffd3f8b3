"""Sampling on a Ray cluster, with one engine per worker and a shared queue of prompts."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack
from importlib import metadata
from typing import TYPE_CHECKING, Any

from data_gen.backend import Backend, SamplingSettings, Work, WorkResult
from data_gen.store import RunStoppedError
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.shell.ray_cluster import ray_cluster

if TYPE_CHECKING:
    from data_gen.config import GenSamplesConfig

log = logging.getLogger(__name__)

#: Maximum number of results, and maximum time in seconds, before a worker sends its results.
_BATCH_RESULTS = 64
_BATCH_S = 0.2


class _Worker:
    """Ray actor with an engine."""

    def __init__(self, config: GenSamplesConfig) -> None:
        from data_gen.config import make_backend

        self._backend = make_backend(config)

    def versions(self) -> tuple[str, str]:
        """Versions of tailcast and of the engine."""
        return metadata.version("tailcast"), self._backend.version

    def sample(self, queue: Any, settings: SamplingSettings) -> Iterator[list[WorkResult]]:
        """Samples the work in the queue until it gets None; yields batches of results."""
        results: list[WorkResult] = []
        sent_at = time.monotonic()
        for result in self._backend.sample(iter(queue.get, None), settings):
            results.append(result)
            if len(results) >= _BATCH_RESULTS or time.monotonic() - sent_at > _BATCH_S:
                yield results
                results, sent_at = [], time.monotonic()
        yield results


class RayBackend:
    """Samples with the engines of many workers; samples are recorded with the name and version of the engine.

    If a worker is lost, its samples in flight are requested again by the run, and the other workers continue.

    Args:
        config: Options of the engine, `ray` (address of the cluster) and `ray_workers`.
        engine: The engine in this process, used only for its name, version and served model.
    """

    def __init__(self, config: GenSamplesConfig, engine: Backend) -> None:
        self._config, self._engine = config, engine
        self._stack = ExitStack()
        self._ray: Any = None
        self._workers: list[Any] = []
        self.name, self.served_model, self.seeded = engine.name, engine.served_model, engine.seeded

    @property
    def version(self) -> str:
        """Version of the engine, the same on all nodes."""
        return self._engine.version

    def sample(self, work: Iterable[Work], settings: SamplingSettings) -> Generator[WorkResult, None, None]:
        """See `Backend.sample`.

        Raises:
            InputError: There is no cluster at the address, or it is too small.
            MissingExtraError: Ray is not installed.
            RunStoppedError: All workers were lost.
            TailcastError: A node has another version of tailcast or of the engine, or a worker failed.
        """
        self._start()
        ray = self._ray
        from ray.util.queue import Queue

        queue = Queue(actor_options={"num_cpus": 0})
        streams = {
            worker.sample.options(num_returns="streaming").remote(queue, settings): worker
            for worker in self._workers
        }
        source = iter(work)
        has_more = True
        try:
            while streams:
                while has_more and queue.qsize() < self._look_ahead(settings) * len(streams):
                    item = next(source, None)
                    has_more = item is not None
                    queue.put_nowait_batch([item] if has_more else [None] * len(streams))
                for stream in ray.wait(list(streams), num_returns=1, timeout=_BATCH_S)[0]:
                    try:
                        yield from ray.get(next(stream))
                    except StopIteration:
                        del streams[stream]
                    except ray.exceptions.RayTaskError as error:
                        if isinstance(error.cause, TailcastError):
                            raise error.cause from None
                        raise
                    except ray.exceptions.RayError as error:
                        log.warning("a worker was lost: %s", str(error).strip().splitlines()[0])
                        self._workers.remove(streams.pop(stream))
            if has_more or not self._workers:
                raise RunStoppedError("all Ray workers were lost; run the same command again to resume")
        finally:
            if streams:  # stopped early: abandon the work in flight
                self._end_workers()
            queue.shutdown(force=True)

    def _look_ahead(self, settings: SamplingSettings) -> int:
        """Number of queued prompts per worker, sufficient to keep all workers busy."""
        rows = {"transformers": self._config.transformers.max_rows, "vllm": self._config.vllm.max_num_seqs}
        return max(4, 2 * rows.get(self._config.backend, 64) // settings.num_samples)

    def _start(self) -> None:
        """Connects to the cluster and starts missing workers."""
        config = self._config
        assert config.ray is not None
        if self._ray is None:
            self._ray = self._stack.enter_context(ray_cluster(config.ray, "ray"))
        ray = self._ray
        nodes = [
            node["Resources"]
            for node in ray.nodes()
            if node["Alive"] and node["Resources"].get("CPU", 0) >= 1
        ]
        num_gpus = sum(node.get("GPU", 0) for node in nodes) if config.backend != "synthetic" else 0
        gpus = config.vllm.tensor_parallel_size if config.backend == "vllm" else 1
        max_workers = int(num_gpus // gpus if num_gpus else sum(node["CPU"] for node in nodes))
        num_workers = config.ray_workers or (max_workers if num_gpus else len(nodes))
        if not 1 <= num_workers <= max_workers:
            allowed = f"integers from 1 to {max_workers}, the capacity of the cluster"
            raise InputError("ray_workers", num_workers, allowed)
        resources: dict[str, Any] = {"num_cpus": 1, "num_gpus": gpus}
        if not num_gpus:
            # Ray limits the threads of a worker to its number of CPUs.
            cpus = min(node["CPU"] for node in nodes) // math.ceil(num_workers / len(nodes))
            resources = {"num_cpus": max(1, int(cpus)), "scheduling_strategy": "SPREAD"}
        actor = ray.remote(_Worker).options(**resources)
        self._workers += [actor.remote(config) for _ in range(num_workers - len(self._workers))]
        expected = metadata.version("tailcast"), self._engine.version
        for versions in ray.get([worker.versions.remote() for worker in self._workers]):
            if versions != expected:
                raise TailcastError(
                    f"a node of the Ray cluster has tailcast {versions[0]} with {self.name} {versions[1]}; this machine "
                    f"has {expected[0]} with {expected[1]}"
                )

    def _end_workers(self) -> None:
        for worker in self._workers:
            self._ray.kill(worker)
        self._workers.clear()

    def close(self) -> None:
        """Stops the workers, and the local cluster if one was started."""
        self._end_workers()
        self._stack.close()
        self._engine.close()
