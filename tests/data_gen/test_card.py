from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from data_gen.card.page import write_card
from data_gen.card.rows import read_card_rows
from data_gen.card.statistics import by_prompt_length, dispersion_of, survival
from data_gen.samples import write_samples
from scheduler_core.errors import InputError
from tests.data_gen.sample_rows import SampleRow, to_table


def sample(prompt: int, index: int, tokens: int, **changes: Any) -> SampleRow:
    values: dict[str, Any] = {
        "prompt_id": f"p{prompt}",
        "prompt": "Hi",
        "category": f"k{prompt % 2}",
        "model": "m",
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": 0,
        "sample_index": index,
        "max_tokens": 100,
        "prompt_tokens": 4 * (prompt + 1),
        "output_tokens": tokens,
        "finish_reason": "length" if tokens == 100 else "stop",
        "engine": "vllm",
        "engine_version": "1",
        "run_id": "r",
    }
    return SampleRow(**values | changes)


def write(path: Path, samples: list[SampleRow]) -> Path:
    write_samples(path, to_table(samples))
    return path


def some(num_prompts: int = 6, num_samples: int = 10, seed: int = 0) -> list[SampleRow]:
    rng = np.random.Generator(np.random.PCG64(seed))
    drawn = np.minimum(np.exp(rng.normal(3, 1, (num_prompts, num_samples))).astype(int) + 1, 100)
    return [sample(p, i, int(drawn[p, i])) for p in range(num_prompts) for i in range(num_samples)]


def test_card_counts_what_is_in_the_file(tmp_path: Path) -> None:
    failed = [
        sample(0, 90, 0, finish_reason="error", error="http_500: no"),
        sample(1, 90, 0, finish_reason="error", error="http_500: again"),
        sample(1, 91, 0, finish_reason="error", error="timeout: 60 s"),
    ]
    samples = [*some(), *failed]
    card = write_card(write(tmp_path / "s.parquet", samples), tmp_path / "card")
    cut = sum(s.finish_reason == "length" for s in samples)
    assert card["counts"]["num_outputs"] == 60
    assert card["counts"]["num_prompts"] == 6
    assert card["counts"]["finish_reasons"] == {"stop": 60 - cut, "length": cut, "error": 3}
    assert card["max_tokens"] == [{"max_tokens": "100", "num_rows": 63, "num_truncated": cut}]
    assert card["failures"]["http_500"] == {"num_rows": 2, "example": "http_500: no"}
    assert card["failures"]["timeout"]["num_rows"] == 1
    lengths = [s.output_tokens for s in samples if s.finish_reason != "error"]
    assert card["length"]["p90"] == pytest.approx(np.percentile(lengths, 90))
    assert {row["name"]: row["num_outputs"] for row in card["categories"]} == {"k0": 30, "k1": 30}
    assert json.loads((tmp_path / "card" / "card.json").read_text()) == json.loads(json.dumps(card))
    for name in ("lengths.png", "survival.png", "dispersion.png"):
        assert (tmp_path / "card" / name).read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "card" / "card.md").read_text()
    assert "| http_500 | 2 | http_500: no |" in page
    assert "a skewness cannot exceed 2.67" in page
    assert "![dispersion.png](dispersion.png)" in page
    assert "Synthetic" not in page


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 10_000), min_size=1, max_size=25), min_size=1, max_size=6),
    st.integers(0, 99),
)
def test_spread_is_what_a_loop_over_prompts_finds(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[int]], seed: int
) -> None:
    rows = [
        sample(p, i, n, max_tokens=None, finish_reason="stop")
        for p, g in enumerate(groups)
        for i, n in enumerate(g)
    ]
    shuffled = [rows[i] for i in np.random.Generator(np.random.PCG64(seed)).permutation(len(rows))]
    found = dispersion_of(read_card_rows(write(tmp_path_factory.mktemp("s") / "s.parquet", shuffled)))
    kept = [np.array(sorted(group), float) for group in groups if len(group) >= 3]
    assert found.num_skipped == len(groups) - len(kept)
    expected = []
    for group in kept:
        size = len(group) / 10
        complete = int(size)
        longest = group[len(group) - complete :].sum() + (size - complete) * group[len(group) - complete - 1]
        constant = len(set(group)) == 1
        expected.append(
            (
                group.std(ddof=1) / group.mean(),
                np.percentile(group, 90) / np.median(group),
                np.percentile(group, 99) / np.median(group),
                longest / group.sum(),
                np.nan if constant else scipy.stats.skew(group),
            )
        )
    got = np.array(list(found.measures.values())).T.reshape(-1, 5)
    order, wanted = np.lexsort(got.T[::-1]), np.array(expected).reshape(-1, 5)
    np.testing.assert_allclose(got[order], wanted[np.lexsort(wanted.T[::-1])], rtol=1e-6, atol=1e-9)


