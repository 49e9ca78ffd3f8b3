"""What a simulation is judged by; names and meanings as in the architecture notes, all times in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from scheduler_core.predictions import Prediction
from scheduler_core.scheduler import Scheduler
from scheduler_core.simulator.fetch import Predictions
from scheduler_core.simulator.loop import Outcome
from scheduler_core.simulator.prediction_quality import prediction_quality
from scheduler_core.simulator.records import LATENCIES, RequestRecord
from scheduler_core.simulator.request_columns import FloatArray, RequestColumns
from scheduler_core.simulator.token_gaps import GapHistogram, TokenGaps
from scheduler_core.simulator.watch import RunWatch, kv_quantiles

#: Share of the longest answers that the starvation slope looks at.
LONG_SHARE = 0.1
#: More groups than this are not listed one by one.
MAX_GROUPS = 64
_GROUPS = ("tier", "tenant", "category")


def summary(values: Iterable[float | None] | FloatArray) -> dict[str, float] | None:
    """mean, p50, p90, p95, p99, p999, max (percentiles interpolated linearly) and tail_ratio = p99 / p50 of what is not
    None or NaN; None if nothing is. Without tail_ratio if the median is 0."""
    array = np.asarray(values if isinstance(values, np.ndarray) else [*values], np.float64)
    array = array[~np.isnan(array)]
    if array.size == 0:
        return None
    p50, p90, p95, p99, p999 = map(float, np.percentile(array, [50, 90, 95, 99, 99.9]))
    named = {"mean": float(array.mean()), "p50": p50, "p90": p90, "p95": p95, "p99": p99, "p999": p999}
    named["max"] = float(array.max())
    if p50 > 0:
        named["tail_ratio"] = p99 / p50
    return named


def jain_index(values: Sequence[float] | FloatArray) -> float | None:
    """(sum x)^2 / (n sum x^2): 1 when all are equal, 1/n when one has everything (Jain et al. 1984); None without x > 0."""
    array = np.asarray(values, float)
    squares = float((array**2).sum())
    return float(array.sum()) ** 2 / (len(array) * squares) if squares > 0 else None


def starvation_slope(records: Sequence[RequestRecord]) -> float | None:
    """Growth of the latency of long requests with their order of arrival, in seconds per request (UniBoost, appendix).

    The least-squares slope of ttlt_s over the position among all arrivals, for the tenth of the requests with the longest
    answers; near 0 where nobody starves. None with fewer than 3 of them.
    """
    return _starvation_slope(RequestColumns.of(records))


def _starvation_slope(requests: RequestColumns) -> float | None:
    order = np.argsort(requests.arrival_s, kind="stable")
    place = np.flatnonzero(
        requests.output_tokens[order] >= np.quantile(requests.output_tokens, 1 - LONG_SHARE)
    )
    if len(place) < 3:
        return None
    centred = place - place.mean()
    return float((centred * requests.ttlt_s[order][place]).sum() / (centred**2).sum())


def run_metrics(
    outcome: Outcome, schedulers: Mapping[str, Scheduler], watch: RunWatch, alone_s: Mapping[str, float]
) -> dict[str, Any]:
    """Metrics of one run.

    - `ttft_s`, `ttlt_s`, `per_token_latency_s`, `tpot_s`, `queueing_delay_s`, `normalized_waiting_s` (queueing delay per
      output token), `slowdown` (ttlt_s over what it would be alone): summaries over the finished requests.
    - `tbt_s`: summary over all gaps between tokens; `kv_use`: share of KV blocks in use, mean over time and maximum.
    - `slo_attainment`: share of the requests with targets, refused ones among them, that met all of theirs;
      `goodput_rps`: those per second. None if nobody has a target.
    - `fairness_requests`: Jain's index of 1 / slowdown over requests; `fairness_tenants`: of its mean per tenant.
    - `starvation_slope`: see there.
    - `groups`: by tier, tenant and category, where there is more than one: the same for each.
    - `prediction`: how good predicted lengths were, see `prediction_quality`; None without predictions.
    - `littles_law_error`: the relative gap between the time average of the number of requests in the system, integrated
      event by event, and throughput times mean ttlt_s: rounding apart it must be 0.
    """
    requests = RequestColumns.of(outcome.records)
    alone = np.array([alone_s[one.request_id] for one in outcome.records], np.float64)
    span = outcome.end_s - outcome.start_s
    per_s = 1.0 / span if span > 0 else 0.0
    in_system = outcome.request_seconds * per_s
    predicted_by_law = float(requests.ttlt_s.sum()) * per_s
    metrics = _of_requests(requests, alone, per_s, len(outcome.refused))
    metrics["tbt_s"] = None if watch.gaps is None else _of_gaps(watch.gaps.total())
    capacity = sum(core.config.num_kv_blocks for core in schedulers.values())
    speed = alone / requests.ttlt_s
    metrics.update(
        num_refused=len(outcome.refused),
        num_preemptions=sum(core.counters.num_preemptions for core in schedulers.values()),
        num_steps=outcome.num_steps,
        makespan_s=span,
        busy_share=outcome.busy_s * per_s / len(schedulers),
        throughput_rps=len(requests) * per_s,
        throughput_output_tokens_per_s=float(requests.output_tokens.sum()) * per_s,
        mean_requests_in_system=in_system,
        mean_requests_waiting=outcome.waiting_seconds * per_s,
        peak_kv_share=sum(core.peak_kv_blocks for core in schedulers.values()) / capacity,
        kv_use=kv_quantiles(watch.loads),
        fairness_requests=jain_index(speed),
        fairness_tenants=jain_index(_tenant_rates(requests, speed)),
        starvation_slope=_starvation_slope(requests),
        littles_law_error=abs(in_system - predicted_by_law) / in_system if in_system > 0 else 0.0,
        groups={name: _by_group(requests, name, alone, per_s, watch.gaps) for name in _GROUPS},
        prediction=prediction_quality(requests),
    )
    return metrics


def _of_requests(
    requests: RequestColumns, alone_s: FloatArray, per_s: float, num_refused: int
) -> dict[str, Any]:
    """What can be said of any set of requests."""
    metrics: dict[str, Any] = {name: summary(getattr(requests, name)) for name in LATENCIES}
    metrics["slowdown"] = summary(requests.ttlt_s / alone_s)
    metrics["num_finished"] = len(requests)
    metrics["num_reached_max_tokens"] = int((requests.finish_reason == "length").sum())
    with_target = int(requests.has_slo.sum())
    met = int((requests.has_slo & requests.meets_slo).sum())
    metrics["slo_attainment"] = met / (with_target + num_refused) if with_target else None
    metrics["goodput_rps"] = met * per_s if with_target else None
    return metrics


def _of_gaps(gaps: GapHistogram) -> dict[str, float] | None:
    """The summary of the gaps with its tail_ratio, as of any latency."""
    named = gaps.summary()
    if named is not None and named["p50"] > 0:
        named["tail_ratio"] = named["p99"] / named["p50"]
    return named


def _tenant_rates(requests: RequestColumns, speed: FloatArray) -> FloatArray:
    """Mean of the speed of each tenant's requests."""
    tenants = requests.tenant.tolist()
    ids = {name: place for place, name in enumerate(dict.fromkeys(tenants))}
    places = np.array([ids[name] for name in tenants], np.int64)
    return np.asarray(np.bincount(places, speed) / np.bincount(places), np.float64)


