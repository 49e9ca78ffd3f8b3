"""`import tailcast` and the command `tailcast`: what they cost, predictions of prompts, completion, messages about options."""

import asyncio
import importlib.metadata
import importlib.util
import json
import math
import os
import subprocess
import sys
import tomllib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import tailcast
from predictors.manifest import Conditions
from predictors.pretrained import TINY, shipped_folder
from predictors.proto import predictor_v1_pb2 as pb
from predictors.proxy.forecast import Forecaster
from predictors.runtime import open_runtime
from predictors.service.json_request import request_message
from predictors.service.messages import RequestReader
from predictors.tiny import TinyPredictor
from scheduler_core.errors import InputError, MissingExtraError, TailcastError
from scheduler_core.prediction.outcome import Outcome
from scheduler_core.prediction.predictions import DEFAULT_MAX_TOKENS, LengthPrediction
from scheduler_core.prediction.predictor import PredictionRequest, open_predictor
from scheduler_core.prediction.prompt_text import LAST_TEXT, PartTokens, PromptForm, messages_of, user_text
from scheduler_core.simulator.commands.simulate import main as simulate
from scheduler_core.simulator.trace import Trace, TraceRequest, write_trace
from tailcast.cli import COMMANDS, main
from tailcast.length_predictor import LocalCorrection
from tailcast.output_length import OutputLength
from tests.predictors.fakes import expected, running_server, write_artifact, write_rich_artifact
from tests.waiting import eventually
from training.fitting.samples import with_conversations

PROMPT = "name three rivers"
SYSTEM = {"role": "system", "content": "crash"}
PARTS = {"role": "user", "content": [{"type": "text", "text": PROMPT}]}
SCRIPTS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["scripts"]
#: Scripts whose sub-command has a shorter name.
SHORT = {"serve-predictor": "serve", "tailcast-proxy": "proxy"}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artifact(tmp_path_factory.mktemp("artifacts") / "tiny")


def modules_after(code: str) -> set[str]:
    """Packages that a new interpreter has imported after `code`."""
    text = f"import sys\n{code}\nprint(' '.join({{name.partition('.')[0] for name in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_import_is_cheap_and_predictions_need_no_torch(artifact: Path) -> None:
    assert not modules_after("import tailcast") & {"numpy", "scheduler_core", "predictors", "training"}
    heavy = {"torch", "grpc", "transformers", "matplotlib", "pyarrow", "scipy"}
    assert not modules_after("import tailcast; tailcast.LogT, tailcast.simulate, tailcast.read_trace") & heavy
    assert not modules_after(f"import tailcast; tailcast.predict('a', predictor={str(artifact)!r})") & heavy


def test_every_name_is_there_and_documented() -> None:
    for name in tailcast.__all__:
        assert getattr(tailcast, name).__doc__, name
    assert set(tailcast.__all__) <= set(dir(tailcast))
    with pytest.raises(AttributeError, match="has no attribute 'forecast'"):
        tailcast.forecast  # noqa: B018


def test_prediction_of_a_prompt(artifact: Path) -> None:
    mu, sigma = expected(PROMPT)
    distribution = tailcast.LogT(mu, sigma, 3.5)
    length = tailcast.predict(PROMPT, max_tokens=100, model="tiny-llm", predictor=str(artifact))
    assert length.median == pytest.approx(math.exp(mu), rel=1e-5)
    assert length.quantile(0.9) == pytest.approx(min(float(distribution.ppf(0.9)), 100), rel=1e-5)
    assert length.expected_tokens == pytest.approx(float(distribution.expected(100)), rel=1e-5)
    assert length.probability_longer_than(60) == pytest.approx(float(distribution.sf(60)), rel=1e-5)
    assert length.probability_longer_than(100) == 0
    assert length.quantile(1) == 100
    assert tailcast.predict(PROMPT, predictor=str(artifact)).max_tokens == DEFAULT_MAX_TOKENS


CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "the sea"}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}


@pytest.mark.parametrize(
    "prompt",
    [
        PROMPT,
        [{"role": "user", "content": PROMPT}],
        [SYSTEM, PARTS],
        [SYSTEM, PARTS, CALL, RESULT],
        [{"role": "developer", "content": ""}, PARTS, {"role": "assistant", "content": "sea"}],
        [PARTS, IMAGE],
        [SimpleNamespace(role="user", content=PROMPT), SimpleNamespace(role="assistant", content=None)],
    ],
)
def test_a_prompt_is_a_text_or_messages(artifact: Path, prompt: Any) -> None:
    median = tailcast.load(artifact).predict(prompt).median
    assert median == pytest.approx(math.exp(expected(PROMPT)[0]), rel=1e-5)


