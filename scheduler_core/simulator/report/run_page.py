"""The page about one run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scheduler_core.simulator.records import LATENCIES, RequestRecord
from scheduler_core.simulator.report import figures
from scheduler_core.simulator.report.page import Page
from scheduler_core.simulator.run import SimulationResult
from scheduler_core.simulator.sweep.tables import flat
from scheduler_core.simulator.token_gaps import GapHistogram

_STATISTICS = {"mean": "mean", "p50": "P50", "p90": "P90", "p95": "P95", "p99": "P99", "p999": "P99.9", "max": "max",
               "tail_ratio": "P99 / P50"}  # fmt: skip
_TABLE = (*LATENCIES, "tbt_s", "slowdown")
_NUMBERS = {
    "num_finished": "requests that finished",
    "num_refused": "requests that could never run",
    "num_reached_max_tokens": "finished requests that were cut off at their cap",
    "num_preemptions": "times that a running request lost its place",
    "num_steps": "steps of all replicas",
    "makespan_s": "seconds from the first arrival to the last token",
    "throughput_rps": "requests per second",
    "throughput_output_tokens_per_s": "output tokens per second",
    "goodput_rps": "requests per second that met all their targets",
    "slo_attainment": "share of the requests with targets that met all of them",
    "busy_share": "share of the time that replicas were in a step",
    "mean_requests_in_system": "waiting and running, over time",
    "mean_requests_waiting": "over time",
    "kv_use.mean": "share of the KV blocks in use, over time",
    "kv_use.max": "the same at its highest",
    "peak_kv_share": "sum of the replicas' own peaks over all KV blocks",
    "fairness_requests": "Jain's index of 1 / slowdown over requests",
    "fairness_tenants": "the same of the tenants' means",
    "starvation_slope": "seconds per request: growth of the latency of long requests with arrival",
    "littles_law_error": "relative; a check of the simulation, 0 up to rounding",
}
#: Requests shown in a Gantt chart.
GANTT_REQUESTS = 60
#: More groups than this are not drawn as violins.
MAX_VIOLINS = 16


def write_run_page(
    result: SimulationResult,
    path: str | Path,
    intervals: Mapping[str, Any] | None = None,
    regret: Mapping[str, Any] | None = None,
) -> None:
    """Writes the HTML report of a run.

    Args:
        result: The run; with several seeds the first one, of which the figures are.
        path: Where to write.
        intervals: Metrics over several seeds, see `statistics.over_seeds`; None: one seed.
        regret: See `regret.regret`; None: not known.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    page = Page(f"Simulation: {result.config['policy']}, {result.trace['num_requests']} requests")
    page.note(_what(result))
    if intervals is not None:
        page.note(f"Everything but the intervals over seeds is of seed {result.config['seed']} alone.")
    _latencies(page, result)
    if intervals is not None:
        _intervals(page, intervals)
    _counts(page, result)
    _quality(page, result)
    if regret is not None:
        _regret(page, regret)
    _figures(page, result)
    page.heading("Configuration")
    page.code(json.dumps(result.config, indent=1, sort_keys=True))
    page.write(path)


def _figures(page: Page, result: SimulationResult) -> None:
    field = _grouping(result)
    by = "" if field is None else f" by {field}"
    page.heading("Distribution of latencies")
    page.figure(figures.distribution_functions(_curves(result, field)), f"TTFT, TBT and TTLT{by}.")
    groups = _groups(result, field)
    if len(groups) <= MAX_VIOLINS:
        page.heading(f"TTFT and TTLT{by}")
        panels = {
            label: {name: [getattr(one, latency) for one in rows] for name, rows in groups.items()}
            for label, latency in (("TTFT", "ttft_s"), ("TTLT", "ttlt_s"))
        }
        page.figure(figures.violins(panels), "Dot: median, bar: P99, n: requests.")
    page.heading("Load over time")
    page.figure(figures.load_over_time(result.watch.loads), _load_caption(result))
    if result.watch.segments is not None:
        page.heading("Who ran when")
        arrivals = {one.request_id: one.arrival_s for one in result.records}
        caption = f"The first {min(GANTT_REQUESTS, len(arrivals))} of {len(arrivals)} requests by arrival, one row each."
        if len(result.watch.loads) > 1:
            caption += " A black mark: the request went on on another replica."
        page.figure(figures.gantt(result.watch.segments, arrivals, GANTT_REQUESTS), caption)


def _load_caption(result: SimulationResult) -> str:
    """What the curves of load are; long runs are thinned out."""
    steps = result.metrics["num_steps"]
    shown = sum(len(line.points) for line in result.watch.loads.values())
    return f"As of the end of steps: {shown} points of {steps} steps (steps taken at once are one point)."


def _what(result: SimulationResult) -> str:
    rate, saturation = result.trace["arrival_rate_rps"], result.trace["saturation_rate_rps"]
    shown = (
        "all at once"
        if rate is None
        else f"{rate:.3g} requests/s, {rate / saturation:.2f} of the estimated capacity"
    )
    versions = result.versions
    cluster = result.config["cluster"]
    if cluster["num_replicas"] > 1:
        shown += f"; {cluster['num_replicas']} replicas, router {cluster['router']}"
    return f"{shown}; predictor: {result.predictor['source']}; tailcast {versions['tailcast']}; seed {result.config['seed']}"


