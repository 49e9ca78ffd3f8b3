"""The page about two runs of the same requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scheduler_core.simulator.bootstrap import Spread
from scheduler_core.simulator.comparison import Comparison, ratio_text
from scheduler_core.simulator.pairing import ratios
from scheduler_core.simulator.report import figures
from scheduler_core.simulator.report.page import Page

_RATIOS = {"TTFT": "ttft_s", "TTLT": "ttlt_s", "per-token latency": "per_token_latency_s"}


def write_compare_page(
    found: Comparison, names: tuple[str, str], confidence: float, path: str | Path
) -> None:
    """Writes the HTML report of a comparison.

    Args:
        found: What there is to say.
        names: How the two runs are called.
        confidence: Of its intervals.
        path: Where to write.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    a, b = names
    page = Page(f"{b} against {a}")
    page.note(f"a is {a}, b is {b}; both ran the same requests with {found.num_seeds} seed(s).")
    page.heading("Configured differently")
    changed = [[name, str(one), str(other)] for name, (one, other) in found.settings.items()]
    if changed:
        page.table(["setting", "a", "b"], changed)
    else:
        page.note("Nothing.")
    if found.pairs is not None:
        _requests(page, found, confidence)
    page.heading("All metrics")
    if found.num_seeds > 1:
        page.note(
            f"Means over seeds. Low and high: {100 * confidence:g} % interval of the mean of b - a, each seed against itself "
            "(Student's t). b / a is marked * where that interval leaves out 0, ? where it does not."
        )  # fmt: skip
    page.table(
        ["metric", "a", "b", "b - a", "low", "high", "b / a"],
        [
            [one.name, one.a, one.b, one.difference, one.low, one.high, ratio_text(one)]
            for one in found.metrics
        ],
    )
    page.write(path)


def _requests(page: Page, found: Comparison, confidence: float) -> None:
    pairs = found.pairs
    assert pairs is not None
    page.heading("Request by request, seconds")
    note = (
        f"{len(pairs)} requests that both runs finished. Low and high: {100 * confidence:g} % interval of b - a, by a "
        "bootstrap of blocks of consecutive requests of each seed. 'b lower': share of the requests for which b is lower."
    )
    if pairs.num_only_a or pairs.num_only_b:
        note += f" Only a finished {pairs.num_only_a} others, only b {pairs.num_only_b}."
    page.note(note)
    rows = []
    for name, one in found.latencies.items():
        for statistic, spread in {"mean": one.mean, **one.quantiles}.items():
            share = f"{one.lower_share:.1%}" if statistic == "mean" else ""
            rows.append([f"{name}, {statistic}", *_cells(spread), share])
    page.table(["", "a", "b", "b - a", "low", "high", "b lower"], rows)
    curves = {
        title: {"all": figures.empirical(values)}
        for title, name in _RATIOS.items()
        if len(values := ratios(pairs, name))
    }
    if curves:
        page.figure(
            figures.ratio_functions(curves),
            "Distribution over requests of b / a; left of 1: b is faster for the request.",
        )
    for field, members in found.groups.items():
        page.heading(f"Means by {field}, seconds")
        page.table(
            [field, "latency", "a", "b", "b - a", "low", "high"],
            [
                [value or "(none)", name, *_cells(spread)]
                for value, latencies in members.items()
                for name, spread in latencies.items()
            ],
        )


def _cells(spread: Spread) -> list[Any]:
    return [spread.a, spread.b, spread.difference, spread.low, spread.high]