def _by_group(
    requests: RequestColumns, name: str, alone_s: FloatArray, per_s: float, gaps: TokenGaps | None
) -> dict[str, Any]:
    """By value of the field: `_of_requests` and the gaps between tokens; empty with one group, or too many."""
    groups = {
        key: _of_requests(requests.where(chosen), alone_s[chosen], per_s, 0)
        for key, chosen in requests.groups(name, MAX_GROUPS).items()
    }
    pick: dict[str, Callable[[tuple[int, str]], str]] = {
        "tier": lambda kind: str(kind[0]),
        "tenant": lambda kind: kind[1],
    }
    if gaps is not None and name in pick:
        for key, values in groups.items():
            parts = [part for kind, part in gaps.by_class.items() if pick[name](kind) == key]
            values["tbt_s"] = _of_gaps(GapHistogram.merged(parts))
    return groups


def with_cluster(metrics: Mapping[str, Any], cluster: Mapping[str, Any] | None) -> dict[str, Any]:
    """Metrics of a run with those of its cluster (migrations, restarts, scaling) under `cluster`, if it had one."""
    return {**metrics} if cluster is None else {**metrics, "cluster": dict(cluster)}


def predictor_statistics(predictions: Predictions, schedulers: Mapping[str, Scheduler]) -> dict[str, Any]:
    """Where predictions came from, how many came, failed or came too late, and how long the calls took."""
    answers = [answer for answer in predictions.answers.values() if answer is not None]
    lengths = [one.length if isinstance(one, Prediction) else one for one in answers]
    named = {f"{one.artifact_id} {one.artifact_version}".strip() for one in lengths if one is not None}
    return {
        "source": predictions.source,
        "num_predicted": len(answers),
        "num_failed": predictions.num_failed,
        "num_late": sum(core.counters.num_late_predictions for core in schedulers.values()),
        "latency_s": summary(predictions.latency_s.values()),
        "artifacts": sorted(named - {""}),
        "first_error": next(iter(predictions.errors.values()), None),
    }
