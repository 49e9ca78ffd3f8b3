"""Where UniBoost's claims hold: gamma over time (figure 9), load and memory, which the paper leaves open, and agents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from benchmarks.agents.simulated import BLOCK, CHUNK, STEP
from benchmarks.reproduce.simulate import over_seeds, percentile
from benchmarks.reproduce.study import NO_EFFECT, Effort, Findings, listed
from benchmarks.reproduce.uniboost_systems import (
    A100,
    COPIED,
    LOAD,
    MARGIN,
    ONE_ORDER,
    PHASES,
    SYSTEMS,
    TRAIL,
    Order,
    azure,
    compared,
    drawn,
    mixture,
    reasoning,
)
from scheduler_core.policies import make_policy
from scheduler_core.policies.uniboost import UniBoost
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.loop import Simulation
from scheduler_core.simulator.trace_predictions import Predictions
from scheduler_core.simulator.workloads.agents import Agents
from scheduler_core.simulator.workloads.arrivals import Process
from scheduler_core.simulator.workloads.workload import Workload

#: Initial values of gamma, per second.
GAMMAS = (0.001, 0.01, 0.1, 1.0, 10.0)
#: Length of the intervals in which figure 9 counts arrivals, in seconds.
WINDOW_S = 60.0


class Recorded(UniBoost):
    """UniBoost with gamma over time: `history` has (s, 1/s)."""

    __slots__ = ("history",)

    def __post_init__(self) -> None:
        UniBoost.__post_init__(self)
        self.history: list[tuple[float, float]] = []

    def on_step(self, now: float, step_s: float) -> None:
        UniBoost.on_step(self, now, step_s)
        self.history.append((now, self.gamma))

    def on_steps(self, now: float, durations_s: Sequence[float]) -> None:
        UniBoost.on_steps(self, now, durations_s)
        self.history.append((now, self.gamma))


def gamma_over_time(effort: Effort) -> Findings:
    """Figure 9: gamma over time with the arrivals of the Azure trace; and what its initial value matters."""
    num = effort.num(10_000, 300)
    findings = Findings(size=effort.size(10_000, 300))
    file = effort.file("traces/azure2023_conv.parquet")
    process: Process = "poisson" if file is None else "trace"
    lengths = replace(azure(effort), in_order=file is not None)
    workload = Workload(num_requests=num, lengths=lengths)
    p99: dict[str, dict[str, float]] = {}
    for ada in (True, False):
        orders = {
            f"{gamma:g}/s": Order("uniboost", {"gamma_per_s": gamma, "adapt_gamma": ada}, batching=ONE_ORDER)
            for gamma in GAMMAS
        }
        kind = "adapted" if ada else "fixed"
        by = compared(effort, orders, workload, LOAD, process=process)
        p99[kind] = {name: values["E2E P99"] for name, values in by.items()}
        for name, values in by.items():
            more = {key: values[key] for key in ("E2E mean", "TTFT mean", "TTFT P99")}
            findings.row("section A.4", f"gamma {name}, {kind}, E2E P99, s", values["E2E P99"], more=more)
    ratio = {kind: max(values.values()) / min(values.values()) for kind, values in p99.items()}
    text = "latencies are stable over a broad range of k, delta and initial gamma"
    evidence = f"largest / smallest P99 E2E {listed(ratio, '{:.3f}')} over gamma"
    findings.claim("section A.4", text, ratio["adapted"] < 1.1, evidence, case="initial gamma")
    trace = drawn(workload, A100, LOAD, 0, effort.quick, process)
    policy = Recorded()
    core = Scheduler(replace(A100.limits(effort.quick), batching=ONE_ORDER), policy)
    Simulation(trace, core, A100.step_time, Predictions()).run()
    times, gammas = np.array(policy.history).T
    edges = np.arange(0.0, times[-1] + WINDOW_S, WINDOW_S)
    arrivals = np.histogram([row.arrival_s for row in trace.requests], edges)[0]
    mean = [gammas[(times >= low) & (times < low + WINDOW_S)] for low in edges[:-1]]
    minutes = [(num, float(values.mean())) for num, values in zip(arrivals, mean, strict=True) if len(values)]
    rates, levels = np.array(minutes, float).T
    for name, value in (
        ("gamma, smallest, 1/s", levels.min()),
        ("gamma, largest, 1/s", levels.max()),
        ("arrivals in a minute, mean", rates.mean()),
        ("arrivals in a minute, variance / mean", rates.var() / rates.mean()),
        ("correlation of gamma and arrivals, by minute", np.corrcoef(rates, levels)[0, 1]),
    ):
        findings.row("figure 9", name, float(value))
    return findings


#: The paper gives neither the load nor the memory of its comparisons: fractions of the estimated capacity, GB of KV cache.
LOADS, MEMORIES_GB = (0.7, 0.85, 1.0), (5, 10, 20, 40)
#: Median and P90 of the output tokens of reasoning tasks.
TAILS = {"light": (4000.0, 6000.0), "heavy": (1500.0, 5000.0)}
REGIONS = {
    TRAIL: SYSTEMS[TRAIL],
    "Sarathi": SYSTEMS["Sarathi"],
    "one order": PHASES["phase 2: one order"],
    "UniBoost": SYSTEMS["UniBoost"],
}
#: Of `regions`: measure, its name, the system that should be better, the other one, and why it is not everywhere.
_COMPARISONS = (
    (
        "E2E P99", "P99 TTLT than TRAIL+", "UniBoost", TRAIL,
        "It holds where requests queue for memory; elsewhere both have the decode time of the longest outputs.",
    ),
    (
        "TTFT P99", "P99 TTFT than TRAIL+", "UniBoost", TRAIL,
        "Where requests queue, TRAIL+ displaces others at any time for those that it knows to be short.",
    ),
    (
        "E2E P99", "P99 TTLT than Sarathi", "UniBoost", "Sarathi",
        "First come, first served already is best for the longest requests, which boosts of others can only delay.",
    ),
    (
        "TTFT P99", "P99 TTFT than Sarathi", "UniBoost", "Sarathi",
        "It holds where prompts queue for memory, but not near saturation with light tails; elsewhere no prompt waits.",
    ),
    (
        "E2E P99", "P99 TTLT than one order without MemGuard", "UniBoost", "one order",
        "It holds where one order alone copies more than one token to the host per token of work.",
    ),
)  # fmt: skip


def regions(effort: Effort) -> Findings:
    """Where the comparisons hold: load and memory, which the paper leaves open, and light or heavy tails of the outputs."""
    num = effort.num(2000, 100)
    findings = Findings(size=effort.size(2000, 100, "requests in each of 24 cells"))
    loads, memories = (LOADS[-1:], MEMORIES_GB[-1:]) if effort.quick else (LOADS, MEMORIES_GB)
    parts: dict[tuple[str, float, int], dict[str, dict[str, float]]] = {}
    for tail, load, memory in product(TAILS, loads, memories):
        workload = mixture(effort, num, outputs=reasoning(*TAILS[tail]))
        engine = replace(A100, kv_bytes=memory * 1e9)
        parts[tail, load, memory] = own = compared(effort, REGIONS, workload, load, engine)
        for measure, _, better, worse, _ in _COMPARISONS:
            change = 100 * (own[better][measure] / own[worse][measure] - 1)
            more = {COPIED: own[better][COPIED], f"{COPIED}, {worse}": own[worse][COPIED]}
            what = f"{measure} of {better} against {worse}, %"
            findings.row(f"{tail} tails, load {load}, {memory} GB", what, change, more=more)
    for measure, what, better, worse, cause in _COMPARISONS:
        wins = [key for key, own in parts.items() if own[better][measure] * NO_EFFECT < own[worse][measure]]
        text = f"UniBoost has a lower {what} at every load and memory, with light and heavy tails"
        evidence = f"in {len(wins)} of {len(parts)} cells{_region(wins)}"
        findings.check("regions", text, len(wins) == len(parts), evidence, cause=cause)
    return findings


def _region(cells: Sequence[tuple[str, float, int]]) -> str:
    """The cells by tail and load: " (light, 0.7: 5, 10 GB; heavy, 0.7: 5 GB)"."""
    memories: dict[tuple[str, float], list[int]] = {}
    for tail, load, memory in cells:
        memories.setdefault((tail, load), []).append(memory)
    parts = [f"{tail}, {load}: {', '.join(map(str, gb))} GB" for (tail, load), gb in memories.items()]
    return f" ({'; '.join(parts)})" if parts else ""


#: Numbers of agent sessions at a time on one engine; scale of the recorded tokens, to the median prompt of 11,800 tokens that
#: UniBoost's authors measured; minutes; tokens of KV memory.
NUM_AGENTS, AGENT_SCALE, AGENT_MINUTES, AGENT_KV_TOKENS = (80, 120, 160, 240, 320), 0.113, 20.0, 1_000_000
#: Host memory is not used; a turn whose context was evicted is computed again.
AGENT_ORDERS = {
    "FCFS": "fcfs",
    "SPF": "spf",
    "longest prefix": "longest_prefix",
    "UniBoost": "uniboost_uncached",
}


def _agent_latencies(workload: Workload, seed: int, horizon_s: float) -> dict[str, dict[str, float]]:
    """Latencies of the turns that ended, in s, and the longest wait, also of turns that still wait at the end."""
    trace = workload.trace(seed)
    config = SchedulerConfig(
        max_num_seqs=64,
        max_num_batched_tokens=CHUNK + 64,
        num_kv_blocks=AGENT_KV_TOKENS // BLOCK,
        kv_block_tokens=BLOCK,
        batching_parameters={"chunk_tokens": CHUNK},
    )
    latencies: dict[str, dict[str, float]] = {}
    for name, policy in AGENT_ORDERS.items():
        core = Scheduler(config, make_policy(policy))
        records = Simulation(trace, core, STEP, Predictions(), horizon_s=horizon_s).run().records
        ttft, ttlt = [row.ttft_s for row in records], [row.ttlt_s for row in records]
        waits = [horizon_s - state.request.arrival_s for state in core.pool.waiting]
        latencies[name] = {
            **{f"TTFT P{share}": percentile(ttft, share) for share in (50, 90, 99)},
            **{f"TTLT P{share}": percentile(ttlt, share) for share in (90, 99)},
            "longest wait": max([*ttft, *waits]),
            "turns": len(records) / horizon_s,
        }
    return latencies


def agents(effort: Effort) -> Findings:
    """The later form of UniBoost's authors (sgl-project/sglang #35637): waiting turns of agents by uncached tokens."""
    minutes = effort.num(round(AGENT_MINUTES), 2)
    findings = Findings(size=effort.size(round(AGENT_MINUTES), 2, "minutes"))
    file = effort.file("traces/agent_sessions.parquet")
    for sessions in NUM_AGENTS[:1] if effort.quick else NUM_AGENTS:
        turns = sessions * (80 + 5 * minutes)
        sets = Agents(
            num_sessions=sessions,
            file=None if file is None else str(file),
            scale=AGENT_SCALE,
            max_pause_s=60.0,
        )
        workload = Workload(num_requests=turns, agents=sets)

        def run_seed(seed: int, workload: Workload = workload) -> dict[str, dict[str, float]]:
            return _agent_latencies(workload, seed, 60.0 * minutes)

        by = over_seeds(effort.seeds, run_seed)
        base = by["FCFS"]
        for name, values in by.items():
            if name != "FCFS":
                for measure in base:
                    change = 100 * (values[measure] / base[measure] - 1)
                    findings.row(f"{sessions} sessions", f"{measure}, {name} against FCFS, %", change)
            else:
                findings.row(f"{sessions} sessions", "TTFT P90, FCFS, s", base["TTFT P90"])
        case = f"{sessions} sessions"
        gain = {name: 100 * (values["TTLT P90"] / base["TTLT P90"] - 1) for name, values in by.items()}
        text = "ordered by uncached tokens, agents' turns have a lower P90 TTLT than under FCFS"
        evidence = (
            f"P90 TTLT against FCFS with {case}: UniBoost {gain['UniBoost']:+.0f} %, SPF {gain['SPF']:+.0f} %"
        )
        findings.check("#35637", text, gain["UniBoost"] < -MARGIN, evidence, case=case)
        ratio = {name: values["longest wait"] / base["longest wait"] for name, values in by.items()}
        text = "no agent's turn waits more than twice as long as the longest one under FCFS"
        evidence = f"longest wait against FCFS with {case}: UniBoost {ratio['UniBoost']:.1f}, SPF {ratio['SPF']:.1f} times"
        findings.check("#35637", text, ratio["UniBoost"] < 2.0, evidence, case=case)
    return findings
