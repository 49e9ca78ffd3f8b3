"""HTML page of a plan: the recommendation, latency over load, cost over latency, and the load over time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_core.report.page import Page
from scheduler_core.report.plotting import GRAY, color, mark_decades, new_figure, svg
from scheduler_core.simulator.metrics import metric
from scheduler_core.simulator.planning.plan import duration, metric_name, metric_text, settings_text
from scheduler_core.simulator.planning.targets import COST, Target


def write_plan_page(content: Mapping[str, Any], targets: Sequence[Target], path: str | Path) -> None:
    """Writes the page of the result of a plan."""
    purchase, log = content["answer"], content["log"]
    targets = [target for target in targets if target.metric != COST]
    lead = f"{log['num_requests']:,} requests in {duration(log['duration_s'])}, {log['rate_rps']:.3g} per second: {log['source']}"
    page = Page(f"Plan: {purchase['num_replicas']} of {purchase['hardware']}", lead)
    page.paragraph(content["text"])
    for warning in content["warnings"].values():
        page.note(f"Note: {warning}.")
    page.heading("Latency over load")
    caption = (
        "Each choice with the replicas that it needs. Dashed: target. A load of 1 is that of the log; gray: "
        f"the targets of the recommendation hold up to a load of {purchase['margin']:.2f}."
    )
    page.figure(_curves(content, targets), caption)
    page.heading("Cost and latency")
    binding = max(targets, key=lambda target: target.slack(metric(purchase["metrics"], target.metric)))
    page.figure(
        _pareto(content, binding), "Lower left is better. Numbers: replicas. Filled: the recommendation."
    )
    page.heading("Load over time")
    profile = content["profile"]
    caption = (
        "Requests per second of the log, and about how many replicas they need, in proportion to the rate. "
        f"All the time: {purchase['num_replicas']}; with perfect auto-scaling on average {np.mean(profile['num_replicas']):.3g}."
    )
    page.figure(_profile(profile), caption)
    page.heading("Choices")
    names = [target.metric for target in targets]
    rows = []
    for one in content["candidates"]:
        metrics = next(point for point in one["curve"] if point["load"] == 1.0)
        values = [metric_text(name, metric(metrics, name)) for name in names]
        settings = settings_text(one["settings"], one["num_replicas"])
        rows.append([one["hardware"], one["num_replicas"], f"{one['price_per_hour']:.2f}", *values, settings])
    page.table(
        ["hardware", "replicas", "per hour", *map(metric_name, names), "settings"], rows, {0, len(names) + 3}
    )
    if content["what_if"]:
        page.heading("What if")
        rows = []
        for one in content["what_if"]:
            values = [
                "-" if one["metrics"] is None else metric_text(name, metric(one["metrics"], name))
                for name in names
            ]
            needed = one["num_replicas"] or "more than allowed"
            price = None if one["price_per_hour"] is None else f"{one['price_per_hour']:.2f}"
            rows.append([one["scenario"], "yes" if one["meets"] else "no", *values, needed, price])
        header = ["scenario", "holds", *map(metric_name, names), "replicas needed", "per hour"]
        page.table(header, rows, {0})
        page.note("Latencies are those of the recommended replicas.")
    if len(content["orders"]) > 1:
        page.heading("Orders of the queue")
        beyond = f"the same at a load of {content['orders'][0]['highest_load']['load']:.2f}"
        rows = [
            [
                one["order"],
                one["num_replicas"] or "more than allowed",
                *(metric_text(name, metric(one["metrics"], name)) for name in names),
                metric_text("ttlt_s.mean", one["metrics"]["ttlt_s"]["mean"]),
                metric_text("ttlt_s.mean", one["highest_load"]["metrics"]["ttlt_s"]["mean"]),
            ]
            for one in content["orders"]
        ]
        page.table(
            ["order", "replicas needed", *map(metric_name, names), "mean of end-to-end latency", beyond],
            rows,
            {0},
        )
    if content["excluded"]:
        page.heading("Not chosen")
        page.table(
            ["hardware", "reason"], [[one["choice"], one["reason"]] for one in content["excluded"]], {0, 1}
        )
    page.heading("What this is based on")
    page.note(
        f"Mean prompt {log['prompt_tokens']:.0f} and output {log['output_tokens']:.0f} tokens, {log['num_units']:,} independent "
        f"arrivals (sessions or single requests). {log['num_simulated']:,} requests were simulated in steady state "
        f"({log['turnovers']:.3g} mean latencies). Intervals are those of resampled logs (blocks of neighboring sessions)."
    )
    page.write(path)


def _curves(content: Mapping[str, Any], targets: Sequence[Target]) -> str:
    figure, axes = new_figure(4.6 * len(targets) + 2.2, 3.6, columns=len(targets))
    for axis, target in zip(axes, targets, strict=True):
        for index, one in enumerate(content["candidates"]):
            x = [point["load"] for point in one["curve"]]
            y = [metric(point, target.metric) for point in one["curve"]]
            label = f"{one['num_replicas']} of {one['hardware']}"
            axis.plot(x, y, "o-", color=color(index), markersize=3.5, linewidth=1.4, label=label)
        axis.axhline(target.bound, color="black", linewidth=1, linestyle="--")
        axis.axvspan(
            1.0, max(1.0, min(content["answer"]["margin"], max(x))), color=GRAY, alpha=0.2, linewidth=0
        )
        for one in content["what_if"]:
            scenario = one["scenario"].split("=")
            if one["metrics"] and scenario[0] == "traffic" and len(scenario) == 2:
                axis.plot(
                    float(scenario[1]),
                    metric(one["metrics"], target.metric),
                    "x",
                    color=color(0),
                    markersize=7,
                )
                axis.annotate(
                    "what if", (float(scenario[1]), metric(one["metrics"], target.metric)),
                    textcoords="offset points", xytext=(0, 7), ha="center", fontsize=7,
                )  # fmt: skip
        axis.set_xlabel("load, multiple of the log's")
        axis.set_ylabel(metric_name(target.metric) + (", s" if "." in target.metric else ""))
        if "." in target.metric:
            axis.set_yscale("log")
            mark_decades(axis.yaxis, axis.get_ylim())
    return svg(figure, axes[0])


def _pareto(content: Mapping[str, Any], target: Target) -> str:
    figure, [axis] = new_figure(6.8, 3.6)
    for index, one in enumerate(content["candidates"]):
        own = next(point for point in one["curve"] if point["load"] == 1.0)
        points = [
            (size["price_per_hour"], size["num_replicas"], metric(size, target.metric))
            for size in (one | own, *one["sizes"])
        ]
        points.sort()
        x, num, y = zip(*points, strict=True)
        axis.plot(
            x, y, "o-", color=color(index), markersize=5, linewidth=1, label=one["hardware"], mfc="white"
        )
        for price, replicas, value in zip(x, num, y, strict=True):
            axis.annotate(
                str(replicas), (price, value), textcoords="offset points", xytext=(5, 4), fontsize=7
            )
        if not index:
            chosen = x[num.index(one["num_replicas"])], y[num.index(one["num_replicas"])]
            axis.plot(*chosen, "o", color=color(0), markersize=7)
    axis.axhline(target.bound, color="black", linewidth=1, linestyle="--")
    axis.set_xlabel("price per hour")
    axis.set_ylabel(metric_name(target.metric) + (", s" if "." in target.metric else ""))
    if "." in target.metric:
        axis.set_yscale("log")
        mark_decades(axis.yaxis, axis.get_ylim())
    return svg(figure, axis)


def _profile(profile: Mapping[str, Any]) -> str:
    figure, axes = new_figure(7.4, 4.2, rows=2, sharex=True)
    edges = np.array(profile["edges_s"])
    unit, size = (
        ("hours", 3600) if edges[-1] > 7200 else ("minutes", 60) if edges[-1] > 120 else ("seconds", 1)
    )
    for axis, values, label in zip(
        axes, (profile["rates_rps"], profile["num_replicas"]), ("requests/s", "replicas needed"), strict=True
    ):
        axis.stairs(values, edges / size, fill=True, color=color(0), alpha=0.35)
        axis.stairs(values, edges / size, color=color(0), linewidth=1.2)
        axis.set_ylim(0, max(values) * 1.15)
        axis.set_ylabel(label)
    axes[1].yaxis.get_major_locator().set_params(integer=True)
    axes[1].set_xlabel(f"time since the start of the log, {unit}")
    return svg(figure)
