"""The page about one run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scheduler_core.report.page import Page
from scheduler_core.simulator import figures
from scheduler_core.simulator.metrics import flat
from scheduler_core.simulator.records import LATENCIES, RequestRecord
from scheduler_core.simulator.run import SimulationResult
from scheduler_core.simulator.token_gaps import GapHistogram

_STATISTICS = {"mean": "mean", "p50": "P50", "p90": "P90", "p95": "P95", "p99": "P99", "p999": "P99.9", "max": "max",
               "tail_ratio": "P99 / P50"}  # fmt: skip
_TABLE = (*LATENCIES, "tbt_s", "slowdown")
_NUMBERS = {
    "num_finished": "requests that finished",
    "num_refused": "requests that could never run",
    "num_reached_max_tokens": "finished requests that were truncated at max_tokens",
    "num_preemptions": "preemptions of running requests",
    "num_steps": "steps of all replicas",
    "makespan_s": "seconds from the first arrival to the last token",
    "throughput_rps": "requests per second",
    "throughput_output_tokens_per_s": "output tokens per second",
    "goodput_rps": "requests per second that met all their targets",
    "slo_attainment": "fraction of the requests with targets that met all of them",
    "busy_fraction": "fraction of the time that replicas were in a step",
    "mean_requests_in_system": "waiting and running, over time",
    "mean_requests_waiting": "over time",
    "kv_usage.mean": "fraction of the KV blocks in use, over time",
    "kv_usage.max": "the same at its highest",
    "peak_kv_usage": "sum of the replicas' own peaks over all KV blocks",
    "fairness_requests": "Jain's index of 1 / slowdown over requests",
    "fairness_tenants": "the same of the tenants' means",
    "starvation_slope": "seconds per request: growth of the latency of long requests with arrival",
    "littles_law_error": "relative; a check of the simulation, 0 up to rounding",
}
#: Requests in a Gantt chart.
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
        regret: See `regret.simulated_regret`; None: not computed.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    page = Page(f"Simulation: {result.config['policy']}, {result.trace['num_requests']} requests")
    page.note(_summary(result))
    if intervals is not None:
        page.note(f"Everything but the intervals over seeds is of seed {result.config['seed']} alone.")
    _add_latencies(page, result.metrics)
    if intervals is not None:
        _add_intervals(page, intervals)
    numbers = dict(flat(result.metrics))
    page.heading("Counts and rates")
    rows = [[name, _integer(numbers[name]), text] for name, text in _NUMBERS.items() if name in numbers]
    page.table(["", "value", "what it is"], rows, text_columns={2})
    if "cluster" in result.metrics:
        page.heading("Cluster")
        page.table(
            ["", "value"], [[name, _integer(value)] for name, value in flat(result.metrics["cluster"])]
        )
    if result.metrics["prediction"] is not None:
        _add_prediction_quality(page, result.metrics["prediction"])
    if regret is not None:
        _add_regret(page, regret)
    _add_figures(page, result)
    page.heading("Configuration")
    page.code(json.dumps(result.config, indent=1, sort_keys=True))
    page.write(path)


def _summary(result: SimulationResult) -> str:
    rate, saturation = result.trace["arrival_rate_rps"], result.trace["saturation_rate_rps"]
    parts = ["all at once"]
    if rate is not None:
        parts = [f"{rate:.3g} requests/s, {rate / saturation:.2f} of the estimated capacity"]
    cluster = result.config["cluster"]
    if cluster["num_replicas"] > 1:
        parts.append(f"{cluster['num_replicas']} replicas, router {cluster['router']}")
    parts.append(f"predictor: {result.predictor['source']}")
    return "; ".join([*parts, f"tailcast {result.versions['tailcast']}", f"seed {result.config['seed']}"])


def _add_latencies(page: Page, metrics: Mapping[str, Any]) -> None:
    page.heading("Latencies, seconds (slowdown: a ratio)")
    rows = [[name, *(metrics[name].get(key) for key in _STATISTICS)] for name in _TABLE if metrics[name]]
    page.table(["", *_STATISTICS.values()], rows)
    columns = {
        "requests": "num_finished", "TTFT mean": "ttft_s.mean", "TTFT P99": "ttft_s.p99", "TBT P99": "tbt_s.p99",
        "TTLT mean": "ttlt_s.mean", "TTLT P99": "ttlt_s.p99", "targets met": "slo_attainment",
    }  # fmt: skip
    for name, groups in metrics["groups"].items():
        if groups:
            page.heading(f"By {name}, seconds")
            values = {key: dict(flat(one)) for key, one in groups.items()}
            used = {
                title: key for title, key in columns.items() if any(key in one for one in values.values())
            }
            rows = []
            for key, one in values.items():
                cells = [one.get(column) for column in used.values()]
                rows.append([key or "(none)", int(one["num_finished"]), *cells[1:]])
            page.table([name, *used], rows)


def _integer(value: float) -> float | int:
    return int(value) if value.is_integer() else value


def _add_intervals(page: Page, intervals: Mapping[str, Any]) -> None:
    page.heading("Means over seeds, 95 % confidence")
    page.note("Student's t: wide with few seeds, and then its lower end may be below 0.")
    ends = ("mean", "low", "high")
    rows = [
        [name, *(one["mean"][key] for key in ends), *(one["p99"][key] for key in ends), one["mean"]["num"]]
        for name in _TABLE
        if (one := intervals.get(name))
    ]
    page.table(["seconds", "mean", "low", "high", "P99", "low", "high", "seeds"], rows)


def _add_prediction_quality(page: Page, quality: Mapping[str, Any]) -> None:
    page.heading("Predicted lengths")
    page.note(
        "Coverage: fraction of the outputs no longer than the predicted quantile. PIT: fractions of the ten bins, each 0.1 if "
        "calibrated."
    )
    rows = [[name, _integer(value)] for name, value in flat(quality) if not name.startswith("pit.")]
    pit = " ".join(f"{fraction:.2f}" for fraction in quality["pit"].values())
    page.table(["", "value"], [*rows, ["pit", pit]])


def _add_regret(page: Page, regret: Mapping[str, Any]) -> None:
    page.heading("Regret: means, seconds")
    page.note(
        "Compared with the shortest true length first on the same requests. Fraction: of the cost of arrival order compared "
        "with that; 0 is as good as the oracle, 1 as bad as arrival order, more is worse. Of predictions: the cost of wrong "
        "ones to the policy; of order: the rest, with true lengths."
    )
    keys = ("regret_s", "fraction", "of_predictions_s", "of_order_s")
    rows = [[name, *map(one.get, keys)] for name, one in regret.items() if isinstance(one, Mapping)]
    page.table(["", "regret", "fraction", "of predictions", "of order"], rows)
    page.note(f"The oracle would have served {regret['slower_fraction']:.1%} of the requests faster.")


def _add_figures(page: Page, result: SimulationResult) -> None:
    field = next((name for name, groups in result.metrics["groups"].items() if groups), None)
    groups = _groups(result, field)
    by = "" if field is None else f" by {field}"
    page.heading("Distribution of latencies")
    page.figure(figures.distribution_functions(_curves(result, groups)), f"TTFT, TBT and TTLT{by}.")
    if len(groups) <= MAX_VIOLINS:
        page.heading(f"TTFT and TTLT{by}")
        panels = {
            label: {name: [getattr(one, latency) for one in records] for name, records in groups.items()}
            for label, latency in (("TTFT", "ttft_s"), ("TTLT", "ttlt_s"))
        }
        page.figure(figures.violins(panels), "Dot: median, bar: P99, n: requests.")
    page.heading("Load over time")
    num_points = sum(len(line.points) for line in result.watch.loads.values())
    num_steps = result.metrics["num_steps"]
    caption = (
        f"At the end of steps: {num_points} points of {num_steps} steps (steps taken at once are one point)."
    )
    page.figure(figures.load_over_time(result.watch.loads), caption)
    if result.watch.segments is not None:
        page.heading("Who ran when")
        arrivals = {one.request_id: one.arrival_s for one in result.records}
        num = min(GANTT_REQUESTS, len(arrivals))
        caption = f"The first {num} of {len(arrivals)} requests by arrival, one row each."
        if len(result.watch.loads) > 1:
            caption += " A black mark: the request moved to another replica."
        page.figure(figures.gantt(result.watch.segments, arrivals, GANTT_REQUESTS), caption)


def _groups(result: SimulationResult, field: str | None) -> dict[str, list[RequestRecord]]:
    if field is None:
        return {"all requests": result.records}
    groups: dict[str, list[RequestRecord]] = {}
    for one in sorted(result.records, key=lambda one: getattr(one, field)):
        groups.setdefault(f"{field} {getattr(one, field)}".strip(), []).append(one)
    return groups


def _curves(
    result: SimulationResult, groups: Mapping[str, list[RequestRecord]]
) -> dict[str, dict[str, figures.Curve]]:
    def empirical(latency: str) -> dict[str, figures.Curve]:
        return {
            name: figures.empirical([getattr(one, latency) for one in rows]) for name, rows in groups.items()
        }

    panels = {"TTFT": empirical("ttft_s")}
    gaps = result.watch.gaps
    if gaps is not None and gaps.by_class:
        panels["TBT"] = {}
        for name, rows in groups.items():
            classes = {(one.tier, one.tenant) for one in rows}
            merged = GapHistogram.merged(part for one, part in gaps.by_class.items() if one in classes)
            if merged.counts.any():
                panels["TBT"][name] = merged.curve()
    panels["TTLT"] = empirical("ttlt_s")
    return panels