def _latencies(page: Page, result: SimulationResult) -> None:
    metrics = result.metrics
    page.heading("Latencies, seconds (slowdown: a ratio)")
    rows = [[name, *(metrics[name].get(key) for key in _STATISTICS)] for name in _TABLE if metrics[name]]
    page.table(["", *_STATISTICS.values()], rows)
    for name, groups in metrics["groups"].items():
        if groups:
            page.heading(f"By {name}, seconds")
            head = [
                name,
                "requests",
                "TTFT mean",
                "TTFT P99",
                "TBT P99",
                "TTLT mean",
                "TTLT P99",
                "targets met",
            ]
            rows = [
                [key or "(none)", one["num_finished"], one["ttft_s"]["mean"], one["ttft_s"]["p99"],
                 (one.get("tbt_s") or {}).get("p99"), one["ttlt_s"]["mean"], one["ttlt_s"]["p99"], one["slo_attainment"]]
                for key, one in groups.items()
            ]  # fmt: skip
            # A column in which nobody has anything tells nothing.
            shown = [place for place in range(len(head)) if any(row[place] is not None for row in rows)]
            page.table([head[place] for place in shown], [[row[place] for place in shown] for row in rows])


def _counts(page: Page, result: SimulationResult) -> None:
    known = dict(flat(result.metrics))
    page.heading("Counts and rates")
    rows = [[name, _whole(known[name]), told] for name, told in _NUMBERS.items() if name in known]
    page.table(["", "value", "what it is"], rows, texts={2})
    if result.cluster is not None:
        page.heading("Cluster")
        page.table(["", "value"], [[name, _whole(value)] for name, value in flat(result.cluster)])


def _whole(value: float) -> float | int:
    return int(value) if value.is_integer() else value


def _intervals(page: Page, intervals: Mapping[str, Any]) -> None:
    page.heading("Means over seeds, 95 % confidence")
    page.note("Student's t: wide with few seeds, and then its lower end may be below 0.")
    page.table(["seconds", "mean", "low", "high", "P99", "low", "high", "seeds"], [
        [name, *(intervals[name]["mean"][key] for key in ("mean", "low", "high")),
         *(intervals[name]["p99"][key] for key in ("mean", "low", "high")), intervals[name]["mean"]["num"]]
        for name in _TABLE if intervals.get(name)
    ])  # fmt: skip


def _quality(page: Page, result: SimulationResult) -> None:
    quality = result.metrics["prediction"]
    if quality is None:
        return
    page.heading("Predicted lengths")
    page.note(
        "Coverage: share of the answers no longer than the predicted quantile. PIT: shares of the ten bins, each 0.1 if calibrated."
    )
    rows = [[name, _whole(value)] for name, value in flat(quality) if not name.startswith("pit.")]
    page.table(["", "value"], [*rows, ["pit", " ".join(f"{share:.2f}" for share in quality["pit"].values())]])


def _regret(page: Page, regret: Mapping[str, Any]) -> None:
    page.heading("Regret: means, seconds")
    page.note(
        "Against the shortest true length first on the same requests. Share: of what arrival order costs against that; "
        "0 is as good as the oracle, 1 as bad as arrival order, more is worse. Of predictions: what wrong ones cost the policy; of "
        "order: what is left with true lengths."
    )
    page.table(["", "regret", "share", "of predictions", "of order"], [
        [name, one["regret_s"], one["share"], one["of_predictions_s"], one["of_order_s"]]
        for name, one in regret.items() if isinstance(one, Mapping)
    ])  # fmt: skip
    page.note(f"The oracle would have served {regret['slower_share']:.1%} of the requests faster.")


def _grouping(result: SimulationResult) -> str | None:
    """The field to group by: the first of which there is more than one value."""
    return next((name for name in ("tier", "tenant", "category") if result.metrics["groups"][name]), None)


def _groups(result: SimulationResult, field: str | None) -> dict[str, list[RequestRecord]]:
    if field is None:
        return {"all requests": result.records}
    groups: dict[str, list[RequestRecord]] = {}
    for one in sorted(result.records, key=lambda one: getattr(one, field)):
        groups.setdefault(f"{field} {getattr(one, field)}".strip(), []).append(one)
    return groups


def _curves(result: SimulationResult, field: str | None) -> dict[str, dict[str, figures.Curve]]:
    groups = _groups(result, field)
    panels: dict[str, dict[str, figures.Curve]] = {
        "TTFT": {name: figures.empirical([one.ttft_s for one in rows]) for name, rows in groups.items()}
    }
    gaps = result.watch.gaps
    if gaps is not None and gaps.by_class:
        panels["TBT"] = {}
        for name, rows in groups.items():
            wanted = {(one.tier, one.tenant) for one in rows}
            merged = GapHistogram.merged(part for kind, part in gaps.by_class.items() if kind in wanted)
            if merged.counts.any():
                panels["TBT"][name] = merged.curve()
    panels["TTLT"] = {name: figures.empirical([one.ttlt_s for one in rows]) for name, rows in groups.items()}
    return panels
