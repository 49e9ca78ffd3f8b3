"""Rows of `samples/2` for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import pyarrow as pa

from data_gen.samples import SCHEMA


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One sample; fields as in `data_gen.samples`."""

    prompt_id: str
    prompt: str | None
    prompt_sha256: str | None = None
    messages: tuple[dict[str, str], ...] | None = None
    category: str
    dataset: str = ""
    model: str
    temperature: float | None
    top_p: float | None
    seed: int | None
    sample_index: int
    max_tokens: int | None
    prompt_tokens: int | None
    output_tokens: int
    finish_reason: str
    error: str | None = None
    queue_s: float | None = None
    ttft_s: float | None = None
    total_s: float | None = None
    text: str | None = None
    engine: str
    engine_version: str
    run_id: str


def to_table(samples: Sequence[SampleRow]) -> pa.Table:
    """Samples as an Arrow table with the documented schema."""
    return pa.Table.from_pylist([asdict(sample) for sample in samples], schema=SCHEMA)
