"""Sets of samples: their file, their card, and the trace that is made of them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.stats

from data_gen.card import dispersion_of, write_card
from data_gen.prompts import Message, Prompt
from data_gen.samples import SCHEMA, TRACE_SCHEMA, prompt_sha256, read_samples, write_samples
from examples.quickstart.steps import SHIPPED_SAMPLES
from examples.quickstart.tables import join_samples, trace_of, write_trace
from scheduler_core.errors import InputError
from scheduler_core.simulator.trace import load_trace
from scheduler_core.simulator.workloads.arrivals import Arrivals
from tests.training.data import sample_row, to_table

SAMPLE = sample_row(prompt_id="a", prompt="Größe?", temperature=0.7)
FULL = SAMPLE | {
    "sample_index": 1, "prompt": None, "prompt_sha256": "0" * 64, "messages": [{"role": "user", "content": "x"}],
    "dataset": "set", "temperature": None, "max_tokens": None, "prompt_tokens": None, "output_tokens": 0,
    "finish_reason": "error", "error": "timeout: after 3 s", "queue_s": 0.5, "ttft_s": 1.5, "total_s": 2.5, "text": "so far",
}  # fmt: skip


def test_every_column_comes_back_as_it_went_in(tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    write_samples(path, to_table([SAMPLE, FULL]))
    table = read_samples(path)
    assert table.schema.equals(SCHEMA, check_metadata=True)
    empty = dict.fromkeys(SCHEMA.names)
    assert table.to_pylist() == [empty | SAMPLE, empty | FULL]


def test_the_shipped_set_is_read_and_joins_new_ones(tmp_path: Path) -> None:
    shipped = read_samples(SHIPPED_SAMPLES)
    assert shipped.schema.equals(SCHEMA)
    write_samples(tmp_path / "new.parquet", to_table([SAMPLE, FULL]))
    assert join_samples([SHIPPED_SAMPLES, tmp_path / "new.parquet"]).num_rows == shipped.num_rows + 2
    with pytest.raises(InputError, match="'a'.*each \\(prompt_id, model, sample_index\\) once"):
        join_samples([tmp_path / "new.parquet", SHIPPED_SAMPLES, tmp_path / "new.parquet"])


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    write_samples(path, to_table([SAMPLE]))
    table = pq.read_table(path)
    newer = table.replace_schema_metadata({b"tailcast.schema": b"samples/9"})
    tables = {"schema: got 'samples/9'; allowed: samples/2 or older": newer}
    tables["also finish_reason"] = table.drop_columns(["finish_reason"])
    for name, values in (("output_tokens", ["many"]), ("finish_reason", [None])):
        wrong = table.set_column(table.column_names.index(name), name, pa.array(values, pa.string()))
        tables[f"{name}|columns of the documented types"] = wrong
    for message, wrong in tables.items():
        pq.write_table(wrong, path)
        with pytest.raises(InputError, match=message):
            read_samples(path)


def test_the_hash_of_a_prompt_is_that_of_what_is_sent() -> None:
    assert prompt_sha256(Prompt("a", "hello")) == hashlib.sha256(b"hello").hexdigest()
    chat = Prompt("a", "hello", messages=(Message("system", "ß"), Message("user", "hello")))
    assert prompt_sha256(chat) == hashlib.sha256('[["system", "ß"], ["user", "hello"]]'.encode()).hexdigest()
    assert prompt_sha256(Prompt("b", "half \ud83d")) != prompt_sha256(Prompt("b", "half ?"))


def test_samples_become_requests_once_each(tmp_path: Path) -> None:
    rows = [sample(number // 3, number % 3, 1 + number) for number in range(12)]
    rows[4] |= {"output_tokens": 0, "finish_reason": "error"}
    samples = to_table(rows)
    trace = trace_of(samples, Arrivals(rate_rps=5.0), 1, {"p1", "p2"})
    assert trace.schema.equals(TRACE_SCHEMA)
    assert sorted(trace.column("output_tokens").to_pylist()) == [4, 6, 7, 8, 9]
    assert len(set(trace.column("request_id").to_pylist())) == 5
    write_trace(tmp_path / "t.parquet", trace)
    requests = load_trace(tmp_path / "t.parquet").requests
    assert [row.arrival_s for row in requests] == trace.column("arrival_s").to_pylist()
    with pytest.raises(InputError, match="at least one finished output"):
        trace_of(samples, Arrivals(), 1, {"unknown"})


def sample(prompt: int, index: int, tokens: int, **changes: Any) -> dict[str, Any]:
    values = {"prompt_id": f"p{prompt}", "category": f"k{prompt % 2}", "output_tokens": tokens}
    values |= {"sample_index": index, "finish_reason": "length" if tokens == 100 else "stop"}
    return sample_row(**values | changes)


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
    assert {name: summary["mean"] for name, summary in content["measures"].items()} == pytest.approx(expected)


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
    with pytest.raises(InputError, match="not of a file"):
        write_card(tmp_path / "s.parquet", tmp_path / "file")
    assert not (tmp_path / "card").exists()
