"""UniBoost: table 2, the ablation of its phases (figure 7), starvation (tables 3 and 4), sensitivity (tables 6 to 8)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from benchmarks.reproduce.hardware import A100_80, LLAMA_3_8B, step_time
from benchmarks.reproduce.simulate import Outcome, System, over_seeds, percentile, simulate
from benchmarks.reproduce.study import Claim, Effort, Findings, Row, Study
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.fetch import oracle_predictions
from scheduler_core.simulator.metrics import starvation_slope
from scheduler_core.simulator.service_time import saturation_rate_rps
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.workloads import Arrivals, Law, Lengths, RequestClass, Workload

#: Memory-constrained: 20 GB for keys and values of 131,072 bytes per token, in blocks of 16 tokens.
KV_BLOCKS, SEATS, CHUNK = int(20e9 / 131_072) // 16, 256, 1024
#: Share of the capacity estimated for full batches; the paper's loads are 0.9 to 0.99 of what the system attains.
LOAD = 0.9
#: Few requests are gone before a queue forms: quick studies come faster, to an engine with an eighth of the memory.
QUICK_LOAD, QUICK_MEMORY = 1.2, 8


@dataclass(frozen=True, slots=True)
class Order:
    """A policy, its parameters, and whether it sees the true lengths."""

    policy: str
    parameters: Mapping[str, float] = field(default_factory=dict)
    oracle: bool = False


TRAIL = "TRAIL+"
SYSTEMS = {
    TRAIL: Order("trail", {"limit": 0.6}, oracle=True),
    "SJF": Order("ssjf", oracle=True),
    "Sarathi": Order("fcfs"),
    "DistBoost": Order("distboost"),
    "UniBoost": Order("uniboost"),
}
PHASES = {
    "phase 1: DistBoost": Order("distboost"),
    "phase 2: one order": Order("uniboost", {"mem_guard": False, "adapt_gamma": False}),
    "phase 3: + MemGuard": Order("uniboost", {"adapt_gamma": False}),
    "phase 4: + gamma-Ada": Order("uniboost"),
}
MEASURES = (
    "E2E mean",
    "E2E P95",
    "E2E P99",
    "TTFT mean",
    "TTFT P95",
    "TTFT P99",
    "TBT mean",
    "TBT P95",
    "TBT P99",
    "tok/s",
)
#: Table 2: improvement over TRAIL+ in percent, in the order of `MEASURES`.
TABLE_2 = {
    "SJF": (-11.1, -12.5, 11.2, -74.6, -70.5, -9.7, -5.2, -7.1, -6.3, -7.9),
    "Sarathi": (-12.3, -13.2, -7.6, -49.9, -40.5, -8.1, -6.8, -8.4, -7.9, -10.9),
    "DistBoost": (-14.0, 6.0, 37.1, -22.8, -35.0, -3.4, -14.1, -10.2, 18.3, 1.1),
    "UniBoost": (-19.1, 1.1, 35.1, 52.1, 97.4, 34.0, -25.3, -8.1, 33.8, 1.2),
}
#: Table 8: improvement over FCFS in percent by chunk size, in the order of `MEASURES`.
TABLE_8 = {
    128: (-17.8, 2.4, 38.6, 12.3, 18.5, 8.2, -22.1, -5.9, 36.4, 0.6),
    512: (-18.7, 1.5, 36.0, 35.8, 58.1, 22.3, -24.5, -7.5, 34.8, 1.0),
    1024: (-19.1, 1.1, 35.1, 52.1, 97.4, 34.0, -25.3, -8.1, 33.8, 1.2),
    2048: (-19.4, 0.8, 34.5, 68.4, 93.6, 45.1, -26.0, -8.6, 33.2, 1.3),
}
#: Tables 6 and 7: P99 E2E in ms.
TABLE_6 = {64: 8530.0, 256: 8512.0, 512: 8681.0, 1024: 8465.0}
TABLE_7 = {0.0: 9500.0, 0.1: 8512.0, 0.3: 8561.0, 0.5: 8575.0}


def system(order: Order, chunk: int = CHUNK, small: bool = False) -> System:
    """Llama-3-8B on an A100; memory, seats and chunk are the same for all."""
    limits = SchedulerConfig(
        max_num_seqs=SEATS,
        max_num_batched_tokens=chunk,
        num_kv_blocks=KV_BLOCKS // (QUICK_MEMORY if small else 1),
    )
    return System(
        policy=order.policy,
        parameters=order.parameters,
        scheduler=limits,
        step_time=step_time(LLAMA_3_8B, A100_80),
    )


def mixture(effort: Effort, num: int) -> Workload:
    """70 % reasoning, 30 % Azure.

    Azure: the public trace's pairs, or log-normal laws through its medians and P90. Reasoning: the paper prints no
    statistics; short questions (median 120 tokens) and long, heavy-tailed answers (median 1,500, cut at 8,192).
    """
    file = effort.file("traces/azure2023_conv.parquet")
    azure = (
        Lengths(file=str(file))
        if file
        else Lengths(prompt=_law(928, 2050), output=_law(129, 420), max_tokens=1000)
    )
    reasoning = Lengths(prompt=_law(120, 400), output=_law(1500, 5000, 8192), max_tokens=8192)
    return Workload(
        num_requests=num,
        classes=(
            RequestClass(share=0.7, category="reasoning", lengths=reasoning),
            RequestClass(share=0.3, category="azure", lengths=azure),
        ),
    )


def _law(median: float, p90: float, high: int = 4096) -> Law:
    return Law(
        law="log_t", mu=math.log(median), sigma=math.log(p90 / median) / 1.2815515655446004, nu=1e6, high=high
    )


def drawn(workload: Workload, load: float, seed: int, chunk: int = CHUNK, small: bool = False) -> Trace:
    """The workload with Poisson arrivals at a share of the estimated capacity."""
    limits = system(SYSTEMS["Sarathi"], chunk, small)
    rate = load * saturation_rate_rps(workload.trace(seed), limits.scheduler, limits.step_time)
    return replace(workload, arrivals=Arrivals(rate_rps=rate)).trace(seed)


def run(order: Order, trace: Trace, chunk: int = CHUNK, small: bool = False) -> Outcome:
    """One system on one trace."""
    return simulate(system(order, chunk, small), trace, oracle_predictions(trace) if order.oracle else None)


def measures(outcome: Outcome) -> dict[str, float]:
    """`MEASURES` of one run."""
    values: dict[str, float] = {}
    for name, found in (
        ("E2E", [one.ttlt_s for one in outcome.records]),
        ("TTFT", [one.ttft_s for one in outcome.records]),
    ):
        values |= {f"{name} mean": sum(found) / len(found)}
        values |= {f"{name} P{share}": percentile(found, share) for share in (95, 99)}
    gaps = outcome.gaps().summary()
    assert gaps is not None
    values |= {"TBT mean": gaps["mean"], "TBT P95": gaps["p95"], "TBT P99": gaps["p99"]}
    start = min(one.arrival_s for one in outcome.records)
    values["tok/s"] = sum(one.output_tokens for one in outcome.records) / (outcome.end_s - start)
    return values


def improvement(base: Mapping[str, float], value: Mapping[str, float], name: str) -> float:
    """In percent, positive is better: less latency, more throughput."""
    change = 100 * (value[name] / base[name] - 1)
    return change if name == "tok/s" else -change


def table_2(effort: Effort) -> Findings:
    """Table 2: everybody against TRAIL with perfect lengths."""
    findings, num = Findings(), 300 if effort.quick else 3000

    def one(seed: int) -> dict[str, float]:
        trace = drawn(mixture(effort, num), QUICK_LOAD if effort.quick else LOAD, seed, small=effort.quick)
        found = {name: measures(run(order, trace, small=effort.quick)) for name, order in SYSTEMS.items()}
        return {f"{name} {key}": value for name, values in found.items() for key, value in values.items()}

    got = over_seeds(effort.seeds, one)
    parts = {name: {key: got[f"{name} {key}"] for key in MEASURES} for name in SYSTEMS}
    for name, printed in TABLE_2.items():
        for measure, paper in zip(MEASURES, printed, strict=True):
            findings.rows.append(
                Row(where=f"table 2, {name}", what=f"{measure}, improvement over TRAIL+, %", paper=paper,
                    ours=improvement(parts[TRAIL], parts[name], measure), neutral=0.0)
            )  # fmt: skip
    best = max(SYSTEMS, key=lambda name: -parts[name]["TTFT P99"])
    findings.claims += [
        Claim("section 4.1", "UniBoost has the best P99 TTFT of all", best == "UniBoost",
              ", ".join(f"{name} {parts[name]['TTFT P99']:.3g} s" for name in SYSTEMS)),
        Claim("section 4.1", "UniBoost improves P99 E2E on TRAIL with perfect lengths",
              parts["UniBoost"]["E2E P99"] < parts[TRAIL]["E2E P99"],
              f"{parts['UniBoost']['E2E P99']:.4g} s and {parts[TRAIL]['E2E P99']:.4g} s"),
    ]  # fmt: skip
    return findings


def ablation(effort: Effort) -> Findings:
    """Figure 7: latency over load of the four phases."""
    findings, num = Findings(), 250 if effort.quick else 2000
    loads = (QUICK_LOAD,) if effort.quick else (0.7, 0.8, 0.9, 1.0)
    p99: dict[tuple[str, float], float] = {}
    for load in loads:
        for name, order in PHASES.items():

            def one(seed: int, order: Order = order, load: float = load) -> dict[str, float]:
                return measures(
                    run(
                        order, drawn(mixture(effort, num), load, seed, small=effort.quick), small=effort.quick
                    )
                )

            got = over_seeds(effort.seeds, one)
            p99[name, load] = got["E2E P99"]
            findings.rows.append(
                Row(where=f"figure 7, load {load}", what=f"{name}, E2E P99, s", paper=None, ours=got["E2E P99"],
                    more={"E2E mean": got["E2E mean"], "TTFT P99": got["TTFT P99"]})
            )  # fmt: skip
    names, high = list(PHASES), loads[-1]
    findings.claims.append(
        Claim("figure 7", "the full design has a lower P99 near saturation than its first phase",
              p99[names[-1], high] < p99[names[0], high],
              " / ".join(f"{p99[name, high]:.4g}" for name in names) + f" s at load {high}")
    )  # fmt: skip
    return findings


#: Tables 3 and 4: mean and P99 E2E of short requests, mean of long ones; section A.3: slope in s per request.
TABLE_3 = {"UniBoost": (2.80, 3.62), "Sarathi": (2.83, 3.84), "SJF": (2.80, 3.62)}
TABLE_4 = {"UniBoost": 88.5, "Sarathi": 88.5, "SJF": 88.4}
SLOPE = 0.0003


def starvation(effort: Effort) -> Findings:
    """Tables 3 and 4 and the slope: 90 % short requests, 10 % long ones."""
    findings, num = Findings(), 600 if effort.quick else 6000
    short = Lengths(
        prompt=Law(law="fixed", low=125, high=125),
        output=Law(law="fixed", low=100, high=100),
        max_tokens=6000,
    )
    long = Lengths(prompt=Law(law="fixed", low=2000, high=2000), output=Law(law="fixed", low=6000, high=6000))
    workload = Workload(
        num_requests=num,
        classes=(
            RequestClass(share=0.9, category="short", lengths=short),
            RequestClass(share=0.1, category="long", lengths=long),
        ),
    )
    for name in TABLE_3:

        def one(seed: int, name: str = name) -> dict[str, float]:
            outcome = run(SYSTEMS[name], drawn(workload, LOAD, seed))
            shorts = [row.ttlt_s for row in outcome.records if row.category == "short"]
            longs = [row for row in outcome.records if row.category == "long"]
            slope = starvation_slope(outcome.records)
            assert slope is not None
            return {"mean": sum(shorts) / len(shorts), "p99": percentile(shorts, 99), "slope": slope,
                    "long": sum(row.ttlt_s for row in longs) / len(longs)}  # fmt: skip

        got = over_seeds(effort.seeds, one)
        findings.rows += [
            Row(
                where="table 3",
                what=f"{name}, short requests, E2E mean, s",
                paper=TABLE_3[name][0],
                ours=got["mean"],
            ),
            Row(
                where="table 3",
                what=f"{name}, short requests, E2E P99, s",
                paper=TABLE_3[name][1],
                ours=got["p99"],
            ),
            Row(
                where="table 4",
                what=f"{name}, long requests, E2E mean, s",
                paper=TABLE_4[name],
                ours=got["long"],
            ),
            Row(
                where="section A.3",
                what=f"{name}, slope of long requests' latency, s per request",
                paper=SLOPE,
                ours=got["slope"],
            ),
        ]
        growth = got["slope"] * num / got["long"]
        findings.claims.append(
            Claim("section A.3", f"{name}: long requests do not wait longer the later they come", abs(growth) < 0.5,
                  f"over the whole run their latency changes by {100 * growth:.0f} % of its mean")
        )  # fmt: skip
    return findings


def sensitivity(effort: Effort) -> Findings:
    """Tables 6, 7 and 8: bin size, hysteresis, chunk size."""
    findings, num = Findings(), 200 if effort.quick else 2000

    def p99(parameters: Mapping[str, float]) -> float:
        order, load, small = Order("uniboost", parameters), QUICK_LOAD if effort.quick else LOAD, effort.quick

        def one(seed: int) -> dict[str, float]:
            return measures(run(order, drawn(mixture(effort, num), load, seed, small=small), small=small))

        return over_seeds(effort.seeds, one)["E2E P99"]

    bins = {k: p99({"bin_tokens": k}) for k in ((64, 1024) if effort.quick else TABLE_6)}
    deltas = {delta: p99({"hysteresis_s": delta}) for delta in ((0.0,) if effort.quick else TABLE_7)}
    deltas[0.1] = deltas.get(0.1) or p99({})
    for where, found, printed in (("table 6, k", bins, TABLE_6), ("table 7, delta", deltas, TABLE_7)):
        findings.rows += [
            Row(where=f"{where} = {key}", what="P99 E2E, s", paper=printed[key] / 1000, ours=value)  # type: ignore[index]
            for key, value in found.items()
        ]
    spread = max(bins.values()) / min(bins.values())
    findings.claims += [
        Claim(
            "table 6",
            "bin size hardly matters (2.6 % in the paper)",
            spread < 1.1,
            f"largest / smallest P99 {spread:.3f}",
        ),
        Claim(
            "table 7",
            "without hysteresis P99 is higher",
            deltas[0.0] > deltas[0.1],
            f"{deltas[0.0]:.4g} and {deltas[0.1]:.4g} s",
        ),
    ]
    for chunk, improvements in TABLE_8.items():
        if effort.quick and chunk != 512:
            continue

        def one(seed: int, chunk: int = chunk) -> dict[str, float]:
            trace = drawn(
                mixture(effort, num), QUICK_LOAD if effort.quick else LOAD, seed, small=effort.quick
            )
            base, ours = (
                measures(run(SYSTEMS["Sarathi"], trace, chunk, effort.quick)),
                measures(run(SYSTEMS["UniBoost"], trace, chunk, effort.quick)),
            )
            return {name: improvement(base, ours, name) for name in MEASURES}

        got = over_seeds(effort.seeds, one)
        findings.rows += [
            Row(
                where=f"table 8, chunk {chunk}",
                what=f"{name}, improvement over FCFS, %",
                paper=paper,
                ours=got[name],
                neutral=0.0,
            )
            for name, paper in zip(MEASURES, improvements, strict=True)
        ]
    return findings


_WHY = (
    "The paper gives neither its traces nor its code: lengths of the reasoning tasks, memory and load are ours. Times are "
    "Llama-3-8B on an A100 from data sheets. TRAIL+ and SJF see the true lengths, as in the paper."
)
STUDIES = (
    Study(name="uniboost-table2", paper="UniBoost", title="Table 2: against TRAIL with perfect lengths", why=_WHY,
          cost_s=(12, 900), run=table_2),
    Study(name="uniboost-ablation", paper="UniBoost", title="Figure 7: the four phases", why=_WHY, cost_s=(10, 1500), run=ablation),
    Study(name="uniboost-starvation", paper="UniBoost", title="Tables 3 and 4: starvation", why=_WHY, cost_s=(10, 600), run=starvation),
    Study(name="uniboost-sensitivity", paper="UniBoost", title="Tables 6 to 8: bins, hysteresis, chunks", why=_WHY,
          cost_s=(12, 2500), run=sensitivity),
)  # fmt: skip
