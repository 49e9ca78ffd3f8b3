"""Batch formers: which running and waiting requests make up the next step."""

from collections.abc import Mapping

from scheduler_core.batching.base import BatchFormer
from scheduler_core.batching.chunked_prefill import ChunkedPrefill
from scheduler_core.batching.rad import Rad, RadPrefillFirst
from scheduler_core.batching.reserving import Orca, QuantileReserve, RequestLevel
from scheduler_core.batching.slai import Slai
from scheduler_core.batching.stage_aware import StageAware
from scheduler_core.batching.uniboost import OneOrder
from scheduler_core.batching.vllm import Vllm
from scheduler_core.errors import unknown_name
from scheduler_core.ranges import construct

#: Every batch former by name.
BATCH_FORMERS: dict[str, type[BatchFormer]] = {
    "chunked_prefill": ChunkedPrefill,
    "orca": Orca,
    "quantile_reserve": QuantileReserve,
    "rad": Rad,
    "rad_prefill_first": RadPrefillFirst,
    "request_level": RequestLevel,
    "slai": Slai,
    "stage_aware": StageAware,
    "uniboost": OneOrder,
    "vllm": Vllm,
}


def make_former(name: str, parameters: Mapping[str, object] | None = None) -> BatchFormer:
    """A new batch former; InputError for an unknown name or parameter, or a value outside its range."""
    if name not in BATCH_FORMERS:
        raise unknown_name("batching", name, BATCH_FORMERS)
    return construct("batching", name, BATCH_FORMERS[name], parameters)
