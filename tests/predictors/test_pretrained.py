"""The predictor `pretrained`: pinned, and spelled alike in every command."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tailcast
from predictors.artifact import open_artifact
from predictors.cli import ServeConfig, build_server
from predictors.cli import main as serve
from predictors.client import SyncPredictor
from predictors.pretrained import FOLDERS, PRETRAINED, pin, shipped_folder
from predictors.proxy.config import ProxyConfig
from predictors.proxy.server import ProxyServer
from predictors.runtime import open_runtime
from scheduler_core.adapters.settings import read_settings
from scheduler_core.errors import InputError
from scheduler_core.predictor import PredictionRequest, open_predictor
from scheduler_core.simulator.commands.simulate import main as simulate
from tests.predictors.fakes import expected

PROMPT = "name three rivers"


@pytest.fixture
def shipped(tmp_path: Path, artifact_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny artifact in the place of the shipped one."""
    folder = tmp_path / "package" / "tailcast-minilm"
    shutil.copytree(artifact_folder, folder)
    pin(folder)
    monkeypatch.setitem(FOLDERS, PRETRAINED, folder)
    return folder


@pytest.fixture
def empty_cache() -> Iterator[None]:
    from tailcast import prediction

    prediction._opened.cache_clear()
    yield
    prediction._opened.cache_clear()


async def test_every_spelling_opens_the_same_artifact(shipped: Path) -> None:
    mu = pytest.approx(expected(PROMPT)[0], rel=1e-5)
    for spelling in ("pretrained", str(shipped), f"local://{shipped}"):
        predictor = open_predictor(spelling)
        [prediction] = await predictor.predict([PredictionRequest("r", PROMPT, 100)])
        await predictor.close()
        assert prediction.length is not None
        assert prediction.length.mu == mu
    assert open_artifact("pretrained").path == shipped


def test_the_commands_take_it_by_default(shipped: Path, empty_cache: None) -> None:
    assert tailcast.predict(PROMPT).prediction.mu == pytest.approx(expected(PROMPT)[0], rel=1e-5)
    _, sources = build_server(ServeConfig())
    assert [source.path for source in sources.values()] == [str(shipped)]
    assert ProxyServer(ProxyConfig(engine_url="http://engine"))._forecaster._predictor.address == str(shipped)  # type: ignore[union-attr]
    settings = read_settings({"tailcast": {"policy": "tie", "predictor": "pretrained"}}, {})
    assert settings.predictor == "pretrained"


def test_simulate_asks_it(shipped: Path, tmp_path: Path) -> None:
    row = {"arrival_s": 0.0, "prompt_tokens": 3, "output_tokens": 9, "max_tokens": 50, "prompt": PROMPT}
    rows = [row | {"request_id": str(number)} for number in range(3)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = f"run --trace {tmp_path}/trace.jsonl --policy tie --predictor pretrained --json {tmp_path}/r.json"
    assert simulate(words.split()) == 0
    assert json.loads((tmp_path / "r.json").read_text())["predictor"]["num_predicted"] == 3


def test_a_changed_or_missing_one_is_refused(
    shipped: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (shipped / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match="as in SHA256SUMS"):
        shipped_folder(PRETRAINED)
    monkeypatch.setitem(FOLDERS, PRETRAINED, tmp_path / "tailcast-minilm")
    assert serve([]) == 2
    assert "this installation comes without" in capsys.readouterr().err
    with pytest.raises(InputError, match="this installation comes without"):
        open_predictor("pretrained")


@pytest.mark.parametrize("predictor", ["oracel", "pretraind", "no/such/folder"])
def test_simulate_names_all_sources(
    predictor: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"request_id": "a", "arrival_s": 0.0, "prompt_tokens": 3, "output_tokens": 9, "max_tokens": 50}
    (tmp_path / "trace.jsonl").write_text(json.dumps(row))
    words = f"run --trace {tmp_path}/trace.jsonl --policy tie --json {tmp_path}/r.json --predictor"
    assert simulate([*words.split(), predictor]) == 2
    allowed = "allowed: none, trace, oracle, pretrained, tiny, an artifact folder, or grpc://HOST:PORT"
    assert allowed in capsys.readouterr().err


def test_the_shipped_one_predicts_for_any_model() -> None:
    predictor = tailcast.load()
    for model in (None, "a-model-that-nobody-trained-on"):
        prompts = ("Say yes.", "Write a detailed essay of 2000 words about the history of Rome.")
        short, long = (predictor.predict(prompt, max_tokens=4096, model=model) for prompt in prompts)
        assert 1 < short.median < long.median < 4096


def test_for_an_unknown_model_the_shipped_one_predicts_the_mean_over_the_known_ones() -> None:
    runtime = open_runtime("pretrained", provider="cpu")
    names = runtime.artifact.manifest.served_models
    for prompt, temperature in ((PROMPT, None), ("Write a story about a river. " * 9, 0.7)):
        found = runtime.predict([prompt] * (len(names) + 1), [None, *names], [temperature] * (len(names) + 1))
        assert found.mu is not None and found.sigma is not None  # noqa: PT018
        assert np.ptp(found.mu[1:]) > 0.1
        assert found.mu[0] == pytest.approx(found.mu[1:].mean(), abs=1e-4)
        variance = (found.sigma[1:] ** 2).mean() + found.mu[1:].var()
        assert found.sigma[0] == pytest.approx(np.sqrt(variance), rel=1e-4)


def test_predict_and_serve_answer_within_ten_seconds_of_being_typed(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tailcast"]
    command = [*words, "predict", "Write a haiku about rivers.", "--max_tokens", "512"]
    output = subprocess.run(command, timeout=10, check=True, capture_output=True, text=True).stdout
    assert "median" in output
    port_file, deadline = tmp_path / "port", time.monotonic() + 10
    command = [*words, "serve", "--port", "0", "--port_file", str(port_file)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            while not port_file.exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            predictor = SyncPredictor(f"127.0.0.1:{port_file.read_text().strip()}")
            [prediction] = predictor.predict([PredictionRequest("r", PROMPT, 100)])
            predictor.close()
            assert prediction.length is not None
            assert time.monotonic() < deadline
        finally:
            process.terminate()
