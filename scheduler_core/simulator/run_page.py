"""The page about one run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_core.report.page import Page
from scheduler_core.simulator import figures
from scheduler_core.simulator.metrics import flat
from scheduler_core.simulator.records import LATENCIES, request_columns
from scheduler_core.simulator.run import SimulationResult
from scheduler_core.simulator.token_gaps import GAP_CLASS, GapHistogram

_STATISTICS = {"mean": "mean", "p50": "P50", "p90": "P90", "p95": "P95", "p99": "P99", "p999": "P99.9", "max": "max",
               "tail_ratio": "P99 / P50"}  # fmt: skip
_LATENCIES = (*LATENCIES, "tbt_s", "slowdown")
_GROUP_COLUMNS = {
    "requests": "num_finished", "TTFT mean": "ttft_s.mean", "TTFT P99": "ttft_s.p99", "TBT P99": "tbt_s.p99",
    "TTLT mean": "ttlt_s.mean", "TTLT P99": "ttlt_s.p99", "targets met": "slo_attainment",
}  # fmt: skip


def write_run_page(
    result: SimulationResult, path: str | Path, intervals: Mapping[str, Any] | None = None
) -> None:
    """Writes the HTML report of a run: latencies, also by group, one figure of their distributions, all other metrics.

    Args:
        result: The run; with several seeds the first one, of which everything but the intervals is.
        path: Where to write.
        intervals: Metrics over several seeds, see `statistics.over_seeds`; None: one seed.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    metrics, seed = result.metrics, result.config["seed"]
    page = Page(f"Simulation: {result.config['policy']}, {result.trace['num_requests']} requests")
    page.note(_summary(result))
    page.heading("Latencies, seconds (slowdown: a ratio)")
    rows = [[name, *map(metrics[name].get, _STATISTICS)] for name in _LATENCIES if metrics[name]]
    page.table(["", *_STATISTICS.values()], rows)
    if intervals is not None:
        page.heading("Means over seeds, 95 % confidence")
        page.note(f"Student's t: wide with few seeds. Everything else on this page is of seed {seed} alone.")
        ends = ("mean", "low", "high")
        rows = [
            [
                name,
                *(one[statistic][key] for statistic in ("mean", "p99") for key in ends),
                one["mean"]["num"],
            ]
            for name in _LATENCIES
            if (one := intervals.get(name))
        ]
        page.table(["seconds", "mean", "low", "high", "P99", "low", "high", "seeds"], rows)
    for name, groups in metrics["groups"].items():
        if groups:
            page.heading(f"By {name}, seconds")
            numbers = {key: dict(flat(one)) for key, one in groups.items()}
            page.table(
                [name, *_GROUP_COLUMNS],
                [[key or "(none)", *map(one.get, _GROUP_COLUMNS.values())] for key, one in numbers.items()],
            )
    field = next((name for name, groups in metrics["groups"].items() if groups), None)
    page.heading("Distribution of latencies")
    page.figure(
        figures.distribution_functions(_curves(result, field)),
        "TTFT, TBT and TTLT" + (f" by {field}." if field else "."),
    )
    page.heading("All other metrics")
    page.note("simulator/README.md explains them.")
    others = {name: value for name, value in metrics.items() if name not in (*_LATENCIES, "groups")}
    page.table(["", "value"], [[name, value] for name, value in flat(others)])
    page.heading("Configuration")
    page.code(json.dumps(result.config, indent=1, sort_keys=True))
    page.write(path)


def _summary(result: SimulationResult) -> str:
    rate, saturation = result.trace["arrival_rate_rps"], result.trace["saturation_rate_rps"]
    load = "all at once"
    if rate is not None:
        load = f"{rate:.3g} requests/s, {rate / saturation:.2f} of the estimated capacity"
    replicas = f"replicas: {result.config['cluster']['num_replicas']}"
    source, version = result.predictor["source"], result.versions["tailcast"]
    return f"{load}; {replicas}; predictor: {source}; tailcast {version}; seed {result.config['seed']}"


def _curves(result: SimulationResult, field: str | None) -> dict[str, dict[str, figures.Curve]]:
    """By latency, by value of the field: the distribution function."""
    columns, gaps = request_columns(result.records), result.watch.gaps
    values = [None] if field is None else sorted(set(columns[field].tolist()))
    curves: dict[str, dict[str, figures.Curve]] = {"TTFT": {}, "TBT": {}, "TTLT": {}}
    for value in values:
        rows = slice(None) if field is None else np.asarray(columns[field] == value)
        name = "all requests" if field is None else f"{field} {value}".strip()
        curves["TTFT"][name] = figures.empirical(columns["ttft_s"][rows])
        curves["TTLT"][name] = figures.empirical(columns["ttlt_s"][rows])
        if field in (None, *GAP_CLASS):
            at = None if field is None else GAP_CLASS.index(field)
            merged = GapHistogram.merged(
                part for one, part in gaps.by_class.items() if at is None or one[at] == value
            )
            if merged.counts.any():
                curves["TBT"][name] = merged.curve()
    return {title: groups for title, groups in curves.items() if groups}
