"""Process of vLLM's OpenAI server, with a step log."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shared.processes import ROOT, Process, free_port, http_ok, running
from benchmarks.vllm.model import NAME, packaged_model
from scheduler_core.errors import InputError
from scheduler_core.shell.files import write_json

#: Served model name.
MODEL = "engine"

#: Entry points for vLLM's environment, in which tailcast is not installed.
ENTRY_POINTS = """[tailcast.predictors]
grpc = predictors.client:GrpcPredictor
table = benchmarks.vllm.table_predictor:connect
"""


def run_engines(run: Callable[[argparse.Namespace], int], options: argparse.Namespace, *paths: str) -> int:
    """Result of a benchmark with its options; 2, with a message, if a requirement is missing. SIGTERM also stops its engines.

    `vllm_python`, `model` (default: SmolLM2, saved next to vLLM's environment) and the options `paths` must exist.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        if options.model is None:
            options.model = options.vllm_python.parents[1] / "models" / NAME
            if options.vllm_python.exists():
                packaged_model(options.model)
        for name in (*paths, "vllm_python", "model"):
            if not (path := getattr(options, name)).exists():
                raise InputError(name, str(path), "an existing path; see --help")
        return run(options)
    except (InputError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2


class StepTail:
    """Reads the rows that were added to a step log since the last call."""

    def __init__(self, path: Path) -> None:
        """Args:
        path: The log; its current content is skipped.
        """
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def read(self) -> list[list[float]]:
        """Complete rows in order; a partially written row is returned by the next call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole = file.read().rpartition(b"\n")[0]
        self._offset += len(whole) + bool(whole)
        return [json.loads(line) for line in whole.splitlines()]


@dataclass(frozen=True, slots=True)
class EngineServer:
    """A running vLLM server.

    Attributes:
        url: Base address.
        steps: File of its step log, see `step_log.py`.
        process: Its main process.
    """

    url: str
    steps: Path
    process: Process


@contextmanager
def engine_server(
    python: Path,
    model: Path,
    folder: Path,
    name: str,
    *,
    max_num_seqs: int,
    settings: Mapping[str, Any] | None,
    options: Sequence[str] = (),
) -> Iterator[EngineServer]:
    """Starts a server with a step log and without prefix caching, and stops it afterwards.

    Args:
        python: Python of vLLM's environment.
        model: Folder of the model.
        folder: Folder for its files.
        name: Prefix of the files: `NAME.steps`, `NAME.json`.
        max_num_seqs: Slots of the engine.
        settings: Settings of our scheduler; None: vLLM's own scheduler.
        options: Further options of the server.

    Raises:
        RuntimeError: It did not start; the message has the end of its log.
    """
    plugins = folder / "plugins" / "tailcast_benchmark-0.dist-info"
    plugins.mkdir(parents=True, exist_ok=True)
    (plugins / "METADATA").write_text("Metadata-Version: 2.1\nName: tailcast-benchmark\nVersion: 0\n")
    (plugins / "entry_points.txt").write_text(ENTRY_POINTS)
    steps = folder / f"{name}.steps"
    environment = {
        "PYTHONPATH": f"{ROOT}:{plugins.parent}", "TAILCAST_STEP_LOG": str(steps.resolve()),
    } | settings_file(folder / f"{name}.json", settings)  # fmt: skip
    scheduler = f"benchmarks.vllm.step_log.Logged{'Stock' if settings is None else 'Tailcast'}Scheduler"
    words = ["--max-model-len", "1024", "--max-num-seqs", str(max_num_seqs), "--scheduler-cls", scheduler]
    words += ["--no-enable-prefix-caching", "--disable-log-stats", *options]
    with openai_server(python, model, words, environment) as (url, process):
        yield EngineServer(url, steps, process)


def settings_file(path: Path, settings: Mapping[str, Any] | None) -> dict[str, str]:
    """Writes settings of our scheduler, unless they are None; returns the environment variable that names the file."""
    if settings is None:
        return {}
    write_json(path, settings)  # JSON is YAML
    return {"TAILCAST_CONFIG": str(path.resolve())}


@contextmanager
def openai_server(
    python: Path, model: Path, words: Sequence[str], environment: Mapping[str, str]
) -> Iterator[tuple[str, Process]]:
    """A vLLM server of the model `MODEL`; yields its address and process. See `engine_server`."""
    port = free_port()
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", MODEL,
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager",
        "--disable-uvicorn-access-log", *words,
    ]  # fmt: skip
    space = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": space}
    url = f"http://127.0.0.1:{port}"
    with running(
        command, lambda: http_ok(f"{url}/health"), environment=offline | dict(environment), timeout_s=900.0
    ) as process:
        yield url, process
