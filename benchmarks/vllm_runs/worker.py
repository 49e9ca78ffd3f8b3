"""An engine's process seen from the benchmark: started when its first run is due."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

#: Entry points that vLLM's environment needs: ours is not installed there.
ENTRY_POINTS = """[tailcast.predictors]
grpc = predictors.client:connect
table = benchmarks.vllm_runs.table_predictor:connect
"""


class EngineWorker:
    """One engine; at most one shall live at a time.

    Args:
        python: That of vLLM's environment.
        task: See `benchmarks.vllm_runs.engine`.
        folder: For logs; gets `NAME.log` and `NAME.steps`.
        name: Name of the files.
        settings: Those of our scheduler; None for vLLM's own.
    """

    def __init__(
        self, python: Path, task: dict[str, Any], folder: Path, name: str, settings: dict[str, Any] | None
    ) -> None:
        self.steps = folder / f"{name}.steps"
        self._log = folder / f"{name}.log"
        plugins = folder / "plugins" / "tailcast_benchmark-0.dist-info"
        plugins.mkdir(parents=True, exist_ok=True)
        (plugins / "METADATA").write_text("Metadata-Version: 2.1\nName: tailcast-benchmark\nVersion: 0\n")
        (plugins / "entry_points.txt").write_text(ENTRY_POINTS)
        environment = {
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": str(os.cpu_count()), **os.environ,
            "PYTHONPATH": f"{ROOT}:{plugins.parent}", "TAILCAST_STEP_LOG": str(self.steps),
        }  # fmt: skip
        if settings is not None:
            path = folder / f"{name}.json"  # JSON is YAML
            path.write_text(json.dumps(settings), encoding="utf-8")
            environment["TAILCAST_CONFIG"] = str(path)
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", "benchmarks.vllm_runs.engine", json.dumps(task)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, cwd=ROOT, start_new_session=True,
            )  # fmt: skip

    def run(self, run: dict[str, Any]) -> dict[str, Any]:
        """Serves one run and waits for its file.

        Raises:
            RuntimeError: The engine ended; the end of its log is told.
        """
        out = Path(run["out"])
        assert self._process.stdin is not None
        try:
            self._process.stdin.write((json.dumps(run) + "\n").encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: the loop below says why
        while not out.exists():
            if self._process.poll() is not None:
                tail = self._log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"the engine has ended:\n{tail}")
            time.sleep(0.2)
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found

    def close(self) -> None:
        """Ends the engine and its children."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
