"""The servers under comparison: ours in several settings, and others with the same model and settings."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.service.load_generator import json_body
from benchmarks.service.peer_servers import (
    CORES,
    NAIVE,
    PEER_KINDS,
    PEERS,
    SINGLE,
    Environments,
    Settings,
    start_of,
)
from benchmarks.shared.processes import ROOT, Process, free_port, http_answers, listens, running


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
    def serve(self, artifact: Path, environments: Environments) -> Iterator[tuple[Process, str]]:
        """The running server, and its URL for the load generator."""
        port = free_port()
        if self.package is None:
            http_port = free_port() if self.scheme == "http" else None
            with self._ours(artifact, port, http_port) as process:
                address = f"127.0.0.1:{port}" if http_port is None else f"127.0.0.1:{http_port}{self.path}"
                yield process, f"{self.scheme}://{address}"
            return
        url = f"http://127.0.0.1:{port}{self.path}"
        body = json.dumps(json_body(self.body, "name three rivers")).encode()
        with tempfile.TemporaryDirectory() as folder:
            start = start_of(self.package, self.settings, environments, Path(folder), port)
            environment = start.environment | {
                "ARTIFACT": str(artifact),
                "PORT": str(port),
                "PYTHONPATH": str(PEERS),
                "TOKENIZERS_PARALLELISM": "false",
            }
            with running(start.command, lambda: http_answers(url, body), environment=environment) as process:
                yield process, url

    def _ours(
        self, artifact: Path, port: int, http_port: int | None
    ) -> contextlib.AbstractContextManager[Process]:
        from predictors.client import ClientSettings, PredictorError, SyncPredictor
        from scheduler_core.prediction.predictor import PredictionRequest

        command = [
            sys.executable,
            "-m",
            "predictors.commands.serve_predictor",
            str(artifact),
            f"--port={port}",
            "--provider=cpu",
        ]
        if http_port is not None:
            command.append(f"--http_port={http_port}")
        settings = ClientSettings(timeout_s=5.0, max_attempts=1)

        def is_ready() -> bool:
            if not listens(port):
                return False
            with SyncPredictor(f"127.0.0.1:{port}", settings) as client:
                try:
                    return bool(client.predict([PredictionRequest("", "name three rivers", 1)]))
                except PredictorError:
                    return False

        return running([*command, *self.arguments], is_ready, environment={"PYTHONPATH": str(ROOT)})


OURS = Variant(name="tailcast", scheme="grpc")
VARIANTS = (
    OURS,
    Variant(name="tailcast, HTTP", path="/v1/predict"),
    Variant(name="tailcast, batch 1", scheme="grpc", arguments=("--max_batch=1",)),
    *(
        Variant(
            name=f"{peer.label}, {setting}",
            package=peer.package,
            app=peer.app,
            path=peer.path,
            settings=settings,
            body=peer.body,
        )
        for peer in PEER_KINDS
        for setting, settings in (("32 / 3 ms", NAIVE), (f"batch 1, {CORES} workers", SINGLE))
    ),
)
