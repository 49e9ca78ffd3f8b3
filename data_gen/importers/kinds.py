"""The literal registry of what can be imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from data_gen.importers import feedback, logs, sets, traces
from data_gen.importers.batch import Batch

SchemaName = Literal["samples", "trace"]


@dataclass(frozen=True, slots=True)
class Kind:
    """One source: how it is read, what its tokens are, and which schemas it can fill, the usual one first."""

    read: Callable[[str | Path], Iterator[Batch]]
    tokens: str
    schemas: tuple[SchemaName, ...]


_MODEL = "the model's own"
_CL100K = "cl100k_base"

KINDS: Mapping[str, Kind] = {
    "castillo": Kind(sets.castillo, _MODEL, ("samples",)),
    "tot-gpt4": Kind(sets.tot_gpt4, _CL100K, ("samples",)),
    "oasst": Kind(sets.oasst, _CL100K, ("samples",)),
    "alpaca-eval": Kind(sets.alpaca_eval, _CL100K, ("samples",)),
    "zeroeval": Kind(sets.zeroeval, _CL100K, ("samples",)),
    "alpaca-52k": Kind(sets.alpaca_52k, _CL100K, ("samples",)),
    "alpaca-52k-vicuna": Kind(sets.alpaca_52k_vicuna, _MODEL, ("samples",)),
    "azure": Kind(partial(traces.trace_batches, kind="azure"), _MODEL, ("trace",)),
    "burstgpt": Kind(partial(traces.trace_batches, kind="burstgpt"), _MODEL, ("trace",)),
    "mooncake": Kind(partial(traces.trace_batches, kind="mooncake"), _MODEL, ("trace",)),
    "vidur": Kind(partial(traces.trace_batches, kind="vidur"), "llama-2", ("trace",)),
    "apex": Kind(partial(traces.trace_batches, kind="apex"), "the tokenizer named as model", ("trace",)),
    "lengths": Kind(partial(traces.trace_batches, kind="lengths"), "unknown", ("trace",)),
    "openai-log": Kind(logs.openai_batches, _MODEL, ("samples", "trace")),
    "feedback": Kind(feedback.feedback_batches, _MODEL, ("samples", "trace")),
    "log": Kind(partial(logs.log_batches, mapping={}), _MODEL, ("samples", "trace")),
}
