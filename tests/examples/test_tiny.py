"""Distillation of the tiny predictor: the teacher's predictions, the network in torch and in numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from examples.pretrained.distillation import made_up_prompts, teacher_predictions
from examples.pretrained.tiny import (
    Prompts,
    TinyNetwork,
    bags_of,
    calibrated,
    make_tokenizer,
    stored_targets,
    train,
)
from predictors.runtime import ArtifactRuntime, open_runtime
from predictors.tiny import WEIGHTS, TinyModel
from predictors.tokenizer import PromptTokenizer

PROMPTS = [
    "Name three rivers of Europe.",
    "Write an essay about the sea and its tides.",
    "def f(x):\n    return 3",
]


@pytest.fixture(scope="module")
def teacher() -> ArtifactRuntime:
    return open_runtime("pretrained")


def test_the_teacher_says_what_its_artifact_predicts(teacher: ArtifactRuntime) -> None:
    names = teacher.artifact.manifest.served_models
    found = teacher_predictions(teacher, PROMPTS)
    assert found.shape == (3, len(names), 2)
    for name in ("gpt-4o", "gpt-4"):
        rows = teacher.predict(PROMPTS, [name] * 3)
        np.testing.assert_allclose(found[:, names.index(name), 0], rows.mu, atol=1e-4)
        np.testing.assert_allclose(found[:, names.index(name), 1], rows.sigma, atol=1e-4)


def test_predictions_are_kept_for_the_same_prompts(teacher: ArtifactRuntime, tmp_path: Path) -> None:
    file = tmp_path / "targets.npz"
    first = stored_targets(file, teacher, PROMPTS[:1])
    written = file.stat().st_mtime_ns
    np.testing.assert_array_equal(stored_targets(file, teacher, PROMPTS[:1]), first)
    assert file.stat().st_mtime_ns == written
    assert len(stored_targets(file, teacher, PROMPTS)) == 3


def test_made_up_prompts_repeat_and_consist_of_words_of_the_given_ones() -> None:
    made = made_up_prompts(PROMPTS, np.ones(3), 50, seed=1)
    assert made == made_up_prompts(PROMPTS, np.ones(3), 50, seed=1)
    assert len(set(made)) > 20
    words = {word for one in PROMPTS for word in one.split()}
    # Two pieces may meet without a space.
    assert {word for one in made for word in one.split()} <= words | {a + b for a in words for b in words}


def test_numpy_calculates_what_torch_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    network = TinyNetwork(40, torch.randn(5, 2))
    with torch.no_grad():
        for table in network.tables:
            steps = torch.randint(-127, 128, table.weight.shape).float()
            steps[:, 0] = 127  # so that int8 has them exactly
            table.weight.copy_(steps / 300)
        for values in (network.norm.weight, network.norm.bias, network.norm.running_mean):
            values.normal_()
        network.norm.running_var.uniform_(0.5, 2.0)
    np.savez(tmp_path / WEIGHTS, **network.eval().arrays())
    model = TinyModel(tmp_path / WEIGHTS)
    prompts = [rng.integers(0, 40, size) for size in (0, 1, 2, 3, 4, 50, 512)]
    with torch.no_grad():
        expected = network(*bags_of(prompts)).numpy()
    for ids, outputs in zip(prompts, expected, strict=True):
        for number, (mu, log_sigma) in enumerate(outputs, 1):
            found = model(ids, number)
            np.testing.assert_allclose([found[0], np.log(found[1])], [mu, log_sigma], atol=0.02)
        unknown = model(ids, 0)
        np.testing.assert_allclose([unknown[0], np.log(unknown[1])], outputs.mean(0), atol=0.02)


def test_the_tokenizer_has_words_of_two_prompts_lines_and_single_characters() -> None:
    tokenizer = make_tokenizer(["Ab 12,\n\n東京", "Ab 12,\n\n京都", "Ab cd"])
    assert tokenizer.encode("Ab cd 12, \n\n京").tokens == ["Ab", "[UNK]", "12", ",", "\n\n", "京"]


def test_training_learns_the_words_of_long_outputs_and_calibration_their_true_length(tmp_path: Path) -> None:
    prompts = [f"{('yes', 'essay')[number % 2]} {number % 7}" for number in range(200)]
    mu = np.array([3.0 + 3 * (number % 2) for number in range(200)], dtype=np.float32)
    targets = np.stack([np.stack([mu, np.full(200, 0.5, np.float32)], axis=-1)] * 2, axis=1)
    make_tokenizer(prompts).save(str(tmp_path / "tokenizer.json"))
    tokenizer = PromptTokenizer(tmp_path / "tokenizer.json", max_length=8, truncation_side="middle")
    columns = {"prompt": prompts, "model": ["a"] * 200, "finished": [[True, True]] * 200}
    parts = []
    for name, shift in (("training", 0.0), ("calibration", 1.0)):
        lengths = [np.round(np.exp(value + shift + np.array([-0.4, 0.4]))) for value in mu]
        pd.DataFrame(columns | {"output_tokens": lengths}).to_parquet(tmp_path / name)
        parts.append(Prompts.of(prompts, tokenizer, targets, {tmp_path / name: 1.0}, ["a", "b"]))
    data, calibration = parts
    content = train(data, tokenizer.vocabulary_size, epochs=30, seed=0).arrays()
    np.savez(tmp_path / WEIGHTS, **content)
    before = TinyModel(tmp_path / WEIGHTS)
    np.savez(tmp_path / WEIGHTS, **calibrated(content, before, calibration, nu=3.5))
    after = TinyModel(tmp_path / WEIGHTS)
    for served_model in (0, 1):
        (short, _), (long, _) = (before(data.tokens[number], served_model) for number in (0, 1))
        assert long - short == pytest.approx(3.0, abs=0.5)
        assert after(data.tokens[1], served_model)[0] - long == pytest.approx(1.0, abs=0.2)
