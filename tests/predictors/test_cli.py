"""`serve-predictor`: answers, drains, and refuses bad input in one line."""

from __future__ import annotations

import json
import shutil
import signal
import socket
from pathlib import Path

import pytest

from predictors.cli import main
from predictors.client import ClientSettings, SyncPredictor
from scheduler_core.predictor import PredictionRequest
from tests.predictors.fakes import expected, without_numbers, write_artifact
from tests.predictors.test_workers import PATIENCE_S, running

REQUEST = PredictionRequest("r", "name three rivers", 100)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_served_process_answers_then_drains_and_exits_0(tmp_path: Path, number: int) -> None:
    with running(tmp_path, write_artifact(tmp_path / "tiny")) as server:
        port, _ = server.ports()
        with SyncPredictor(f"127.0.0.1:{port}", ClientSettings(timeout_s=PATIENCE_S)) as predictor:
            [prediction] = predictor.predict([REQUEST])
        assert prediction.length is not None
        assert prediction.length.mu == pytest.approx(expected("name three rivers")[0], rel=1e-6)
        assert server.stop(number) == 0, server.log
        assert "execution provider CPUExecutionProvider (requested: auto)" in server.log
        assert f"ready on 127.0.0.1:{port}" in server.log
        assert "draining 0 requests" in server.log
        assert "Traceback" not in server.log
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
        (lambda folder: (folder / "manifest.json").write_text("{"), "valid JSON"),
        (without_numbers, "the model gave mu = nan"),
    ],
    ids=["folder", "bad manifest", "no numbers"],
)
def test_broken_artifact_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], breakage, message: str
) -> None:
    folder = write_artifact(tmp_path / "a")
    breakage(folder)
    port_file = tmp_path / "port"
    port_file.write_text("50051\n")  # of a server that was killed
    assert main([str(folder), "--port", "0", "--port_file", str(port_file)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("serve-predictor: error: ")
    assert message in error
    assert not port_file.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "ARTIFACT: missing"),
        (["a", "--port", "70000"], "port: got 70000"),
        (["{artifact}", "--max_batch", "0"], "max_batch"),
        (["{artifact}", "--max_padding", "0.5"], "max_padding"),
        (["{artifact}", "--drain_timeout_s", "-1"], "drain_timeout_s"),
        (["{artifact}", "--threads_per_worker", "0"], "threads_per_worker"),
        (["{artifact}", "--port_file", "{artifact}"], "port_file"),
        (["a", "--config", "{config}"], "port: got 70001"),
    ],
)
def test_bad_option_is_one_line(
    artifact_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(json.dumps({"port": 70001}))
    assert main([word.format(artifact=artifact_folder, config=config) for word in arguments]) == 2
    assert message in one_error_line(capsys)
