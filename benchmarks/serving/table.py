"""The tables that the comparison prints."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.serving.load_generator import OK
from benchmarks.serving.variants import Variant


@dataclass(slots=True)
class Row:
    """What was measured of one server: one entry per round; reports by load."""

    variant: Variant
    start_s: list[float] = field(default_factory=list)
    pss_mb: list[float] = field(default_factory=list)
    reports: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def print_limits(limits: Mapping[str, Sequence[float]]) -> None:
    """The raw limit of ONNX Runtime."""
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    print(f"{'ONNX Runtime alone, one thread':44} {'req/cpu-s':>16}")
    for way, rates in limits.items():
        print(f"{way:44} {_range(rates):>16}")


def print_table(rows: Sequence[Row], saturation: float) -> None:
    """One line for each server."""
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
        f" {'PSS MB':>7} {'start s':>7} {'lines':>5}"
    )
    for row in rows:
        if "saturation" not in row.reports:
            print(f"{row.variant.name:34} failed: {'; '.join(row.failures)}")
            continue
        print(
            f"{row.variant.name:34} {_range(_each(row, 'saturation', 'answers_per_s')):>16}"
            f" {_range(_each(row, 'saturation', 'per_cpu_s')):>16} {_latency(row, '20'):>15}"
            f" {_latency(row, '70%'):>17} {_answered(row, '70%'):>8}"
            f" {_range(_each(row, '120%', 'answers_per_s')):>13}"
            f" {statistics.median(row.pss_mb):7.0f} {statistics.median(row.start_s):7.1f} {row.variant.user_lines:5}"
        )


def _each(row: Row, load: str, name: str) -> list[float]:
    return [report[name] for report in row.reports.get(load, [])]


def _latency(row: Row, load: str) -> str:
    found = [report["latency_ms"] for report in row.reports.get(load, []) if report["latency_ms"]]
    if not found:
        return "-"
    return "/".join(f"{statistics.median(one[name] for one in found):.0f}" for name in ("p50", "p99"))


def _answered(row: Row, load: str) -> str:
    """Share of the requests that were answered at all."""
    reports = row.reports.get(load, [])
    total = sum(report["num_requests"] for report in reports)
    answered = sum(report["statuses"].get(OK, 0) for report in reports)
    return f"{answered / total:.0%}" if total else "-"


def _range(values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean = statistics.mean(values)
    return f"{mean:.0f} ({min(values):.0f}-{max(values):.0f})" if len(values) > 1 else f"{mean:.0f}"
