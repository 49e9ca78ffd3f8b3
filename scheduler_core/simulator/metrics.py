"""Metrics of a run, in seconds where a name ends in _s; names and meanings as in the architecture notes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.lengths import LogT
from scheduler_core.predictions import Prediction
from scheduler_core.scheduler import Scheduler
from scheduler_core.simulator.loop import SimulationOutcome
from scheduler_core.simulator.predictions import Predictions
from scheduler_core.simulator.records import LATENCIES, FloatArray, RequestColumns, RequestRecord
from scheduler_core.simulator.token_gaps import GapClass, GapHistogram, TokenGaps
from scheduler_core.simulator.watch import RunWatch

#: Fraction of the longest outputs that the starvation slope is about.
LONG_FRACTION = 0.1
#: Fields with more groups than this are not listed.
MAX_GROUPS = 64
#: Quantiles that pinball loss and coverage are computed for.
LEVELS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
NUM_PIT_BINS = 10
#: Degrees of freedom above which Student's t is taken as normal: the CRPS then differs by less than 1e-6.
_NORMAL_NU = 1e6


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """(dotted name, number) of every number in a tree of metrics."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", float(value)


def metric(tree: Mapping[str, Any], name: str) -> float:
    """The number of this dotted name, `ttft_s.p50` or `groups.tenant.paying.tbt_s.p99` for instance.

    Raises:
        InputError: There is none; names the metrics at that level.
    """
    value: Any = tree
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            names = ", ".join(map(str, value)) if isinstance(value, Mapping) else "nothing below"
            raise InputError(f"metric {name}", part, names)
        value = value[part]
    if isinstance(value, bool) or not isinstance(value, int | float):
        parts = ", ".join(f"{name}.{key}" for key in value) if isinstance(value, Mapping) else ""
        raise InputError("metric", name, parts or "a metric with a value")
    return float(value)


def summary(values: Iterable[float | None] | FloatArray) -> dict[str, float] | None:
    """mean, p50, p90, p95, p99, p999, max (percentiles interpolated linearly) and tail_ratio = p99 / p50 of all values but
    None and NaN; None without any. Without tail_ratio if the median is 0."""
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


def starvation_slope(requests: RequestColumns | Sequence[RequestRecord]) -> float | None:
    """Growth of the latency of long requests with their order of arrival, in seconds per request (UniBoost, appendix).

    The least-squares slope of ttlt_s over the position among all arrivals, for the tenth of the requests with the longest
    outputs; near 0 without starvation. None with fewer than 3 of them.
    """
    columns = requests if isinstance(requests, RequestColumns) else RequestColumns.of(requests)
    order = np.argsort(columns.arrival_s, kind="stable")
    threshold = np.quantile(columns.output_tokens, 1 - LONG_FRACTION)
    positions = np.flatnonzero(columns.output_tokens[order] >= threshold)
    if len(positions) < 3:
        return None
    centered = positions - positions.mean()
    return float((centered * columns.ttlt_s[order][positions]).sum() / (centered**2).sum())


