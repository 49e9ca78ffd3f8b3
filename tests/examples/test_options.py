"""Training rows whose requests have options of reasoning or formats."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

from examples.pretrained.options import (
    NUM_SETTINGS,
    format_settings,
    option_rows,
    reasoning_settings,
)

LENGTHS = np.array([200, 400])
#: Efforts and verbosities from short to long outputs.
ORDER = ("none", "minimal", "low", "medium", "high", "xhigh")


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    table = pd.DataFrame(
        {
            "dataset": np.where(np.arange(400) % 2, "Dolly", "fasteval"),
            "prompt_id": [str(number // 2) for number in range(400)],
            "prompt": [f"prompt {number // 2} " * (number // 40 + 1) for number in range(400)],
            "messages": None,
            "model": ["a", None] * 200,
            "temperature": [0.6 if number < 200 else np.nan for number in range(400)],
            "output_tokens": [np.array([50, number + 1]) for number in range(400)],
            "finished": [np.array([True, False])] * 400,
        }
    )
    return option_rows(table, 1, 60, 60)


def _options(row: object) -> str:
    return str(row.messages[0]["content"])  # type: ignore[attr-defined]


def test_prompts_come_with_several_settings_that_a_predictor_can_tell_apart(rows: pd.DataFrame) -> None:
    rows = rows.assign(options=[_options(row) for row in rows.itertuples()])
    settings = rows.groupby([rows.prompt, rows.prompt_id.str.contains("format")]).options.nunique()
    assert settings.max() == NUM_SETTINGS
    assert settings.gt(1).mean() > 0.7
    kinds = {re.sub(r"[\d.]+", "N", text.split("]")[0].split(" ", 1)[0]) for text in rows.options}
    assert {"[effort", "[thinking", "[verbosity", "[size"} <= kinds
    assert rows.output_tokens.map(min).ge(1).all()
    assert all(len(row.output_tokens) == len(row.finished) for row in rows.itertuples())


@pytest.mark.parametrize("dataset", ["Dolly", "aiw", "Mbpp"])
def test_more_reasoning_is_longer(dataset: str) -> None:
    rng = np.random.default_rng(0)
    options = set()
    for _ in range(60):
        settings = reasoning_settings(dataset, rng)
        [name] = {key for each in settings for key in each.options}
        options.add(name)
        values = [each.options[name] for each in settings]
        if name in ("reasoning_effort", "verbosity"):
            values = [ORDER.index(value) for value in values]
        elif name == "chat_template_kwargs":
            values = [value["enable_thinking"] for value in values]
        lengths = [each.lengths(LENGTHS).sum() for each in settings]
        assert [lengths[at] for at in np.argsort(values)] == sorted(lengths)
        if name != "verbosity":
            assert min(lengths) >= LENGTHS.sum()
    assert len(options) == 4


def test_formats_are_as_long_as_they_allow() -> None:
    rng = np.random.default_rng(0)
    short, medians = [], []
    for _ in range(200):
        for each in format_settings("Dolly", rng):
            length = float(np.exp(np.log(each.lengths(LENGTHS)).mean()))
            medians.append(length)
            if "guided_choice" in each.options:
                short.append(length)
    assert max(short) < 12
    assert min(medians) < 5
    assert 300 < max(medians) < 3_000
