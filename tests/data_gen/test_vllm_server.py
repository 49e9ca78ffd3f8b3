"""A real vLLM server, sampled by the real command; both are killed in the middle.

The packaged model is converted once and kept in vLLM's environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.serving.processes import free_port
from benchmarks.vllm_runs.model import NAME as MODEL
from benchmarks.vllm_runs.model import packaged_model
from data_gen.samples import read_samples
from data_gen.sampling_run import STORE_NAME
from tests.data_gen.conftest import ROOT, vllm_environment

MAX_TOKENS = 48


@pytest.fixture(scope="module")
def model_folder(vllm_python: Path) -> Path:
    """The packaged GGUF model as vLLM reads it."""
    return packaged_model(vllm_python.parents[1] / "models" / MODEL)


class VllmServer:
    """A vLLM server in a process group of its own, always on the same port; it takes minutes until it responds."""

    def __init__(self, python: Path, model: Path, log: Path) -> None:
        self.port = free_port()
        self._command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        self._command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(self.port)]
        self._command += ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=vllm_environment(), start_new_session=True
            )

    def kill(self) -> None:
        """SIGKILL to it and its engine processes."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


def num_stored(out: Path) -> int:
    """Samples in the store, which another process may write to: of a copy, because the run locks the store itself."""
    store, copy = out.with_name(out.name + ".partial") / STORE_NAME, out.with_name("copy.sqlite")
    try:
        shutil.copy(store, copy)
        shutil.copy(f"{store}-wal", f"{copy}-wal")
        with contextlib.closing(sqlite3.connect(copy)) as connection:
            query = "SELECT COUNT(*) FROM samples WHERE finish_reason != 'error'"
            return int(connection.execute(query).fetchone()[0])
    except (OSError, sqlite3.Error):
        return 0


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float) -> None:
    """Looks again and again while the command runs."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the command ended too soon"
        assert time.monotonic() < end, "took too long"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_run_outlives_the_death_of_the_command_and_of_the_server(
    vllm_python: Path, model_folder: Path, tmp_path: Path
) -> None:
    out, log = tmp_path / "samples.parquet", tmp_path / "command.log"
    server = VllmServer(vllm_python, model_folder, tmp_path / "server.log")
    options = {
        "out": out,
        "backend": "openai",
        "num_samples": 4,
        "max_tokens": MAX_TOKENS,
        "seed": 5,
        "keep_text": "true",
        "progress": "false",
        "openai.base_urls": f"[http://127.0.0.1:{server.port}/v1]",
        "openai.concurrency": 2,
        "openai.stream": "true",
        "openai.tokenizer": model_folder,
        "openai.start_wait_s": 400,
        "openai.server_wait_s": 400,
    }
    command = [sys.executable, "-m", "data_gen.cli_gen_samples"]
    command += ["templates:4?seed=1"]
    command += [f"--{name}={value}" for name, value in options.items()]

    def begin() -> subprocess.Popen[bytes]:
        with open(log, "ab") as stream:
            return subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=stream)

    server.start()
    running = begin()
    try:
        wait_until(lambda: num_stored(out) >= 3, running, 500)
        running.kill()
        running.wait()
        num_kept = num_stored(out)
        assert 3 <= num_kept < 16

        running = begin()
        wait_until(lambda: num_stored(out) >= num_kept + 3, running, 60)
        server.kill()
        num_kept = num_stored(out)
        assert num_kept < 16
        server.start()
        assert running.wait(500) == 0, log.read_text()
    finally:
        running.kill()
        running.wait()
        server.kill()

    rows = read_samples(out).to_pylist()
    assert len(rows) == len({(row["prompt_id"], row["sample_index"]) for row in rows}) == 16
    for row in rows:
        assert (row["engine"], row["model"]) == ("vllm", MODEL)
        assert row["finish_reason"] == "stop" or row["output_tokens"] == MAX_TOKENS
        assert 1 <= row["output_tokens"] <= MAX_TOKENS
        assert row["prompt_tokens"] > 10
        assert 0 < row["ttft_s"] <= row["total_s"]
    assert len({row["text"] for row in rows}) > 12, "the outputs of a prompt differ"
    report = json.loads(out.with_name(out.name + ".run.json").read_text())
    assert report["engine_counters"]["server_down"] >= 1
    assert "tokenizer_mismatch" not in report["engine_counters"]
    assert "resuming" in log.read_text()
