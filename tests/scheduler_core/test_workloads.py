"""Workloads: what is drawn has the law it was asked for, and the same seed gives the same trace."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scheduler_core.errors import InputError
from scheduler_core.simulator.trace import load_trace, write_trace
from scheduler_core.simulator.workloads.arrivals import Arrivals
from scheduler_core.simulator.workloads.lengths import Lengths, TokenDistribution
from scheduler_core.simulator.workloads.workload import RequestClass, Sessions, Tiers, Workload, tier_weights

CLASSES = (RequestClass(weight=0.3, tenant="paying", tier=0), RequestClass(weight=0.7, tbt_slo_s=0.5))
SHORT = Lengths(prompt=TokenDistribution(low=1, high=20), output=TokenDistribution(low=1, high=30))


@pytest.mark.parametrize(
    ("arrivals", "cv", "rate"),
    [
        (Arrivals(rate_rps=4.0), 1.0, 4.0),
        (Arrivals(process="gamma", rate_rps=4.0, cv=3.0), 3.0, 4.0),
        # Vidur's Poisson: no gap above 3 means, so that the rate is 1 / (1 - exp(-3)) times the nominal one.
        (Arrivals(rate_rps=4.0, max_gap_ratio=3.0), None, 4.0 / (1 - np.exp(-3))),
    ],
)
def test_gaps_have_their_mean_and_variation(arrivals: Arrivals, cv: float | None, rate: float) -> None:
    gaps = np.diff(arrivals.times(20_000, np.random.default_rng(1)), prepend=0.0)
    assert gaps.mean() == pytest.approx(1 / rate, abs=4 * (cv or 1.0) / rate / 20_000**0.5)
    if cv is None:
        assert gaps.max() <= 0.75 + 1e-12
    else:
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_a_day_has_its_peak_in_the_first_quarter() -> None:
    """Rate 1 + swing sin(2 pi t / P): over the first half 1 + 2 swing / pi of the mean."""
    times = Arrivals(process="diurnal", rate_rps=5.0, period_s=100.0, swing=0.8).times(
        20_000, np.random.default_rng(2)
    )
    assert np.all(np.diff(times) >= 0)
    assert 20_000 / times[-1] == pytest.approx(5.0, rel=0.03)
    first_half = np.mean(times % 100 < 50)
    assert first_half == pytest.approx(0.5 * (1 + 1.6 / np.pi), abs=0.02)


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
    exact = weights[:64].sum() / weights.sum()
    assert draws.min() == 64
    assert draws.max() <= 512
    assert np.mean(draws < 128) == pytest.approx(exact, abs=0.01)


def test_buckets_and_log_t() -> None:
    rng = np.random.default_rng(5)
    law = TokenDistribution(kind="buckets", edges=(64, 128, 512), weights=(3.0, 1.0))
    draws = law.draw(20_000, rng)
    assert np.mean(draws < 128) == pytest.approx(0.75, abs=0.015)
    assert (draws.min(), draws.max()) == (64, 512)
    tokens = TokenDistribution(kind="log_t", mu=5.0, sigma=0.5, high=1000).draw(20_000, rng)
    assert np.median(tokens) == pytest.approx(np.exp(5.0), rel=0.03)
    assert tokens.max() == 1000


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
    classes = (
        RequestClass(weight=1, category="reasoning", tenant="a", ttft_slo_s=2.0, lengths=fixed),
        RequestClass(weight=3, category="chat", tenant="b", tier=0),
    )
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


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
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
        (lambda: TokenDistribution(kind="buckets", edges=(1, 2), weights=()), "weights"),
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
