"""Served artifacts: their sources, and a table of several artifacts that can be reloaded while serving."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from predictors.heads import HEADS
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
from scheduler_core.prediction.joint import Parts
from scheduler_core.prediction.predictor import addresses

logger = logging.getLogger(__name__)

Reopen = Callable[[str], ArtifactRuntime]
#: Seconds of the shortest deadline after which a late part of a joined artifact is paused, so that a client with a short one
#: does not pause it for all.
PAUSED_S = 1.0
#: Fields of a manifest that belong to a head other than length.
_HEAD_FIELDS = {"urgency": ("urgency_levels", "abstain_threshold"), "bucket": ("bucket_edges",)}


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


class OpenedArtifacts(NamedTuple):
    """Artifacts of a service: sources by artifact id, runtimes in the same order, and of joined artifacts the id of the first
    one -> those of the others."""

    sources: dict[str, ArtifactSource]
    runtimes: list[ArtifactRuntime]
    joined: dict[str, list[str]]


def open_sources(config: ServeConfig) -> OpenedArtifacts:
    """Loads the artifacts of `config`. The first one of those joined by "+" is the first with a length head. One that is joined
    to several artifacts is loaded once."""
    if config.public_key is not None:
        logger.info("the key %s verifies the signatures of artifacts", config.public_key)
    opened = OpenedArtifacts({}, [], {})
    loaded: dict[str, ArtifactRuntime] = {}  # by folder
    for address in (config.artifact, *config.more_artifacts):
        paths, new = addresses(address), []
        for path in paths:
            if len(paths) > 1 and path in loaded:
                continue
            source = ArtifactSource(str(artifact_folder(path)), config)
            runtime = loaded[path] = source.open()
            manifest = runtime.artifact.manifest
            logger.info(
                "artifact %s version %s from %s", manifest.artifact_id, manifest.artifact_version, path
            )
            logger.info("execution provider %s (requested: %s)", runtime.provider, config.provider)
            opened.sources[manifest.artifact_id] = source
            new.append(runtime)
        opened.runtimes.extend(length_first(new))
        if len(paths) > 1:
            parts = length_first(loaded[path] for path in paths)
            first, *others = (part.artifact.manifest.artifact_id for part in parts)
            if first in opened.joined:
                raise InputError(
                    "more_artifacts", address, f"other artifacts than {first}, which is joined already"
                )
            opened.joined[first] = others
    return opened


def length_first(runtimes: Iterable[ArtifactRuntime]) -> list[ArtifactRuntime]:
    """Joined artifacts in their order, but those with a length head first: a response has the fields of the first one."""
    return sorted(runtimes, key=lambda each: "length" not in each.artifact.manifest.heads)


class ArtifactTable:
    """Served artifacts by id; the first one is the default. `reopen` loads an artifact again by id, in a
    thread; None: reloading is disabled. `joined` is as in `OpenedArtifacts`."""

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
        joined: Mapping[str, Sequence[str]] | None = None,
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
        #: Artifacts to which others are joined -> their parts, of which they are the first.
        self.joined = {
            name: Parts((name, *others), shortest_s=PAUSED_S) for name, others in (joined or {}).items()
        }

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

    def manifest(self, served: ServedArtifact) -> Manifest:
        """The manifest of an artifact, with the heads of those that are joined to it."""
        manifest = served.manifest
        for other in self.others(served):
            new = [head for head in other.manifest.heads if head not in manifest.heads]
            update = {
                name: getattr(other.manifest, name) for head in new for name in _HEAD_FIELDS.get(head, ())
            }
            update["heads"] = tuple(head for head in HEADS if head in (*manifest.heads, *new))
            manifest = manifest.model_copy(update=update)
        return manifest

    def others(self, served: ServedArtifact) -> list[ServedArtifact]:
        """The artifacts that are joined to this one."""
        parts = self.joined.get(served.name)
        return [] if parts is None else [self._served[name] for name in parts.names[1:]]

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
