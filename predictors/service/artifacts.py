"""The artifacts in service: where they lie, and several at once, each replaceable while requests run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from predictors.artifact import MANIFEST, SIGNATURE
from predictors.runtime import ArtifactRuntime, ProviderChoice, open_runtime
from predictors.service.batcher import BatchingSettings, Clock
from predictors.service.errors import ClosedError, ReloadError, UnknownArtifactError
from predictors.service.messages import RequestReader
from predictors.service.metrics import ArtifactMetrics, ServiceMetrics
from predictors.service.pipeline import PredictionPipeline, Runtime, ServiceThreads
from scheduler_core.errors import InputError

logger = logging.getLogger(__name__)

Reopen = Callable[[str], Runtime]
FileState = tuple[int, int, int] | None
"""Inode, time of the last change in ns, and size of a file; None while there is none."""


@dataclass(frozen=True, slots=True)
class ArtifactSource:
    """A folder, or a link to one, whose content may be replaced.

    Attributes are the arguments of `open_runtime`; the file of the public key is read at every load.
    """

    path: str
    provider: ProviderChoice
    threads_per_run: int
    public_key: str | None = None

    def open(self) -> ArtifactRuntime:
        """Verifies and loads the current content; raises as `open_runtime`."""
        # Of a link that is moved meanwhile, all files come from the same folder.
        folder = Path(self.path).resolve() if Path(self.path).exists() else Path(self.path)
        return open_runtime(
            folder,
            provider=self.provider,
            threads_per_run=self.threads_per_run,
            public_key=self.public_key,
        )

    def state(self) -> tuple[FileState, FileState]:
        """Changes when the manifest or its signature is replaced: a signature may come after its manifest."""
        folder = Path(self.path)
        return _file_state(folder / MANIFEST), _file_state(folder / SIGNATURE)


def _file_state(file: Path) -> FileState:
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def open_sources(
    paths: Sequence[str],
    *,
    provider: ProviderChoice,
    threads_per_run: int,
    public_key: str | None = None,
) -> tuple[dict[str, ArtifactSource], list[ArtifactRuntime]]:
    """Loads the artifacts at `paths`: their sources by artifact id, and the runtimes in the same order."""
    if public_key is not None:
        logger.info("artifacts must be signed with the key %s", public_key)
    sources: dict[str, ArtifactSource] = {}
    runtimes = []
    for path in paths:
        source = ArtifactSource(path, provider, threads_per_run, public_key)
        runtime = source.open()
        manifest = runtime.artifact.manifest
        logger.info("artifact %s version %s from %s", manifest.artifact_id, manifest.artifact_version, path)
        logger.info("execution provider %s (requested: %s)", runtime.provider, provider)
        sources[manifest.artifact_id] = source
        runtimes.append(runtime)
    return sources, runtimes


@dataclass(frozen=True, slots=True)
class ServedArtifact:
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
        reopen: Loads the artifact of a name again, called in a thread; None: nothing can be replaced.
        batching, clock, cache_entries, max_prompt_chars, worker_cores, metrics: As of `PredictionPipeline`,
            `RequestReader` and `ServiceThreads`.
    """

    def __init__(
        self,
        runtimes: Sequence[Runtime],
        batching: BatchingSettings,
        *,
        clock: Clock | None = None,
        cache_entries: int = 0,
        max_prompt_chars: int | None = None,
        worker_cores: Sequence[int] = (),
        metrics: ServiceMetrics | None = None,
        reopen: Reopen | None = None,
    ) -> None:
        self._batching = batching
        self._clock = clock
        self._cache_entries = cache_entries
        self._max_prompt_chars = max_prompt_chars
        self._reopen = reopen
        self._threads = ServiceThreads(batching.num_workers, worker_cores)
        self._reloading = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()
        self._closing = False
        self._ending = False
        self._served: dict[str, ServedArtifact] = {}
        metrics = metrics or ServiceMetrics()
        for runtime in runtimes:
            name = runtime.artifact.manifest.artifact_id
            if name in self._served:
                raise InputError("artifact", name, "artifacts of different ids")
            self._served[name] = self._serve(runtime, metrics.artifact(name))

    @property
    def names(self) -> list[str]:
        """Ids of the artifacts, the default first."""
        return list(self._served)

    @property
    def default(self) -> ServedArtifact:
        """The first artifact."""
        return next(iter(self._served.values()))

    @property
    def num_in_flight(self) -> int:
        """Requests accepted and not yet answered, of all artifacts."""
        return sum(served.pipeline.num_in_flight for served in self._served.values())

    @property
    def is_full(self) -> bool:
        """Whether every artifact refuses any request now, because its queue is full."""
        return all(served.pipeline.is_full for served in self._served.values())

    @property
    def is_ready(self) -> bool:
        """Whether all artifacts take requests, and will go on to."""
        return all(self.is_artifact_ready(served) for served in self._served.values())

    def is_artifact_ready(self, served: ServedArtifact) -> bool:
        """Whether one artifact takes requests, and will go on to."""
        return not self._ending and served.pipeline.state == "ready"

    def get(self, name: str) -> ServedArtifact:
        """The artifact of that id; the default if it is empty.

        Raises:
            UnknownArtifactError: There is none.
        """
        if not name:
            return self.default
        served = self._served.get(name)
        if served is None:
            raise UnknownArtifactError("artifact_id", name, f"one of {', '.join(self._served)}")
        return served

    async def start(self) -> None:
        """Warms up and verifies; requests are accepted from then on.

        Raises:
            TailcastError: A model fails, or gives numbers that no scheduler can use.
        """
        for served in self._served.values():
            await served.pipeline.start()
            served.metrics.loaded(served.version, served.pipeline.runtime.provider, None)

    async def reload(self, name: str) -> bool:
        """Replaces an artifact by the current content of its source; True if it has changed.

        The new one is verified (files, session, some predictions) and warmed up before a single request meets it;
        requests in flight in the old one are answered by it. If anything is wrong with the new one, nothing changes.

        Raises:
            ReloadError: The new artifact was refused.
        """
        served = self.get(name)
        if self._reopen is None:
            raise ReloadError(f"artifact {served.name}: this server has no source to load it from")
        async with self._reloading:
            served = self.get(name)  # as the last reload left it
            try:
                runtime = await asyncio.to_thread(self._reopen, served.name)
                if runtime.artifact.manifest == served.pipeline.runtime.artifact.manifest:
                    return False
                _check_successor(served, runtime)
                successor = self._serve(runtime, served.metrics)
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
        """Reports not ready, so that load balancers look away; requests are still taken."""
        self._ending = True

    def refuse_new(self) -> None:
        """Lets the requests in flight finish."""
        self._closing = True
        for served in self._served.values():
            served.pipeline.refuse_new()

    async def close(self) -> None:
        """Ends all pipelines once they are empty, replaced ones too."""
        await asyncio.gather(*(served.pipeline.close() for served in self._served.values()), *self._leaving)
        self._threads.close()

    def _serve(self, runtime: Runtime, metrics: ArtifactMetrics) -> ServedArtifact:
        pipeline = PredictionPipeline(
            runtime,
            self._batching,
            self._clock,
            threads=self._threads,
            cache_entries=self._cache_entries,
            metrics=metrics,
        )
        name = runtime.artifact.manifest.artifact_id
        return ServedArtifact(name, pipeline, RequestReader(pipeline, self._max_prompt_chars), metrics)


def _check_successor(served: ServedArtifact, runtime: Runtime) -> None:
    old, new = served.pipeline.runtime.artifact.manifest, runtime.artifact.manifest
    if new.artifact_id != old.artifact_id:
        raise InputError("artifact_id", new.artifact_id, f"{old.artifact_id}, as before")
    if set(old.heads) - set(new.heads):
        raise InputError("heads", list(new.heads), f"all that are in service: {', '.join(old.heads)}")
