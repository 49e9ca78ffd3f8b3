"""Metrics of a run; names that end in _s are in seconds. README.md explains them."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.scheduler import Scheduler
from scheduler_core.simulator.loop import SimulationOutcome
from scheduler_core.simulator.records import LATENCIES, has_slo, meets_slo, request_columns
from scheduler_core.simulator.steady_state import steady_state
from scheduler_core.simulator.tables import Columns
from scheduler_core.simulator.trace import TraceRequest
from scheduler_core.simulator.trace_predictions import Predictions
from scheduler_core.simulator.watch import GAP_CLASS, QUANTILES, RunWatch, TokenGaps, named_statistics
from scheduler_core.statistics import UNBOUNDED, FloatArray, Interval, interval, kendall_tau

#: Fraction of requests with the longest outputs, for the starvation slope.
LONG_FRACTION = 0.1
#: Maximum number of groups of a field; there are no group metrics with more.
MAX_GROUPS = 64
#: Fields by which there are group metrics, and the targets that make an SLO class.
GROUPS = ("tier", "tenant", "category", "slo")
TARGETS = ("ttft_slo_s", "tbt_slo_s", "ttlt_slo_s")
_targets = attrgetter(*TARGETS)
#: Quantiles for coverage.
LEVELS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_FRACTION = (0.0, 1.0)
#: Bounds of metrics that are not only >= 0, by the last or the last but one part of their name.
_BOUNDS = {
    "slo_attainment": _FRACTION, "busy_fraction": _FRACTION, "prefix_hit_fraction": _FRACTION,
    "peak_kv_usage": _FRACTION, "kv_usage": _FRACTION,
    "fairness_requests": _FRACTION, "fairness_tenants": _FRACTION, "coverage": _FRACTION, "kendall_tau": (-1.0, 1.0),
    "starvation_slope": UNBOUNDED, "accumulated_fraction": (-math.inf, 1.0), "relative_growth": UNBOUNDED,
}  # fmt: skip


def metric_bounds(name: str) -> tuple[float, float]:
    """Smallest and largest possible value of a metric by its dotted name."""
    *_, parent, last = ("", *name.split("."))
    return _BOUNDS.get(last) or _BOUNDS.get(parent) or (0.0, math.inf)


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of all leaves of a tree of mappings."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def flat(tree: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(dotted name, number) of every number in a tree of metrics."""
    for name, value in leaves(tree):
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(value)


def metric(tree: Mapping[str, Any], name: str) -> float:
    """The number with this dotted name, such as `ttft_s.p50` or `groups.tenant.paying.tbt_s.p99`; an
    `InputError` lists names with the same first part."""
    numbers = dict(flat(tree))
    if name not in numbers:
        head = name.split(".")[0]
        heads = dict.fromkeys(other.split(".")[0] for other in numbers)
        similar = [other for other in numbers if other.split(".")[0] == head]
        raise InputError("metric", name, ", ".join(similar or heads))
    return numbers[name]


def over_seeds(runs: Iterable[Mapping[str, Any]]) -> dict[str, Interval]:
    """Intervals over the metric trees of several runs of every number, by dotted name, from the runs that have it."""
    values: dict[str, list[float]] = {}
    for tree in runs:
        for name, value in flat(tree):
            values.setdefault(name, []).append(value)
    return {name: interval(numbers, metric_bounds(name)) for name, numbers in values.items()}


def summary(values: Iterable[float | None] | FloatArray) -> dict[str, float] | None:
    """mean, p50, p90, p95, p99, p999, max (percentiles with linear interpolation) and tail_ratio = p99 / p50
    of the values, without None and NaN. None without values; no tail_ratio if the median is 0."""
    array = np.asarray(values if isinstance(values, np.ndarray) else [*values], np.float64)
    array = array[~np.isnan(array)]
    if array.size == 0:
        return None
    return named_statistics(float(array.mean()), np.quantile(array, QUANTILES), float(array.max()))


def jain_index(values: Sequence[float] | FloatArray) -> float | None:
    """(sum x)^2 / (n sum x^2), from 1/n (one x > 0) to 1 (all equal); None without x > 0 (Jain et al. 1984)."""
    array = np.asarray(values, float)
    squares = float((array**2).sum())
    return float(array.sum()) ** 2 / (len(array) * squares) if squares > 0 else None


