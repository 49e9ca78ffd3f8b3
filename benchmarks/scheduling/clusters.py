"""Routers of gateways, auto-scalers and failing replicas on simulated engines: what each costs or gains.

    python -m benchmarks.scheduling.clusters [--seeds 3] [--requests 1000] [--parts routers scaling failures]

Engines are Llama-3-8B on an H100 by the simulator's data sheets, with prefix caching and the KV cache that fits. Requests are
drawn: chats; shared prompts (40 groups with 3,000 tokens in common); conversations of 8 turns on average.

routers    4 engines; ratios of TTFT to `jsq` of the same seed, with 95 % intervals, and the tokens found in caches
scaling    a day in 4 hours, whose rate varies from 0.2 to 1.8 of its mean; long outputs, replicas of 2 slots, 120 s to start
failures   4 engines, each of which fails once a minute on average and is back after 20 s, so that short runs have failures
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.shared.command import Parser
from benchmarks.shared.pages import mean_cell
from scheduler_core.report.page import markdown_table
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.config import ClusterConfig, SimulationConfig
from scheduler_core.simulator.run import run_simulation
from scheduler_core.simulator.workloads.arrivals import Arrivals
from scheduler_core.simulator.workloads.lengths import Lengths, TokenDistribution
from scheduler_core.simulator.workloads.workload import RequestClass, Sessions, SharedPrefix, Workload

DAY_S = 4 * 3600.0
LONG = TokenDistribution(kind="log_t", mu=6.3, sigma=0.5, high=2048)
PREFIX = TokenDistribution(kind="fixed", low=3000, high=3000)
#: Workloads and their arrivals per second on 4 engines: requests, or conversations.
WORKLOADS = {
    "chats": (Workload(), 100.0),
    "shared prompts": (Workload(shared_prefix=SharedPrefix(num_groups=40, prefix=PREFIX)), 60.0),
    "conversations": (Workload(sessions=Sessions(mean_turns=8.0, mean_think_time_s=5.0)), 12.0),
}
ROUTERS: dict[str, dict[str, Any]] = {
    "jsq": {}, "round_robin": {}, "power_of_two": {}, "session_hash": {}, "prefix_aware": {}, "cache_aware": {},
    "endpoint_picker": {"snapshot_interval_s": 0.05}, "endpoint_picker, 5 s": {"snapshot_interval_s": 5.0}, "kv_router": {},
    "session_affine": {}, "least_kv": {}, "least_kv, 5 s": {"snapshot_interval_s": 5.0},
}  # fmt: skip
#: Scalers of up to 6 replicas; None: so many all the time.
SCALERS: dict[str, dict[str, Any]] = {
    "4 replicas": {"num_replicas": 4}, "3 replicas": {"num_replicas": 3},
    **{
        f"target_tracking, {metric} {target:g}": {
            "min_replicas": 1, "scaler": "target_tracking", "scaler_parameters": {"metric": metric, "target": target},
        }
        for metric, target in (("waiting", 5.0), ("waiting", 1.0), ("concurrency", 2.0), ("concurrency", 1.5))
    },
}  # fmt: skip


def metrics_of(
    workload: Workload, rate_rps: float, seed: int, slots: int = 128, **cluster: Any
) -> Mapping[str, Any]:
    """Metrics of one run."""
    config = SimulationConfig(
        workload=workload,
        rate=rate_rps,
        seed=seed,
        scheduler=SchedulerConfig(max_num_seqs=slots, max_num_batched_tokens=2048, prefix_caching=True),
        step_time_model="roofline",
        step_time_parameters={"model": "llama-3-8b", "gpu": "h100"},
        cluster=ClusterConfig(**cluster),
    )
    return run_simulation(config).metrics


def routers(num_requests: int, seeds: range) -> None:
    """Prints a table for each workload."""
    for name, (workload, rate_rps) in WORKLOADS.items():
        drawn, rows = replace(workload, num_requests=num_requests), []
        first: list[Mapping[str, Any]] = []
        for label, settings in ROUTERS.items():
            cluster = {"num_replicas": 4, "router": label.split(",")[0], **settings}
            runs = [metrics_of(drawn, rate_rps, seed, **cluster) for seed in seeds]
            first = first or runs
            cells = [
                mean_cell(
                    [run["ttft_s"][key] / base["ttft_s"][key] for run, base in zip(runs, first, strict=True)]
                )
                for key in ("mean", "p99")
            ]
            ttft = mean_cell([run["ttft_s"]["mean"] for run in runs], 3)
            tpot = mean_cell([1000 * run["tpot_s"]["mean"] for run in runs], 1)
            hits = mean_cell([100 * run["prefix_hit_fraction"] for run in runs], 0)
            rows.append((label, ttft, *cells, tpot, hits))
        header = ("router", "TTFT mean, s", "/ jsq", "P99 / jsq", "TPOT mean, ms", "found in caches, %")
        print(f"{name}, {rate_rps:g}/s:\n\n{markdown_table(header, rows)}\n", flush=True)


def scaling(num_requests: int, seeds: range) -> None:
    """Prints a table of costs and attained targets."""
    day = Workload(
        num_requests=8 * num_requests,
        arrivals=Arrivals(process="diurnal", period_s=DAY_S),
        lengths=Lengths(prompt=Workload().lengths.prompt, output=LONG),
        classes=(RequestClass(ttft_slo_s=2.0),),
    )
    rows = []
    for label, settings in SCALERS.items():
        cluster = {"num_replicas": 6, "startup_s": 120.0 if "min_replicas" in settings else 0.0, **settings}
        runs = [metrics_of(day, day.num_requests / DAY_S, seed, slots=2, **cluster) for seed in seeds]
        rows.append((
            label, mean_cell([run["replica_seconds"] / 3600 for run in runs]),
            mean_cell([100 * run["slo_attainment"] for run in runs], 1), mean_cell([run["ttft_s"]["p99"] for run in runs]),
            mean_cell([run["cluster"]["num_scalings"] for run in runs], 0),
        ))  # fmt: skip
    header = ("replicas", "replica-hours", "TTFT below 2 s, %", "TTFT P99, s", "starts and stops")
    print(f"a day in 4 hours, {day.num_requests:,} chats:\n\n{markdown_table(header, rows)}\n", flush=True)


def failures(num_requests: int, seeds: range) -> None:
    """Prints what failures cost, by router."""
    workload = replace(WORKLOADS["conversations"][0], num_requests=3 * num_requests)
    rows = []
    for router in ("jsq", "session_affine"):
        for mtbf_s, retry_started in ((None, True), (60.0, True), (60.0, False)):
            cluster: dict[str, Any] = {
                "num_replicas": 4,
                "router": router,
                "mtbf_s": mtbf_s,
                "restart_s": 20.0,
            }
            runs = [
                metrics_of(
                    workload, WORKLOADS["conversations"][1], seed, retry_started=retry_started, **cluster
                )
                for seed in seeds
            ]
            rows.append((
                router, "none" if mtbf_s is None else "all lost ones sent again" if retry_started else "started ones fail",
                mean_cell([run["cluster"]["num_failures"] for run in runs], 1),
                mean_cell([run["cluster"]["num_retried"] for run in runs], 0), mean_cell([run["num_failed"] for run in runs], 0),
                mean_cell([run["ttft_s"]["mean"] for run in runs], 3), mean_cell([run["ttft_s"]["p99"] for run in runs]),
                mean_cell([100 * run["prefix_hit_fraction"] for run in runs], 0),
            ))  # fmt: skip
    header = (
        "router",
        "failures",
        "number",
        "retried",
        "failed",
        "TTFT mean, s",
        "P99, s",
        "found in caches, %",
    )
    print(f"conversations with failures:\n\n{markdown_table(header, rows)}\n", flush=True)


PARTS = {"routers": routers, "scaling": scaling, "failures": failures}


def main() -> None:
    """Prints the tables of the parts."""
    parser = Parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    for part in options.parts:
        PARTS[part](options.requests, range(options.seeds))


if __name__ == "__main__":
    main()
