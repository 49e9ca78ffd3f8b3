"""Heads of a predictor: their names and output tensors. Their networks are in `modules.heads`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, get_args

Head = Literal["length", "urgency", "bucket", "regression", "rank"]
HEADS: tuple[Head, ...] = get_args(Head)


class HeadFields(Protocol):
    """Fields of a manifest that the tensors depend on; see `Manifest`."""

    heads: tuple[Head, ...]
    nu: float | None
    within: bool
    quantile_levels: tuple[float, ...]
    urgency_levels: tuple[str, ...]
    bucket_edges: tuple[float, ...]


def output_tensors(fields: HeadFields) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, unit and shape of a row of each output tensor of a graph with `fields.heads`, in order; all float32."""
    length: list[tuple[str, str, tuple[int, ...]]] = [("mu", "log tokens", ()), ("sigma", "log tokens", ())]
    length += [("nu", "degrees of freedom", ())] if fields.nu is None else []
    length += [("sigma_within", "log tokens", ())] if fields.within else []
    length += [("quantiles", "log tokens", (len(fields.quantile_levels),))] if fields.quantile_levels else []
    tensors: dict[Head, Sequence[tuple[str, str, tuple[int, ...]]]] = {
        "length": length,
        "urgency": [("urgency", "probability", (len(fields.urgency_levels),))],
        "bucket": [("bucket", "probability", (len(fields.bucket_edges) + 1,))],
        "regression": [("regression_tokens", "tokens", ())],
        "rank": [("rank", "none; larger = longer", ())],
    }
    return [tensor for head in HEADS if head in fields.heads for tensor in tensors[head]]
