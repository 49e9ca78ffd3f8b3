"""The servers under comparison: ours in several settings, and others with the same model and settings."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.service.load_generator import json_body
from benchmarks.shared.processes import ROOT, Process, command_ports, free_port, http_ok, running

PEERS = Path(__file__).resolve().parent / "peers"
TRITON = ROOT / ".venv-triton"
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
    """Whether a package is in the environment of `python`, for Triton in `TRITON`; None is our server."""
    if package is None:
        return True
    if package == "triton":
        return (TRITON / "pytriton/tritonserver/bin/tritonserver").is_file()
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", probe], check=False, capture_output=True).returncode == 0


def triton_command(settings: Settings, folder: Path, port: int) -> list[str]:
    """Writes a model repository to an empty folder; returns the command that serves it."""
    model = folder / "predict" / "1" / "model.py"
    model.parent.mkdir(parents=True)
    model.write_text((PEERS / "triton_app.py").read_text())
    # Its Python ignores PYTHONPATH and finds modules only next to the model.
    (model.parent / "shared_model.py").write_text((PEERS / "shared_model.py").read_text())
    config = (PEERS / "triton_config.pbtxt").read_text()
    values = {
        "MAX_BATCH": settings.max_batch,
        "WORKERS": settings.workers,
        "MAX_WAIT_US": round(settings.max_wait_s * 1e6),
    }
    for name, value in values.items():
        config = config.replace(name, str(value))
    (folder / "predict" / "config.pbtxt").write_text(config)
    triton = TRITON / "pytriton" / "tritonserver"
    command = [str(triton / "bin" / "tritonserver"), "--model-repository", str(folder)]
    command += ["--backend-directory", str(triton / "backends"), "--http-port", str(port)]
    return [*command, "--http-address", "127.0.0.1", "--allow-metrics", "false", "--allow-grpc", "false"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One row of the table.

    Attributes:
        name: Name of the row.
        package: Package of the server; None: ours.
        app: Files in peers/ that a user writes.
        scheme: "grpc" or "http".
        path: Path of the HTTP address.
        arguments: Options of serve-predictor.
        settings: Batching and workers of a peer.
        body: Kind of JSON body; see `load_generator.json_body`.
    """

    name: str
    package: str | None = None
    app: tuple[str, ...] = ()
    scheme: str = "http"
    path: str = "/predict"
    arguments: tuple[str, ...] = ()
    settings: Settings = SINGLE
    body: str = "prompt"

    @property
    def user_lines(self) -> int:
        """Lines that a user writes for it, without shared_model.py, blank lines and comments."""
        lines = [line.strip() for app in self.app for line in (PEERS / app).read_text().splitlines()]
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
        body = json.dumps(json_body(self.body, "name three rivers")).encode()
        with tempfile.TemporaryDirectory() as folder:
            command = [python, str(PEERS / f"{self.package}_app.py")]
            if self.package == "mosec":
                command += ["--address", "127.0.0.1", "--port", str(port), "--timeout", "300000"]
            libraries = {}
            if self.package == "triton":
                command = triton_command(self.settings, Path(folder), port)
                libraries = {"LD_LIBRARY_PATH": str(TRITON / "nvidia_pytriton.libs")}
            environment = self.settings.environment() | libraries
            environment |= {"ARTIFACT": str(artifact), "PORT": str(port), "PYTHONPATH": str(PEERS)}
            environment |= {"TOKENIZERS_PARALLELISM": "false"}
            with running(command, lambda: http_ok(url, body), environment=environment) as process:
                yield process, url


def _peers(
    name: str, package: str, *app: str, path: str = "/predict", body: str = "prompt"
) -> Iterator[Variant]:
    for setting, settings in (("32 / 3 ms", NAIVE), (f"batch 1, {CORES} workers", SINGLE)):
        title = f"{name}, {setting}"
        yield Variant(name=title, package=package, app=app, path=path, settings=settings, body=body)


OURS = Variant(name="tailcast", scheme="grpc")
VARIANTS = (
    OURS,
    Variant(name="tailcast, HTTP", path="/v1/predict"),
    Variant(name="tailcast, batch 1", scheme="grpc", arguments=("--max_batch=1",)),
    *_peers("Mosec", "mosec", "mosec_app.py", path="/inference"),
    *_peers("Ray Serve", "ray", "ray_app.py"),
    *_peers("Triton", "triton", "triton_app.py", "triton_config.pbtxt", path="/v2/models/predict/infer", body="tensors"),
)  # fmt: skip
