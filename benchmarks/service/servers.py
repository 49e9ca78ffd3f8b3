"""The servers under comparison: ours in several settings, and others with the same model and settings."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shared.processes import Process, command_ports, free_port, http_ok, running

PEERS = Path(__file__).resolve().parent / "peers"
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Batching and workers, the same for every peer."""

    max_batch: int
    max_wait_s: float
    workers: int
    threads: int

    def environment(self) -> dict[str, str]:
        """Environment variables for the apps in peers/."""
        return {
            "MAX_BATCH": str(self.max_batch),
            "MAX_WAIT_S": str(self.max_wait_s),
            "WORKERS": str(self.workers),
            "THREADS": str(self.threads),
        }


NAIVE = Settings(max_batch=32, max_wait_s=0.003, workers=1, threads=CORES)
SINGLE = Settings(max_batch=1, max_wait_s=0.0, workers=CORES, threads=1)


def is_installed(package: str | None, python: str) -> bool:
    """Whether a package is in the environment of `python`; None is our server."""
    if package is None:
        return True
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", probe], check=False, capture_output=True).returncode == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One row of the table.

    Attributes:
        name: Name of the row.
        package: Package of the server; None: ours.
        scheme: "grpc" or "http".
        path: Path of the HTTP address.
        arguments: Options of serve-predictor.
        settings: Batching and workers of a peer.
    """

    name: str
    package: str | None = None
    scheme: str = "http"
    path: str = "/predict"
    arguments: tuple[str, ...] = ()
    settings: Settings = SINGLE

    @property
    def app(self) -> Path:
        """What a user writes for it."""
        return PEERS / f"{self.package}_app.py"

    @property
    def user_lines(self) -> int:
        """Lines that a user writes for it, without shared_model.py, blank lines and comments."""
        lines = [] if self.package is None else map(str.strip, self.app.read_text().splitlines())
        return sum(bool(line) and not line.startswith("#") for line in lines)

    @contextlib.contextmanager
    def serve(self, artifact: Path, python: str) -> Iterator[tuple[Process, str]]:
        """The running server, and its URL for the load generator; `python` is that of Mosec and Ray Serve."""
        if self.package is None:
            words = [str(artifact), "--provider", "cpu", *self.arguments]
            words += ["--http_port", "0"] if self.scheme == "http" else []
            with command_ports("serve_predictor", *words) as (process, [port, *http]):
                yield (
                    process,
                    f"http://127.0.0.1:{http[0]}{self.path}" if http else f"grpc://127.0.0.1:{port}",
                )
            return
        port = free_port()
        url = f"http://127.0.0.1:{port}{self.path}"
        command = [python, str(self.app)]
        if self.package == "mosec":
            command += ["--address", "127.0.0.1", "--port", str(port), "--timeout", "300000"]
        environment = self.settings.environment() | {"TOKENIZERS_PARALLELISM": "false"}
        environment |= {"ARTIFACT": str(artifact), "PORT": str(port), "PYTHONPATH": str(PEERS)}
        body = b'{"prompt": "name three rivers"}'
        with running(command, lambda: http_ok(url, body), environment=environment) as process:
            yield process, url


def _peers(name: str, package: str, path: str) -> Iterator[Variant]:
    for setting, settings in (("32 / 3 ms", NAIVE), (f"batch 1, {CORES} workers", SINGLE)):
        yield Variant(name=f"{name}, {setting}", package=package, path=path, settings=settings)


OURS = Variant(name="tailcast", scheme="grpc")
VARIANTS = (
    OURS,
    Variant(name="tailcast, HTTP", path="/v1/predict"),
    Variant(name="tailcast, batch 1", scheme="grpc", arguments=("--max_batch=1",)),
    *_peers("Mosec", "mosec", "/inference"),
    *_peers("Ray Serve", "ray", "/predict"),
)
