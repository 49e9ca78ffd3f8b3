"""The predictor `tiny`: alike wherever it is spelled, for any text."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from predictors.cli import ServeConfig, build_server
from predictors.client import open_client
from predictors.pretrained import FOLDERS, TINY
from predictors.proxy.config import ProxyConfig
from predictors.proxy.server import ProxyServer
from predictors.runtime import open_runtime
from predictors.tiny import WEIGHTS, TinyModel, TinyPredictor, load
from scheduler_core.adapters.settings import read_settings
from scheduler_core.errors import InputError
from scheduler_core.predictor import PredictionRequest, open_predictor

SHORT, LONG = "Say yes.", "Write a detailed essay about the history of Rome, its emperors and its wars."
MODEL = "meta-llama/Llama-3.1-8B-Instruct"


async def test_every_spelling_gives_the_same_prediction() -> None:
    here = load().length(LONG, MODEL)
    assert here.mu > load().length(SHORT, MODEL).mu
    assert here.artifact_id == "tailcast-tiny"
    for predictor in (open_predictor("tiny"), open_client("tiny")):
        requests = [PredictionRequest("a", LONG, 100, MODEL), PredictionRequest("b", LONG, 100, "another")]
        known, unknown = [one.length for one in await predictor.predict(requests)]
        await predictor.close()
        assert known is not None
        assert unknown is not None
        assert (known.mu, known.sigma) == pytest.approx((here.mu, here.sigma), rel=1e-6)
        assert unknown.mu == pytest.approx(load().length(LONG).mu, rel=1e-6)
    rows = open_runtime("tiny").predict([SHORT, LONG], [None, MODEL])
    assert rows.mu is not None
    assert rows.mu[1] == pytest.approx(here.mu, rel=1e-6)


def test_the_commands_take_it() -> None:
    settings = read_settings({"tailcast": {"policy": "tie", "predictor": "tiny"}}, {})
    assert settings.predictor is not None
    assert isinstance(open_predictor(settings.predictor), TinyPredictor)
    _, sources = build_server(ServeConfig(artifact="tiny"))
    assert list(sources) == ["tailcast-tiny"]
    proxy = ProxyServer(ProxyConfig(engine_url="http://engine", predictor="tiny"))
    assert proxy._forecaster._predictor.address == str(FOLDERS[TINY])  # type: ignore[union-attr]


def test_it_needs_numpy_and_tokenizers_alone() -> None:
    code = (
        "import sys; from scheduler_core.predictor import open_predictor; open_predictor('tiny').length('Say yes.')\n"
        "print({'onnxruntime', 'grpc', 'pydantic', 'torch', 'aiohttp'} & sys.modules.keys())"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output == "set()\n"


async def test_any_text_has_a_prediction() -> None:
    texts = ["", "\n", "\x00", "a", "\ud800 half a character", "日本の首都はどこですか。"]
    texts += ["x" * 10**6, "word " * 10**6]
    requests = [PredictionRequest(str(number), text, 100) for number, text in enumerate(texts)]
    for prediction in await load().predict(requests):
        assert prediction.length is not None
        assert 1 < prediction.length.distribution().ppf(0.5) < 1e5


def test_tokens_beside_the_middle_of_a_long_prompt_do_not_count() -> None:
    begin, end = "word " * 1200, " other" * 1200
    assert load().length(begin + "one" + end) == load().length(begin + "two" + end)


def test_a_changed_or_truncated_file_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(FOLDERS[TINY], folder)
    whole = (folder / WEIGHTS).read_bytes()
    for size in (100, len(whole) // 2, len(whole) - 1):
        (folder / WEIGHTS).write_bytes(whole[:size])
        with pytest.raises(
            InputError, match=r"artifact file model\.npz: got .*allowed: a whole file of the weights"
        ):
            TinyModel(folder / WEIGHTS)
        for opened in (TinyPredictor, open_runtime):
            with pytest.raises(InputError, match=r"artifact file model\.npz: got 'SHA-256"):
                opened(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(InputError, match=r"model\.npz"):
        TinyPredictor(folder)


def test_weights_that_do_not_fit_each_other_are_refused(tmp_path: Path) -> None:
    with np.load(FOLDERS[TINY] / WEIGHTS) as file:
        content = dict(file)
    for name, change in (("hidden_2_bias", lambda one: one[:-1]), ("token_scale", lambda one: one[:3])):
        np.savez(tmp_path / WEIGHTS, **content | {name: change(content[name])})
        with pytest.raises(InputError, match="a whole file of the weights"):
            TinyModel(tmp_path / WEIGHTS)


def test_there_is_no_graph_to_run_on_a_gpu() -> None:
    with pytest.raises(InputError, match="a tiny predictor has no graph"):
        open_runtime("tiny", provider="cuda")
