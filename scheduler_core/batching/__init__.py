"""Batch formers: which running and waiting requests make up the next step."""

from __future__ import annotations

from scheduler_core.batching.base import BatchFormer
from scheduler_core.batching.chunked_prefill import ChunkedPrefill

#: Every batch former by name.
BATCH_FORMERS: dict[str, type[BatchFormer]] = {"chunked_prefill": ChunkedPrefill}

__all__ = ["BATCH_FORMERS", "BatchFormer", "ChunkedPrefill"]
