from __future__ import annotations

from pathlib import Path

import pytest

from data_gen.samples import TRACE_SCHEMA
from examples.quickstart.tables import trace_of, write_trace
from scheduler_core.errors import InputError
from scheduler_core.simulator.trace import load_trace
from scheduler_core.simulator.workloads.arrivals import Arrivals
from tests.data_gen.sample_rows import sample_row, to_table


def test_samples_become_requests_once_each(tmp_path: Path) -> None:
    rows = [
        sample_row(
            prompt_id=f"p{number // 3}",
            sample_index=number % 3,
            output_tokens=0 if number == 4 else 1 + number,
            finish_reason="error" if number == 4 else "stop",
        )
        for number in range(12)
    ]
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
