"""Online calibration of a process that serves: its file, its metrics, and what must not stop the process."""

import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from scheduler_core.adapters.live_calibration import (
    PUBLISH_S,
    REMINDER_S,
    SAVE_S,
    CalibrationGauges,
    LiveCalibration,
    packed,
    unpacked,
)
from scheduler_core.errors import InputError
from scheduler_core.prediction.correction import Correction, CorrectionConfig, RequestContext
from scheduler_core.prediction.outcome import Outcome
from scheduler_core.prediction.predictions import LengthPrediction, PointPrediction, Prediction
from tests.scheduler_core.helpers import Clock

CONTEXT = RequestContext(served_model="m", prompt_tokens=10)
PREDICTION = Prediction(length=LengthPrediction(4.0, 0.5, 3.5), point=PointPrediction(60.0))


def outcome(output_tokens: int, **more: Any) -> Outcome:
    return Outcome(**{
        "prediction": PREDICTION.length, "prompt_tokens": 10, "output_tokens": output_tokens, "finished": True, **more
    })  # fmt: skip


def live(file: Path | None, clock: Clock | None = None) -> LiveCalibration:
    gauges = CalibrationGauges("tailcast_", CollectorRegistry())
    return LiveCalibration(None if file is None else str(file), gauges, clock or Clock())


def feed(calibration: LiveCalibration, count: int = 60, tokens: int = 200) -> None:
    for _ in range(count):
        calibration.observe(CONTEXT, outcome(tokens))
    calibration.publish()


def test_what_was_learned_outlasts_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "made" / "calibration.json"
    first = live(file)
    assert first.correct(CONTEXT, PREDICTION) == PREDICTION
    feed(first)
    corrected = first.correct(CONTEXT, PREDICTION)
    assert corrected is not None
    assert corrected.length is not None
    assert corrected.length.mu == pytest.approx(5.3, abs=0.2)
    assert corrected.point == PREDICTION.point
    first.close()
    second = live(file)
    assert second.correct(CONTEXT, PREDICTION) == corrected
    second.close()


def test_the_file_is_written_while_it_serves(tmp_path: Path) -> None:
    file, clock = tmp_path / "calibration.json", Clock()
    calibration = live(file, clock)
    feed(calibration, 5)
    assert not file.exists()
    clock.now = SAVE_S
    feed(calibration, 1)
    assert unpacked(file.read_bytes())["pairs"][0][2]["num_outputs"] == 6
    calibration.close()


@pytest.mark.parametrize(
    "text", ["", "{}", '{"format": "tailcast-online-calibration/1"}', "\ud800", "PK\x03\x04"]
)
def test_a_file_of_another_kind_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.json"
    content = text.encode("utf-8", "surrogatepass")
    file.write_bytes(content)
    with pytest.raises(InputError):
        live(file)
    assert file.read_bytes() == content