def starvation_slope(requests: Columns) -> float | None:
    """Growth of the latency of long requests with their arrival number, in seconds per request (UniBoost, appendix).

    It is the least-squares slope of ttlt_s over the position in the order of arrival, for the 10 % of
    requests with the longest outputs; near 0 without starvation. None for fewer than 3 such requests.
    """
    order = np.argsort(requests["arrival_s"], kind="stable")
    tokens = requests["output_tokens"][order]
    positions = np.flatnonzero(tokens >= np.quantile(tokens, 1 - LONG_FRACTION))
    if len(positions) < 3:
        return None
    centered = positions - positions.mean()
    return float((centered * requests["ttlt_s"][order][positions]).sum() / (centered**2).sum())


def run_metrics(
    outcome: SimulationOutcome,
    schedulers: Mapping[str, Scheduler],
    watch: RunWatch,
    isolated_latency_s: Mapping[str, float],
) -> dict[str, Any]:
    """Metrics of one run, see README.md; SLO metrics are None without targets.

    - `fairness_tenants`: Jain's index of the mean 1 / slowdown of each tenant.
    - `prefix_hit_fraction`: fraction of the tokens to process that admitted requests found in the prefix cache.
    - `groups`: request metrics by tier, tenant, category and SLO class (`slo`: the targets), if there are several values.
    - `littles_law_error`: relative difference between the time average of the number of requests in the system and
      throughput times mean ttlt_s; must be 0 up to rounding.

    `isolated_latency_s` maps request ids to the latency on an idle engine.
    """
    requests = request_columns(outcome.records)
    requests["slowdown"] = requests["ttlt_s"] / [isolated_latency_s[name] for name in requests["request_id"]]
    span = outcome.end_s - outcome.start_s
    per_s = 1.0 / span if span > 0 else 0.0
    in_system = outcome.request_seconds * per_s
    expected_in_system = (float(requests["ttlt_s"].sum()) + outcome.failed_seconds) * per_s
    capacity = sum(core.config.capacity_blocks for core in schedulers.values())
    admitted = [core.pool.num_admitted_tokens for core in schedulers.values()]
    speed, tenants = 1 / requests["slowdown"], _codes(requests["tenant"])[1]
    mean_replicas = outcome.replica_seconds * per_s
    missed = [row for row in outcome.unserved if slo_class(_targets(row))]
    targets = zip(*(requests[name].tolist() for name in TARGETS), strict=True)
    requests["slo"] = np.array([*map(slo_class, targets)], object)
    return {
        **_request_metrics(requests, per_s, len(missed)),
        "tbt_s": watch.gaps.merged().summary(),
        "num_refused": len(outcome.refused),
        "num_failed": len(outcome.failed),
        "num_unfinished": outcome.num_unfinished,
        "num_preemptions": sum(core.counters.num_preemptions for core in schedulers.values()),
        "prefix_hit_fraction": _fraction(
            [core.pool.num_cached_tokens for core in schedulers.values()], admitted
        ),
        "num_steps": outcome.num_steps,
        "makespan_s": span,
        "busy_fraction": outcome.busy_s * per_s / len(schedulers),
        "replica_seconds": outcome.replica_seconds,
        "mean_replicas": mean_replicas,
        "cost_per_latency": mean_replicas * float(np.quantile(requests["ttlt_s"], 0.99)),
        "throughput_rps": len(outcome.records) * per_s,
        "throughput_output_tokens_per_s": float(requests["output_tokens"].sum()) * per_s,
        "mean_requests_in_system": in_system,
        "mean_requests_waiting": outcome.waiting_seconds * per_s,
        "peak_kv_usage": sum(core.pool.kv.peak_blocks for core in schedulers.values()) / capacity,
        "kv_usage": watch.kv_usage(),
        "fairness_requests": jain_index(speed),
        "fairness_tenants": jain_index(np.bincount(tenants, speed) / np.bincount(tenants)),
        "starvation_slope": starvation_slope(requests),
        "steady_state": steady_state(requests),
        "littles_law_error": abs(in_system - expected_in_system) / in_system if in_system > 0 else 0.0,
        "groups": {name: _group_metrics(requests, missed, name, per_s, watch.gaps) for name in GROUPS},
        "prediction": prediction_quality(requests),
    }


def _fraction(parts: Sequence[int], totals: Sequence[int]) -> float:
    """Sum of the parts divided by that of the totals; 0 if that is 0."""
    total = sum(totals)
    return sum(parts) / total if total else 0.0


