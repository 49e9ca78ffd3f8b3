from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_gen.samples import Sample, to_table
from data_gen.trace import (
    TRACE_SCHEMA,
    PoissonArrivals,
    arrivals_of,
    as_trace,
    at_rate,
    between,
    read_trace,
    repeated,
    thinned,
    trace_of,
    write_trace,
)
from scheduler_core.errors import InputError
from scheduler_core.simulator.trace_file import load_trace


def trace(times: list[float]) -> pa.Table:
    count = len(times)
    return as_trace(
        {
            "request_id": pa.array([f"r{i}" for i in range(count)]),
            "arrival_s": pa.array(times, pa.float64()),
            "prompt_tokens": pa.array([10 + i for i in range(count)]),
            "output_tokens": pa.array([1 + i for i in range(count)]),
            "max_tokens": pa.array([1000] * count),
        },
        count,
    )


def samples() -> pa.Table:
    return to_table(
        [
            Sample(
                prompt_id=f"p{number // 3}",
                prompt="Hi",
                category="k",
                model="m",
                temperature=1.0,
                top_p=1.0,
                seed=0,
                sample_index=number % 3,
                max_tokens=40,
                prompt_tokens=5,
                output_tokens=0 if number == 4 else 1 + number,
                finish_reason="error" if number == 4 else "stop",
                engine="e",
                engine_version="1",
                run_id="r",
            )
            for number in range(12)
        ]
    )


def test_samples_become_requests_once_at_the_asked_rate(tmp_path: Path) -> None:
    made = trace_of(samples(), PoissonArrivals(5.0, 1), {"p1", "p2"})
    assert made.schema.equals(TRACE_SCHEMA)
    assert sorted(made.column("output_tokens").to_pylist()) == [4, 6, 7, 8, 9]
    assert len(set(made.column("request_id").to_pylist())) == 5
    write_trace(tmp_path / "t.parquet", made)
    assert read_trace(tmp_path / "t.parquet").equals(made)
    assert len(load_trace(tmp_path / "t.parquet")) == 5
    times = PoissonArrivals(rate_rps=5.0, seed=1).times(4000)
    assert times[0] == 0
    assert (times[1:] >= times[:-1]).all()
    # The mean of 4,000 exponential gaps has a standard error of 1.6 %.
    assert times[-1] / 3999 == pytest.approx(0.2, rel=0.08)
    with pytest.raises(InputError, match="at least one finished answer"):
        trace_of(samples(), PoissonArrivals(5.0, 1), {"unknown"})
    with pytest.raises(InputError, match="rate_rps"):
        PoissonArrivals(0.0, 1)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=40), st.floats(1e-3, 1e3))
def test_a_rate_scales_all_gaps_by_one_factor(times: list[float], rate: float) -> None:
    if np.ptp(times) < 1e-3:
        with pytest.raises(InputError, match="arrivals at two times"):
            at_rate(trace([1.0] * len(times)), rate)
        return
    made = arrivals_of(at_rate(trace(times), rate))
    assert made[0] == 0
    assert (len(times) - 1) / made[-1] == pytest.approx(rate)
    expected = np.diff(np.sort(times)) / np.ptp(times)
    np.testing.assert_allclose(np.diff(made) / made[-1], expected, atol=1e-9)


def test_thinning_keeps_times_and_about_its_share() -> None:
    whole = trace([float(i) for i in range(4000)])
    part = thinned(whole, 0.25, seed=3)
    assert part.equals(thinned(whole, 0.25, seed=3))
    assert not part.equals(thinned(whole, 0.25, seed=4))
    # The standard error of the share is 0.007.
    assert part.num_rows / 4000 == pytest.approx(0.25, abs=0.03)
    assert set(part.column("request_id").to_pylist()) <= set(whole.column("request_id").to_pylist())
    assert thinned(whole, 1.0, 0).num_rows == 4000
    with pytest.raises(InputError, match="share"):
        thinned(whole, 0.0, 0)


def test_a_slice_counts_from_its_start() -> None:
    part = between(trace([30.0, 5.0, 10.0, 20.0]), 10.0, 30.0)
    assert part.column("request_id").to_pylist() == ["r2", "r3"]
    assert arrivals_of(part).tolist() == [0.0, 10.0]
    with pytest.raises(InputError, match="which lasts 30.000 s"):
        between(trace([0.0, 30.0]), 40.0, 50.0)
    with pytest.raises(InputError, match="end_s"):
        between(trace([0.0]), 1.0, 1.0)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=12), st.integers(1, 60), st.integers(0, 9))
def test_repetition_has_the_asked_length_and_every_request_as_often(
    times: list[float], count: int, seed: int
) -> None:
    made = repeated(trace(times), count, seed)
    assert made.num_rows == count
    assert made.equals(repeated(trace(times), count, seed))
    arrivals = arrivals_of(made)
    assert (np.diff(arrivals) >= 0).all()
    ids = made.column("request_id").to_pylist()
    assert len(set(ids)) == count
    often = Counter(name.partition("~")[0] for name in ids)
    if count >= len(times):
        assert max(often.values()) - min(often[f"r{i}"] for i in range(len(times))) <= 1
        gaps = np.diff(np.sort(times))
        whole = arrivals[: len(times) * (count // len(times))].reshape(-1, len(times))
        np.testing.assert_allclose(
            np.diff(whole, axis=1), np.broadcast_to(gaps, (len(whole), len(gaps))), atol=1e-6
        )


def test_arrivals_that_are_not_known_are_named() -> None:
    unknown = trace([0.0, 1.0]).set_column(1, "arrival_s", pa.array([0.0, None], pa.float64()))
    for change in (lambda t: at_rate(t, 1.0), lambda t: between(t, 0, 1), lambda t: repeated(t, 5, 0)):
        with pytest.raises(InputError, match="trace row 2 column arrival_s"):
            change(unknown)


def test_a_file_of_another_shape_is_refused(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.parquet", trace([0.0]).drop_columns(["tenant"]))
    with pytest.raises(InputError, match="also tenant"):
        read_trace(tmp_path / "t.parquet")