def test_survival_takes_truncated_outputs_for_at_least_that_long() -> None:
    at, alive = survival(np.array([1, 2, 2, 3, 4], np.int32), np.array([False, False, True, False, True]))
    # Kaplan-Meier by hand: 4/5, then 3/4 of that, then 1/2 of that; the last is truncated, so nothing ends at 4.
    assert at.tolist() == [1, 2, 3]
    assert alive == pytest.approx([0.8, 0.6, 0.3])


def test_the_list_form_gives_the_same_card(tmp_path: Path) -> None:
    samples = some()
    by_prompt: dict[str, list[SampleRow]] = {}
    for item in samples:
        by_prompt.setdefault(item.prompt_id, []).append(item)
    rows = [
        {
            "prompt_id": name,
            "model": "m",
            "max_tokens": 100,
            "category": group[0].category,
            "output_tokens": [item.output_tokens for item in group],
            "finished": [item.finish_reason == "stop" for item in group],
        }
        for name, group in by_prompt.items()
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "lists.parquet")
    listed = write_card(tmp_path / "lists.parquet", tmp_path / "a", figures=False)
    long = write_card(write(tmp_path / "s.parquet", samples), tmp_path / "b", figures=False)
    for part in ("length", "categories", "max_tokens"):
        assert listed[part] == long[part]
    for name, found in listed["dispersion"]["measures"].items():
        assert found == pytest.approx(long["dispersion"]["measures"][name])
    assert not (tmp_path / "a" / "lengths.png").exists()
    pq.write_table(pa.Table.from_pylist(rows).drop_columns(["finished"]), tmp_path / "open.parquet")
    unknown = write_card(tmp_path / "open.parquet", tmp_path / "c", figures=False)
    assert unknown["counts"]["finish_reasons"] == {"unknown": 60}


def test_groups_are_of_one_prompt_model_and_setting(tmp_path: Path) -> None:
    mixed = [sample(0, i, 10 + i, temperature=1.0 if i % 2 else 0.5, model=f"m{i % 3}") for i in range(18)]
    card = write_card(write(tmp_path / "s.parquet", mixed), tmp_path / "card", figures=False)
    assert card["counts"]["num_groups"] == 6
    assert card["counts"]["num_prompts"] == 1
    assert card["dispersion"]["num_groups"] == 6
    assert len(card["settings"]) == 6


def test_extreme_sets_have_cards_too(tmp_path: Path) -> None:
    one = write_card(write(tmp_path / "one.parquet", [sample(0, 0, 1, prompt_tokens=None)]), tmp_path / "one")
    assert one["dispersion"]["num_groups"] == 0
    assert one["prompt_length"] == {}
    same = write_card(
        write(tmp_path / "same.parquet", [sample(0, i, 100) for i in range(5)]), tmp_path / "same"
    )
    assert same["dispersion"]["num_constant"] == 1
    assert same["dispersion"]["measures"]["skewness"] == {}
    assert same["prompt_length"]["spearman"] is None
    fake = [sample(0, i, 5 + i, engine="synthetic") for i in range(4)]
    write_card(write(tmp_path / "fake.parquet", fake), tmp_path / "fake", figures=False)
    assert "no language model wrote these" in (tmp_path / "fake" / "card.md").read_text()


def test_prompt_length_relation(tmp_path: Path) -> None:
    rising = [sample(p, 0, 5 + p) for p in range(20)]
    found = by_prompt_length(read_card_rows(write(tmp_path / "s.parquet", rising)))
    assert found["spearman"] == pytest.approx(1.0)
    assert [row["from"] for row in found["bins"]] == [4, 8, 16, 32, 64]
    assert sum(row["num_outputs"] for row in found["bins"]) == 20


def test_bad_files_are_named(tmp_path: Path) -> None:
    bad = write(tmp_path / "s.parquet", [sample(0, 0, 0, finish_reason="error", error="x: y")])
    with pytest.raises(InputError, match="at least one output"):
        write_card(bad, tmp_path / "card")
    pq.write_table(pa.table({"prompt_id": ["a"]}), tmp_path / "n.parquet")
    with pytest.raises(InputError, match="also output_tokens"):
        write_card(tmp_path / "n.parquet", tmp_path / "card")
    pq.write_table(pa.table({"prompt_id": ["a"], "output_tokens": [3]}), tmp_path / "m.parquet")
    with pytest.raises(InputError, match="also finish_reason"):
        write_card(tmp_path / "m.parquet", tmp_path / "card")
    with pytest.raises(InputError, match="a file stands there"):
        write_card(write(tmp_path / "g.parquet", some()), tmp_path / "m.parquet")
    assert not (tmp_path / "card").exists()