def slo_class(targets: Iterable[float | None]) -> str:
    """Name of the SLO class of a request with these `TARGETS` in seconds; empty without any."""
    pairs = zip(("ttft", "tbt", "ttlt"), targets, strict=True)
    return ", ".join([f"{name} {value:g} s" for name, value in pairs if value is not None and value >= 0])


def _request_metrics(requests: Columns, per_s: float, num_missed: int) -> dict[str, Any]:
    """Metrics of a set of finished requests, and of `num_missed` others with targets, which were refused or failed."""
    with_target, meets = has_slo(requests), meets_slo(requests)
    num, met = int(with_target.sum()) + num_missed, int((with_target & meets).sum())
    return {name: summary(requests[name]) for name in (*LATENCIES, "slowdown")} | {
        "num_finished": len(meets),
        "num_reached_max_tokens": int((requests["finish_reason"] == "length").sum()),
        "slo_attainment": met / num if num else None,
        "goodput_rps": met * per_s if num else None,
    }


def _codes(column: NDArray[Any]) -> tuple[list[Any], NDArray[np.int64]]:
    """Sorted distinct values of a column [n], and the index of each row's value [n]."""
    # Uses a dictionary, because np.unique would sort all strings, which takes seconds for a million rows.
    rows = column.tolist()
    numbers = {value: number for number, value in enumerate(sorted(set(rows)))}
    return list(numbers), np.array([numbers[value] for value in rows], np.int64)


def _group_metrics(
    requests: Columns, missed: Sequence[TraceRequest], name: str, per_s: float, gaps: TokenGaps
) -> dict[str, Any]:
    """Metrics of the requests and their gaps, by value of the column; empty for one group or too many. `missed`: requests with
    targets that were refused or failed."""
    keys, codes = _codes(requests[name])
    num_missed = Counter(slo_class(_targets(row)) if name == "slo" else getattr(row, name) for row in missed)
    keys += sorted(set(num_missed) - set(keys))
    if not 1 < len(keys) <= MAX_GROUPS:
        return {}
    groups = {}
    for number, key in enumerate(keys):
        members = {column: values[codes == number] for column, values in requests.items()}
        groups[str(key)] = _request_metrics(members, per_s, num_missed[key])
        if name in GAP_CLASS:
            groups[str(key)]["tbt_s"] = gaps.merged(name, key).summary()
    return groups


def predictor_statistics(predictions: Predictions, schedulers: Mapping[str, Scheduler]) -> dict[str, Any]:
    """Source of predictions; numbers of successful, failed and late ones, of those that lack a part of a joined predictor,
    and of requests without a prompt, for which the predictor was not called; latency of the calls."""
    present = [prediction for prediction in predictions.by_id.values() if prediction is not None]
    lengths = [prediction.length for prediction in present if prediction.length is not None]
    artifacts = {f"{length.artifact_id} {length.artifact_version}".strip() for length in lengths}
    return {
        "source": predictions.source,
        "num_predicted": len(present),
        "num_failed": predictions.num_failed,
        "num_partial": predictions.num_partial,
        "num_without_prompt": predictions.num_without_prompt,
        "num_late": sum(core.counters.num_late_predictions for core in schedulers.values()),
        "latency_s": summary(predictions.latency_s.values()),
        "artifacts": sorted(artifacts - {""}),
        "first_error": next(iter(predictions.errors.values()), None),
    }


def prediction_quality(requests: Columns) -> dict[str, Any] | None:
    """Scores of the predicted lengths of the finished requests; None without predictions.

    `mae_tokens` is the error of the median; `mae_log` and `rmse_log` are errors of mu as ln length; `kendall_tau` is that
    of medians and lengths (None if all are equal); `coverage` is the fraction of lengths up to the predicted P50, P90, P99.
    """
    predicted = np.isfinite(requests["predicted_mu"])
    if not predicted.any():
        return None
    mu, probability, length = (
        requests[name][predicted] for name in ("predicted_mu", "predicted_probability", "output_tokens")
    )
    error_log = mu - np.log(length)
    return {
        "num": len(length),
        "mae_tokens": float(np.abs(np.exp(mu) - length).mean()),
        "mae_log": float(np.abs(error_log).mean()),
        "rmse_log": float(np.sqrt((error_log**2).mean())),
        "kendall_tau": kendall_tau(mu, length),
        "coverage": {name: float((probability <= level).mean()) for name, level in LEVELS.items()},
    }
