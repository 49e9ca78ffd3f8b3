"""Sampling from a vLLM server that is killed in the middle."""

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shared.processes import free_port
from benchmarks.vllm.model import NAME as MODEL
from benchmarks.vllm.model import packaged_model
from data_gen.samples import read_samples
from data_gen.sampling_run import STORE_NAME
from tests.data_gen.conftest import ROOT, vllm_environment
from tests.waiting import eventually

MAX_TOKENS = 48


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
            options: dict[str, Any] = {"env": vllm_environment(), "start_new_session": True}
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, **options)

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
    assert eventually(lambda: process.poll() is not None or condition(), seconds), "took too long"
    assert process.poll() is None, "the command ended too soon"


@pytest.mark.slow
def test_a_run_outlives_command_and_server(vllm_python: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "samples.parquet", tmp_path / "command.log"
    # Converted once and kept in vLLM's environment.
    model_folder = packaged_model(vllm_python.parents[1] / "models" / MODEL)
    server = VllmServer(vllm_python, model_folder, tmp_path / "server.log")
    command = [sys.executable, "-m", "data_gen.commands.gen_samples", "templates:4?seed=1", "--out", str(out)]
    command += f"--backend openai --num_samples 4 --max_tokens {MAX_TOKENS} --seed 5 --keep_text true".split()
    command += f"--openai.base_urls [http://127.0.0.1:{server.port}/v1] --openai.concurrency 2".split()
    command += ["--progress", "false"]
    command += ["--openai.start_wait_s", "400", "--openai.server_wait_s", "400"]

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
        assert row["total_s"] > 0
    assert len({row["text"] for row in rows}) > 12, "the outputs of a prompt differ"
    report = json.loads(out.with_name(out.name + ".run.json").read_text())
    assert report["engine_counters"]["server_down"] >= 1
    assert "resuming" in log.read_text()
