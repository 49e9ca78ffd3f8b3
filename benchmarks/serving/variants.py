"""The servers that are compared: ours in several settings, and others with the same model, prompts and settings."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serving.processes import ROOT, Process, free_port, http_answers, running

PEERS = Path(__file__).resolve().parent / "peers"
CORES = len(os.sched_getaffinity(0))
NAIVE = {"MAX_BATCH": "32", "MAX_WAIT_S": "0.003", "WORKERS": "1", "THREADS": str(CORES)}
SINGLE = {"MAX_BATCH": "1", "MAX_WAIT_S": "0", "WORKERS": str(CORES), "THREADS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One row of the table.

    Attributes:
        name: Row's name.
        package: Package it needs in the Python that runs it; None: it is ours.
        app: File below peers/.
        scheme: "grpc", "stream" or "http".
        path: Of the HTTP address.
        arguments: Options of serve-predictor.
        environment: Settings of a peer.
        command: How a peer is started: "script", or "bentoml serve".
        batched_json: The body is {"prompts": [prompt]}.
    """

    name: str
    package: str | None = None
    app: str = ""
    scheme: str = "http"
    path: str = "/predict"
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    command: str = "script"
    batched_json: bool = False

    @property
    def user_lines(self) -> int:
        """Lines of code that a user writes for it, model.py not counted; blank lines and comments neither."""
        if not self.app:
            return 0
        text = (PEERS / self.app).read_text()
        lines = {node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)}
        return len(lines)

    def is_there(self, python: str) -> bool:
        """Whether its package can be imported."""
        if self.package is None:
            return True
        probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({self.package!r}) is None)"
        return subprocess.run([python, "-c", probe], check=False, capture_output=True).returncode == 0

    @contextlib.contextmanager
    def serve(self, artifact: Path, python: str) -> Iterator[tuple[Process, str]]:
        """The running server and the URL that the load generator takes."""
        port = free_port()
        if self.package is None:
            with self._ours(artifact, port) as process:
                yield process, f"{self.scheme}://127.0.0.1:{port}"
            return
        url = f"http://127.0.0.1:{port}{self.path}"
        prompt = "name three rivers"
        body = json.dumps({"prompts": [prompt]} if self.batched_json else {"prompt": prompt}).encode()
        environment = dict(self.environment) | {
            "ARTIFACT": str(artifact),
            "PORT": str(port),
            "PYTHONPATH": str(PEERS),
            "TOKENIZERS_PARALLELISM": "false",
        }
        with running(
            self._peer_command(python, port), lambda: http_answers(url, body), environment=environment
        ) as process:
            yield process, url

    def _ours(self, artifact: Path, port: int) -> contextlib.AbstractContextManager[Process]:
        from predictors.client import ClientSettings, PredictorError, RetrySettings, SyncPredictor
        from scheduler_core.predictor import PredictionRequest

        command = [sys.executable, "-m", "predictors.cli", str(artifact), f"--port={port}", "--provider=cpu"]
        settings = ClientSettings(timeout_s=5.0, breaker=None, retries=RetrySettings(max_attempts=1))

        def answers() -> bool:
            with SyncPredictor(f"127.0.0.1:{port}", settings) as client:
                try:
                    return bool(client.predict([PredictionRequest("", "name three rivers", 1)]))
                except PredictorError:
                    return False

        return running([*command, *self.arguments], answers, environment={"PYTHONPATH": str(ROOT)})

    def _peer_command(self, python: str, port: int) -> list[str]:
        if self.command == "bentoml serve":
            module = self.app.removesuffix(".py")
            options = ["--host", "127.0.0.1", "--port", str(port), "--working-dir", str(PEERS)]
            return [python, "-m", "bentoml", "serve", f"{module}:Predict", *options]
        command = [python, str(PEERS / self.app)]
        if self.package == "mosec":
            command += ["--address", "127.0.0.1", "--port", str(port), "--timeout", "300000"]
        return command


OURS = Variant(name="tailcast", scheme="grpc")
VARIANTS = (
    OURS,
    Variant(name="tailcast, PredictStream", scheme="stream"),
    Variant(name="tailcast, batch 1", scheme="grpc", arguments=("--max_batch=1",)),
    Variant(
        name="tailcast, 32 / 3 ms by arrival",
        scheme="grpc",
        arguments=(
            "--max_batch=32",
            "--max_wait_s=0.003",
            "--order=arrival",
            "--num_workers=1",
            f"--threads_per_worker={CORES}",
        ),
    ),
    *(
        Variant(
            name=f"{label}, {setting}",
            package=package,
            app=f"{package.replace('ray', 'ray_serve')}_app.py",
            path="/inference" if package == "mosec" else "/predict",
            environment=tuple(environment.items()),
            command="bentoml serve" if package == "bentoml" else "script",
            batched_json=package == "bentoml",
        )
        for label, package in (
            ("LitServe", "litserve"),
            ("Mosec", "mosec"),
            ("BentoML", "bentoml"),
            ("Ray Serve", "ray"),
        )
        for setting, environment in (("32 / 3 ms", NAIVE), (f"batch 1, {CORES} workers", SINGLE))
    ),
)
