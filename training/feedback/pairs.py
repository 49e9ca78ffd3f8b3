"""Records of the log as pairs of prediction and outcome, of either of the two predictors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from data_gen.feedback_record import FeedbackRecord

Side = Literal["main", "shadow"]


def pair(record: FeedbackRecord, side: Side) -> dict[str, Any] | None:
    """What `evaluate --stream` reads of a record; None where it has no such prediction, or no true length.

    Lengths of which only events were counted are no true lengths; an answer whose client hung up is one that was cut.

    Args:
        record: Of the feedback log.
        side: Whose prediction: the first predictor's, or the second one's.
    """
    prediction = record.main if side == "main" else record.shadow
    if prediction is None or record.counted_by == "deltas":
        return None
    tokens, cap = record.output_tokens, record.max_tokens
    if tokens < 1 or record.finish_reason in ("error", "content_filter"):
        return None
    finished = record.finished
    return {
        "mu": prediction.mu,
        "sigma": prediction.sigma,
        "nu": prediction.nu,
        "output_tokens": tokens,
        "finished": cap is None or tokens < cap if finished is None else finished,
        "served_model": record.served_model or None,
        "max_tokens": record.cap,
        "time": record.time,
    }


def pairs(records: Iterable[tuple[int, FeedbackRecord]], side: Side) -> Iterator[dict[str, Any]]:
    """The pairs of all records that have one."""
    for _, record in records:
        found = pair(record, side)
        if found is not None:
            yield found