def run_metrics(
    outcome: SimulationOutcome,
    schedulers: Mapping[str, Scheduler],
    watch: RunWatch,
    isolated_latency_s: Mapping[str, float],
) -> dict[str, Any]:
    """Metrics of one run.

    - `ttft_s`, `ttlt_s`, `normalized_latency_s`, `tpot_s`, `queueing_delay_s`, `normalized_waiting_s` (queueing delay per
      output token), `slowdown` (ttlt_s over the latency on an idle engine): summaries over the finished requests.
    - `tbt_s`: summary over all gaps between tokens; `kv_usage`: fraction of KV blocks in use, mean over time and maximum.
    - `slo_attainment`: fraction of the requests with targets, refused ones among them, that met all of theirs;
      `goodput_rps`: those per second. None without targets.
    - `fairness_requests`: Jain's index of 1 / slowdown over requests; `fairness_tenants`: of its mean per tenant.
    - `starvation_slope`: see there.
    - `groups`: by tier, tenant and category, where there is more than one: the same for each.
    - `prediction`: see `prediction_quality`; None without predictions.
    - `littles_law_error`: the relative gap between the time average of the number of requests in the system, integrated
      event by event, and throughput times mean ttlt_s: rounding apart it must be 0.

    Args:
        outcome: The run.
        schedulers: By replica; their counters and memory peaks are read.
        watch: The observations of the run.
        isolated_latency_s: By request id: latency on an idle engine.
    """
    requests = RequestColumns.of(outcome.records)
    isolated = np.array([isolated_latency_s[one.request_id] for one in outcome.records], np.float64)
    span = outcome.end_s - outcome.start_s
    per_s = 1.0 / span if span > 0 else 0.0
    in_system = outcome.request_seconds * per_s
    expected_in_system = float(requests.ttlt_s.sum()) * per_s
    capacity = sum(core.config.num_kv_blocks for core in schedulers.values())
    speed = isolated / requests.ttlt_s
    return {
        **_request_metrics(requests, isolated, per_s, len(outcome.refused)),
        "tbt_s": None if watch.gaps is None else watch.gaps.total().summary(),
        "num_refused": len(outcome.refused),
        "num_preemptions": sum(core.counters.num_preemptions for core in schedulers.values()),
        "num_steps": outcome.num_steps,
        "makespan_s": span,
        "busy_fraction": outcome.busy_s * per_s / len(schedulers),
        "throughput_rps": len(requests) * per_s,
        "throughput_output_tokens_per_s": float(requests.output_tokens.sum()) * per_s,
        "mean_requests_in_system": in_system,
        "mean_requests_waiting": outcome.waiting_seconds * per_s,
        "peak_kv_usage": sum(core.peak_kv_blocks for core in schedulers.values()) / capacity,
        "kv_usage": watch.kv_usage(),
        "fairness_requests": jain_index(speed),
        "fairness_tenants": jain_index(_tenant_means(requests, speed)),
        "starvation_slope": starvation_slope(requests),
        "littles_law_error": abs(in_system - expected_in_system) / in_system if in_system > 0 else 0.0,
        "groups": {
            name: _group_metrics(requests, name, isolated, per_s, watch.gaps)
            for name in ("tier", "tenant", "category")
        },
        "prediction": prediction_quality(requests),
    }


def _request_metrics(
    requests: RequestColumns, isolated_s: FloatArray, per_s: float, num_refused: int
) -> dict[str, Any]:
    """Metrics of any set of requests."""
    metrics: dict[str, Any] = {name: summary(getattr(requests, name)) for name in LATENCIES}
    with_target = int(requests.has_slo.sum())
    met = int((requests.has_slo & requests.meets_slo).sum())
    return metrics | {
        "slowdown": summary(requests.ttlt_s / isolated_s),
        "num_finished": len(requests),
        "num_reached_max_tokens": int((requests.finish_reason == "length").sum()),
        "slo_attainment": met / (with_target + num_refused) if with_target else None,
        "goodput_rps": met * per_s if with_target else None,
    }


def _tenant_means(requests: RequestColumns, values: FloatArray) -> FloatArray:
    """Mean of the values of each tenant's requests."""
    tenants = requests.tenant.tolist()
    numbers = {name: number for number, name in enumerate(dict.fromkeys(tenants))}
    codes = np.array([numbers[name] for name in tenants], np.int64)
    return np.asarray(np.bincount(codes, values) / np.bincount(codes), np.float64)


