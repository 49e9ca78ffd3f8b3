"""What a simulation is judged by; names and meanings as in the architecture notes, all times in seconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from scheduler_core.scheduler import Scheduler
from scheduler_core.simulator.fetch import Predictions
from scheduler_core.simulator.loop import Outcome
from scheduler_core.simulator.records import LATENCIES


def summary(values: Iterable[float | None]) -> dict[str, float] | None:
    """mean, p50, p90, p99 and max (percentiles interpolated linearly) of what is not None; None if nothing is."""
    array = np.array([value for value in values if value is not None], float)
    if array.size == 0:
        return None
    p50, p90, p99 = np.percentile(array, [50, 90, 99])
    return {
        "mean": float(array.mean()),
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
        "max": float(array.max()),
    }


def run_metrics(outcome: Outcome, scheduler: Scheduler) -> dict[str, Any]:
    """Metrics of one run.

    Latencies (`ttft_s`, `ttlt_s`, `per_token_latency_s`, `tpot_s`, `queueing_delay_s`) are summaries over the finished
    requests. `littles_law_error` is the relative gap between the time average of the number of requests in the
    system, integrated event by event, and throughput times mean ttlt: rounding apart it must be 0.
    """
    records = outcome.records
    span = outcome.end_s - outcome.start_s
    tokens = sum(record.output_tokens for record in records)
    in_system = outcome.request_seconds / span if span > 0 else 0.0
    predicted_by_law = sum(record.ttlt_s for record in records) / span if span > 0 else 0.0
    metrics: dict[str, Any] = {
        name: summary(getattr(record, name) for record in records) for name in LATENCIES
    }
    metrics.update(
        num_finished=len(records),
        num_refused=len(outcome.refused),
        num_reached_max_tokens=sum(record.finish_reason == "length" for record in records),
        num_preemptions=scheduler.counters.num_preemptions,
        num_steps=outcome.num_steps,
        makespan_s=span,
        busy_share=outcome.busy_s / span if span > 0 else 0.0,
        throughput_rps=len(records) / span if span > 0 else 0.0,
        throughput_output_tokens_per_s=tokens / span if span > 0 else 0.0,
        mean_requests_in_system=in_system,
        mean_requests_waiting=outcome.waiting_seconds / span if span > 0 else 0.0,
        peak_kv_share=scheduler.peak_kv_blocks / scheduler.config.num_kv_blocks,
        littles_law_error=abs(in_system - predicted_by_law) / in_system if in_system > 0 else 0.0,
    )
    return metrics


def predictor_statistics(predictions: Predictions, scheduler: Scheduler) -> dict[str, Any]:
    """Where predictions came from, how many came, failed or came too late, and how long the calls took."""
    answers = [answer for answer in predictions.answers.values() if answer is not None]
    artifacts = sorted({f"{a.artifact_id} {a.artifact_version}".strip() for a in answers} - {""})
    return {
        "source": predictions.source,
        "num_predicted": len(answers),
        "num_failed": predictions.num_failed,
        "num_late": scheduler.counters.num_late_predictions,
        "latency_s": summary(predictions.latency_s.values()),
        "artifacts": artifacts,
        "first_error": next(iter(predictions.errors.values()), None),
    }
