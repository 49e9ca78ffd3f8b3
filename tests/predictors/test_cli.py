from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from predictors.artifact import content_version, hash_files
from predictors.cli import ServeConfig, batching_settings, main
from predictors.client import ClientSettings, GrpcPredictor, SyncPredictor
from predictors.runtime import CPU, CUDA
from scheduler_core.errors import InputError
from scheduler_core.predictor import PredictionRequest
from tests.predictors.fakes import expected, without_numbers, write_artifact

REQUEST = PredictionRequest("r", "name three rivers", 100)
PATIENCE_S = 150.0
PATIENT = ClientSettings(timeout_s=PATIENCE_S)


class Server:
    """`serve-predictor` as a process of its own; `log` is what it wrote to stderr until then."""

    def __init__(self, folder: Path, artifact: Path, *arguments: str) -> None:
        self.port_file = folder / "port"
        self.log = ""
        command = [sys.executable, "-W", "error", "-m", "predictors.cli", str(artifact)]
        self.process = subprocess.Popen(
            [*command, "--port", "0", "--port_file", str(self.port_file), *arguments],
            stderr=subprocess.PIPE,
            text=True,
        )

    def port(self) -> int:
        """Reads the log until the server is ready, then the port file."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line
            if "ready on" in line:
                return int(self.port_file.read_text())
        raise AssertionError(self.log)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and waits for the exit code."""
        self.process.send_signal(number)
        try:
            self.log += self.process.communicate(timeout=PATIENCE_S)[1]
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"signal {number} did not end it; it wrote:\n{self.log}") from None
        return self.process.returncode

    def kill(self) -> None:
        """Ends it if a test failed before it did."""
        if self.process.poll() is None:
            self.process.kill()
            self.log += self.process.communicate()[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    server = Server(folder, write_artifact(folder / "tiny"))
    yield server
    server.kill()


def test_served_process_answers_then_drains_on_sigterm_and_exits_0(server: Server) -> None:
    port = server.port()
    with SyncPredictor(f"127.0.0.1:{port}", PATIENT) as predictor:
        [prediction] = predictor.predict([REQUEST])
    assert prediction.mu == pytest.approx(expected("name three rivers")[0], rel=1e-6)
    assert server.stop() == 0, server.log
    log = server.log
    assert "execution provider CPUExecutionProvider (requested: auto)" in log
    assert f"ready on 127.0.0.1:{port}" in log
    assert "draining 0 requests" in log
    assert "Traceback" not in log
    assert not server.port_file.exists()


def one_error_line(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1, error
    assert error.startswith("serve-predictor: error: ")
    return error


def test_port_in_use_is_one_line(artifact_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main([str(artifact_folder), "--port", str(port)]) == 2
    line = one_error_line(capsys)
    assert f"port: got '127.0.0.1:{port}'" in line
    assert "in use" in line


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (shutil.rmtree, "existing artifact folder"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "valid JSON"),
        (lambda folder: (folder / "manifest.json").write_text('{"format_version": 9}'), "upgrade"),
        (lambda folder: (folder / "model.onnx").write_bytes(b"\0" * 10), "SHA-256"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
    ],
    ids=["folder", "no manifest", "bad manifest", "newer format", "wrong hash", "no tokenizer"],
)
def test_broken_artifact_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], breakage, message: str
) -> None:
    folder = write_artifact(tmp_path / "a")
    breakage(folder)
    port_file = tmp_path / "port"
    port_file.write_text("50051\n")  # of a server that was killed
    assert main([str(folder), "--port", "0", "--port_file", str(port_file)]) == 2
    assert message in one_error_line(capsys)
    assert not port_file.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "ARTIFACT: missing"),
        (["a", "--port", "70000"], "port: got 70000"),
        (["a", "--port", "many"], "port"),
        (["a", "--provider", "tpu"], "provider"),
        (["a", "--max_message_mib", "0"], "max_message_mib"),
        (["{artifact}", "--max_batch", "0"], "max_batch"),
        (["{artifact}", "--max_padding", "0.5"], "max_padding"),
        (["{artifact}", "--drain_timeout_s", "-1"], "drain_timeout_s"),
        (["{artifact}", "--threads_per_worker", "0"], "threads_per_worker"),
        (["{artifact}", "--port_file", "{artifact}"], "port_file"),
    ],
)
def test_bad_option_is_one_line(
    artifact_folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    filled = [argument.replace("{artifact}", str(artifact_folder)) for argument in arguments]
    assert main(filled) == 2
    assert message in one_error_line(capsys)


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for phrase in ("0 takes a free one", "auto takes CUDA where it works", "RESOURCE_EXHAUSTED"):
        assert phrase in text


def test_defaults_follow_the_provider_and_options_override_them() -> None:
    config = ServeConfig(artifact="a")
    assert batching_settings(config, CPU).max_batch == 4
    assert batching_settings(config, CPU).max_padded_tokens == 256
    assert batching_settings(replace(config, max_padded_tokens=512), CPU).max_padded_tokens == 512
    assert batching_settings(config, CPU).num_workers == len(os.sched_getaffinity(0))
    assert batching_settings(config, CUDA).max_batch == 32
    assert batching_settings(config, CUDA).max_wait_s == 0.003
    naive = batching_settings(
        replace(config, max_batch=32, max_wait_s=0.003, order="arrival", num_workers=1), CPU
    )
    assert (naive.max_batch, naive.max_wait_s, naive.order, naive.num_workers) == (32, 0.003, "arrival", 1)
    with pytest.raises(InputError, match="max_queue"):
        batching_settings(replace(config, max_queue=0), CPU)


def test_config_file_sets_options(
    artifact_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(json.dumps({"port": 70001}))
    assert main([str(artifact_folder), "--config", str(config)]) == 2
    assert "port: got 70001" in one_error_line(capsys)


async def test_sigint_drains_too(tmp_path: Path) -> None:
    server = Server(tmp_path, write_artifact(tmp_path / "tiny"), "--max_batch", "1")
    try:
        port = await asyncio.to_thread(server.port)
        async with GrpcPredictor(f"127.0.0.1:{port}", PATIENT) as predictor:
            [prediction] = await predictor.predict([REQUEST])
        assert prediction.artifact_id == "tiny"
        assert await asyncio.to_thread(server.stop, signal.SIGINT) == 0, server.log
        assert "draining 0 requests" in server.log
    finally:
        server.kill()


@pytest.mark.parametrize("broken", ["numbers", "model.onnx", "tokenizer.json"])
def test_an_artifact_that_cannot_predict_ends_the_start_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    folder = write_artifact(tmp_path / "a")
    if broken == "numbers":
        without_numbers(folder)
    else:
        content = (folder / broken).read_bytes()
        (folder / broken).write_bytes(content[: len(content) // 2])
        manifest = json.loads((folder / "manifest.json").read_text()) | {"files": hash_files(folder)}
        manifest["artifact_version"] = content_version(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))
    port_file = tmp_path / "port"
    assert main([str(folder), "--port=0", f"--port_file={port_file}"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    expected_error = "the model gave mu = nan" if broken == "numbers" else f"artifact file {broken}: got"
    assert error.startswith(f"serve-predictor: error: {expected_error}")
    assert not port_file.exists()
