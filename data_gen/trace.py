"""Sampled answers as a request trace: real prompts with their real lengths, arriving at a chosen rate."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from scheduler_core.errors import InputError
from scheduler_core.files import atomic_file


@dataclass(frozen=True, slots=True)
class PoissonArrivals:
    """Arrivals with independent exponential gaps; `rate_rps` requests per second on average."""

    rate_rps: float
    seed: int

    def __post_init__(self) -> None:
        if not (np.isfinite(self.rate_rps) and self.rate_rps > 0):
            raise InputError("rate_rps", self.rate_rps, "a finite number above 0")

    def times(self, count: int) -> np.ndarray:
        """Arrival times in seconds, increasing, the first at 0; shape [count]."""
        rng = np.random.Generator(np.random.PCG64(self.seed))
        gaps = rng.exponential(1 / self.rate_rps, count)
        gaps[:1] = 0.0
        return np.cumsum(gaps)


def trace_of(
    samples: pa.Table, arrivals: PoissonArrivals, prompt_ids: Collection[str] | None = None
) -> pa.Table:
    """One request per sampled answer, in random order.

    An answer that was cut at max_tokens is a request that really ends there, so its length is exact.

    Args:
        samples: Table of the schema `samples/1`.
        arrivals: When the requests come; its seed also shuffles their order.
        prompt_ids: Only answers to these prompts; None takes all.

    Returns:
        Table with request_id, arrival_s, prompt_tokens, output_tokens, max_tokens, prompt, prompt_id and model.

    Raises:
        InputError: If no answer is left.
    """
    rows = [
        row
        for row in samples.to_pylist()
        if row["finish_reason"] != "error" and (prompt_ids is None or row["prompt_id"] in prompt_ids)
    ]
    if not rows:
        raise InputError("samples", samples.num_rows, "at least one finished answer to the chosen prompts")
    rng = np.random.Generator(np.random.PCG64(arrivals.seed + 1))
    rows = [rows[index] for index in rng.permutation(len(rows))]
    return pa.table(
        {
            "request_id": [f"{row['prompt_id']}-{row['sample_index']}" for row in rows],
            "arrival_s": arrivals.times(len(rows)),
            "prompt_tokens": pa.array([row["prompt_tokens"] for row in rows], pa.int32()),
            "output_tokens": pa.array([row["output_tokens"] for row in rows], pa.int32()),
            "max_tokens": pa.array([row["max_tokens"] for row in rows], pa.int32()),
            "prompt": [row["prompt"] for row in rows],
            "prompt_id": [row["prompt_id"] for row in rows],
            "model": [row["model"] for row in rows],
        }
    )


def write_trace(path: str | Path, trace: pa.Table) -> None:
    """Writes a trace as Parquet (zstd), atomically."""
    with atomic_file(path) as temporary:
        pq.write_table(trace, temporary, compression="zstd")
