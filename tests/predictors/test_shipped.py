"""Published files: the predictors that come with the package, the manifest's JSON Schema, the code of the .proto, examples of the pages."""

import asyncio
import contextlib
import functools
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tailcast
from predictors.artifact import open_artifact
from predictors.client import SyncPredictor
from predictors.commands.serve_predictor import main as serve
from predictors.manifest import FORMAT_VERSION, manifest_schema
from predictors.pretrained import FOLDERS, PRETRAINED, TINY, pin, shipped_folder
from predictors.proto.generate import generate
from predictors.proxy.config import ProxyConfig
from predictors.proxy.server import ProxyServer
from predictors.runtime import open_runtime
from predictors.service.config import ServeConfig
from predictors.service.in_process import InProcessPredictor
from predictors.service.process import open_server
from predictors.tiny import WEIGHTS, AsciiTokenizer, TinyModel, TinyPredictor, length_features
from predictors.tokenizer import PromptTokenizer
from scheduler_core.adapters.settings import read_settings
from scheduler_core.errors import InputError
from scheduler_core.prediction.predictor import PredictionRequest, open_predictor
from scheduler_core.simulator.commands.simulate import main as simulate
from tests.predictors import fakes
from tests.predictors.fakes import expected, read_manifest
from tests.waiting import eventually

PROMPT = "name three rivers"
SHORT, LONG = "Say yes.", "Write a detailed essay about the history of Rome, its emperors and its wars."
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
SCHEMA = json.loads(resources.files("predictors").joinpath("manifest.schema.json").read_text("utf-8"))


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
    from tailcast import length_predictor

    length_predictor._opened.cache_clear()
    yield
    length_predictor._opened.cache_clear()


async def test_every_spelling_opens_the_same_artifact(shipped: Path) -> None:
    mu = pytest.approx(expected(PROMPT)[0], rel=1e-5)
    for spelling in ("pretrained", str(shipped), f"local://{shipped}"):
        predictor = open_predictor(spelling)
        [prediction] = await predictor.predict([PredictionRequest("r", PROMPT, 100)])
        await predictor.close()
        assert prediction.length is not None
        assert prediction.length.mu == mu
    assert open_artifact("pretrained").path == shipped


def test_the_commands_take_them_and_pretrained_by_default(shipped: Path, empty_cache: None) -> None:
    assert tailcast.predict(PROMPT).prediction.mu == pytest.approx(expected(PROMPT)[0], rel=1e-5)
    tiny = ServeConfig(artifact="tiny"), ProxyConfig(engine_url="http://engine", predictor="tiny")
    defaults = ServeConfig(), ProxyConfig(engine_url="http://engine")
    for (serving, proxy), folder in ((defaults, shipped), (tiny, FOLDERS[TINY])):
        assert open_server(serving).artifacts.default.runtime.artifact.path == folder.resolve()
        predictor = ProxyServer(proxy).handler.forecaster._predictor
        if folder is shipped:
            assert isinstance(predictor, InProcessPredictor)
            assert predictor.address == str(folder)
        else:
            assert isinstance(predictor, TinyPredictor)
    for predictor in ("pretrained", "tiny"):
        settings = read_settings({"tailcast": {"policy": "tie", "predictor": predictor}}, {})
        assert settings.predictor == predictor
    assert isinstance(open_predictor("tiny"), TinyPredictor)


def test_settings_of_adapters_name_the_model() -> None:
    assert read_settings({"tailcast": {"policy": "tie", "model": "m"}}, {}).model == "m"


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
    assert "this installation does not include" in capsys.readouterr().err
    with pytest.raises(InputError, match="this installation does not include"):
        open_predictor("pretrained")