def _with_member(name: str, member: bytes, version: bytes = b"\x14\x00") -> bytes:
    """A valid file with another content of one array, that needs this version of zip."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(packed(_learned_state()))) as old, zipfile.ZipFile(stream, "w") as new:
        for each in old.namelist():
            new.writestr(each, member if each == name else old.read(each))
    content = stream.getvalue()
    at = content.rindex(b"PK\x01\x02")
    return content[: at + 6] + version + content[at + 8 :]


def _learned_state() -> dict[str, Any]:
    correction, vector = Correction(), np.full(4, 0.5, np.float32)
    for _ in range(5):
        correction.observe(replace(CONTEXT, embedding=vector), outcome(200))
    return correction.state()


def _header(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


@pytest.mark.mend
@pytest.mark.parametrize(
    "content",
    [
        _with_member("0.npy", _header("{'descr': '<f8', 'fortran_order': False, 'shape': (10000000000000, 64)}")),
        _with_member("0.npy", _header("{'descr': '<f8', 'fortran_order': False, ")),
        _with_member("none", b"", version=b"\xff\x00"),
        b"[" * 100_000,
        json.dumps(_learned_state(), default=lambda array: [[2**70]]).encode(),
        json.dumps(_learned_state(), default=lambda array: array.tolist()).replace("0.0", "1" + "0" * 400).encode(),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    """Some damages ended the process with MemoryError, TokenError, NotImplementedError, RecursionError or OverflowError."""
    file = tmp_path / "calibration"
    file.write_bytes(content)
    with pytest.raises(InputError):
        live(file)
    file.unlink()
    live(file).close()  # the file is not locked any more


def test_a_disk_that_refuses_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calibration = live(tmp_path / "folder" / "calibration.json")
    feed(calibration)
    shutil.rmtree(tmp_path / "folder")
    with caplog.at_level(logging.WARNING):
        calibration.close()
    assert "cannot be written" in caplog.text


def test_no_length_and_impossible_lengths_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    calibration = live(None)
    assert calibration.correct(CONTEXT, None) is None
    other = Prediction(point=PointPrediction(60.0))
    assert calibration.correct(CONTEXT, other) is other
    calibration.observe(CONTEXT, replace(outcome(20), prediction=None))
    calibration.observe(CONTEXT, outcome(0, finished=False))
    calibration.publish()
    assert not calibration.calibration.served_models
    calibration.observe(CONTEXT, outcome(20, prompt_tokens=-1))
    calibration.publish()
    assert "prompt_tokens: got -1" in caplog.text
    # An engine that counts in another way.
    calibration.observe(CONTEXT, outcome(20, max_tokens=5))
    calibration.publish()
    assert calibration.calibration.metrics("m")["num_outputs"] == 1
    calibration.close()


def test_an_alarm_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    calibration = live(None)
    feed(calibration, 300, tokens=200)
    feed(calibration, 300, tokens=20)
    assert "outputs of 'm' have been" in caplog.text
    calibration.close()


def test_the_metrics_before_and_after() -> None:
    registry, clock = CollectorRegistry(), Clock()
    calibration = LiveCalibration(None, CalibrationGauges("tailcast_", registry), clock)
    of_model = {"served_model": "m"}
    feed(calibration, 99)
    calibration.observe(CONTEXT, outcome(200))
    calibration.publish_if_due()
    assert registry.get_sample_value("tailcast_calibration_outputs", of_model) == 99
    clock.now = PUBLISH_S
    calibration.publish_if_due()
    calibration.close()
    calibration.observe(CONTEXT, outcome(200))  # too late: left out
    calibration.publish()
    calibration.close()
    assert registry.get_sample_value("tailcast_calibration_outputs", of_model) == 100
    assert registry.get_sample_value("tailcast_calibration_in_use", of_model) == 1
    raw, corrected = (
        registry.get_sample_value("tailcast_calibration_crps_log_tokens", of_model | {"predictions": which})
        for which in ("raw", "corrected")
    )
    assert 0 < (corrected or 0) < 0.5 * (raw or 0)
    labels = of_model | {"predictions": "raw", "quantile": "p50"}
    assert registry.get_sample_value("tailcast_calibration_coverage", labels) == 0.0


def test_thread_error_is_survived(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    calibration = live(None)
    with monkeypatch.context() as patch:
        patch.setattr(calibration.calibration, "observe", lambda *_, **__: 1 / 0)
        feed(calibration, 1)
    assert "online calibration has failed" in caplog.text
    feed(calibration, 1)
    assert calibration.calibration.metrics("m")["num_outputs"] == 1
    calibration.close()


def test_what_waits_to_be_learned_from_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_core.adapters.live_calibration.MAX_PENDING", 5)
    calibration, stalls = live(None), threading.Event()
    calibration._thread.submit(stalls.wait)
    for _ in range(20):
        calibration.observe(CONTEXT, outcome(200))
    stalls.set()
    calibration.publish()
    assert calibration.calibration.metrics("m")["num_outputs"] == 5
    calibration.close()


@pytest.mark.mend  # scrapes grew to 3.6 GB: the metrics of dropped models stayed
def test_metrics_of_a_dropped_model_are_removed() -> None:
    registry = CollectorRegistry()
    calibration = LiveCalibration(None, CalibrationGauges("tailcast_", registry), Clock())
    calibration.calibration = Correction(CorrectionConfig(max_models=1))
    for model in ("old", "new"):
        for _ in range(60):
            calibration.observe(RequestContext(served_model=model), outcome(200))
        calibration.publish()
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    names = {sample.labels["served_model"] for sample in samples if "served_model" in sample.labels}
    assert names == {"new"}
    calibration.close()


@pytest.mark.mend  # names of 1 MB were labels of metrics
def test_a_long_name_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    calibration = live(None)
    for name in ("x" * 256, "x" * 257, "x" * 2**20):
        calibration.observe(RequestContext(served_model=name), outcome(200))
    calibration.publish()
    assert calibration.calibration.served_models == ("x" * 256,)
    assert len(caplog.text) < 2000
    calibration.close()


def test_a_reason_for_not_learning_is_logged_once_per_hour(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    calibration = live(None, clock)
    for now in (0.0, 1.0, REMINDER_S - 1.0, REMINDER_S):
        clock.now = now
        calibration.skip("no_counts", "streams have no token counts")
    calibration.skip("other", "another reason")
    assert caplog.text.count("streams have no token counts") == 2
    assert caplog.text.count("another reason") == 1
    calibration.close()


@pytest.mark.mend  # the start waited for a writer for ever
def test_a_pipe_is_not_a_calibration_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="a regular file"):
        live(tmp_path / "pipe")


@pytest.mark.mend  # of two proxies with one file, the last writer silently dropped what the other had learned
def test_a_file_belongs_to_one_process_at_a_time(tmp_path: Path) -> None:
    first = live(tmp_path / "state")
    with pytest.raises(InputError, match="to share a memory, use one tailcast serve"):
        live(tmp_path / "state")
    first.close()
    live(tmp_path / "state").close()


def test_a_killed_process_leaves_its_last_state(tmp_path: Path) -> None:
    file = tmp_path / "state"
    code = (
        "import os, signal, sys; sys.path.insert(0, '.')\n"
        "from pathlib import Path\n"
        "from tests.scheduler_core.adapters import test_live_calibration as tests\n"
        f"clock = tests.Clock(); calibration = tests.live(Path({str(file)!r}), clock)\n"
        "tests.feed(calibration, 59); clock.now = tests.SAVE_S; tests.feed(calibration, 1); tests.feed(calibration, 5)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    restored = live(file)
    assert restored.calibration.metrics("m")["num_outputs"] == 60
    restored.close()
    assert [path.name for path in tmp_path.iterdir() if "lock" not in path.name] == ["state"]


def test_a_state_of_the_version_before_is_read() -> None:
    """Written by version 1: 60 outputs of 200 tokens, predicted 55."""
    file = Path(__file__).parent / "calibration_1.json"
    state = unpacked(file.read_bytes())
    assert state["format"] == "tailcast-online-calibration/1"
    correction = Correction()
    correction.restore(state)
    assert correction.metrics("m")["num_outputs"] == 60
    assert PREDICTION.length is not None
    assert correction.correct(CONTEXT, PREDICTION.length).mu == pytest.approx(5.3, abs=0.2)
    again = Correction()
    again.restore(unpacked(packed(correction.state())))
    assert again.correct(CONTEXT, PREDICTION.length) == correction.correct(CONTEXT, PREDICTION.length)