PARTS_OF_TOKENS = PartTokens(options=9, system=9, turns=9, last=9)
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [PARTS],
    [SYSTEM, PARTS],
    [SYSTEM, PARTS, {"role": "assistant", "content": "sea"}, {"role": "user", "content": "the sea"}],
    [PARTS, CALL, RESULT],
    [{"role": "system", "content": ""}, PARTS, IMAGE],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize(
    "form",
    [
        LAST_TEXT,
        PromptForm(conversations=True),
        PromptForm(conversations=True, part_tokens=PARTS_OF_TOKENS),
    ],
)
async def test_training_service_and_python_read_the_same_text(
    tmp_path: Path, messages: list[dict[str, Any]], form: PromptForm
) -> None:
    runtime = open_runtime(
        write_artifact(tmp_path / "a", conversations=form.conversations, part_tokens=form.part_tokens)
    )
    stored = [[{"role": role, "content": text} for role, text in messages_of(messages)]]
    user = user_text(messages_of(messages))
    [trained] = (
        with_conversations(pa.table({"prompt": [user], "messages": stored}), Path("t"), form)
        .column("prompt")
        .to_pylist()
        if form.conversations
        else [user]
    )
    reader = RequestReader(runtime, None)
    assert reader.read(request_message({"messages": messages})).prompt == trained
    chat = pb.ChatMessages(
        messages=[pb.ChatMessage(role=role, content=text) for role, text in messages_of(messages)]
    )
    assert reader.read(pb.PredictRequest(messages=chat)).prompt == trained
    async with running_server(runtime, http_port=None) as (_, address):

        def text() -> str:
            with tailcast.connect(address) as predictor:
                return predictor.text(messages)

        assert await asyncio.to_thread(text) == trained
    assert tailcast.load(tmp_path / "a").text(messages) == trained


def test_unknown_models_are_reported_once_with_similar_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    predictor = tailcast.load(write_rich_artifact(tmp_path / "a"))
    for model in ("tiny_llm", "tiny_llm", "tiny-llm", None):
        predictor.predict(PROMPT, model=model)
    [record] = caplog.records
    assert record.getMessage().startswith("model 'tiny_llm' is none of the 2 served models")
    assert record.getMessage().endswith("Did you mean tiny-llm?")


async def test_the_log_of_the_proxy_lists_the_models_of_a_predictor_that_refuses_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    conditioning = Conditions(unknown_models=False, temperature=True)
    folder = write_rich_artifact(tmp_path / "a", conditioning=conditioning)
    async with running_server(open_runtime(folder)) as (_, address):
        for source in (str(folder), f"grpc://{address}"):
            forecaster = Forecaster(source, "predictor", 30.0)
            forecast = await forecaster.forecast(PredictionRequest("r", PROMPT, 9, "big-llm"))
            assert forecast.outcome == "refused"
            await forecaster.close()
            assert "allowed: one of tiny-llm, huge-llm. Did you mean tiny-llm" in caplog.text
            assert "big-llm" not in caplog.text
            caplog.clear()


def test_the_version_is_that_of_the_package() -> None:
    assert tailcast.__version__ == importlib.metadata.version("tailcast")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompt": " "}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": []}, "messages"),
        ({"prompt": [{"role": "user", "content": None}]}, "messages"),
        ({"prompt": {"role": "user", "content": PROMPT}}, "prompt"),
        ({"model": "another"}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_what_cannot_be_predicted_is_named(artifact: Path, arguments: dict[str, object], field: str) -> None:
    with pytest.raises(InputError) as error:
        tailcast.load(artifact).predict(**({"prompt": PROMPT} | arguments))  # type: ignore[arg-type]
    assert error.value.field == field


def test_predictors_without_lengths_and_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="an artifact with a length head"):
        tailcast.load(write_rich_artifact(tmp_path / "urgency", heads=("urgency",)))
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "training.json").write_text("{}")
    for open_it in (tailcast.load, open_predictor, lambda path: Forecaster(path, "predictor", 1.0)):
        with pytest.raises(InputError, match="is a checkpoint; run export-onnx"):
            open_it(str(tmp_path / "checkpoint"))


