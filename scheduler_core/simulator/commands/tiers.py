"""`simulate tiers`: number of tiers and headroom of multi-tier Llumnix with the highest cost-effectiveness for a mix."""

import logging
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from scheduler_core.errors import InputError
from scheduler_core.ranges import check_ranges
from scheduler_core.report.page import text_table
from scheduler_core.shell.files import writable_target, write_json
from scheduler_core.shell.progress import progress_bar
from scheduler_core.simulator.commands.last_lines import end_with_warnings, few_seeds, seed_warnings
from scheduler_core.simulator.commands.sweep import BaseConfig
from scheduler_core.simulator.config import MAX_SEEDS, SimulationConfig
from scheduler_core.simulator.sweep import Cell, CellStore, grid, run_cells
from scheduler_core.statistics import interval

logger = logging.getLogger(__name__)

Results = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class TiersConfig(BaseConfig):
    """Find the number of tiers K and the headroom with the highest cost-effectiveness for a mix of tiers.

    Every combination is simulated with router llumnix, and INFaaS in front of fcfs replicas as the baseline, with the same
    seeds. The requests are those of workload, with tiers by workload.tiers.mix for each K. Cost-effectiveness: requests per
    second that met their targets, per replica; without targets, 1 / (replicas x P99 of the latency), the multi-tier
    paper's cost per latency.
    """

    INPUTS = ("workload", "step_time_parameters")  # type: ignore[assignment]
    OUTPUTS = ("json", "cells")

    json: str
    """Path of the result."""
    overwrite: bool = False
    """Replace existing output files."""
    tiers: list[int] = field(default_factory=lambda: [*range(1, 11)])
    """Numbers of tiers."""
    headroom_fractions: list[float] = field(default_factory=lambda: [0.0, 0.1, 0.2, 0.4])
    """Values of cluster.headroom_fraction."""
    num_seeds: int = 5
    """Number of seeds of each combination: seed, seed + 1, ..."""
    cells: str | None = None
    """Folder for results of simulations, to resume an interrupted search. Unset: a temporary folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, num_seeds=(1, MAX_SEEDS))
        if self.workload is None or self.workload.tiers is None:
            raise InputError("workload.tiers", None, "a mix of tiers, such as {mix: enterprise}")
        if self.cluster.num_replicas == 1:
            raise InputError("cluster.num_replicas", 1, "at least 2")
        self.combinations()

    @property
    def seeds(self) -> range:
        return range(self.seed, self.seed + self.num_seeds)

    def combinations(self) -> list[Cell]:
        """The simulations of all combinations, those of one combination together."""
        cluster = self.cluster
        if cluster.router != "llumnix":
            cluster = replace(cluster, router="llumnix", router_parameters={}, num_prefill_replicas=0)
        vary: dict[str, list[Any]] = {
            "num_tiers": self.tiers,
            "cluster.headroom_fraction": self.headroom_fractions,
        }
        return grid(replace(self.simulation(), cluster=cluster), vary, self.seeds)

    def baselines(self) -> list[Cell]:
        """The simulations of the baseline, which does not use tiers."""
        base: SimulationConfig = self.combinations()[0].config
        cluster = replace(
            base.cluster, router="infaas", router_parameters={}, migration=False, headroom_window_s=None
        )
        base = replace(base, policy="fcfs", policy_parameters={}, cluster=cluster)
        return [Cell(replace(base, seed=seed), {"router": "infaas", "seed": seed}) for seed in self.seeds]


def effectiveness(metrics: Mapping[str, Any]) -> float:
    """Cost-effectiveness of a run, higher is better; see `TiersConfig`."""
    if metrics["goodput_rps"] is None:
        return 1.0 / float(metrics["cost_per_latency"])
    return float(metrics["goodput_rps"]) / float(metrics["mean_replicas"])


def compare_tiers(config: TiersConfig, baseline: Results, results: Results) -> dict[str, Any]:
    """Cost-effectiveness of every combination.

    Args:
        config: The search.
        baseline: Results of its `baselines`.
        results: Results of its `combinations`.

    Returns:
        `measure`, the name of the effectiveness; `baseline` and `points`, each with `effectiveness` (interval over seeds) and
        means over seeds in seconds (`ttlt_s`; `ttft_s` of the first and the last tier). Points also have num_tiers, headroom_fraction, `gain` (ratio of the
        effectiveness to the baseline's, None if that is 0) and `may_be_best` (whether the interval of the paired
        difference from the best contains 0). `best`: index of the point with the highest mean.
    """
    num = len(config.seeds)
    groups = [results[start : start + num] for start in range(0, len(results), num)]
    base, *points = [_point(group) for group in (baseline, *groups)]
    values = [[effectiveness(result["metrics"]) for result in group] for group in groups]
    best = max(range(len(points)), key=lambda index: points[index]["effectiveness"]["mean"])
    base_mean = base["effectiveness"]["mean"]
    for point, own, group in zip(points, values, groups, strict=True):
        difference = interval([one - other for one, other in zip(own, values[best], strict=True)])
        settings = group[0]["settings"]
        point |= {
            "num_tiers": settings["num_tiers"],
            "headroom_fraction": settings["cluster.headroom_fraction"],
            "gain": point["effectiveness"]["mean"] / base_mean if base_mean > 0 else None,
            "may_be_best": difference.high >= 0,
        }
    has_targets = baseline[0]["metrics"]["goodput_rps"] is not None
    measure = "goodput per replica" if has_targets else "1 / cost per latency"
    return {"measure": measure, "baseline": base, "points": points, "best": best}


def _point(results: Results) -> dict[str, Any]:
    metrics = [result["metrics"] for result in results]
    first, last = [], []
    for one in metrics:
        tiers = one["groups"]["tier"] or {"0": one}
        in_order = sorted(tiers, key=int)
        first.append(tiers[in_order[0]]["ttft_s"]["mean"])
        last.append(tiers[in_order[-1]]["ttft_s"]["mean"])
    mean = {
        name: math.fsum(one["ttlt_s"][name] for one in metrics) / len(metrics) for name in ("mean", "p99")
    }
    return {
        "effectiveness": interval([effectiveness(one) for one in metrics]).to_json(),
        "ttlt_s": mean,
        "ttft_s": {"first": math.fsum(first) / len(first), "last": math.fsum(last) / len(last)},
    }


def tiers_table(result: Mapping[str, Any]) -> str:
    """The combinations by cost-effectiveness, the best first; `=` marks those that may be the best as well."""
    header = [
        "K",
        "headroom",
        result["measure"],
        "95 %",
        "/ INFaaS",
        "",
        "TTLT mean",
        "P99",
        "TTFT tier 0",
        "last tier",
    ]
    points = sorted(result["points"], key=lambda point: -point["effectiveness"]["mean"])
    rows = []
    for point in [*points, {"num_tiers": "INFaaS", "headroom_fraction": None, **result["baseline"]}]:
        ends = [point["effectiveness"][end] for end in ("low", "high")]
        rows.append([
            point["num_tiers"], point["headroom_fraction"], point["effectiveness"]["mean"],
            "-" if None in ends else f"{ends[0]:.4g} to {ends[1]:.4g}", point.get("gain"),
            "=" if point.get("may_be_best") else "", *point["ttlt_s"].values(), *point["ttft_s"].values(),
        ])  # fmt: skip
    return text_table(header, rows)


def run(config: TiersConfig) -> int:
    """Runs `simulate tiers`."""
    target = writable_target(config.json, "json")
    baselines, combinations = config.baselines(), config.combinations()
    cells = [*baselines, *combinations]
    with (
        tempfile.TemporaryDirectory() as scratch,
        progress_bar(len(cells), "run", enabled=None, desc="simulating") as bar,
    ):
        results = run_cells(cells, CellStore(config.cells or scratch), config.workers, bar.update)
    comparison = compare_tiers(config, results[: len(baselines)], results[len(baselines) :])
    warnings = seed_warnings(config, results) | few_seeds(config.num_seeds)
    content = {"schema": "tailcast.tiers/1", "config": asdict(config), **comparison, "warnings": warnings}
    write_json(target, content)
    best = comparison["points"][comparison["best"]]
    logger.info("cost-effectiveness:\n%s", tiers_table(comparison))
    logger.info(
        "best: %d tiers with headroom_fraction %g; = : not distinguishable from it over %d seeds",
        best["num_tiers"], best["headroom_fraction"], config.num_seeds,
    )  # fmt: skip
    return end_with_warnings(warnings, [result["metrics"] for result in results])
