"""Printed tables of the server comparison."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.service.load_generator import OK
from benchmarks.service.variants import Variant


@dataclass(slots=True)
class Row:
    """Measurements of one server: one entry per round; reports by load."""

    variant: Variant
    start_s: list[float] = field(default_factory=list)
    start_cpu_s: list[float] = field(default_factory=list)
    pss_mb: list[float] = field(default_factory=list)
    reports: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def saved(
    rows: Sequence[Row], limits: Mapping[str, Sequence[float]], saturation: float, artifact: Path
) -> dict[str, Any]:
    """All measurements, for a JSON file."""
    return {
        "artifact": artifact.name,
        "cores": os.cpu_count(),
        "saturation": saturation,
        "limits": {way: list(rates) for way, rates in limits.items()},
        "servers": {
            row.variant.name: {
                "start_s": row.start_s,
                "start_cpu_s": row.start_cpu_s,
                "pss_mb": row.pss_mb,
                "lines": row.variant.user_lines,
                "failures": row.failures,
                "reports": row.reports,
            }
            for row in rows
        },
    }


def print_limits(limits: Mapping[str, Sequence[float]]) -> None:
    """Prints the upper limit, ONNX Runtime alone."""
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    print(f"{'ONNX Runtime alone, one thread':44} {'req/cpu-s':>16}")
    for way, rates in limits.items():
        print(f"{way:44} {_range(rates):>16}")


def print_start(row: Row) -> None:
    """Prints a line: seconds, CPU seconds and memory at the first response."""
    text = "; ".join(row.failures)
    if row.start_s:
        middle = [statistics.median(values) for values in (row.start_s, row.start_cpu_s, row.pss_mb)]
        text = f"{middle[0]:6.1f} s {middle[1]:6.1f} CPU s {middle[2]:6.0f} MB PSS {text}"
    print(f"{row.variant.name:34} {text}", flush=True)


def print_table(rows: Sequence[Row], saturation: float) -> None:
    """Prints a line for each server."""
    print(f"offered loads: 20 req/s, 70 % and 120 % of {saturation:.0f} req/s, 64 callers")
    heads = (
        "saturation req/s",
        "req/cpu-s",
        "20: p50/p99 ms",
        "70 %: p50/p99 ms",
        "answered",
        "120 %: req/s",
    )
    print(
        f"{'server':34} {heads[0]:>16} {heads[1]:>16} {heads[2]:>15} {heads[3]:>17} {heads[4]:>8} {heads[5]:>13}"
        f" {'PSS MB':>7} {'start s':>7} {'cpu s':>6} {'lines':>5}"
    )
    for row in rows:
        if not row.reports:
            print(f"{row.variant.name:34} failed: {'; '.join(row.failures)}")
            continue
        if row.failures:
            print(f"{row.variant.name:34} failed in {len(row.failures)} rounds: {row.failures[-1]}")
        print(
            f"{row.variant.name:34} {_range(_each(row, 'saturation', 'answers_per_s')):>16}"
            f" {_range(_each(row, 'saturation', 'per_cpu_s')):>16} {_latency(row, '20'):>15}"
            f" {_latency(row, '70%'):>17} {_answered(row, '70%'):>8}"
            f" {_range(_each(row, '120%', 'answers_per_s')):>13}"
            f" {statistics.median(row.pss_mb):7.0f} {statistics.median(row.start_s):7.1f}"
            f" {statistics.median(row.start_cpu_s):6.1f} {row.variant.user_lines:5}"
        )


def print_ratios(rows: Sequence[Row], reference: str) -> None:
    """Prints our latency and saturation, divided by those of the server `reference` in the same round.

    Prints nothing if `reference` or our servers were not measured.
    """
    others = [row for row in rows if row.variant.name == reference]
    ours = [row for row in rows if row.variant.package is None]
    if not others or not ours:
        return
    print(f"divided by {reference}: median of the rounds (smallest-largest)")
    print(f"{'server':34} {'saturation':>18} {'70 %: p50':>18} {'p90':>18} {'p99':>18}")
    for row in ours:
        ratios = [_ratios(row, others[0], "saturation", "answers_per_s")]
        ratios += [_ratios(row, others[0], "70%", name) for name in ("p50", "p90", "p99")]
        print(f"{row.variant.name:34} {' '.join(f'{text:>18}' for text in ratios)}")


def _ratios(row: Row, other: Row, load: str, name: str) -> str:
    """A metric of one row divided by that of another, over the rounds that both have."""

    def by_round(one: Row) -> dict[int, float]:
        reports = [report for report in one.reports.get(load, []) if report["latency_ms"]]
        return {report["round"]: (report | report["latency_ms"])[name] for report in reports}

    own, others = by_round(row), by_round(other)
    ratios = [own[turn] / others[turn] for turn in own.keys() & others.keys()]
    if not ratios:
        return "-"
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def _each(row: Row, load: str, name: str) -> list[float]:
    return [report[name] for report in row.reports.get(load, [])]


def _latency(row: Row, load: str) -> str:
    latencies = [report["latency_ms"] for report in row.reports.get(load, []) if report["latency_ms"]]
    if not latencies:
        return "-"
    return "/".join(f"{statistics.median(one[name] for one in latencies):.0f}" for name in ("p50", "p99"))


def _answered(row: Row, load: str) -> str:
    """Fraction of the requests that succeeded."""
    reports = row.reports.get(load, [])
    total = sum(report["num_requests"] for report in reports)
    answered = sum(report["statuses"].get(OK, 0) for report in reports)
    return f"{answered / total:.0%}" if total else "-"


def _range(values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean = statistics.mean(values)
    return f"{mean:.0f} ({min(values):.0f}-{max(values):.0f})" if len(values) > 1 else f"{mean:.0f}"
