"""Where artifacts lie, and how they are loaded from there, again and again."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from predictors.artifact import MANIFEST, SIGNATURE
from predictors.minisign import read_public_key
from predictors.runtime import ArtifactRuntime, ProviderChoice, open_runtime

logger = logging.getLogger(__name__)

Stamp = tuple[int, int, int] | None
"""Of a file: inode, time of its last change in ns, size; None while there is none."""


@dataclass(frozen=True, slots=True)
class ArtifactPlace:
    """A folder, or a link to one, whose content may be replaced.

    Attributes:
        path: The place.
        provider: Where the model shall run.
        threads_per_run: Threads of one model call on a CPU.
        public_key: Public key of minisign, file or base64 line, with which whatever lies here must be signed; a file is
            read each time, so that a key can be replaced. None: a signature is not looked at.
    """

    path: str
    provider: ProviderChoice
    threads_per_run: int
    public_key: str | None = None

    def open(self) -> ArtifactRuntime:
        """Verifies and loads what lies there now; raises as `open_runtime`."""
        # Of a link that is moved meanwhile, all files come from the same folder.
        folder = Path(self.path).resolve() if Path(self.path).exists() else Path(self.path)
        return open_runtime(
            folder,
            provider=self.provider,
            threads_per_run=self.threads_per_run,
            public_key=self.public_key,
        )

    def stamp(self) -> tuple[Stamp, Stamp]:
        """What changes when the manifest or its signature is replaced: a signature may come after what it signs."""
        folder = Path(self.path)
        return _stamp(folder / MANIFEST), _stamp(folder / SIGNATURE)


def _stamp(file: Path) -> Stamp:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def open_places(
    paths: Sequence[str],
    *,
    provider: ProviderChoice,
    threads_per_run: int,
    public_key: str | None = None,
) -> tuple[dict[str, ArtifactPlace], list[ArtifactRuntime]]:
    """Loads the artifacts at `paths`; their places by artifact id, and the runtimes in the same order.

    Raises:
        InputError: `public_key` is none, or an artifact is refused.
    """
    if public_key is not None:
        key = read_public_key(public_key)
        logger.info("artifacts must be signed with key %s", key.name)
    places: dict[str, ArtifactPlace] = {}
    runtimes = []
    for path in paths:
        place = ArtifactPlace(path, provider, threads_per_run, public_key)
        runtime = place.open()
        manifest = runtime.artifact.manifest
        logger.info("artifact %s version %s from %s", manifest.artifact_id, manifest.artifact_version, path)
        logger.info("execution provider %s (asked for: %s)", runtime.provider, provider)
        places[manifest.artifact_id] = place
        runtimes.append(runtime)
    return places, runtimes
