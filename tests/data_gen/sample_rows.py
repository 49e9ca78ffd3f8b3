"""Rows of `samples/2` for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import pyarrow as pa

from data_gen.samples import SCHEMA


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One sample; fields as in `data_gen.samples`."""

    prompt_id: str = "p0"
    prompt: str | None = "Hi"
    prompt_sha256: str | None = None
    messages: tuple[dict[str, str], ...] | None = None
    category: str = ""
    dataset: str = ""
    model: str = "m"
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    seed: int | None = 0
    sample_index: int = 0
    max_tokens: int | None = 100
    prompt_tokens: int | None = 5
    output_tokens: int = 7
    finish_reason: str = "stop"
    error: str | None = None
    queue_s: float | None = None
    ttft_s: float | None = None
    total_s: float | None = None
    text: str | None = None
    engine: str = "e"
    engine_version: str = "1"
    run_id: str = "r"


def to_table(samples: Sequence[SampleRow]) -> pa.Table:
    """Samples as an Arrow table with the documented schema."""
    return pa.Table.from_pylist([asdict(sample) for sample in samples], schema=SCHEMA)
