"""The artifacts in service: several at once, each replaceable while requests run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from predictors.service.clock import Clock
from predictors.service.errors import ClosedError, ReloadError, UnknownArtifactError
from predictors.service.grouping import BatchingSettings
from predictors.service.inputs import RequestReader
from predictors.service.metrics import ArtifactMetrics, ServiceMetrics
from predictors.service.pipeline import PredictionPipeline, Runtime
from predictors.service.threads import ServiceThreads
from scheduler_core.errors import InputError

logger = logging.getLogger(__name__)

Reopen = Callable[[str], Runtime]


@dataclass(frozen=True, slots=True)
class Served:
    """One artifact in service, at one version."""

    name: str
    pipeline: PredictionPipeline
    reader: RequestReader
    metrics: ArtifactMetrics

    @property
    def version(self) -> str:
        """The artifact's version."""
        return self.pipeline.runtime.artifact.manifest.artifact_version


class ArtifactTable:
    """Name -> artifact in service; the name is the artifact's id, the first one is the default.

    Args:
        runtimes: One or more loaded artifacts of different ids.
        batching: Batching of each.
        clock: Source of time; None: the event loop's.
        cache_entries: Predictions that each remembers; 0: none.
        max_prompt_chars: Longest prompt; None: any.
        worker_niceness, worker_cores: `niceness` and `cores` of `ServiceThreads`.
        metrics: Who counts.
        reopen: Loads the artifact of a name again, called in a thread; None: nothing can be replaced.
    """

    def __init__(
        self,
        runtimes: Sequence[Runtime],
        batching: BatchingSettings,
        *,
        clock: Clock | None = None,
        cache_entries: int = 0,
        max_prompt_chars: int | None = None,
        worker_niceness: int = 0,
        worker_cores: Sequence[int] = (),
        metrics: ServiceMetrics | None = None,
        reopen: Reopen | None = None,
    ) -> None:
        self._batching = batching
        self._clock = clock
        self._cache_entries = cache_entries
        self._max_prompt_chars = max_prompt_chars
        self._metrics = metrics or ServiceMetrics()
        self._reopen = reopen
        self._threads = ServiceThreads(batching.num_workers, worker_niceness, worker_cores)
        self._reloading = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()
        self._closing = False
        self._ending = False
        self._served: dict[str, Served] = {}
        for runtime in runtimes:
            name = runtime.artifact.manifest.artifact_id
            if name in self._served:
                raise InputError("artifact", name, "artifacts of different ids")
            self._served[name] = self._made(runtime, self._metrics.artifact(name))

    @property
    def names(self) -> list[str]:
        """Ids of the artifacts, the default first."""
        return list(self._served)

    @property
    def default(self) -> Served:
        """The first artifact."""
        return next(iter(self._served.values()))

    @property
    def num_inside(self) -> int:
        """Requests accepted and not yet answered, of all artifacts."""
        return sum(served.pipeline.num_inside for served in self._served.values())

    @property
    def is_full(self) -> bool:
        """Whether every artifact refuses whatever is asked now, because its queue is full."""
        return all(served.pipeline.is_full for served in self._served.values())

    @property
    def is_ready(self) -> bool:
        """Whether all artifacts take requests, and will go on to."""
        return all(self.says_ready(served) for served in self._served.values())

    def says_ready(self, served: Served) -> bool:
        """Whether one artifact takes requests, and will go on to."""
        return not self._ending and served.pipeline.state == "ready"

    def get(self, name: str) -> Served:
        """The artifact of that id; the default if it is empty.

        Raises:
            UnknownArtifactError: None has it.
        """
        if not name:
            return self.default
        found = self._served.get(name)
        if found is None:
            raise UnknownArtifactError("artifact_id", name, f"one of {', '.join(self._served)}")
        return found

    async def start(self) -> None:
        """Warms up and verifies; requests are accepted from then on.

        Raises:
            TailcastError: A model fails, or gives numbers that no scheduler can use.
        """
        for served in self._served.values():
            await served.pipeline.start()
            served.metrics.loaded(served.version, served.pipeline.runtime.provider, None)

    async def reload(self, name: str) -> bool:
        """Replaces an artifact by what lies at its place now; True if it has changed.

        The new one is verified (files, session, some predictions) and warmed up before a single request meets it;
        requests inside the old one are answered by it. If anything is wrong with the new one, nothing changes.

        Raises:
            ReloadError: The new artifact was refused.
        """
        served = self.get(name)
        if self._reopen is None:
            raise ReloadError(f"artifact {served.name}: this server was given no place to load it from")
        async with self._reloading:
            served = self.get(name)  # as the last reload left it
            try:
                runtime = await asyncio.to_thread(self._reopen, served.name)
                if _is_same(served, runtime):
                    return False
                _check_successor(served, runtime)
                successor = self._made(runtime, served.metrics)
                await successor.pipeline.start()
                if self._closing:
                    raise ClosedError
            except Exception as error:  # whatever it is, what is in service must stay
                served.metrics.reload(False)
                raise ReloadError(
                    f"artifact {served.name}: a new version was refused, {served.version} stays: {error}"
                ) from error
            self._served[served.name] = successor
            served.metrics.reload(True)
            served.metrics.loaded(successor.version, runtime.provider, served.version)
            leaving = asyncio.create_task(served.pipeline.close())
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
            logger.info("artifact %s: version %s replaces %s", name, successor.version, served.version)
            return True

    def announce_end(self) -> None:
        """Says that it is not ready, so that load balancers look away; requests are still taken."""
        self._ending = True

    def refuse_new(self) -> None:
        """Lets what is inside finish."""
        self._closing = True
        for served in self._served.values():
            served.pipeline.refuse_new()

    async def close(self) -> None:
        """Ends all pipelines once they are empty, replaced ones too."""
        await asyncio.gather(*(served.pipeline.close() for served in self._served.values()), *self._leaving)
        self._threads.close()

    def _made(self, runtime: Runtime, metrics: ArtifactMetrics) -> Served:
        pipeline = PredictionPipeline(
            runtime,
            self._batching,
            self._clock,
            threads=self._threads,
            cache_entries=self._cache_entries,
            metrics=metrics,
        )
        name = runtime.artifact.manifest.artifact_id
        return Served(name, pipeline, RequestReader(pipeline, self._max_prompt_chars), metrics)


def _is_same(served: Served, runtime: Runtime) -> bool:
    old, new = served.pipeline.runtime.artifact.manifest, runtime.artifact.manifest
    return old == new


def _check_successor(served: Served, runtime: Runtime) -> None:
    old, new = served.pipeline.runtime.artifact.manifest, runtime.artifact.manifest
    if new.artifact_id != old.artifact_id:
        raise InputError("artifact_id", new.artifact_id, f"{old.artifact_id}, as before")
    missing = [head for head in old.heads if head not in new.heads]
    if missing:
        raise InputError("heads", list(new.heads), f"all that are in service: {', '.join(old.heads)}")