@pytest.mark.parametrize(
    "address",
    ["no/such/folder", "tiny+no/such/folder", "local://no/such/folder", "nosuch://host:1", "grpc://"],
)
def test_every_command_refuses_an_address_with_the_same_words(address: str) -> None:
    allowed = (
        f"predictor: got {address!r}; allowed: pretrained, tiny, an artifact folder, or grpc://HOST:PORT (grpcs:// with TLS); joined by + for "
        "further heads, as in pretrained+urgency"
    )
    openers: tuple[Callable[[], object], ...] = (
        lambda: open_predictor(address),
        lambda: Forecaster(address, "predictor", 1.0),
        lambda: tailcast.predict(PROMPT, predictor=address),
    )
    for opener in openers:
        with pytest.raises(InputError) as error:
            opener()
        assert str(error.value) == allowed


def test_missing_packages_are_named_with_their_extra(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"onnxruntime is not installed; .*tailcast\[predict\]"):
        tailcast.load(artifact)
    monkeypatch.setitem(sys.modules, "training.fitting.estimate", None)
    with pytest.raises(MissingExtraError, match=r"tailcast\[train\]"):
        tailcast.fit([1, 2, 3])


@pytest.mark.parametrize(
    ("prediction", "max_tokens"),
    [
        (LengthPrediction(5.0, 0.6, 3.5), 512),
        (LengthPrediction(5.0, 1e-9, 3.5), 512),
        (LengthPrediction(9.0, 0.6, 3.5), 10),
        (LengthPrediction(-3.0, 2.0, 3.5), 1),
        (LengthPrediction(6.0, 3.0, 1.0), DEFAULT_MAX_TOKENS),
    ],
)
def test_charts_hold_all_probability(prediction: LengthPrediction, max_tokens: int) -> None:
    length = OutputLength(prediction, max_tokens)
    bins = length.bins()
    assert sum(probability for _, probability in bins) == pytest.approx(1.0)
    assert all(probability >= 0 for _, probability in bins)
    for text in (str(length), length._repr_html_()):
        assert f"median {length.median:.0f}, P90 {length.quantile(0.9):.0f}" in text
        assert text.count("%") == len(bins) + 1
    [axis] = length.plot().axes
    assert axis.get_xlabel() == "output tokens"


def test_fit_finds_the_distribution_of_samples() -> None:
    lengths = np.maximum(np.exp(5 + 0.5 * np.random.default_rng(1).standard_t(3.5, 4000)), 1).astype(np.int64)
    limit = 200
    fitted = tailcast.fit(np.minimum(lengths, limit), finished=list(lengths < limit))
    assert fitted.mu == pytest.approx(5.0, abs=0.03)
    assert fitted.sigma == pytest.approx(0.5, abs=0.03)
    for wrong in ([1, 2], [1, 2, 0], [1.5, 2.0, 3.0]):
        with pytest.raises(InputError, match="output_tokens"):
            tailcast.fit(wrong)
    with pytest.raises(InputError, match="finished"):
        tailcast.fit([5, 5, 5], finished=[False] * 3)


