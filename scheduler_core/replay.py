"""Exact replay of a decision log: the same calls on a new scheduler must have the same outcomes."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_core.decision_log import SCHEMA, DecisionLog, Entry
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.plan import StepResult
from scheduler_core.policies import make_policy
from scheduler_core.predictions import (
    BucketPrediction,
    LengthPrediction,
    Prediction,
    RankPrediction,
    UrgencyPrediction,
    apply_prediction,
)
from scheduler_core.request import Request, RequestState
from scheduler_core.scheduler import Scheduler, SchedulerConfig


class ReplayError(TailcastError):
    """A replayed call had another outcome than the recorded one."""


def replay(entries: Iterable[Entry]) -> Scheduler:
    """Repeats the calls on a new scheduler and compares every outcome, number by number.

    Returns:
        The scheduler in its last state.

    Raises:
        ReplayError: An outcome differs; the message names the entry.
        InputError: The log does not start with an "open" entry of this schema.
    """
    remaining = iter(entries)
    head = next(remaining, {})
    if head.get("op") != "open" or head.get("schema") != SCHEMA:
        raise InputError("first entry of the decision log", head, f'an "open" entry of schema {SCHEMA}')
    log = DecisionLog()
    config = SchedulerConfig(**head["config"])
    scheduler = Scheduler(config, make_policy(head["policy"], head["parameters"]), log)
    for number, entry in enumerate(remaining, start=2):
        _repeat(scheduler, entry)
        if log.entries[-1] != entry:
            raise ReplayError(f"entry {number}: recorded {entry}, replayed {log.entries[-1]}")
    return scheduler


def _repeat(scheduler: Scheduler, entry: Entry) -> None:
    now = entry["now"]
    match entry["op"]:
        case "add":
            scheduler.add(Request(**entry["request"]), now)
        case "update":
            content = entry["prediction"]
            scheduler.update(entry["request_id"], None if content is None else _prediction(content), now)
        case "schedule":
            scheduler.schedule(now)
        case "complete":
            result = entry["result"]
            if result["num_steps"] > 1:
                scheduler.steady_steps(result["num_steps"])
            scheduler.complete(StepResult(result["step"], tuple(result["stopped"]), result["num_steps"]), now)
        case "abort":
            scheduler.abort(entry["request_id"], now)
        case "reserve":
            scheduler.reserve(entry["request_id"], entry["num_blocks"], now)
        case "unreserve":
            scheduler.unreserve(entry["request_id"], now)
        case "detach":
            scheduler.detach(entry["request_id"], now)
        case "attach":
            scheduler.attach(_state(entry["state"]), now)
        case other:
            allowed = "add, update, schedule, complete, abort, reserve, unreserve, detach, attach"
            raise InputError("op", other, allowed)


def _state(content: Entry) -> RequestState:
    """The state of a request that came from another replica."""
    state = RequestState(Request(**content["request"]), order=0)
    for name in content.keys() - {"request", "request_id", "prediction", "urgency", "bucket", "rank"}:
        setattr(state, name, content[name])
    apply_prediction(state, _prediction({**content, "length": content["prediction"]}))
    state.prediction_failed = content["prediction_failed"]
    return state


def _prediction(content: Entry) -> Prediction:
    length, urgency, bucket, rank = (content[name] for name in ("length", "urgency", "bucket", "rank"))
    return Prediction(
        length=LengthPrediction(**length) if length else None,
        urgency=UrgencyPrediction(tuple(urgency["probabilities"])) if urgency else None,
        bucket=BucketPrediction(tuple(bucket["probabilities"]), tuple(bucket["edges"])) if bucket else None,
        rank=RankPrediction(**rank) if rank else None,
    )
