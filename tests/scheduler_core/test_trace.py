"""Traces in three formats, and the wrong ones named by row, column and value."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scheduler_core.errors import InputError
from scheduler_core.predictions import LengthPrediction
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.step_time import saturation_rate_rps
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import load_trace
from tests.scheduler_core.helpers import random_trace

GOOD: list[dict[str, Any]] = [
    {"request_id": "b", "arrival_s": 2.5, "prompt_tokens": 7, "output_tokens": 3, "max_tokens": 9,
     "prompt": "Hi, you\n\"there\"", "prompt_id": "p1", "mu": 1.0, "sigma": 0.5, "nu": 3.5},
    {"request_id": "a", "arrival_s": 0.5, "prompt_tokens": 1, "output_tokens": 9, "max_tokens": 9,
     "prompt": "Hö", "prompt_id": "p2", "mu": None, "sigma": None, "nu": None},
]  # fmt: skip


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".csv":
        with open(path, "w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_all_formats_give_the_same_requests_sorted_by_arrival(suffix: str, tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path / f"trace{suffix}", GOOD))
    first, second = trace.requests
    assert (first.request_id, second.request_id) == ("a", "b")
    assert (second.arrival_s, second.prompt_tokens, second.output_tokens, second.max_tokens) == (2.5, 7, 3, 9)
    assert (second.prompt, second.prompt_id) == ('Hi, you\n"there"', "p1")
    assert first.prompt == "Hö"
    assert second.prediction == LengthPrediction(1.0, 0.5, 3.5)
    assert first.prediction is None
    assert len(trace.sha256) == 64


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("output_tokens", 0),
        ("output_tokens", 10),
        ("output_tokens", 2.5),
        ("max_tokens", -4),
        ("prompt_tokens", 0),
        ("arrival_s", -1.0),
        ("arrival_s", float("nan")),
        ("arrival_s", None),
        ("request_id", ""),
        ("request_id", "b"),
        ("mu", float("inf")),
        ("mu", 3.0),
    ],
)
def test_a_wrong_value_is_named_with_row_and_column(
    suffix: str, column: str, value: object, tmp_path: Path
) -> None:
    rows = [GOOD[0], {**GOOD[1], column: value}]
    with pytest.raises(InputError, match="row 2") as caught:
        load_trace(write(tmp_path / f"trace{suffix}", rows))
    assert column in str(caught.value) or (column == "mu" and "sigma" in str(caught.value))


@pytest.mark.parametrize(
    ("column", "value"), [("output_tokens", "many"), ("output_tokens", True), ("prompt", 5)]
)
def test_a_value_of_the_wrong_kind_is_named(column: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({**GOOD[0], column: value}) + "\n")
    with pytest.raises(InputError, match=f"row 1 column {column}"):
        load_trace(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_missing_column_is_named(suffix: str, tmp_path: Path) -> None:
    rows = [{name: value for name, value in row.items() if name != "max_tokens"} for row in GOOD]
    with pytest.raises(InputError, match="row 1 column max_tokens"):
        load_trace(write(tmp_path / f"trace{suffix}", rows))


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize("gone", ["column", "value"])
def test_requests_without_a_cap_get_the_default(suffix: str, gone: str, tmp_path: Path) -> None:
    def uncapped(row: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in row.items() if name != "max_tokens"}

    rows = [uncapped(row) for row in GOOD]
    if gone == "value":
        rows = [GOOD[0], uncapped(GOOD[1]) | {"max_tokens": None}]
    path = write(tmp_path / f"trace{suffix}", rows)
    caps = {row.request_id: row.max_tokens for row in load_trace(path, default_max_tokens=40).requests}
    assert caps == {"a": 40, "b": 9 if gone == "value" else 40}
    with pytest.raises(
        InputError, match=r"column output_tokens: got '?9'?; allowed: .* default_max_tokens = 8$"
    ):
        load_trace(path, default_max_tokens=8)
    with pytest.raises(
        InputError, match="column max_tokens: .*; or default_max_tokens for requests without max_tokens$"
    ):
        load_trace(path)


def test_a_default_cap_does_not_excuse_a_wrong_one(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", [{**GOOD[0], "max_tokens": 0}])
    with pytest.raises(InputError, match="column max_tokens: got 0"):
        load_trace(path, default_max_tokens=40)


def test_arrivals_may_be_missing_if_they_are_drawn(tmp_path: Path) -> None:
    rows = [{name: value for name, value in row.items() if name != "arrival_s"} for row in GOOD]
    path = write(tmp_path / "trace.jsonl", rows)
    with pytest.raises(InputError, match="arrival_s"):
        load_trace(path)
    assert [row.request_id for row in load_trace(path, need_arrivals=False).requests] == ["b", "a"]


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("trace.jsonl", '{"request_id": "a", "arri', "line 1"),
        ("trace.jsonl", "[1, 2]\n", "line 1"),
        ("trace.jsonl", "\n\n", "at least one row"),
        ("trace.jsonl", "", "not empty"),
        ("trace.jsonl", b"\xff\xfe\x00", "UTF-8"),
        ("trace.csv", "request_id,arrival_s\n", "at least one row"),
        ("trace.csv", '"unfinished\n', "CSV row"),
        ("trace.parquet", "PAR1 but not really", "readable Parquet"),
        ("trace.xlsx", "whatever", "jsonl, .csv or .parquet"),
    ],
)
def test_a_broken_file_is_named(name: str, content: str | bytes, named: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=named):
        load_trace(tmp_path / name)


def test_a_truncated_parquet_file_is_named(tmp_path: Path) -> None:
    whole = write(tmp_path / "trace.parquet", GOOD).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="readable Parquet"):
        load_trace(tmp_path / "cut.parquet")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="existing file"):
        load_trace(tmp_path / "none.jsonl")


def test_poisson_arrivals_have_the_rate_and_the_seed() -> None:
    trace = random_trace(4000)
    drawn = trace.with_poisson_arrivals(5.0, np.random.default_rng(3))
    again = trace.with_poisson_arrivals(5.0, np.random.default_rng(3))
    assert drawn == again
    gaps = np.diff([0.0, *(row.arrival_s for row in drawn.requests)])
    assert gaps.mean() == pytest.approx(0.2, abs=4 * 0.2 / 4000**0.5)
    assert gaps.std() == pytest.approx(0.2, rel=0.1)
    assert [row.request_id for row in drawn.requests] == [row.request_id for row in trace.requests]


def test_saturation_rate_of_one_seat_is_one_over_the_service_time() -> None:
    """One request at a time, 0.5 s per step and nothing else: o steps each."""
    trace = random_trace(100)
    step_time = LinearStepTime(base_s=0.5, per_prefill_token_s=0, per_decode_s=0, per_context_token_s=0)
    mean_tokens = np.mean([row.output_tokens for row in trace.requests])
    rate = saturation_rate_rps(trace, SchedulerConfig(max_num_seqs=1), step_time)
    assert rate == pytest.approx(1 / (0.5 * mean_tokens))


def test_memory_limits_the_saturation_rate() -> None:
    trace = random_trace(100)
    wide = saturation_rate_rps(trace, SchedulerConfig(), LinearStepTime())
    narrow = saturation_rate_rps(trace, SchedulerConfig(num_kv_blocks=60), LinearStepTime())
    assert narrow < wide / 3