def test_simulate_runs_a_trace_that_was_read(tmp_path: Path) -> None:
    row = {"arrival_s": 0.0, "prompt_tokens": 5, "max_tokens": 100}
    rows = [row | {"request_id": str(n), "output_tokens": 90 - 10 * n} for n in range(8)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trace = tailcast.read_trace(tmp_path / "trace.jsonl")
    runs = {policy: tailcast.simulate(trace, policy, predictor="oracle") for policy in ("fcfs", "sept")}
    means = {policy: run.metrics["ttlt_s"]["mean"] for policy, run in runs.items()}
    assert means["sept"] <= means["fcfs"]
    assert tailcast.simulate(str(tmp_path / "trace.jsonl"), "fcfs").metrics["ttlt_s"]["mean"] == means["fcfs"]
    with pytest.raises(InputError, match="rate"):
        tailcast.simulate(trace, "fcfs", rate=1.0)


def test_the_tutorial_runs(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[1] / "docs" / "tutorials" / "predict.md").read_text()
    section = text.partition("## From Python")[2].partition("## As a service")[0]
    code = "\n".join(line[4:] for line in section.splitlines() if line.startswith("    "))
    tiny = shipped_folder(TINY)  # for the embeddings of observed prompts
    monkeypatch.setattr(
        "predictors.pretrained.shipped_folder", lambda name: tiny if name == TINY else artifact
    )
    monkeypatch.chdir(tmp_path)
    rows = [
        TraceRequest(request_id=f"r{at}", arrival_s=at, prompt_tokens=9, output_tokens=5, max_tokens=9)
        for at in range(4)
    ]
    write_trace(Trace(tuple(rows)), "trace.parquet")
    names: dict[str, object] = {}
    exec(code, names)
    assert len(names["lengths"]) == 2  # type: ignore[arg-type]
    for name in ("length.png", "latencies.png"):
        assert (tmp_path / name).stat().st_size > 0


def test_every_script_is_a_sub_command() -> None:
    entries = {SHORT.get(name, name): entry for name, entry in SCRIPTS.items() if name != "tailcast"}
    assert {name: entry for name, (entry, _) in COMMANDS.items() if name in entries} == entries


@pytest.mark.parametrize("name", [*COMMANDS])
def test_sub_commands_explain_themselves(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = COMMANDS[name][0].partition(":")[0]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not there yet")
    try:
        code = main([name, "--help"])
    except SystemExit as end:
        code = end.code
    assert code == 0
    assert capsys.readouterr().out.lower().startswith("usage: ")


def test_list_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tailcast ")
    assert main([]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("predikt", "Did you mean predict?"),
        ("simulate rum", "Did you mean run?"),
        ("simulate run --polcy tie --json x", "did you mean --policy?"),
        ("train --out x --stage1.epocs 3", "did you mean --stage1.epochs?"),
        ("train", "missing: --out; see train --help"),
        ("import-lengths log", "missing: FILE, --out; see import-lengths --help"),
        ("proxy http://x --policy tei", "Did you mean tie?"),
        ('proxy http://x --policy tie --policy_parameters {"gama":1}', "Did you mean gamma?"),
        ("train --config minilm-quikstart --out x", "Did you mean minilm-quickstart?"),
        ("serve --provider cpuu", "provider: got 'cpuu'; allowed: auto, cpu, cuda. Did you mean cpu?"),
        ("predict", "PROMPT, data: got (None, None); allowed: exactly one of them"),
        ("predict x --out y.csv", "data, out: got (None, 'y.csv'); allowed: both or neither"),
    ],
)
def test_wrong_words_get_advice(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err


def test_unknown_options_of_a_file_get_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text("polcy: tie")
    assert simulate(["run", "--config", str(tmp_path / "c.yaml")]) == 2
    assert "did you mean --policy?" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--config minilm-quickstart", "--config=minilm-quickstart"])
def test_recipes_are_found_by_name(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*f"train {option} --out x".split(), "--print_config"])
    assert end.value.code == 0
    assert "pooling:\n" in capsys.readouterr().out


def test_a_prompt_is_printed_in_time(artifact: Path) -> None:
    command = [sys.executable, "-m", "tailcast", "predict", "name three rivers", "--predictor", str(artifact)]
    result = subprocess.run([*command, "--max_tokens", "300"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    first, *bars = result.stdout.splitlines()
    assert first.startswith("output tokens: median ")
    assert "of at most 300" in first
    assert bars
    assert all(bar.endswith("%") for bar in bars)


ROWS: list[Any] = [
    {"request_id": "a", "prompt": "name three rivers", "max_tokens": 40},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "name three rivers"}]}], "model": "tiny-llm"},
    {"custom_id": 7, "body": {"messages": [{"role": "user", "content": "the sea"}], "max_completion_tokens": 9}},
    "no object",
    {"prompt": ""},
    {"prompt": "the sea", "model": "another"},
    {"prompt": "the sea", "temperature": -1},
]  # fmt: skip


def predict(*words: object) -> int:
    return main(["predict", "--progress", "false", *map(str, words)])


