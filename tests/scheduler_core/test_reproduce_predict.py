"""Heads on frozen features, for TIE's studies: each family is trained as such."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from benchmarks.distribution_heads import HEADS, Rows
from benchmarks.reproduce.predict import BASELINES, head_columns, prediction_table
from benchmarks.reproduce.tie_requests import COLUMNS, FAMILIES
from training.data import SampleLengths
from training.evaluating.predictors import PredictedRows


def rows_of(num: int, seed: int) -> Rows:
    """Prompts with one feature, the mean of ln length, and ten log-normal lengths each."""
    rng = np.random.default_rng(seed)
    mean = rng.normal(5.0, 1.0, num)
    tokens = np.exp(mean[:, None] + 0.3 * rng.standard_normal((num, 10))).astype(np.float32)
    ones = torch.ones(num, 10, dtype=torch.bool)
    return Rows(
        features=torch.tensor(mean[:, None] - 5.0, dtype=torch.float32),
        prompt=torch.arange(num),
        model=torch.ones(num, dtype=torch.int64),
        temperature=torch.full((num,), 0.7),
        samples=SampleLengths(torch.from_numpy(tokens), ones, ones, torch.full((num,), torch.inf)),
        weight=torch.ones(num),
        table=pd.DataFrame(
            {
                "prompt_id": [f"p{row}" for row in range(num)],
                "model": "m",
                "dataset": "d",
                "prompt_tokens": 10,
                "output_tokens": tokens.astype(int).tolist(),
            }
        ),
    )


def test_each_head_is_trained_by_its_own_loss() -> None:
    report = rows_of(200, 2)
    heads = BASELINES | {name: HEADS[name] for name in FAMILIES}
    columns, likelihood = head_columns(heads, rows_of(6000, 0), rows_of(200, 1), report, ["m"])
    mean = np.log(np.array(report.table.output_tokens.tolist())).mean(axis=1)
    for scores in (columns["regression_tokens"], columns["rank"], np.array(columns["log-normal"])[:, 0]):
        assert pd.Series(scores).corr(pd.Series(mean), method="kendall") > 0.8
    nu = {name: np.array(columns[name])[:, 2] for name in likelihood}
    assert set(nu["log-t, nu 3.5"]) == {3.5}
    assert set(nu["log-normal"]) == {1000.0}
    assert np.median(nu["log-t, free nu"]) > 5.0  # of log-normal lengths
    assert likelihood["log-normal"] > likelihood["log-t, nu 3.5"]
    num = len(report.table)
    shipped = PredictedRows(mu=np.full(num, 5.0), sigma=np.full(num, 0.4), sigma_within=np.full(num, 0.3))
    table = prediction_table(report.table.assign(**columns), shipped)
    assert table.column_names == list(COLUMNS)
    assert table["within"][0].as_py() == pytest.approx([5.0, 0.3, 3.5])
    assert table["log-normal"][0].as_py() == columns["log-normal"][0]
