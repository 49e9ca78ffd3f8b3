"""Records of the log as pairs of prediction and outcome, of either of the two predictors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

Side = Literal["main", "shadow"]


def pair(record: Mapping[str, Any], side: Side) -> dict[str, Any] | None:
    """What `evaluate --stream` reads of a record; None where it has no such prediction, or no true length.

    Lengths of which only events were counted are no true lengths; an answer whose client hung up is one that was cut.

    Args:
        record: Of the feedback log.
        side: Whose prediction: the first predictor's, or the second one's.
    """
    numbers = record if side == "main" else record.get("shadow")
    if not isinstance(numbers, Mapping) or numbers.get("mu") is None or record["counted_by"] == "deltas":
        return None
    tokens, cap = record["output_tokens"], record.get("max_tokens")
    if tokens < 1 or record["finish_reason"] in ("error", "content_filter"):
        return None
    finished = record.get("finished")
    return {
        "mu": numbers["mu"],
        "sigma": numbers["sigma"],
        "nu": numbers["nu"],
        "output_tokens": tokens,
        "finished": cap is None or tokens < cap if finished is None else finished,
        "served_model": record.get("served_model"),
        # A server may count a token more than its cap.
        "max_tokens": cap if cap is None else max(cap, tokens),
        "time": record["time"],
    }


def pairs(records: Iterable[tuple[int, Mapping[str, Any]]], side: Side) -> Iterator[dict[str, Any]]:
    """The pairs of all records that have one."""
    for _, record in records:
        found = pair(record, side)
        if found is not None:
            yield found
