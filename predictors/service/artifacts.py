"""Served artifacts: their sources, and a table of several artifacts that can be reloaded while serving."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from predictors.hosting.process import file_state
from predictors.manifest import MANIFEST, SIGNATURE, Manifest
from predictors.pretrained import artifact_folder
from predictors.runtime import ArtifactRuntime, open_runtime
from predictors.service.batcher import BatchingSettings
from predictors.service.config import ServeConfig
from predictors.service.errors import ClosedError, ReloadError, UnknownArtifactError
from predictors.service.metrics import ArtifactMetrics, ServiceMetrics
from predictors.service.pipeline import ServedArtifact, ServiceThreads
from scheduler_core.errors import InputError

logger = logging.getLogger(__name__)

Reopen = Callable[[str], ArtifactRuntime]


@dataclass(frozen=True, slots=True)
class ArtifactSource:
    """An artifact folder, or a link to one, that can be replaced, and the options to load it with."""

    path: str
    config: ServeConfig

    def open(self) -> ArtifactRuntime:
        """Verifies and loads the current content; raises as `open_runtime`."""
        # Resolve a link once, so that all files come from the same folder.
        folder = Path(self.path).resolve() if Path(self.path).exists() else Path(self.path)
        return open_runtime(folder, provider=self.config.provider, public_key=self.config.public_key)

    def state(self) -> tuple[object, ...]:
        """A value that changes when the manifest or its signature is replaced."""
        return tuple(file_state(Path(self.path) / name) for name in (MANIFEST, SIGNATURE))


def open_sources(config: ServeConfig) -> tuple[dict[str, ArtifactSource], list[ArtifactRuntime]]:
    """Loads the artifacts of `config`; returns sources by artifact id, and runtimes in the same order."""
    if config.public_key is not None:
        logger.info("the key %s verifies the signatures of artifacts", config.public_key)
    sources: dict[str, ArtifactSource] = {}
    runtimes = []
    for path in (config.artifact, *config.more_artifacts):
        source = ArtifactSource(str(artifact_folder(path)), config)
        runtime = source.open()
        manifest = runtime.artifact.manifest
        logger.info("artifact %s version %s from %s", manifest.artifact_id, manifest.artifact_version, path)
        logger.info("execution provider %s (requested: %s)", runtime.provider, config.provider)
        sources[manifest.artifact_id] = source
        runtimes.append(runtime)
    return sources, runtimes


class ArtifactTable:
    """Served artifacts by id; the first one is the default. `reopen` loads an artifact again by id, in a
    thread; None: reloading is disabled."""

    def __init__(
        self,
        runtimes: Sequence[ArtifactRuntime],
        batching: BatchingSettings,
        *,
        cache_entries: int = 0,
        max_prompt_chars: int | None = None,
        worker_cores: Sequence[int] = (),
        metrics: ServiceMetrics | None = None,
        reopen: Reopen | None = None,
    ) -> None:
        self._reopen = reopen
        self._threads = ServiceThreads(batching.num_workers, worker_cores)
        self._serve = functools.partial(
            ServedArtifact, batching, self._threads, cache_entries, max_prompt_chars
        )
        self._reloading = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()
        self._closing = False
        # The service is reported as not ready for load balancers, but still accepts requests.
        self.is_ending = False
        self._served: dict[str, ServedArtifact] = {}
        metrics = metrics or ServiceMetrics()
        for runtime in runtimes:
            name = runtime.artifact.manifest.artifact_id
            if name in self._served:
                raise InputError("artifact", name, "artifacts with distinct ids")
            self._served[name] = self._serve(runtime, ArtifactMetrics(metrics, name))

    @property
    def names(self) -> list[str]:
        """Ids of the artifacts; the default is first."""
        return list(self._served)

    @property
    def default(self) -> ServedArtifact:
        """The first artifact."""
        return next(iter(self._served.values()))

    @property
    def num_in_flight(self) -> int:
        """Number of requests in flight, over all artifacts."""
        return sum(served.num_in_flight for served in self._served.values())

    @property
    def is_full(self) -> bool:
        """Whether the queues of all artifacts are full."""
        return all(served.is_full for served in self._served.values())

    @property
    def is_ready(self) -> bool:
        """Whether all artifacts accept requests and the service is not stopping."""
        return all(self.is_artifact_ready(served) for served in self._served.values())

    def is_artifact_ready(self, served: ServedArtifact) -> bool:
        """Whether one artifact accepts requests and the service is not stopping."""
        return not self.is_ending and served.state == "ready"

    def get(self, name: str) -> ServedArtifact:
        """The artifact with the id `name`, or the default if empty; UnknownArtifactError for other ids."""
        served = self._served.get(name) if name else self.default
        if served is None:
            raise UnknownArtifactError("artifact_id", name, f"one of {', '.join(self._served)}")
        return served

    async def start(self) -> None:
        """Warms up and verifies all artifacts, then accepts requests. Raises as `ArtifactRuntime.warm_up`."""
        for served in self._served.values():
            await served.start()
            served.metrics.loaded(served.version, served.runtime.provider, None)

    async def reload(self, name: str) -> bool:
        """Replaces an artifact by the current content of its source; returns whether it changed. The new one
        is verified and warmed up first; on ReloadError nothing changes. The old one finishes its requests."""
        served = self.get(name)
        if self._reopen is None:
            raise ReloadError(f"artifact {served.name}: this server cannot reload it")
        async with self._reloading:
            served = self.get(name)  # another reload may have replaced it
            try:
                runtime = await asyncio.to_thread(self._reopen, served.name)
                if runtime.artifact.manifest == served.manifest:
                    return False
                _check_successor(served.manifest, runtime.artifact.manifest)
                successor = self._serve(runtime, served.metrics)
                await successor.start()
                if self._closing:
                    raise ClosedError
            except Exception as error:  # on any error, keep serving the old artifact
                served.metrics.reload(False)
                text = f"artifact {served.name}: rejected a new version, kept {served.version}: {error}"
                raise ReloadError(text) from error
            self._served[served.name] = successor
            served.metrics.reload(True)
            served.metrics.loaded(successor.version, runtime.provider, served.version)
            leaving = asyncio.create_task(served.close())
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
            logger.info("artifact %s: version %s replaces %s", name, successor.version, served.version)
            return True

    async def close(self) -> None:
        """Rejects new requests, and closes all pipelines, including replaced ones, when they are empty."""
        self._closing = True
        await asyncio.gather(*(served.close() for served in self._served.values()), *self._leaving)
        self._threads.close()


def _check_successor(old: Manifest, new: Manifest) -> None:
    if new.artifact_id != old.artifact_id:
        raise InputError("artifact_id", new.artifact_id, f"{old.artifact_id}, as before")
    if set(old.heads) - set(new.heads):
        raise InputError("heads", list(new.heads), f"all heads in service: {', '.join(old.heads)}")
