"""Traces in three formats, the wrong ones named by row and column, and drawn workloads: their laws, and the same for a seed."""

import io
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest

from scheduler_core.errors import InputError
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.step_time import saturation_rate_rps
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import load_trace, write_trace
from scheduler_core.simulator.workloads.arrivals import Arrivals
from scheduler_core.simulator.workloads.lengths import Lengths, TokenDistribution, read_lengths
from scheduler_core.simulator.workloads.workload import RequestClass, Sessions, Tiers, Workload, tier_weights
from tests.hostile import DEEP
from tests.scheduler_core.helpers import random_trace

GOOD: list[dict[str, Any]] = [
    {"request_id": "b", "arrival_s": 2.5, "prompt_tokens": 7, "output_tokens": 3, "max_tokens": 9,
     "prompt": "Hi, you\n\"there\"", "prompt_id": "p1", "mu": 1.0, "sigma": 0.5, "nu": 3.5},
    {"request_id": "a", "arrival_s": 0.5, "prompt_tokens": 1, "output_tokens": 9, "max_tokens": 9,
     "prompt": "Hö", "prompt_id": "p2", "mu": None, "sigma": None, "nu": None},
]  # fmt: skip
SUFFIXES = pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
HEADER = "request_id,arrival_s,prompt_tokens,output_tokens,max_tokens"
CLASSES = (RequestClass(weight=0.3, tenant="paying", tier=0), RequestClass(weight=0.7, tbt_slo_s=0.5))
SHORT = Lengths(prompt=TokenDistribution(low=1, high=20), output=TokenDistribution(low=1, high=30))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".csv":
        csv.write_csv(pa.Table.from_pylist(rows), path)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@SUFFIXES
def test_all_formats_give_the_same_requests_sorted_by_arrival(suffix: str, tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path / f"trace{suffix}", GOOD))
    first, second = trace.requests
    assert (first.request_id, second.request_id) == ("a", "b")
    assert (second.arrival_s, second.prompt_tokens, second.output_tokens, second.max_tokens) == (2.5, 7, 3, 9)
    assert (second.prompt, second.prompt_id) == ('Hi, you\n"there"', "p1")
    assert (first.prompt, second.prediction) == ("Hö", LengthPrediction(1.0, 0.5, 3.5))
    assert first.prediction is None
    assert len(trace.sha256) == 64


@SUFFIXES
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("output_tokens", 0), ("output_tokens", 10), ("arrival_s", -1.0), ("arrival_s", None),
        ("request_id", ""), ("request_id", "b"), ("mu", float("inf")), ("mu", 3.0),
    ],
)  # fmt: skip
def test_wrong_values_have_row_and_column(suffix: str, column: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"row \d.*({column}|sigma)"):
        load_trace(write(tmp_path / f"trace{suffix}", [GOOD[0], {**GOOD[1], column: value}]))


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
        ({"ttft_slo_s": 0}, "ttft_slo_s of request b: got 0"), ({"sigma": -1.0}, "predicted sigma: got -1"),
        ({"max_tokens": None}, "column max_tokens: .*; or default_max_tokens for requests without max_tokens"),
    ],
)  # fmt: skip
def test_values_that_have_no_place_in_simulations(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"row 1.*{named}"):
        load_trace(write(tmp_path / "trace.jsonl", [GOOD[0] | change]))


@SUFFIXES
def test_requests_without_max_tokens_get_the_default_and_only_they(suffix: str, tmp_path: Path) -> None:
    without = {name: value for name, value in GOOD[1].items() if name != "max_tokens"}
    path = write(tmp_path / f"trace{suffix}", [GOOD[0], without | {"max_tokens": None}])
    limits = {row.request_id: row.max_tokens for row in load_trace(path, default_max_tokens=40).requests}
    assert limits == {"a": 40, "b": 9}
    with pytest.raises(InputError, match=r"output_tokens: got '?9'?; allowed: .* default_max_tokens = 8$"):
        load_trace(path, default_max_tokens=8)
    column = write(tmp_path / f"column{suffix}", [without])
    assert load_trace(column, default_max_tokens=40).requests[0].max_tokens == 40
    with pytest.raises(InputError, match=r"row \d column max_tokens: .*; or default_max_tokens for requests"):
        load_trace(column)


