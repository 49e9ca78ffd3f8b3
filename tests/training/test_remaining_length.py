"""The study of remaining lengths on a tiny predictor."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.remaining_length import main, study
from scheduler_core.errors import InputError
from tests.training.checkpoints import random_checkpoint, write_drawn_answers
from tests.training.data import write_lists
from training.evaluating.predictors import PredictedRows
from training.evaluating.rows import EvaluationRows
from training.fitting.fits import FitOptions, read_fits_or_fit


def test_it_runs_on_a_checkpoint_and_writes_its_table(tmp_path, capsys):
    checkpoint = random_checkpoint(tmp_path)
    data = write_drawn_answers(tmp_path / "x.parquet", checkpoint, max_tokens=500)
    main([str(checkpoint), "--data", str(data), "--at", "0,20,100", "--json", str(tmp_path / "r.json")])
    printed = capsys.readouterr().out
    table = json.loads((tmp_path / "r.json").read_text())
    assert [row["generated_tokens"] for row in table] == [0, 20, 100]
    assert printed.count("\n| 20 |") == 1
    counts = [row["num_answers"] for row in table]
    assert counts == sorted(counts, reverse=True)
    # before the first token nothing has been learnt: both are the same prediction
    first = table[0]["mae"]
    assert first["conditional mean"] == pytest.approx(first["static mean"], rel=1e-6)
    assert first["conditional median"] == pytest.approx(first["static median"], rel=1e-6)


def test_with_the_true_distributions_the_conditional_median_is_the_best(tmp_path):
    rng = np.random.default_rng(0)
    mu, sigma = rng.uniform(4, 5.5, 200), rng.uniform(0.3, 0.9, 200)
    drawn = np.exp(mu[:, None] + sigma[:, None] * rng.standard_t(3.5, (200, 30)))
    lengths = np.clip(np.rint(np.minimum(drawn, 1e6)), 1, None).astype(int)
    path = write_lists(tmp_path / "x.parquet", lengths.tolist())
    rows = EvaluationRows.of(read_fits_or_fit(path, FitOptions()))
    for row in study(rows, PredictedRows(mu, sigma, 3.5), [50, 150]):
        best = row["mae"]["conditional median"]
        for name in ("static mean", "static median", "conditional mean", "bins"):
            assert best < row["mae"][name] * 1.001
    with pytest.raises(InputError, match="length head"):
        study(rows, PredictedRows(rank=mu), [0])