def test_a_file_of_prompts(artifact: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data, out = tmp_path / "prompts.jsonl", tmp_path / "out.parquet"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = ("--data", data, "--out", out, "--predictor", artifact)
    with caplog.at_level("INFO"):
        assert predict(*words) == 3  # more than half of the rows are left out
    table = pq.read_table(out).to_pylist()
    rows = [(row["row"], row["request_id"], row["max_tokens"]) for row in table]
    assert rows == [(1, "a", 40), (2, None, 32768), (3, "7", 9)]
    assert table[0]["mu"] == table[1]["mu"] == pytest.approx(expected("name three rivers")[0], rel=1e-5)
    assert table[0]["median_tokens"] == 40
    skipped = "1 for format, 1 for prompt, 1 for temperature, 1 for model"
    assert f"3 predictions; rows skipped: {skipped}" in caplog.text
    assert "prompts.jsonl row 5 skipped: prompt: got None" in caplog.text
    last = caplog.messages[-1]
    assert last.startswith("left out 4 of 7 rows: 1 x format; 1 x prompt; ")


def test_a_file_of_requests_of_any_api(artifact: Path, tmp_path: Path) -> None:
    """Tools, images, JSON text in cells, Responses and Anthropic bodies, and -1 and 0 as no limit."""
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
    }
    ask = {"role": "user", "content": "the sea"}
    image = {
        "role": "user",
        "content": [{"type": "text", "text": "the sea"}, {"type": "image_url", "image_url": {}}],
    }
    rows: list[dict[str, Any]] = [
        {"messages": [ask, call, {"role": "tool", "content": "19"}], "max_tokens": -1},
        {"messages": [image], "max_tokens": 0},
        {"messages": json.dumps([{"role": "system", "content": ""}, ask])},
        {"body": {"input": "the sea", "instructions": "Be brief.", "max_output_tokens": 9}},
        {"request": json.dumps({"system": "Be brief.", "messages": [ask], "max_tokens": 8})},
        {"messages": [ask], "max_tokens": 900, "ignore_eos": True},
        {"messages": [ask], "max_tokens": 900, "min_tokens": 800},
        {
            "params": {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "the sea"}]}],
                "max_tokens": 7,
            }
        },
    ]
    data, out = tmp_path / "requests.jsonl", tmp_path / "out.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert predict("--data", data, "--out", out, "--predictor", artifact) == 0
    predictions = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["max_tokens"] for row in predictions] == [32768, 32768, 32768, 9, 8, 900, 900, 7]
    forced, at_least = predictions[5], predictions.pop(6)
    assert predictions.pop(5) is forced
    assert forced["expected_tokens"] == pytest.approx(900, rel=0.01)
    assert forced["artifact_id"] == predictions[0]["artifact_id"]
    assert 799.99 < at_least["median_tokens"] <= at_least["expected_tokens"] <= 900
    assert {round(row["mu"], 5) for row in predictions} == {round(predictions[0]["mu"], 5)}
    assert predictions[0]["mu"] == pytest.approx(expected("the sea")[0], rel=1e-5)


