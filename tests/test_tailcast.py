"""`import tailcast`: what it costs, its names, and predictions of one prompt."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tailcast
from predictors.proxy.prediction import Forecaster
from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.predictions import DEFAULT_MAX_TOKENS, LengthPrediction
from scheduler_core.predictor import open_predictor
from tailcast.output_length import OutputLength
from tests.predictors.fakes import expected, write_artifact, write_rich_artifact

PROMPT = "name three rivers"


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


@pytest.mark.parametrize(
    "prompt",
    [
        PROMPT,
        [{"role": "user", "content": PROMPT}],
        [
            {"role": "system", "content": "crash"},
            {"role": "user", "content": [{"type": "text", "text": PROMPT}]},
        ],
    ],
)
def test_a_prompt_is_a_text_or_messages(artifact: Path, prompt: object) -> None:
    median = tailcast.load(artifact).predict(prompt).median  # type: ignore[arg-type]
    assert median == pytest.approx(math.exp(expected(PROMPT)[0]), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompt": " "}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": []}, "messages"),
        ({"prompt": [{"role": "assistant", "content": "x"}]}, "messages"),
        ({"prompt": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content"),
        ({"model": "another"}, "served_model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_what_cannot_be_predicted_is_named(artifact: Path, arguments: dict[str, object], field: str) -> None:
    with pytest.raises(InputError) as error:
        tailcast.load(artifact).predict(**({"prompt": PROMPT} | arguments))  # type: ignore[arg-type]
    assert error.value.field == field


def test_predictors_without_lengths_and_checkpoints_are_refused(tmp_path: Path) -> None:
    folder = write_rich_artifact(tmp_path / "urgency", heads=("urgency",))
    with pytest.raises(InputError, match="an artifact with a length head"):
        tailcast.load(folder)
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "training.json").write_text("{}")
    for open_it in (tailcast.load, open_predictor, lambda path: Forecaster(path, "predictor", 1.0)):
        with pytest.raises(InputError, match="is a checkpoint; run export-onnx"):
            open_it(str(tmp_path / "checkpoint"))


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
    rng = np.random.default_rng(1)
    lengths = np.maximum(np.exp(5 + 0.5 * rng.standard_t(3.5, 4000)), 1).astype(np.int64)
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
    means = {
        policy: tailcast.simulate(trace, policy, predictor="oracle").metrics["ttlt_s"]["mean"]
        for policy in ("fcfs", "sept")
    }
    assert means["sept"] <= means["fcfs"]
    assert tailcast.simulate(str(tmp_path / "trace.jsonl"), "fcfs").metrics["ttlt_s"]["mean"] == means["fcfs"]
    with pytest.raises(InputError, match="rate"):
        tailcast.simulate(trace, "fcfs", rate=1.0)


def test_the_tutorial_runs(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[1] / "docs" / "tutorials" / "predict.md").read_text()
    section = text.partition("## From Python")[2].partition("## As a service")[0]
    code = "\n".join(line[4:] for line in section.splitlines() if line.startswith("    "))
    monkeypatch.setattr("predictors.pretrained.shipped_folder", lambda _: artifact)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(code, names)
    assert len(names["lengths"]) == 2  # type: ignore[arg-type]
    assert (tmp_path / "length.png").stat().st_size > 0
