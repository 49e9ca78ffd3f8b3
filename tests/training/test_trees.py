"""The boosted-trees baseline: words, served model and temperature decide the length."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.training.checkpoints import random_checkpoint
from tests.training.data import write_rows
from training.evaluating.cli import main as evaluate
from training.evaluating.rows import EvaluationRows
from training.evaluating.trees import boosted_trees
from training.fitting.fits import FitOptions, read_fits_or_fit


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trees")
    train = write_rows(folder / "train.parquet", num_prompts=90, num_samples=8)
    return train, write_rows(folder / "test.parquet", num_prompts=40, num_samples=8, seed=1)


def test_trees_predict_unseen_samples_and_unknown_models(files):
    train, test = (EvaluationRows.of(read_fits_or_fit(str(path), FitOptions())) for path in files)
    prediction = boosted_trees(train, test)
    errors = np.abs(prediction.mu - test.fits.mu)
    assert errors.mean() < 0.3 * test.fits.mu.std()
    assert 0.1 < prediction.sigma[0] < 0.6
    assert prediction.mu.tolist() == boosted_trees(train, test).mu.tolist()


def test_evaluate_has_them_with_a_file_of_training_rows(files, tmp_path):
    train, test = map(str, files)
    checkpoint = random_checkpoint(tmp_path)
    out = tmp_path / "e.json"
    args = [str(checkpoint), "--data", test, "--json", str(out), "--ceiling", "false", "--progress", "false"]
    assert evaluate([*args, "--baselines_from", train]) == 0
    content = json.loads(out.read_text())
    trees = content["compared"]["boosted trees"]
    assert trees["crps_log_tokens"] < content["baselines"]["per_model"]["crps_log_tokens"]
