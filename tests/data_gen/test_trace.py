from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from data_gen.trace import TRACE_SCHEMA, PoissonArrivals, as_trace, read_trace, trace_of, write_trace
from scheduler_core.errors import InputError
from scheduler_core.simulator.trace import load_trace
from tests.data_gen.sample_rows import SampleRow, to_table


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
            SampleRow(
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
    with pytest.raises(InputError, match="at least one finished output"):
        trace_of(samples(), PoissonArrivals(5.0, 1), {"unknown"})
    with pytest.raises(InputError, match="rate_rps"):
        PoissonArrivals(0.0, 1)


def test_a_file_of_another_shape_is_refused(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.parquet", trace([0.0]).drop_columns(["tenant"]))
    with pytest.raises(InputError, match="also tenant"):
        read_trace(tmp_path / "t.parquet")
