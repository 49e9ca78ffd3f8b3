"""Where artifacts lie, and how they are loaded from there, again and again."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from predictors.artifact import MANIFEST
from predictors.runtime import ArtifactRuntime, ProviderChoice, open_runtime

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ArtifactPlace:
    """A folder, or a link to one, whose content may be replaced.

    Attributes:
        path: The place.
        provider: Where the model shall run.
        threads_per_run: Threads of one model call on a CPU.
    """

    path: str
    provider: ProviderChoice
    threads_per_run: int

    def open(self) -> ArtifactRuntime:
        """Verifies and loads what lies there now; raises as `open_runtime`."""
        # Of a link that is moved meanwhile, all files come from the same folder.
        folder = Path(self.path).resolve() if Path(self.path).exists() else Path(self.path)
        return open_runtime(folder, provider=self.provider, threads_per_run=self.threads_per_run)

    def stamp(self) -> tuple[int, int, int] | None:
        """What changes when the manifest is replaced; None while there is none."""
        try:
            found = (Path(self.path) / MANIFEST).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


def open_places(
    paths: Sequence[str], *, provider: ProviderChoice, threads_per_run: int
) -> tuple[dict[str, ArtifactPlace], list[ArtifactRuntime]]:
    """Loads the artifacts at `paths`; their places by artifact id, and the runtimes in the same order."""
    places: dict[str, ArtifactPlace] = {}
    runtimes = []
    for path in paths:
        place = ArtifactPlace(path, provider, threads_per_run)
        runtime = place.open()
        manifest = runtime.artifact.manifest
        logger.info("artifact %s version %s from %s", manifest.artifact_id, manifest.artifact_version, path)
        logger.info("execution provider %s (asked for: %s)", runtime.provider, provider)
        places[manifest.artifact_id] = place
        runtimes.append(runtime)
    return places, runtimes
