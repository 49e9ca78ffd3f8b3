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
from scheduler_core.simulator.token_gaps import GapHistogram

_STATISTICS = ("mean", "p50", "p90", "p95", "p99", "p999", "max", "tail_ratio")
_TABLE = (*LATENCIES, "tbt_s", "slowdown")
_NUMBERS = (
    "num_finished",
    "num_refused",
    "num_reached_max_tokens",
    "num_preemptions",
    "makespan_s",
    "throughput_rps",
    "throughput_output_tokens_per_s",
    "goodput_rps",
    "slo_attainment",
    "busy_share",
    "mean_requests_in_system",
    "mean_requests_waiting",
    "peak_kv_share",
    "fairness_requests",
    "fairness_tenants",
    "starvation_slope",
    "littles_law_error",
)
#: Requests shown in a Gantt chart.
GANTT_REQUESTS = 60


def write_run_page(
    result: SimulationResult, path: str | Path, intervals: Mapping[str, Any] | None = None
) -> None:
    """Writes the HTML report of a run.

    Args:
        result: The run; with several seeds the first one, of which the figures are.
        path: Where to write.
        intervals: Metrics over several seeds, see `statistics.over_seeds`; None: one seed.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    page = Page(f"Simulation: {result.config['policy']}, {result.trace['num_requests']} requests")
    page.note(_what(result))
    _numbers(page, result, intervals)
    field = _grouping(result)
    page.heading("Distribution of latencies")
    page.figure(figures.distribution_functions(_curves(result, field)), f"TTFT, TBT and TTLT by {field}.")
    groups = _groups(result, field)
    page.heading(f"TTLT by {field}")
    page.figure(
        figures.violins({name: [one.ttlt_s for one in rows] for name, rows in groups.items()}, "TTLT"),
        "Dot: median, bar: P99.",
    )
    page.heading("Load over time")
    page.figure(figures.load_over_time(result.watch.loads), "At the end of each step.")
    if result.watch.segments is not None:
        page.heading("Who ran when")
        arrivals = {one.request_id: one.arrival_s for one in result.records}
        page.figure(
            figures.gantt(result.watch.segments, arrivals, GANTT_REQUESTS),
            f"The first {min(GANTT_REQUESTS, len(arrivals))} requests by arrival.",
        )
    page.heading("Configuration")
    page.code(json.dumps(result.config, indent=1, sort_keys=True))
    page.write(path)


def _what(result: SimulationResult) -> str:
    rate, saturation = result.trace["arrival_rate_rps"], result.trace["saturation_rate_rps"]
    shown = (
        "all at once"
        if rate is None
        else f"{rate:.3g} requests/s, {rate / saturation:.2f} of the estimated capacity"
    )
    versions = result.versions
    return f"{shown}; predictor: {result.predictor['source']}; tailcast {versions['tailcast']}; seed {result.config['seed']}"


def _numbers(page: Page, result: SimulationResult, intervals: Mapping[str, Any] | None) -> None:
    metrics = result.metrics
    page.heading("Latencies, seconds")
    rows = [[name, *(metrics[name].get(key) for key in _STATISTICS)] for name in _TABLE if metrics[name]]
    page.table(["", *_STATISTICS], rows)
    for name, groups in metrics["groups"].items():
        if groups:
            page.heading(f"By {name}")
            page.table([name, "n", "TTFT mean", "TTFT P99", "TBT P99", "TTLT mean", "TTLT P99", "targets met"], [
                [key or "(none)", one["num_finished"], one["ttft_s"]["mean"], one["ttft_s"]["p99"],
                 (one.get("tbt_s") or {}).get("p99"), one["ttlt_s"]["mean"], one["ttlt_s"]["p99"], one["slo_attainment"]]
                for key, one in groups.items()
            ])  # fmt: skip
    page.heading("Counts and rates")
    page.table(["", "value"], [[name, metrics[name]] for name in _NUMBERS])
    if result.cluster is not None:
        page.table(["cluster", "value"], [[name, str(value)] for name, value in result.cluster.items()])
    if intervals is not None:
        page.heading("Means over seeds, 95 % confidence")
        page.table(["mean of", "mean", "low", "high", "seeds"], [
            [name, *(intervals[name]["mean"][key] for key in ("mean", "low", "high", "num"))]
            for name in _TABLE if intervals.get(name)
        ])  # fmt: skip


def _grouping(result: SimulationResult) -> str:
    """The field to group by: the first of which there is more than one value."""
    for name in ("tier", "tenant", "category"):
        if result.metrics["groups"][name]:
            return name
    return "tier"


def _groups(result: SimulationResult, field: str) -> dict[str, list[RequestRecord]]:
    groups: dict[str, list[RequestRecord]] = {}
    for one in sorted(result.records, key=lambda one: str(getattr(one, field))):
        groups.setdefault(f"{field} {getattr(one, field)}", []).append(one)
    return groups


def _curves(result: SimulationResult, field: str) -> dict[str, dict[str, figures.Curve]]:
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