def _group_metrics(
    requests: RequestColumns, name: str, isolated_s: FloatArray, per_s: float, gaps: TokenGaps | None
) -> dict[str, Any]:
    """By value of the field: metrics of its requests and their gaps; empty with one group, or too many."""
    groups = {
        key: _request_metrics(requests.where(rows), isolated_s[rows], per_s, 0)
        for key, rows in requests.groups(name, MAX_GROUPS).items()
    }
    keys: dict[str, Callable[[GapClass], str]] = {
        "tier": lambda one: str(one[0]),
        "tenant": lambda one: one[1],
    }
    if gaps is not None and name in keys:
        for key, values in groups.items():
            parts = [part for one, part in gaps.by_class.items() if keys[name](one) == key]
            values["tbt_s"] = GapHistogram.merged(parts).summary()
    return groups


def predictor_statistics(predictions: Predictions, schedulers: Mapping[str, Scheduler]) -> dict[str, Any]:
    """Source of predictions, how many came, failed or came too late, and the duration of the calls."""
    present = [one for one in predictions.by_id.values() if one is not None]
    lengths = [one.length if isinstance(one, Prediction) else one for one in present]
    artifacts = {f"{one.artifact_id} {one.artifact_version}".strip() for one in lengths if one is not None}
    return {
        "source": predictions.source,
        "num_predicted": len(present),
        "num_failed": predictions.num_failed,
        "num_late": sum(core.counters.num_late_predictions for core in schedulers.values()),
        "latency_s": summary(predictions.latency_s.values()),
        "artifacts": sorted(artifacts - {""}),
        "first_error": next(iter(predictions.errors.values()), None),
    }


def prediction_quality(requests: RequestColumns) -> dict[str, Any] | None:
    """Scores of the predicted log-t lengths of the finished requests; None without predictions.

    - `num`: requests with a prediction.
    - `mae_tokens`, `rmse_tokens`: of the predicted median; `mae_log`, `rmse_log`, `r2_log`: of mu against ln length.
    - `kendall_tau`: tau-b of the predicted medians and the lengths.
    - `pinball_tokens`: mean pinball loss of the predicted P50, P90, P99; `coverage`: fraction of lengths up to them.
    - `crps_log`: mean continuous ranked probability score of ln length; None if a nu is 1 or less, where it is infinite.
    - `pit`: fraction of the requests in each tenth of the probability integral transform; all 0.1 if calibrated.

    R2 is None if all lengths are equal, tau if one side ranks nothing. A request has one length, so there is
    no truth that the predicted sigma could be compared with: CRPS, coverage and PIT score it.
    """
    predicted = np.isfinite(requests.predicted_mu)
    if not predicted.any():
        return None
    requests = requests if predicted.all() else requests.where(predicted)
    mu, sigma, nu = requests.predicted_mu, requests.predicted_sigma, requests.predicted_nu
    length = requests.output_tokens
    distribution = LogT(mu, sigma, nu[:1] if (nu == nu[0]).all() else nu)
    error_tokens, error_log = np.exp(mu) - length, mu - np.log(length)
    variation = float(((np.log(length) - np.log(length).mean()) ** 2).sum())
    # mu + sigma t: one quantile of Student's t for each nu, not one for each request.
    values, codes = np.unique(nu, return_inverse=True)
    student = LogT(0.0, 1.0, values)
    quantiles = {
        name: np.exp(mu + sigma * np.asarray(student.logppf(level))[codes]) for name, level in LEVELS.items()
    }
    cdf = np.asarray(distribution.cdf(length))
    pit = np.histogram(cdf, NUM_PIT_BINS, (0.0, 1.0))[0] / len(length)
    return {
        "num": len(length),
        "mae_tokens": float(np.abs(error_tokens).mean()),
        "rmse_tokens": float(np.sqrt((error_tokens**2).mean())),
        "mae_log": float(np.abs(error_log).mean()),
        "rmse_log": float(np.sqrt((error_log**2).mean())),
        "r2_log": 1 - float((error_log**2).sum()) / variation if variation > 0 else None,
        "kendall_tau": kendall_tau(mu, length),
        "pinball_tokens": {
            name: float(np.maximum(level * error, (level - 1) * error).mean())
            for name, level in LEVELS.items()
            for error in [length - quantiles[name]]
        },
        "coverage": {name: float((length <= quantile).mean()) for name, quantile in quantiles.items()},
        "crps_log": _crps_log(requests, distribution, cdf),
        "pit": {f"bin_{index}": float(fraction) for index, fraction in enumerate(pit)},
    }