def test_arrivals_may_be_missing_if_they_are_drawn(tmp_path: Path) -> None:
    rows = [{name: value for name, value in row.items() if name != "arrival_s"} for row in GOOD]
    path = write(tmp_path / "trace.jsonl", rows)
    with pytest.raises(InputError, match="arrival_s: .*; or a rate or load, with which arrivals are drawn"):
        load_trace(path)
    assert [row.request_id for row in load_trace(path, need_arrivals=False).requests] == ["b", "a"]


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
def test_files_read_as_something_else(name: str, content: bytes | None, named: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    for read in (load_trace, lambda path: read_lengths(str(path))):
        with pytest.raises(InputError, match=named):
            read(tmp_path / name)


def test_poisson_arrivals_have_the_rate_and_the_seed() -> None:
    trace = random_trace(4000)
    drawn, again = (trace.with_poisson_arrivals(5.0, np.random.default_rng(3)) for _ in range(2))
    assert drawn == again
    gaps = np.diff([0.0, *(row.arrival_s for row in drawn.requests)])
    assert gaps.mean() == pytest.approx(0.2, abs=4 * 0.2 / 4000**0.5)
    assert [row.request_id for row in drawn.requests] == [row.request_id for row in trace.requests]


def test_saturation_rate_of_one_seat_is_one_over_the_service_time() -> None:
    """One request at a time, 0.5 s per step and nothing else: o steps each."""
    trace = random_trace(100)
    step_time = LinearStepTime(base_s=0.5, per_prefill_token_s=0, per_decode_s=0, per_context_token_s=0)
    rate = saturation_rate_rps(trace, SchedulerConfig(max_num_seqs=1), step_time)
    assert rate == pytest.approx(1 / (0.5 * np.mean([row.output_tokens for row in trace.requests])))


@pytest.mark.parametrize(
    ("arrivals", "cv", "rate"),
    [
        (Arrivals(rate_rps=4.0), 1.0, 4.0), (Arrivals(process="gamma", rate_rps=4.0, cv=3.0), 3.0, 4.0),
        # Vidur's Poisson: no gap above 3 means, so that the rate is 1 / (1 - exp(-3)) times the nominal one.
        (Arrivals(rate_rps=4.0, max_gap_ratio=3.0), None, 4.0 / (1 - np.exp(-3))),
    ],
)  # fmt: skip
def test_gaps_have_their_mean_and_variation(arrivals: Arrivals, cv: float | None, rate: float) -> None:
    gaps = np.diff(arrivals.times(20_000, np.random.default_rng(1)), prepend=0.0)
    assert gaps.mean() == pytest.approx(1 / rate, abs=4 * (cv or 1.0) / rate / 20_000**0.5)
    if cv is None:
        assert gaps.max() <= 0.75 + 1e-12
    else:
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_a_day_has_its_peak_in_the_first_quarter() -> None:
    """Rate 1 + swing sin(2 pi t / P): over the first half 1 + 2 swing / pi of the mean."""
    arrivals = Arrivals(process="diurnal", rate_rps=5.0, period_s=100.0, swing=0.8)
    times = arrivals.times(20_000, np.random.default_rng(2))
    assert np.all(np.diff(times) >= 0)
    assert 20_000 / times[-1] == pytest.approx(5.0, rel=0.03)
    assert np.mean(times % 100 < 50) == pytest.approx(0.5 * (1 + 1.6 / np.pi), abs=0.02)


def test_spikes_come_together_and_have_every_size() -> None:
    times = Arrivals(process="spikes", gap_s=0.1, max_burst=4).times(20_000, np.random.default_rng(3))
    _, sizes = np.unique(times, return_counts=True)
    assert set(sizes) == {1, 2, 3, 4}
    assert np.allclose(times / 0.1, np.rint(times / 0.1))
    assert 20_000 / times[-1] == pytest.approx(20.0, rel=0.05)
    assert np.all(Arrivals(process="at_once").times(5, np.random.default_rng(0)) == 0)


def test_zipf_is_that_of_the_multi_tier_papers_code() -> None:
    """P(k) ~ k^-1.2 on 64..512: 83 % below 128 tokens (its sampler, an approximation, gives 82)."""
    draws = TokenDistribution(kind="zipf", low=64, high=512, theta=1.2).draw(50_000, np.random.default_rng(4))
    weights = np.arange(1, 450, dtype=float) ** -1.2
    assert draws.min() == 64
    assert draws.max() <= 512
    assert np.mean(draws < 128) == pytest.approx(weights[:64].sum() / weights.sum(), abs=0.01)


def test_log_t_lengths() -> None:
    rng = np.random.default_rng(5)
    tokens = TokenDistribution(kind="log_t", mu=5.0, sigma=0.5, high=1000).draw(20_000, rng)
    assert (np.median(tokens), tokens.max()) == (pytest.approx(np.exp(5.0), rel=0.03), 1000)


def test_fractions_of_tiers_are_those_of_the_paper_and_its_code() -> None:
    for mix, num in product(("uniform", "gaussian", "gaussian_released", "enterprise"), range(1, 11)):
        weights = tier_weights(mix, num)
        assert weights.shape == (num,)
        assert weights.sum() == pytest.approx(1.0)
        assert np.all(weights > 0)
    assert tier_weights("enterprise", 4) == pytest.approx([0.10, 0.15, 0.15, 0.60])
    assert tier_weights("enterprise", 6) == pytest.approx([0.10, *[0.70 / 4] * 4, 0.20])
    assert tier_weights("gaussian_released", 5) == pytest.approx([0.05, 0.2, 0.5, 0.2, 0.05])
    bell = tier_weights("gaussian", 5)
    assert bell[1] / bell[2] == pytest.approx(np.exp(-0.5 * (1 / 1.25) ** 2))


def test_the_same_seed_gives_the_same_trace_and_another_rate_the_same_lengths() -> None:
    workload = Workload(num_requests=200, lengths=SHORT, tiers=Tiers(num_tiers=3), classes=CLASSES)
    assert workload.trace(3) == workload.trace(3)
    assert workload.trace(3) != workload.trace(4)
    faster = replace(workload, arrivals=Arrivals(rate_rps=10.0)).trace(3)
    for slow, fast in zip(workload.trace(3).requests, faster.requests, strict=True):
        assert fast == replace(slow, arrival_s=fast.arrival_s)
        assert fast.arrival_s == pytest.approx(slow.arrival_s / 10)


def test_classes_bring_their_share_targets_and_lengths() -> None:
    prompt, output = (TokenDistribution(kind="fixed", low=low) for low in (100, 50))
    fixed = Lengths(prompt=prompt, output=output)
    first = RequestClass(weight=1, category="reasoning", tenant="a", ttft_slo_s=2.0, lengths=fixed)
    classes = (first, RequestClass(weight=3, category="chat", tenant="b", tier=0))
    workload = Workload(num_requests=2000, lengths=SHORT, classes=classes, tiers=Tiers(num_tiers=2))
    rows = workload.trace(1).requests
    reasoning = [row for row in rows if row.category == "reasoning"]
    assert len(reasoning) == pytest.approx(500, abs=80)
    assert {(row.prompt_tokens, row.output_tokens, row.ttft_slo_s) for row in reasoning} == {(100, 50, 2.0)}
    assert {row.tier for row in reasoning} == {0, 1}, "by the workload's tiers"
    chat = [row for row in rows if row.category == "chat"]
    assert {row.tier for row in chat} == {0}
    assert max(row.prompt_tokens for row in chat) <= 20
    assert (reasoning[0].request().tenant, reasoning[0].request().ttft_slo_s) == ("a", 2.0)


def test_conversations_grow_and_wait() -> None:
    sessions = Sessions(mean_turns=3, mean_think_time_s=5, max_prompt_tokens=200)
    rows = Workload(num_requests=400, lengths=SHORT, sessions=sessions).trace(2).requests
    assert len(rows) == 400
    turns_of: dict[str, list[int]] = {}
    by_turn = {(row.session_id, row.turn): row for row in rows}
    for row in rows:
        assert row.session_id is not None
        turns_of.setdefault(row.session_id, []).append(row.turn)
        if row.turn == 0:
            assert (row.prefix_tokens, row.think_time_s) == (0, None)
            continue
        before = by_turn[row.session_id, row.turn - 1]
        assert row.prefix_tokens == before.prompt_tokens + before.output_tokens
        assert row.think_time_s is not None
        assert row.arrival_s == pytest.approx(before.arrival_s + row.think_time_s)
        assert row.prompt_tokens <= 200
    assert all(sorted(turns) == list(range(len(turns))) for turns in turns_of.values())
    assert len(rows) / len(turns_of) == pytest.approx(3, rel=0.25)


def test_lengths_from_a_trace_keep_the_pairs_and_its_arrivals_can_be_rescaled(tmp_path: Path) -> None:
    file = tmp_path / "lengths.parquet"
    columns = {"arrival_s": [10.0, 11.0, 15.0], "prompt_tokens": [1, 2, 3], "output_tokens": [10, 20, 30]}
    pq.write_table(pa.table(columns), file)
    drawn = Workload(num_requests=50, lengths=Lengths(file=str(file))).trace(0).requests
    assert {(row.prompt_tokens, row.output_tokens) for row in drawn} == {(1, 10), (2, 20), (3, 30)}
    arrivals, lengths = Arrivals(process="trace", rate_rps=4.0), Lengths(file=str(file), in_order=True)
    rows = Workload(num_requests=3, lengths=lengths, arrivals=arrivals).trace(0).requests
    assert [row.prompt_tokens for row in rows] == [1, 2, 3]
    assert [row.arrival_s for row in rows] == pytest.approx([0.0, 0.1, 0.5])


def test_answers_from_fitted_laws_carry_them_as_predictions(tmp_path: Path) -> None:
    file = tmp_path / "fits.jsonl"
    file.write_text(json.dumps({"mu": 4.0, "sigma": 0.2, "prompt_tokens": 7}) + "\n")
    rows = Workload(num_requests=500, lengths=Lengths(file=str(file), max_tokens=90)).trace(0).requests
    assert np.median([row.output_tokens for row in rows]) == pytest.approx(np.exp(4.0), rel=0.05)
    assert {(row.prompt_tokens, row.max_tokens) for row in rows} == {(7, 90)}
    assert rows[0].prediction is not None
    assert (rows[0].prediction.mu, rows[0].prediction.nu) == (4.0, 3.5)


@SUFFIXES
def test_a_written_trace_reads_back(suffix: str, tmp_path: Path) -> None:
    workload = Workload(num_requests=60, lengths=SHORT, classes=CLASSES, sessions=Sessions(mean_turns=2))
    trace = workload.trace(1)
    write_trace(trace, tmp_path / f"t{suffix}")
    assert load_trace(tmp_path / f"t{suffix}").requests == trace.requests


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Arrivals(process="waves"), "process"),  # type: ignore[arg-type]
        (lambda: TokenDistribution(low=5, high=4), "low, high"),
        (lambda: Lengths(), "lengths"),
        (lambda: Lengths(file="x", output=TokenDistribution()), "lengths.file"),
        (lambda: Workload(arrivals=Arrivals(process="trace")), "arrivals.process"),
        (lambda: Workload(lengths=Lengths(file="missing.parquet")).trace(0), "lengths.file"),
    ],
)
def test_a_wrong_value_is_named(make: object, named: str) -> None:
    with pytest.raises(InputError) as caught:
        make()  # type: ignore[operator]
    assert caught.value.field == named