def test_on_error_stop(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = tmp_path / "prompts.jsonl", tmp_path / "out.csv"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert predict("--data", data, "--out", out, "--predictor", artifact, "--on_error", "stop") == 2
    assert "prompts.jsonl row 4: " in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_tables_of_prompts(
    artifact: Path, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    table = pa.table({"prompt": ["name three rivers", "the sea"], "max_tokens": [50, None]})
    data, out = tmp_path / f"prompts{suffix}", tmp_path / "out.jsonl"
    pq.write_table(table, data) if suffix == ".parquet" else pa.csv.write_csv(table, data)
    words = ("--data", data, "--out", out, "--predictor", artifact)
    assert predict(*words, "--max_tokens", 60) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["max_tokens"] for row in rows] == [50, 60]
    assert predict(*words) == 2
    assert "--overwrite true replaces this one" in capsys.readouterr().err
    assert predict(*words, "--overwrite", "true") == 0


@pytest.mark.parametrize(
    ("text", "predictor", "message"),
    [
        ("text\nhello\n", None, "a file with valid rows (skipped: 1 for prompt)"),
        ("prompt,model\nhello\n", None, "a file with valid rows (skipped: 1 for format)"),
        ("prompt\nhello\n", "grpc://127.0.0.1:1", "UNAVAILABLE"),
    ],
)
def test_a_file_without_usable_rows_and_a_service_that_is_gone_are_errors(
    artifact: Path, tmp_path: Path, text: str, predictor: str | None, message: str, capsys: Any
) -> None:
    (tmp_path / "p.csv").write_text(text)
    words = ("--data", tmp_path / "p.csv", "--out", tmp_path / "o.csv", "--predictor", predictor or artifact)
    assert predict(*words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("tailcast pre", {"predict"}),
        ("tailcast simulate c", {"compare", "capacity", "calibrate"}),
        ("tailcast serve --provider ", {"auto", "cpu", "cuda"}),
        ("tailcast predict --over", {"--overwrite"}),
        ("tailcast predict --overwrite ", {"true", "false"}),
    ],
)
def test_the_shell_completes_words(line: str, completions: set[str], tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    shell = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9", "_ARGCOMPLETE": "1"}
    shell |= {"_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_COMP_WORDBREAKS": " "}
    shell |= {"_ARGCOMPLETE_SUPPRESS_SPACE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "words")}
    subprocess.run([sys.executable, "-m", "tailcast"], env=os.environ | shell, check=True)
    assert set((tmp_path / "words").read_text().split()) == completions


def test_observed_lengths_correct_later_predictions() -> None:
    """In this process and by a service: two applications whose lengths are not those of their texts."""

    def check_local(predictor: tailcast.LengthPredictor) -> None:
        before = predictor.predict("Write an essay about rain")
        for number in range(60):
            predictor.observe(f"Write an essay about topic {number}", 12 + number % 3)
            predictor.observe(f"Answer yes or no: is it {number}?", 700 + number, max_tokens=2000)
        essay = predictor.predict("Write an essay about rain")
        assert essay.median == pytest.approx(13, rel=0.4)
        assert essay.median < 0.3 * before.median
        answer = predictor.predict("Answer yes or no: is it raining?")
        assert answer.median == pytest.approx(730, rel=0.4)
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"output_tokens": 0}, "output_tokens"), ({"output_tokens": 2.5}, "output_tokens"),
            ({"output_tokens": 5, "max_tokens": 0}, "max_tokens"), ({"output_tokens": 5, "tenant": "t" * 300}, "tenant"),
            ({"output_tokens": 5, "prompt": " "}, "prompt"),
        ]  # fmt: skip
        for values, field in wrong:
            with pytest.raises(InputError, match=field):
                predictor.observe(**{"prompt": "sea", **values})
        predictor.observe("Write an essay about rain", 5, finished=False)

    def check_remote(predictor: tailcast.LengthPredictor, server: Any) -> None:
        for number in range(60):
            predictor.observe(f"Write an essay about topic {number}", 12 + number % 3)
        assert eventually(lambda: server._calls.learner.calibration.calibration.num_remembered >= 60)
        assert predictor.predict("Write an essay about rain").median == pytest.approx(13, rel=0.4)
        # Ids "0", "1", ... took the place of other clients' predictions that waited for their lengths.
        assert not server._calls.learner._open
        with pytest.raises(InputError, match="tenant"):
            predictor.observe("sea", 5, tenant="t" * 300)

    async def serve() -> None:
        async with running_server(open_runtime("tiny")) as (server, address):
            with tailcast.connect(address) as predictor:
                await asyncio.to_thread(check_remote, predictor, server)

    check_local(tailcast.load("tiny"))
    asyncio.run(serve())


@pytest.mark.mend
def test_threads_predict_while_others_observe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prediction raised "OrderedDict mutated during iteration" while another thread observed."""
    learner, request = LocalCorrection(), PredictionRequest("", "sea", 100, "m")
    length = LengthPrediction(5.0, 0.6, 3.5)
    outcome = Outcome(output_tokens=9, finished=True)

    class Pairs(OrderedDict[tuple[str, str], Any]):
        def __iter__(self) -> Iterator[tuple[str, str]]:
            yield next(super().__iter__())
            raise RuntimeError("another thread has observed a length")

    for _ in range(60):
        learner.observe(request, outcome, lambda: length)
    monkeypatch.setattr(learner._correction, "_pairs", Pairs(learner._correction._pairs.items()))
    assert learner.corrected(request, length).mu < 4.0


@pytest.mark.mend
def test_a_prompt_whose_length_is_out_of_range_has_an_embedding() -> None:
    """One such prompt, for which tiny predicts a sigma above 50, ended the use of the memory in a service for good."""
    predictor = TinyPredictor()
    with pytest.raises(TailcastError, match="sigma"):
        predictor.length("flawless " * 1_000)
    vector = predictor.embedding("flawless " * 1_000)
    assert vector is not None
    assert float(vector @ vector) == pytest.approx(1.0, abs=1e-3)
