from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from data_gen.card import dispersion_of, write_card
from data_gen.samples import write_samples
from scheduler_core.errors import InputError
from tests.data_gen.sample_rows import sample_row, to_table


def sample(prompt: int, index: int, tokens: int, **changes: Any) -> dict[str, Any]:
    values = {
        "prompt_id": f"p{prompt}",
        "category": f"k{prompt % 2}",
        "sample_index": index,
        "output_tokens": tokens,
    }
    return sample_row(**values | {"finish_reason": "length" if tokens == 100 else "stop"} | changes)


def card_of(folder: Path, samples: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """The card and its page."""
    folder.mkdir(exist_ok=True)
    write_samples(folder / "s.parquet", to_table(samples))
    card = write_card(folder / "s.parquet", folder / "card")
    assert json.loads((folder / "card" / "card.json").read_text()) == json.loads(json.dumps(card))
    assert (folder / "card" / "survival.png").read_bytes().startswith(b"\x89PNG")
    return card, (folder / "card" / "card.md").read_text()


def some(num_prompts: int = 6, num_samples: int = 10) -> list[dict[str, Any]]:
    rng = np.random.Generator(np.random.PCG64(0))
    drawn = np.minimum(np.exp(rng.normal(3, 1, (num_prompts, num_samples))).astype(int) + 1, 100)
    return [sample(p, i, int(drawn[p, i])) for p in range(num_prompts) for i in range(num_samples)]


def test_card_counts_what_is_in_the_file(tmp_path: Path) -> None:
    failed = [sample(1, 90 + i, 0, finish_reason="error", error="http_500: no") for i in range(3)]
    samples = [*some(), *failed]
    card, page = card_of(tmp_path, samples)
    lengths = [s["output_tokens"] for s in samples if s["finish_reason"] != "error"]
    truncated = lengths.count(100)
    assert card["num_prompts"] == 6
    assert card["finish_reasons"] == {"stop": 60 - truncated, "length": truncated, "error": 3}
    (total,) = card["lengths"]["all"]
    assert total["p90"] == pytest.approx(np.percentile(lengths, 90))
    assert total["truncated_fraction"] == pytest.approx(truncated / 60)
    (setting,) = card["lengths"]["settings"]
    assert (setting["max_tokens"], setting["num_outputs"]) == (100, 60)
    assert "| category k1 | 30 |" in page
    assert "Synthetic" not in page


def test_dispersion_is_within_each_prompt() -> None:
    groups = {0: [1, 2, 2, 3, 4, 5, 6, 7, 8, 40], 1: [7, 7, 7], 2: [5, 6]}
    rows = [sample(p, i, n, finish_reason="stop") for p, group in groups.items() for i, n in enumerate(group)]
    content = dispersion_of(to_table(rows[::-1]).sort_by("output_tokens"))
    assert (content["num_groups"], content["num_skipped"], content["max_samples"]) == (2, 1, 10)
    first = np.array(groups[0], float)
    # Of the constant group all are 0 or 1, the longest tenth a tenth, and there is no skewness.
    expected = {
        "cv": (first.std(ddof=1) / first.mean()) / 2,
        "p90_p50": (np.percentile(first, 90) / 4.5 + 1) / 2,
        "p99_p50": (np.percentile(first, 99) / 4.5 + 1) / 2,
        "top_decile_fraction": (40 / 78 + 0.1) / 2,
        "skewness": scipy.stats.skew(first),
    }
    measures = {name: summary["mean"] for name, summary in content["measures"].items()}
    assert measures == pytest.approx(expected)


def test_extreme_sets_have_cards_too(tmp_path: Path) -> None:
    one, _ = card_of(tmp_path / "one", [sample(0, 0, 1)])
    assert one["dispersion"] == {"num_groups": 0, "num_skipped": 1}
    same, _ = card_of(tmp_path / "same", [sample(0, i, 100) for i in range(5)])
    assert same["dispersion"]["measures"]["skewness"] == {}
    _, page = card_of(tmp_path / "synthetic", [sample(0, i, 5 + i, engine="synthetic") for i in range(4)])
    assert "no language model wrote these" in page


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least one output"):
        card_of(tmp_path, [sample(0, 0, 0, finish_reason="error", error="x: y")])
    write_samples(tmp_path / "s.parquet", to_table(some()))
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="a file stands there"):
        write_card(tmp_path / "s.parquet", tmp_path / "file")
    assert not (tmp_path / "card").exists()
