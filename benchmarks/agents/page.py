"""Tables, goals and figure of the simulated agents, from the values of the runs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.shared.pages import mean_cell, write_svg
from scheduler_core.report.page import markdown_table
from scheduler_core.report.plotting import color, dash, mark_decades, new_figure
from scheduler_core.statistics import interval

Values = Mapping[str, float]
FCFS, HRRN, OURS = "fcfs", "hrrn", "working_set"
UNPREDICTED, TRUE = "working_set, no prediction", "working_set, true returns"
RATIOS = {"turns": "turns/s", "mean": "TTFT mean", "P50": "P50", "P99": "P99", "longest": "longest wait"}
OTHERS = {"jain": "Jain's index", "sessions": "sessions", "hits": "hits"}
#: Contexts as multiples of the KV memory for which the goals are, and up to which all fits.
LOADS, FITS = (1.5, 3.0), 0.8


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """What is simulated, except for the policy.

    Attributes:
        num_sessions, kv_tokens: Sessions at a time, and tokens of KV memory, of each replica.
        host: With a host tier.
        router: Of several replicas; empty: one replica.
    """

    router: str
    seed: int
    host: bool
    num_sessions: int
    kv_tokens: int

    @property
    def label(self) -> str:
        return f"{self.num_sessions} sessions, {self.kv_tokens / 1e6:g} M"


#: Values by setting and policy; all policies of a setting are from the same requests.
Runs = Mapping[Setting, Mapping[str, Values]]


class Cases:
    """Runs by setting without its seed, in order."""

    def __init__(self, runs: Runs) -> None:
        self._runs: dict[Setting, list[Mapping[str, Values]]] = defaultdict(list)
        for setting, values in sorted(runs.items()):
            self._runs[replace(setting, seed=0)].append(values)
        self.settings = list(self._runs)

    def values(self, case: Setting, policy: str, column: str) -> list[float]:
        """One value for each seed."""
        return [run[policy][column] for run in self._runs[case]]

    def ratios(self, case: Setting, policy: str, column: str, reference: str = FCFS) -> list[float]:
        """To the reference with the same seed, one for each seed."""
        pairs = zip(self.values(case, policy, column), self.values(case, reference, column), strict=True)
        return [value / max(other, 1e-9) for value, other in pairs]

    def mean(self, case: Setting, policy: str, column: str, reference: str = FCFS) -> float:
        return float(np.mean(self.ratios(case, policy, column, reference)))

    def load(self, case: Setting) -> float:
        """Contexts under FCFS, as a multiple of the KV memory."""
        return float(np.mean(self.values(case, FCFS, "contexts")))

    def policies(self, case: Setting) -> list[str]:
        return list(self._runs[case][0])

    def num(self, case: Setting) -> int:
        return len(self._runs[case])


def tables(runs: Runs) -> str:
    """Markdown: turns per second of all settings, goals, and all values of each setting."""
    cases = Cases(runs)
    single = [case for case in cases.settings if not case.router]
    parts = []
    for host in (False, True):
        columns = [case for case in single if case.host == host]
        if not columns:
            continue
        header = ["turns/s, ratio to FCFS", *(case.label for case in columns)]
        rows = [["contexts / KV memory", *(f"{cases.load(case):.2f}" for case in columns)]]
        rows.append(["fcfs, turns/s", *(mean_cell(cases.values(case, FCFS, "turns")) for case in columns)])
        rows += [
            [policy, *(mean_cell(cases.ratios(case, policy, "turns")) for case in columns)]
            for policy in cases.policies(columns[0])
            if policy != FCFS
        ]
        parts.append(f"## {'With' if host else 'Without'} a host tier\n\n{markdown_table(header, rows)}")
    parts.append(f"## Goals\n\n{goals(cases, single)}")
    routed = [case for case in cases.settings if case.router]
    if routed:
        parts.append(f"## Eight replicas\n\n{_routers(cases, routed)}")
    parts += [f"## {_title(case)}\n\n{_table(cases, case)}" for case in single]
    return "\n\n".join(parts)


def _title(case: Setting) -> str:
    return f"{case.label} tokens of KV memory, {'with' if case.host else 'without'} a host tier"


def _table(cases: Cases, case: Setting) -> str:
    rows = []
    for policy in cases.policies(case):
        others = [mean_cell(cases.values(case, policy, column)) for column in OTHERS]
        of_policy = cases.values if policy == FCFS else cases.ratios
        name = "fcfs (1/s, s)" if policy == FCFS else policy
        rows.append([name, *(mean_cell(of_policy(case, policy, column)) for column in RATIOS), *others])
    note = f"Seeds: {cases.num(case)}. Contexts: {cases.load(case):.2f} times the KV memory."
    return f"{note}\n\n{markdown_table(['policy', *RATIOS.values(), *OTHERS.values()], rows)}"


def _routers(cases: Cases, routed: Sequence[Setting]) -> str:
    rows = []
    for case in routed:
        for policy in cases.policies(case):
            values = [mean_cell(cases.values(case, policy, column)) for column in (*RATIOS, *OTHERS)]
            rows.append([case.router, policy, *values])
    note = f"{routed[0].label} tokens of KV memory for each replica; values, not ratios. Seeds: {cases.num(routed[0])}."
    return f"{note}\n\n{markdown_table(['router', 'policy', *RATIOS.values(), *OTHERS.values()], rows)}"


def goals(cases: Cases, single: Sequence[Setting]) -> str:
    """Markdown table of the goals, each met only if it is in all of its settings."""
    rows: list[list[str]] = []
    for host, fcfs, hrrn in ((False, 2.0, 1.3), (True, 1.5, 1.05)):
        settings = [case for case in single if case.host == host]
        loaded = [case for case in settings if LOADS[0] <= cases.load(case) <= LOADS[1]]
        fitting = [case for case in settings if cases.load(case) <= FITS]
        # Text, settings, column of the ratio, reference, least and largest value.
        ratios = (
            (f"turns/s >= {fcfs:g} x FCFS", loaded, "turns", FCFS, fcfs, math.inf),
            (f"turns/s >= {hrrn:g} x HRRN", loaded, "turns", HRRN, hrrn, math.inf),
            ("longest wait <= 1.5 x FCFS", loaded, "longest", FCFS, 0.0, 1.5),
            ("P99 <= 1.5 x FCFS", loaded, "P99", FCFS, 0.0, 1.5),
            ("all fits: turns/s >= .98 x FCFS", fitting, "turns", FCFS, 0.98, math.inf),
        )
        where = "with a host tier" if host else "no host tier"
        for text, of, column, reference, low, high in ratios:
            values = [cases.mean(case, OURS, column, reference) for case in of]
            rows.append([f"{where}: {text}", *_result(of, values, low, high)])
        closed = [_closed(cases, case) for case in loaded]
        rows.append(
            [f"{where}: closed of the gap to true returns >= .5", *_result(loaded, closed, 0.5, math.inf)]
        )
    return markdown_table(["goal", "measured, mean over seeds", "result"], rows)


def _result(settings: Sequence[Setting], values: Sequence[float], low: float, high: float) -> tuple[str, str]:
    cells = "; ".join(f"{case.label}: {value:.2f}" for case, value in zip(settings, values, strict=True))
    num = sum(not low <= value <= high for value in values)
    return cells, "-" if not values else "met" if not num else f"missed in {num} of {len(values)}"


def _closed(cases: Cases, case: Setting) -> float:
    """Of the gap in turns per second between no prediction and true returns, the part that predictions close; 1 without a gap."""
    none, ours, true = (cases.mean(case, policy, "turns") for policy in (UNPREDICTED, OURS, TRUE))
    return (ours - none) / (true - none) if true > none else 1.0


def plot(file: Path, runs: Runs, num_sessions: int, policies: Sequence[str]) -> None:
    """Turns per second, mean TTFT and longest wait over KV memory, without a host tier, as SVG."""
    cases = Cases(runs)
    columns = [
        case
        for case in cases.settings
        if (case.router, case.host, case.num_sessions) == ("", False, num_sessions)
    ]
    sizes = [case.kv_tokens / 1e6 for case in columns]
    labels = {
        "turns": "turns per second",
        "mean": "mean time to first token (s)",
        "longest": "longest wait (s)",
    }
    figure, axes = new_figure(11.0, 3.4, columns=3)
    for axis, (column, label) in zip(axes, labels.items(), strict=True):
        for number, policy in enumerate(policies):
            style = {"color": color(number), "linestyle": dash(number), "marker": "o", "markersize": 4}
            if policy == OURS:
                style |= {"linewidth": 2.8, "zorder": 5}
            means = [interval(cases.values(case, policy, column)).mean for case in columns]
            axis.plot(sizes, means, label=policy, **style)
        axis.set_xticks(sizes)
        axis.set(title=label, xlabel="KV memory (million tokens)", ylim=(0.0, None))
    axes[2].set_yscale("log")
    waits = [
        value for policy in policies for case in columns for value in cases.values(case, policy, "longest")
    ]
    limits = (0.8 * min(waits), 1.25 * max(waits))
    axes[2].set_ylim(limits)
    mark_decades(axes[2].yaxis, limits)
    write_svg(file, figure, axes[0])
