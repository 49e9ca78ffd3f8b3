"""The example that makes the shipped predictor: its data, and its scores on sources that training never saw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from examples.pretrained.prepare import SET_ASIDE, SOURCES, Prepared, prepare, served_model
from examples.pretrained.unseen import markdown, score_source
from tests.predictors.fakes import write_artifact
from training.evaluating.predictors import InferenceOptions, OpenedPredictor, open_predictor

NUM_PROMPTS = 30


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    data, out = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("out")
    for folder in ("more", "multi_model", "repeated_samples"):
        (data / folder).mkdir()
    for split in ("train", "validation"):
        rows = [
            {"dataset": "Dolly", "model": model, "prompt": f"{split} prompt {number}", "temperature": 0.6,
             "output_tokens": [3, 20_000, 5]}
            for number in range(NUM_PROMPTS) for model in ("a/b", "c/d")
        ]  # fmt: skip
        pd.DataFrame(rows).to_parquet(data / f"castillo_{split}.parquet")
    for file in [source.file for source in SOURCES] + [f"more/{name}" for name in SET_ASIDE]:
        table = _source(Path(file).name)
        if file.startswith("repeated_samples"):
            table = table.assign(tokens=[[4, 6]] * len(table), finished=[[True, False]] * len(table))
        elif file.startswith("more"):
            table = table.assign(
                n_tokens_reasoning=[None, 100.0] * (len(table) // 2),
                api_tokens=[None, None, None, 7.0] * (len(table) // 4),
                hidden_reasoning=[number % 10 == 0 for number in range(len(table))],
            )
        table.to_parquet(data / f"{file}.parquet")
    return prepare(data, out)


def _source(name: str) -> pd.DataFrame:
    models = ["gpt-4o-2024-08-06", "org/own-fine-tune-3", "other", "gpt-4o"]
    rows = [
        {"dataset": name, "prompt": f"{name} prompt {number}", "model": model, "n_tokens": number + 1, "finished": None}
        for number in range(NUM_PROMPTS) for model in models
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_splits_share_no_prompts(prepared: Prepared) -> None:
    def prompts(files: list[Path]) -> set[str]:
        return {prompt for file in files for prompt in pd.read_parquet(file).prompt}

    training = prompts(list(prepared.training))
    assert len(training) > NUM_PROMPTS * len(SOURCES) // 2
    for file in (prepared.calibration, prepared.report, *prepared.set_aside.values()):
        held_out = prompts([file])
        assert held_out
        assert not held_out & training


def test_lengths_count_reasoning_and_leave_hidden_reasoning_out(prepared: Prepared) -> None:
    [file] = [file for file in prepared.training if file.stem == "rakuda_ranking"]
    table = pd.read_parquet(file).set_index(["prompt", "model"]).output_tokens
    # Rows of prompt 1: 4 (gpt-4o, snapshot), 5 (unknown, 100 thinking tokens), 6 (unknown), 7 (gpt-4o, 7 by the provider).
    assert sorted(table["rakuda_ranking prompt 1", "gpt-4o"]) == [2, 7]
    unknown = table[[model is None or pd.isna(model) for _, model in table.index]]
    assert sorted(unknown.loc["rakuda_ranking prompt 1"].iloc[0]) == [2, 102]
    # Of prompt 0 the first row is hidden.
    assert sorted(table["rakuda_ranking prompt 0", "gpt-4o"]) == [7]


def test_castillo_is_censored_at_its_limit(prepared: Prepared) -> None:
    row = pd.read_parquet(prepared.calibration).iloc[0]
    assert list(row.output_tokens) == [3, 15_000, 5]
    assert list(row.finished) == [True, False, True]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("qwen2.5-7b-instruct-gptq-int4", "Qwen/Qwen2.5-7B-Instruct"),
        ("gpt-4o-mini-2024-07-18", "gpt-4o-mini"),
        ("/data/checkpoints/gpt-4o-like", None),
        ("my-llama-3.1-8b-instruct-lora", None),
    ],
)
def test_served_models_by_name(name: str, known: str | None) -> None:
    assert served_model(name) == known


def test_scores_of_an_unseen_source(tmp_path: Path) -> None:
    opened = open_predictor(write_artifact(tmp_path / "artifact"), InferenceOptions(progress=False))
    prompts = ["word " * (3 * number + 1) for number in range(24)]
    mu = opened.predict(prompts, [None] * 24, [None] * 24).mu
    assert mu is not None
    rows = [
        {"prompt_id": str(number), "prompt": prompt, "model": model, "output_tokens": np.array([length, length + 1])}
        for number, prompt in enumerate(prompts)
        for model, length in (("gpt-4o", round(1000 * float(mu[number]))), ("other", 50 - number))
    ]  # fmt: skip
    score = score_source(_named(opened), "made up", pd.DataFrame(rows))
    assert (score.num_prompts, score.num_models) == (24, 2)
    assert score.named == pytest.approx(1.0)
    assert score.unknown == score.mean
    assert score.ceiling is not None
    assert "| made up | 24 | 2 |" in markdown([score])


def _named(opened: OpenedPredictor) -> OpenedPredictor:
    """The same, as if it knew two served models by name."""
    from dataclasses import replace

    def predict(prompts, models, temperatures):  # type: ignore[no-untyped-def]
        return opened.predict(prompts, [None] * len(prompts), temperatures)

    return replace(opened, served_models=("gpt-4", "gpt-4o"), predict=predict)
