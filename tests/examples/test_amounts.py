"""Composed training prompts that ask for amounts, and their labels."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks.lengths import compliance
from benchmarks.lengths.compliance import slope, with_amounts
from examples.pretrained import amounts
from examples.pretrained.amounts import (
    FORM_TRUST,
    Composed,
    composed_prompts,
    implied_tokens,
    labels,
    real_requests,
)
from examples.pretrained.prepare import COLUMNS, Prepared
from scheduler_core.prediction.prompt_text import conversation_text
from scheduler_core.prediction.requested_amount import requested_amount
from tests.examples.test_pretrained import save_teacher

REAL = {"en": ["Why is the sky blue?", "Describe the taste of tea"], "ja": ["空はなぜ青いのですか？"]}


@pytest.fixture(scope="module")
def prompts() -> list[Composed]:
    return composed_prompts(REAL, 1_500, np.random.default_rng(0))


def _text(prompt: Composed) -> str:
    return conversation_text(prompt.messages)


def test_prompts_are_different_and_the_same_for_a_seed(prompts: list[Composed]) -> None:
    assert len({_text(prompt) for prompt in prompts}) == len(prompts) >= 1_500
    assert composed_prompts(REAL, 1_500, np.random.default_rng(0)) == prompts
    assert not any("{" in _text(prompt) + prompt.plain for prompt in prompts)


def test_amounts_are_found_in_the_prompts_that_ask_for_them(prompts: list[Composed]) -> None:
    # Forms of text are more than the tagged ones.
    asking = [prompt for prompt in prompts if prompt.tokens is not None and prompt.weight > FORM_TRUST[0]]
    tagged = [requested_amount(_text(prompt)) is not None for prompt in asking]
    others = [requested_amount(_text(prompt)) is not None for prompt in prompts if prompt.weight == 0]
    assert len(tagged) > 750
    assert np.mean(tagged) > 0.95
    assert len(others) > 50
    assert np.mean(others) < 0.05  # forms of text as such


def test_the_teacher_reads_the_request_and_its_limit_as_one_message(prompts: list[Composed]) -> None:
    limited = [prompt for prompt in prompts if prompt.system]
    assert len(limited) > 100
    assert all(prompt.text.rstrip(".?!。？！") in prompt.plain for prompt in limited)
    assert all(prompt.plain == prompt.text for prompt in prompts if not prompt.system)


@pytest.mark.parametrize("unit", amounts._NUMBERS)
def test_more_is_longer_and_saturates(unit: str) -> None:
    numbers = sorted(set(amounts._NUMBERS[unit]))
    lengths = [implied_tokens(unit, number, "en", 30.0) for number in numbers]
    assert all(high > low for low, high in pairwise(lengths))
    assert max(lengths) < amounts.SATURATION
    assert lengths[0] < 2 * implied_tokens(unit, numbers[0], "de", 30.0) < 4 * lengths[0]


def test_labels_lie_between_the_teacher_and_the_implied_length() -> None:
    prompts = [
        Composed(0, "none", "none"),
        Composed(1, "words", "words", tokens=100.0, weight=0.8, sigma=0.3),
        Composed(2, "brief", "brief", weight=0.5, sigma=0.3, base="base", factor=0.5),
        Composed(3, "most", "most", tokens=1_000.0, weight=1.0, sigma=0.3, base="base", bound="most"),
        Composed(4, "least", "least", tokens=10.0, weight=1.0, sigma=0.3, base="base", bound="least"),
    ]
    of_base = np.full((5, 1), np.log(200.0))
    mu, sigma = labels(prompts, np.full((5, 1), np.log(400.0)), np.full((5, 1), 0.8), of_base)
    expected = [np.log(400.0), 0.2 * np.log(400.0) + 0.8 * np.log(100.0), (np.log(400.0) + np.log(100.0)) / 2]
    np.testing.assert_allclose(mu[:3, 0], expected)
    np.testing.assert_allclose(sigma[:, 0], [0.8, 0.4, 0.55, 0.3, 0.3])
    assert np.log(200.0) < mu[3, 0] < np.log(1_000.0)
    assert np.log(10.0) < mu[4, 0] < np.log(200.0)


def _prepared(folder: Path, texts: list[str]) -> Prepared:
    file = folder / "castillo_train.parquet"
    pd.DataFrame({"prompt": texts}).to_parquet(file)
    return Prepared({file: 1.0}, file, file, (), {})


def test_short_requests_without_amounts_code_or_numbers_are_tasks(tmp_path: Path) -> None:
    good = "Why is the sky blue in the evening?"
    texts = [
        good,
        "Write a Python function to sort",
        "List ten animals of the forest",
        "Hi",
        "x" * 500,
        "What is 2 + 2 in words?",
    ]
    assert real_requests(_prepared(tmp_path, texts))["en"] == [good]


def test_rows_have_the_same_served_models_for_the_prompts_of_a_task(tmp_path: Path) -> None:
    save_teacher(tmp_path, tuple(f"org/{number}" for number in range(10)))
    file = tmp_path / "rows.parquet"
    prompts = composed_prompts(REAL, 40, np.random.default_rng(0))
    amounts.amount_rows(file, tmp_path / "teacher", prompts, {"org/1": 0.6}, seed=0)
    rows = pd.read_parquet(file)
    assert tuple(rows.columns) == COLUMNS
    models = rows.groupby("prompt_id", sort=False).model.agg(tuple)
    assert models.map(len).eq(8).all()
    assert models.nunique() < len(models) / 2
    assert rows.temperature.notna().eq(rows.model == "org/1").all()
    assert rows.output_tokens.map(lambda pair: len(pair) == 2 and pair[0] <= pair[1] and pair[0] >= 1).all()
    system = [row.messages[0]["content"] for row in rows.itertuples() if row.messages is not None]
    assert all(requested_amount(text) is not None for text in set(system))
    assert len(set(system)) > 1


def test_compliance_is_the_slope_within_a_served_model() -> None:
    numbers = np.array([50, 100, 200, 400])
    rows = pd.DataFrame({
        "prompt": [f"Write {number} words" for number in numbers] * 2 + ["Why?"] * 2,
        "model": np.repeat(["short", "long"], [4, 6]),
        "log_tokens": [*(0.5 * np.log(numbers)), *(0.5 * np.log(numbers) + 2), 3.0, 4.0],
    })  # fmt: skip
    requests = with_amounts(rows)
    assert requests.unit.eq("words").all()
    assert len(requests) == 8
    value, error = slope(requests)
    assert value == pytest.approx(0.5)
    assert error < 1e-6


def test_the_slope_of_sampled_answers_is_within_the_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.parquet"
    assert compliance.main(["--prompts", str(file)]) == 0
    prompts = pd.read_parquet(file)
    assert prompts.groupby("category").size().between(compliance.MIN_AMOUNTS, 5).all()
    requests = with_amounts(prompts)
    tasks = requests.groupby("unit").category.nunique()
    assert tasks.to_dict() == dict.fromkeys(compliance.SAMPLED_UNITS, compliance.NUM_TASKS)

    # Tasks with large amounts have shorter answers; within a task the length is the square root of the amount.
    task = requests.groupby("category").log_amount.transform("mean")
    log_tokens = 6 + 0.5 * (requests.log_amount - task) - task
    samples = requests.assign(
        model="m", finish_reason="stop", output_tokens=(1e6 * np.exp(log_tokens)).astype(int)
    )
    cut = samples.assign(finish_reason="length", output_tokens=1)
    pd.concat([samples, cut]).to_parquet(tmp_path / "samples.parquet")
    assert compliance.main(["--sampled", str(tmp_path / "samples.parquet")]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"left out: {len(cut)} of {2 * len(cut)} samples")
    rows = [line.split(" | ") for line in lines if "sampled/m" in line]
    assert len(rows) == len(compliance.SAMPLED_UNITS)
    assert all(row[5].startswith("0.50 ± 0.00") for row in rows)

    for arguments in ([], ["--prompts", str(file), "--sampled", str(file)]):
        with pytest.raises(SystemExit):
            compliance.main(arguments)