def _crps_log(requests: RequestColumns, distribution: LogT, cdf: FloatArray) -> float | None:
    """Mean CRPS of ln length under mu + sigma T_nu, in closed form (Jordan, Krueger & Lerch 2019, appendix A)."""
    nu, sigma, length = requests.predicted_nu, requests.predicted_sigma, requests.output_tokens
    if not (nu > 1).all():
        return None
    z = (np.log(length) - requests.predicted_mu) / sigma
    density = np.asarray(distribution.pdf(length)) * length * sigma
    values, codes = np.unique(nu, return_inverse=True)
    normal = values > _NORMAL_NU
    finite = np.where(normal, 2.0, values)
    scale = np.where(normal, 1.0, 1 / (finite - 1))[codes]
    half_distance = [_half_mean_distance(value) for value in finite]
    own = np.where(normal, 1 / math.sqrt(math.pi), half_distance)[codes]
    squares = np.where(nu > _NORMAL_NU, 1.0, nu + z**2)
    return float((sigma * (z * (2 * cdf - 1) + 2 * density * squares * scale - own)).mean())


def _half_mean_distance(nu: float) -> float:
    """Half the mean distance of two draws from Student's t: 2 sqrt(nu) / (nu - 1) B(1/2, nu - 1/2) / B(1/2, nu/2)^2."""

    def log_beta(b: float) -> float:
        return math.lgamma(0.5) + math.lgamma(b) - math.lgamma(b + 0.5)

    return 2 * math.sqrt(nu) / (nu - 1) * math.exp(log_beta(nu - 0.5) - 2 * log_beta(nu / 2))


def kendall_tau(first: FloatArray, second: FloatArray) -> float | None:
    """Kendall's tau-b of two rankings [n], in O(n log^2 n); None if one of them ranks nothing.

    Not scipy's: simulations need numpy alone, and its import takes longer than a short run.
    """
    a, b = (np.unique(values, return_inverse=True)[1] for values in (first, second))
    pairs = len(a) * (len(a) - 1) / 2
    tied_a, tied_b = _tied_pairs(a), _tied_pairs(b)
    if tied_a == pairs or tied_b == pairs:
        return None
    tied_both = _tied_pairs(a * (int(b.max()) + 1) + b)
    swaps = _inversions(b[np.lexsort((b, a))])
    difference = pairs - tied_a - tied_b + tied_both - 2 * swaps
    return float(difference / math.sqrt((pairs - tied_a) * (pairs - tied_b)))


def _tied_pairs(values: NDArray[np.int64]) -> float:
    counts = np.unique(values, return_counts=True)[1].astype(float)
    return float((counts * (counts - 1) / 2).sum())


def _inversions(ranks: NDArray[np.int64]) -> int:
    """Pairs i < j with ranks[i] > ranks[j], by a merge sort that does all merges of one size together."""
    above = int(ranks.max()) + 1
    values = np.full(1 << max(0, len(ranks) - 1).bit_length(), above, np.int64)
    values[: len(ranks)] = ranks
    swaps, width = 0, 1
    while width < len(values):
        rows = values.reshape(-1, 2 * width)
        # An offset per row makes all left halves together one sorted array.
        index = np.arange(len(rows))[:, None]
        left, right = ((half + index * (above + 1)).ravel() for half in (rows[:, :width], rows[:, width:]))
        not_above = np.searchsorted(left, right, side="right").reshape(-1, width) - index * width
        swaps += rows.size // 2 * width - int(not_above.sum())
        values = np.sort(rows, axis=1, kind="stable").ravel()
        width *= 2
    return swaps
