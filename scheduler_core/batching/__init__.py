"""Batch formers: which running and waiting requests make up the next step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from scheduler_core.batching.base import BatchFormer
from scheduler_core.batching.batch import Batch
from scheduler_core.batching.chunked_prefill import ChunkedPrefill
from scheduler_core.batching.rad import Rad, RadPrefillFirst
from scheduler_core.batching.reserving import Orca, RequestLevel
from scheduler_core.batching.slai import Slai
from scheduler_core.batching.stage_aware import StageAware
from scheduler_core.batching.vllm import Vllm
from scheduler_core.errors import InputError

#: Every batch former by name.
BATCH_FORMERS: dict[str, type[BatchFormer]] = {
    "chunked_prefill": ChunkedPrefill,
    "orca": Orca,
    "rad": Rad,
    "rad_prefill_first": RadPrefillFirst,
    "request_level": RequestLevel,
    "slai": Slai,
    "stage_aware": StageAware,
    "vllm": Vllm,
}


def make_former(name: str, parameters: Mapping[str, object] | None = None) -> BatchFormer:
    """A new batch former.

    Args:
        name: One of `BATCH_FORMERS`.
        parameters: Values for fields of the former; the others keep their defaults.

    Raises:
        InputError: The name or a parameter is unknown, or a value is outside its range.
    """
    if name not in BATCH_FORMERS:
        raise InputError("batching", name, ", ".join(BATCH_FORMERS))
    names = [item.name for item in fields(BATCH_FORMERS[name]) if item.init]  # type: ignore[arg-type]
    for parameter in parameters or {}:
        if parameter not in names:
            raise InputError(f"parameter of batching {name}", parameter, ", ".join(sorted(names)) or "none")
    return BATCH_FORMERS[name](**(parameters or {}))


__all__ = [
    "BATCH_FORMERS",
    "Batch",
    "BatchFormer",
    "ChunkedPrefill",
    "Orca",
    "Rad",
    "RadPrefillFirst",
    "RequestLevel",
    "Slai",
    "StageAware",
    "Vllm",
    "make_former",
]
