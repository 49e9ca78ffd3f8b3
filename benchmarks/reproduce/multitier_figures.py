"""Multi-tier Llumnix (Vestrum et al., "Beyond Binary Priorities"): figures 5, 8 and 9 (tiers), 6 and 7 (K = 1 to 10)."""

from __future__ import annotations

import numpy as np

from benchmarks.reproduce.multitier_systems import (
    MEASURES,
    REPLICAS,
    STEP_TIME,
    latencies,
    limits,
    proposed,
    whole_queue,
    workload,
)
from benchmarks.reproduce.simulate import Outcome, System, over_seeds, simulate
from benchmarks.reproduce.study import Effort, Findings
from scheduler_core.simulator.config import ClusterConfig

MIXES = {
    "figure 5, uniform": "uniform",
    "figure 8, Gaussian": "gaussian_released",
    "figure 9, enterprise": "enterprise",
}
#: Median TTFT in s by (figure, K, tier), from the text of section 5.1; "over 3 s" is 3, "under 0.5 s" is 0.5.
MEDIAN_TTFT = {
    ("figure 5, uniform", 3, 0): 0.3,
    ("figure 5, uniform", 3, 2): 3.0,
    ("figure 8, Gaussian", 5, 0): 0.5,
}
#: Section 5.1: median E2E "around 10 to 12 seconds" without tiers.
MEDIAN_E2E = {("figure 5, uniform", 1, 0): 11.0}


def _medians(outcome: Outcome, num_tiers: int) -> dict[str, dict[int, float]]:
    """Median TTFT, mean time between tokens and E2E by tier, in seconds."""
    medians: dict[str, dict[int, float]] = {"ttft": {}, "tbt": {}, "e2e": {}}
    for tier in range(num_tiers):
        rows = [one for one in outcome.records if one.tier == tier]
        medians["ttft"][tier] = float(np.median([one.ttft_s for one in rows]))
        medians["tbt"][tier] = float(np.median([one.tpot_s for one in rows if one.tpot_s is not None]))
        medians["e2e"][tier] = float(np.median([one.ttlt_s for one in rows]))
    return medians


def tiers(effort: Effort) -> Findings:
    """Figures 5, 8 and 9: latency by tier, with the paper's dispatch and with the whole queue counted."""
    num = effort.num(10_000, 800)
    findings = Findings(size=effort.size(10_000, 800))
    cells = [(where, k) for where in MIXES for k in (1, 3, 5) if k > 1 or where.startswith("figure 5")]
    for where, k in cells[:2] if effort.quick else cells:

        def run_seed(seed: int, where: str = where, k: int = k) -> dict[str, dict[str, dict[int, float]]]:
            trace = workload(num, k, MIXES[where]).trace(seed)
            systems = {"paper": proposed(k), "queue": whole_queue(proposed(k))}
            return {name: _medians(simulate(one, trace, seed=seed), k) for name, one in systems.items()}

        got = over_seeds(effort.seeds, run_seed)
        for tier in range(k):
            for key, what, printed in (
                ("ttft", "median TTFT, s", MEDIAN_TTFT),
                ("tbt", "median TBT, s", {}),
                ("e2e", "median E2E, s", MEDIAN_E2E),
            ):
                findings.row(f"{where}, K = {k}", f"tier {tier}, {what}", got["paper"][key][tier],
                             printed.get((where, k, tier)), more={"whole queue": got["queue"][key][tier]})  # fmt: skip
        for system, name in (("paper", "the paper's dispatch"), ("queue", "whole queue counted")):
            if k > 1:
                ttft = list(got[system]["ttft"].values())
                findings.claim(
                    f"{where}, K = {k}; section 5.1", f"{name}: the more urgent the tier, the sooner its first token",
                    ttft == sorted(ttft), " / ".join(f"{value:.3g}" for value in ttft) + " s", own_variant=system == "queue",
                )  # fmt: skip
    return findings


#: Figures 6 and 7: systems at QPS 10 with 1,000 requests.
FIGURE_6 = {
    "vLLM": ("fcfs", "vllm"),
    "Orca": ("fcfs", "orca"),
    "Sarathi": ("fcfs", "chunked_prefill"),
}
LLUMLET, STILL = "Llumlet", "Llumlet, no migration"
#: E2E P99 in seconds at K = 1, from the text of section 5.2; Llumlet at K = 7.
FIGURE_6_P99 = {
    ("vLLM", 1): 1.63,
    ("Orca", 1): 1.585,
    ("Sarathi", 1): 1.585,
    (LLUMLET, 1): 1.585,
    (LLUMLET, 7): 1.61,
}


def _figure_6_system(name: str, num_tiers: int) -> System:
    if name in (LLUMLET, STILL):
        return proposed(num_tiers, migration=name == LLUMLET)
    policy, batching = FIGURE_6[name]
    cluster = ClusterConfig(num_replicas=REPLICAS, router="round_robin")
    return System(policy=policy, scheduler=limits(batching), step_time=STEP_TIME, cluster=cluster)


def figures(effort: Effort) -> Findings:
    """Figures 6 and 7: K = 1 to 10 far below saturation."""
    num = effort.num(1000, 200)
    findings = Findings(size=effort.size(1000, 200))
    counts = (1, 4, 7) if effort.quick else tuple(range(1, 11))
    results: dict[tuple[str, int], dict[str, float]] = {}
    for k in counts:
        for name in (*FIGURE_6, LLUMLET, STILL):

            def run_seed(seed: int, name: str = name, k: int = k) -> dict[str, float]:
                trace = workload(num, k, "uniform", 10.0).trace(seed)
                outcome = simulate(_figure_6_system(name, k), trace, seed=seed)
                values = dict(zip(MEASURES, latencies(outcome), strict=True))
                gaps = [row.tpot_s for row in outcome.records if row.tpot_s is not None]
                return values | {"decode mean": sum(gaps) / len(gaps), "moves": outcome.num_migrations}

            got = results[name, k] = over_seeds(effort.seeds, run_seed)
            more = {key: got[key] for key in ("E2E mean", "prefill P99", "prefill mean", "decode mean")}
            paper = FIGURE_6_P99.get((name, k))
            findings.row(f"figure 6, K = {k}", f"{name}, E2E P99, s", got["E2E P99"], paper, more=more)
    p99 = {place: got["E2E P99"] for place, got in results.items()}
    spread = max(p99[LLUMLET, k] for k in counts) / min(p99[LLUMLET, k] for k in counts)
    worst = {name: max(p99[name, k] / p99["vLLM", k] for k in counts) for name in (LLUMLET, STILL)}
    moves = max(results[LLUMLET, k]["moves"] for k in counts)
    findings.claim("section 5.2", "Llumlet keeps up to 10 tiers without latency collapse", spread < 1.1,
                   f"largest P99 over K / smallest: {spread:.3f}")  # fmt: skip
    findings.claim("figure 7", "Llumlet is no worse than vLLM round robin below saturation", worst[LLUMLET] < 1.05,
                   f"largest ratio of P99 to vLLM: {worst[LLUMLET]:.3f}, with up to {moves:.0f} migrations")  # fmt: skip
    findings.claim("figure 7", "without migration it is no worse either", worst[STILL] < 1.05,
                   f"largest ratio of P99 to vLLM: {worst[STILL]:.3f}", own_variant=True)  # fmt: skip
    return findings