@pytest.mark.parametrize("predictor", ["oracel", "pretraind", "no/such/folder"])
def test_simulate_names_sources(predictor: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_older_runtimes_read_the_shipped_graph() -> None:
    graph = onnx.load(FOLDERS[PRETRAINED] / "model.onnx")
    assert graph.ir_version <= 9  # ONNX Runtime 1.17


def test_predict_and_serve_answer_within_ten_seconds_of_being_typed(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tailcast"]
    command = [*words, "predict", "Write a haiku about rivers.", "--max_tokens", "512"]
    output = subprocess.run(command, timeout=10, check=True, capture_output=True, text=True).stdout
    assert "median" in output
    port_file, deadline = tmp_path / "port", time.monotonic() + 10
    command = [*words, "serve", "--port", "0", "--port_file", str(port_file)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            assert eventually(port_file.exists, 10)
            predictor = SyncPredictor(f"127.0.0.1:{port_file.read_text().strip()}")
            [prediction] = predictor.predict([PredictionRequest("r", PROMPT, 100)])
            predictor.close()
            assert prediction.length is not None
            assert time.monotonic() < deadline
        finally:
            process.terminate()


async def test_every_spelling_gives_the_same_prediction() -> None:
    here = TinyPredictor().length(LONG, MODEL)
    assert here.mu > TinyPredictor().length(SHORT, MODEL).mu
    assert here.artifact_id == "tailcast-tiny"
    for predictor in (open_predictor("tiny"), InProcessPredictor("tiny")):
        requests = [PredictionRequest("a", LONG, 100, MODEL), PredictionRequest("b", LONG, 100, "another")]
        known, unknown = [one.length for one in await predictor.predict(requests)]
        await predictor.close()
        assert known is not None
        assert unknown is not None
        assert (known.mu, known.sigma) == pytest.approx((here.mu, here.sigma), rel=1e-6)
        assert unknown.mu == pytest.approx(TinyPredictor().length(LONG).mu, rel=1e-6)
    rows = open_runtime("tiny").predict([SHORT, LONG], [None, MODEL])
    assert rows.mu is not None
    assert rows.mu[1] == pytest.approx(here.mu, rel=1e-6)


def test_it_needs_numpy_and_tokenizers_alone() -> None:
    code = (
        "import sys; from scheduler_core.prediction.predictor import open_predictor; open_predictor('tiny').length('Say yes.')\n"
        "print({'onnxruntime', 'grpc', 'pydantic', 'torch', 'aiohttp'} & sys.modules.keys())"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output == "set()\n"


async def test_any_text_has_a_prediction() -> None:
    texts = ["", "\n", "\x00", "a", "\ud800 half a character", "日本の首都はどこですか。"]
    texts += ["x" * 10**6, "word " * 10**6]
    requests = [PredictionRequest(str(number), text, 100) for number, text in enumerate(texts)]
    for prediction in await TinyPredictor().predict(requests):
        assert prediction.length is not None
        assert 1 < prediction.length.distribution().ppf(0.5) < 1e5


def test_tokens_beside_the_middle_of_a_long_prompt_do_not_count() -> None:
    begin, end = "word " * 1200, " other" * 1200
    assert TinyPredictor().length(begin + "one" + end) == TinyPredictor().length(begin + "two" + end)


@functools.cache
def tiny_tokenizers(amounts: bool) -> tuple[AsciiTokenizer, PromptTokenizer]:
    path = FOLDERS[TINY] / "tokenizer.json"
    exact = PromptTokenizer(path, max_length=40, truncation_side="middle", amounts=amounts)
    return AsciiTokenizer(path, max_length=40, amounts=amounts), exact


@given(st.text(st.characters(max_codepoint=127), max_size=300) | st.text(max_size=60), st.booleans())
def test_ascii_texts_have_the_tokens_of_the_tokenizer(text: str, amounts: bool) -> None:
    tokens, tokenizer = tiny_tokenizers(amounts)
    ids, [exact] = tokens(text), tokenizer([text])
    assert (ids is None) == (not text.isascii() or exact.truncated)
    if ids is not None:
        assert ids.tolist() == exact.ids.tolist()


def test_length_features_of_one_number_are_those_of_an_array() -> None:
    numbers = np.array([0, 1, 50, 400, 5_000])
    model = TinyModel(FOLDERS[TINY] / WEIGHTS)
    expected = np.stack(length_features(numbers), axis=1)
    ends = [model._features(np.zeros(number, dtype=np.int64))[-3:] for number in numbers]
    np.testing.assert_allclose(ends, expected, rtol=1e-6)


def test_similar_prompts_have_similar_embeddings() -> None:
    predictor = TinyPredictor()
    texts = [
        "Translate to German: The train is late.", "Translate to German: My cat sleeps.",
        "Write a story about a dragon and a knight.", "Write a story about a robot and a garden.",
    ]  # fmt: skip
    vectors = np.array([predictor.embedding(text) for text in texts])
    assert vectors.shape == (4, 64)
    assert vectors.dtype == np.float32
    products = vectors @ vectors.T
    np.testing.assert_allclose(np.diag(products), 1.0, atol=1e-5)
    assert min(products[0, 1], products[2, 3]) > products[:2, 2:].max() + 0.2
    for text in ("", "\x00", "word " * 10_000):
        vector = predictor.embedding(text)
        assert vector is not None
        assert np.isfinite(vector).all()


def test_weights_without_an_embedding_predict_as_before(tmp_path: Path) -> None:
    with np.load(FOLDERS[TINY] / WEIGHTS) as file:
        content = {name: values for name, values in file.items() if not name.startswith("embedding")}
    np.savez(tmp_path / WEIGHTS, **content)
    ids = np.arange(20)
    mu, sigma, embedding = TinyModel(FOLDERS[TINY] / WEIGHTS).predict(ids, 0)
    assert embedding is not None
    assert TinyModel(tmp_path / WEIGHTS).predict(ids, 0) == (mu, sigma, None)


def test_a_changed_or_truncated_file_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(FOLDERS[TINY], folder)
    whole = (folder / WEIGHTS).read_bytes()
    for size in (100, len(whole) // 2, len(whole) - 1):
        (folder / WEIGHTS).write_bytes(whole[:size])
        message = r"artifact file model\.npz: got .*allowed: a complete weights file"
        with pytest.raises(InputError, match=message):
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
        with pytest.raises(InputError, match="a complete weights file"):
            TinyModel(tmp_path / WEIGHTS)


def test_there_is_no_graph_to_run_on_a_gpu() -> None:
    with pytest.raises(InputError, match="a tiny predictor has no graph"):
        open_runtime("tiny", provider="cuda")


def errors(content: object) -> list[str]:
    return [error.json_path for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(content)]


def test_schema_is_that_of_the_types() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert manifest_schema() == SCHEMA, "python -m predictors.manifest > predictors/manifest.schema.json"
    assert SCHEMA["properties"]["format_version"]["const"] == FORMAT_VERSION


def test_manifests_fit(artifact_folder: Path, rich_folder: Path) -> None:
    for folder in (artifact_folder, rich_folder):
        assert errors(read_manifest(folder)) == []
        assert read_manifest(folder).keys() == set(SCHEMA["required"])
    assert set(SCHEMA["required"]) == SCHEMA["properties"].keys() - {
        "quantile_levels",
        "part_tokens",
        "amounts",
    }


def test_checked_in_code_is_what_the_proto_generates(tmp_path: Path) -> None:
    assert generate(tmp_path) == 0
    fresh = [path.relative_to(tmp_path) for path in tmp_path.rglob("*.py*")]
    assert len(fresh) == 6
    for path in fresh:
        advice = f"run python -m predictors.proto.generate ({path.name})"
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), advice


ROOT = Path(__file__).resolve().parents[2]
CLIENT, PLAIN = (
    re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)[0]
    for page in ("predictors/README.md", "docs/artifact.md")
)


async def test_client_example(artifact_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with fakes.running_server(open_runtime(artifact_folder)) as (_, address):
        code = CLIENT.replace("127.0.0.1:50051", address)
        names: dict[str, object] = {}
        # The example starts its own loop, so it runs in a thread; the server stays in this one.
        code = code.replace("asyncio.run(ask(", "run(ask(")
        loop = asyncio.get_running_loop()
        names["run"] = lambda call: asyncio.run_coroutine_threadsafe(call, loop).result(timeout=20)
        await asyncio.to_thread(exec, code, names)
    median, p90, p99 = (float(number) for number in re.findall(r"[\d.]+", capsys.readouterr().out))
    assert 1 < median < p90 < p99


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("write", [fakes.write_artifact, fakes.write_rich_artifact])
def test_plain_onnxruntime_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Path]
) -> None:
    write(tmp_path / "artifact")
    monkeypatch.chdir(tmp_path)
    values: dict[str, Any] = {}
    exec(PLAIN, values)
    statements = [line for line in PLAIN.splitlines() if line and not line.startswith(("import", "from"))]
    assert len(statements) <= 12
    prompts = ["Name three rivers.", "Write an essay on the history of tides."]
    expected = open_runtime("artifact").predict(prompts, [None, None], [1.0, None])
    np.testing.assert_allclose(values["predictions"]["mu"], expected.mu, rtol=1e-6)
    np.testing.assert_allclose(values["predictions"]["sigma"], expected.sigma, rtol=1e-6)


# A flipped bit in model.npz was "a bug in tailcast" (zlib.error, TokenError of numpy's header).
@pytest.mark.mend
@given(data=st.data())
def test_damaged_weights_are_named(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = bytearray((shipped_folder("tiny") / WEIGHTS).read_bytes())
    path = tmp_path_factory.mktemp("damaged") / WEIGHTS
    part = data.draw(st.sampled_from(["head", "anywhere", "directory", "cut"]))
    size = len(content)
    low, high = {"head": (0, 400), "directory": (size - 2000, size)}.get(part, (0, size))
    if part == "cut":
        del content[data.draw(st.integers(0, size - 1)) :]
    else:
        for place in data.draw(st.lists(st.integers(low, high - 1), min_size=1, max_size=30)):
            content[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    with contextlib.suppress(InputError):
        TinyModel(path)
    path.write_bytes(b"PK" + data.draw(st.binary(max_size=50)))
    with pytest.raises(InputError, match=r"artifact file model\.npz: got .*complete weights file"):
        TinyModel(path)
