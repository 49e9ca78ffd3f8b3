"""Traces in three formats, and the wrong ones named by row, column and value."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest

from scheduler_core.errors import InputError
from scheduler_core.predictions import LengthPrediction
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.step_time import saturation_rate_rps
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import load_trace
from scheduler_core.simulator.workloads.lengths import read_lengths
from tests.hostile import DEEP
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
        csv.write_csv(pa.Table.from_pylist(rows), path)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


SUFFIXES = pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])


@SUFFIXES
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


@SUFFIXES
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("output_tokens", 0),
        ("output_tokens", 10),
        ("arrival_s", -1.0),
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
    with pytest.raises(InputError, match=rf"row \d.*({column}|sigma)"):
        load_trace(write(tmp_path / f"trace{suffix}", rows))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"output_tokens": "many"}, "column output_tokens: got 'many'"),
        ({"output_tokens": True}, "column output_tokens: got True"),
        ({"prompt": 5}, "column prompt: got 5; allowed: a string"),
        ({"arrival_s": 1e308}, "column arrival_s: got 1e\\+308; allowed: seconds from 0 to 1e\\+10"),
        ({"max_tokens": 2**63}, f"column max_tokens: got {2**63}; allowed: integers from 1 to 2147483647"),
        ({"max_tokens": 10**400}, "column max_tokens"),
        ({"tier": 100}, "column tier: got 100; allowed: integers from 0 to 99"),
        ({"prefix_tokens": 7}, "column prefix_tokens: got 7; allowed: integers from 0 to 6"),
        ({"ttft_slo_s": 0}, "ttft_slo_s of request b: got 0"),
        ({"sigma": -1.0}, "predicted sigma: got -1"),
        (
            {"max_tokens": None},
            "column max_tokens: .*; or default_max_tokens for requests without max_tokens",
        ),
    ],
)
def test_values_that_have_no_place_in_a_simulation(
    change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=f"row 1.*{named}"):
        load_trace(write(tmp_path / "trace.jsonl", [GOOD[0] | change]))


@SUFFIXES
def test_requests_without_max_tokens_get_the_default_and_only_they(suffix: str, tmp_path: Path) -> None:
    without = {name: value for name, value in GOOD[1].items() if name != "max_tokens"}
    path = write(tmp_path / f"trace{suffix}", [GOOD[0], without | {"max_tokens": None}])
    limits = {row.request_id: row.max_tokens for row in load_trace(path, default_max_tokens=40).requests}
    assert limits == {"a": 40, "b": 9}
    with pytest.raises(
        InputError, match=r"column output_tokens: got '?9'?; allowed: .* default_max_tokens = 8$"
    ):
        load_trace(path, default_max_tokens=8)
    column = write(tmp_path / f"column{suffix}", [without])
    assert load_trace(column, default_max_tokens=40).requests[0].max_tokens == 40
    with pytest.raises(InputError, match=r"row \d column max_tokens: .*; or default_max_tokens for requests"):
        load_trace(column)


def test_arrivals_may_be_missing_if_they_are_drawn(tmp_path: Path) -> None:
    rows = [{name: value for name, value in row.items() if name != "arrival_s"} for row in GOOD]
    path = write(tmp_path / "trace.jsonl", rows)
    with pytest.raises(InputError, match="arrival_s"):
        load_trace(path)
    assert [row.request_id for row in load_trace(path, need_arrivals=False).requests] == ["b", "a"]


HEADER = "request_id,arrival_s,prompt_tokens,output_tokens,max_tokens"


def _parquet(**changes: Any) -> bytes:
    table = pa.table({name: [value] for name, value in GOOD[0].items()})
    if "column" in changes:
        table = table.append_column(changes["column"], pa.array([99]))
    buffer, schema = io.BytesIO(), {"tailcast.schema": changes.get("schema", "trace/1")}
    pq.write_table(table.replace_schema_metadata(schema), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("t.jsonl", b'{"request_id": "a", "arri', "t.jsonl row 1"),
        ("t.jsonl", b"[1, 2]\n", "t.jsonl row 1"),
        ("t.jsonl", b"[" * DEEP, "t.jsonl row 1"),
        ("t.jsonl", b"\n\n", "at least one row"),
        ("t.jsonl", b"\xff\xfe\x00", "text in UTF-8"),
        ("t.csv", b"request_id,arrival_s\n", "at least one row"),
        ("t.csv", b'"unfinished\n', "a whole text file"),
        ("t.csv", f"{HEADER},tier,tier\na,0,1,1,1,1,2\n".encode(), "t.csv: columns: got 'tier'; allowed: each name once"),
        ("t.csv", f"{HEADER}\na,0,1,1,1,9\n".encode(), "t.csv row 2"),
        ("t.csv", f"{HEADER}\ncaf\xe9,0,1,1,1\n".encode("latin-1"), "text in UTF-8"),
        ("t.parquet", b"PAR1 but not really", "a whole Parquet file"),
        ("t.parquet", _parquet()[:400], "a whole Parquet file"),
        ("t.parquet", _parquet(column="max_tokens"), "max_tokens"),
        ("t.parquet", _parquet(schema="trace/2"), "schema: got 'trace/2'; allowed: trace/1 or older"),
        ("t.xlsx", b"whatever", "a file ending in .jsonl"),
        ("none.jsonl", None, "existing file"),
    ],
)  # fmt: skip
def test_a_file_that_would_be_read_as_something_else_is_named(
    name: str, content: bytes | None, named: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    for read in (load_trace, lambda path: read_lengths(str(path))):
        with pytest.raises(InputError, match=named):
            read(tmp_path / name)


def test_poisson_arrivals_have_the_rate_and_the_seed() -> None:
    trace = random_trace(4000)
    drawn = trace.with_poisson_arrivals(5.0, np.random.default_rng(3))
    again = trace.with_poisson_arrivals(5.0, np.random.default_rng(3))
    assert drawn == again
    gaps = np.diff([0.0, *(row.arrival_s for row in drawn.requests)])
    assert gaps.mean() == pytest.approx(0.2, abs=4 * 0.2 / 4000**0.5)
    assert [row.request_id for row in drawn.requests] == [row.request_id for row in trace.requests]


def test_saturation_rate_of_one_seat_is_one_over_the_service_time() -> None:
    """One request at a time, 0.5 s per step and nothing else: o steps each."""
    trace = random_trace(100)
    step_time = LinearStepTime(base_s=0.5, per_prefill_token_s=0, per_decode_s=0, per_context_token_s=0)
    mean_tokens = np.mean([row.output_tokens for row in trace.requests])
    rate = saturation_rate_rps(trace, SchedulerConfig(max_num_seqs=1), step_time)
    assert rate == pytest.approx(1 / (0.5 * mean_tokens))
