"""Systems, workloads and measures of the studies of UniBoost (Li et al., "Beyond Prediction")."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from benchmarks.reproduce.data_sheets import data_sheets, num_kv_blocks
from benchmarks.reproduce.simulate import Outcome, System, log_normal, over_seeds, percentile, simulate
from benchmarks.reproduce.study import NO_EFFECT, Effort
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.config import ClusterConfig
from scheduler_core.simulator.step_time import saturation_rate_rps
from scheduler_core.simulator.step_time.roofline import RooflineStepTime
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.trace_predictions import oracle_predictions
from scheduler_core.simulator.workloads.arrivals import Arrivals, Process
from scheduler_core.simulator.workloads.lengths import Lengths
from scheduler_core.simulator.workloads.workload import RequestClass, Workload

SEATS, CHUNK = 256, 1024
#: Fraction of the capacity estimated for full batches; the paper's loads are 0.9 to 0.99 of the actual one.
LOAD = 0.9
#: Few requests finish before a queue forms: quick studies use a quarter of the memory, if the longest request fits into it.
QUICK_MEMORY, QUICK_BLOCKS = 4, 1024


@dataclass(frozen=True, slots=True)
class Order:
    """A policy and its parameters, whether it uses true lengths, and the batch former and its parameters."""

    policy: str
    parameters: Mapping[str, float] = field(default_factory=dict)
    oracle: bool = False
    batching: str = "chunked_prefill"
    batching_parameters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Model, GPUs, memory and chunk size, the same for all systems.

    Attributes:
        model: Data sheet of the model.
        gpu: Data sheet of the GPU.
        devices: Tensor-parallel GPUs.
        kv_bytes: Size of the KV cache; None: the memory without the weights.
        chunk: Tokens per step.
        replicas: Number of engines behind a router.
        router: Name of the router.
    """

    model: str = "llama-3-8b"
    gpu: str = "a100-80gb"
    devices: int = 1
    kv_bytes: float | None = 20e9
    chunk: int = CHUNK
    replicas: int = 1
    router: str = "random"

    @property
    def step_time(self) -> RooflineStepTime:
        """Step times from data sheets."""
        return data_sheets(self.model, self.gpu, self.devices)

    def limits(self, small: bool) -> SchedulerConfig:
        """Limits of one replica: at most one slot per token of a step; the quick version has less memory."""
        times = self.step_time
        blocks = num_kv_blocks(times)
        if self.kv_bytes is not None:
            blocks = int(self.kv_bytes / times.size.kv_bytes_per_token) // 16
        return SchedulerConfig(
            max_num_seqs=min(SEATS, self.chunk),
            max_num_batched_tokens=self.chunk,
            num_kv_blocks=max(blocks // QUICK_MEMORY, QUICK_BLOCKS) if small else blocks,
            preemption="swap",
        )

    def system(self, order: Order, small: bool) -> System:
        """The engine with a policy."""
        return System(
            policy=order.policy,
            parameters=order.parameters,
            scheduler=replace(
                self.limits(small),
                batching=order.batching,
                batching_parameters=dict(order.batching_parameters),
            ),
            step_time=self.step_time,
            cluster=ClusterConfig(
                num_replicas=self.replicas, router=self.router if self.replicas > 1 else "jsq"
            ),
        )


#: Memory-constrained: a KV cache of 20 GB with 131,072 bytes per token.
A100 = Engine()
TRAIL = "TRAIL+"
#: Algorithm 1: one order of prompts and decodes.
ONE_ORDER = "uniboost"
SYSTEMS = {
    TRAIL: Order("trail", {"limit": 0.6}, oracle=True),
    "SJF": Order("ssjf", oracle=True),
    "Sarathi": Order("fcfs"),
    "DistBoost": Order("distboost"),
    "UniBoost": Order("uniboost", batching=ONE_ORDER),
}
#: The non-clairvoyant baseline of figures 6 and 7.
LAS = "LAS (MLFQ+)"
#: UniBoost without MemGuard and with a fixed gamma, and with one of both.
NO_GUARD, NO_ADA = {"mem_guard": False}, {"adapt_gamma": False}
#: Our variant: UniBoost's order in Sarathi's batches, which never pause a decode.
DECODES_FIRST = Order("uniboost")
PHASES = {
    LAS: Order("las"),
    "phase 1: DistBoost": Order("distboost"),
    "phase 2: one order": Order("uniboost", NO_GUARD | NO_ADA, batching=ONE_ORDER),
    "phase 3: + MemGuard": Order("uniboost", NO_ADA, batching=ONE_ORDER),
    "phase 4: + gamma-Ada": Order("uniboost", batching=ONE_ORDER),
}
#: Changes in percent within which there is no effect.
MARGIN = 100 * (NO_EFFECT - 1)
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


def azure(effort: Effort) -> Lengths:
    """Length pairs of the public Azure conversation trace, or log-normals with its medians and P90."""
    file = effort.file("traces/azure2023_conv.parquet")
    if file:
        return Lengths(file=str(file))
    return Lengths(prompt=log_normal(928, 2050, 4096), output=log_normal(129, 420, 4096), max_tokens=1000)


def reasoning(median: float = 4000.0, p90: float = 6000.0) -> Lengths:
    """Short questions, long outputs, light-tailed as in figure 1 (a); the paper prints no statistics."""
    return Lengths(prompt=log_normal(120, 400, 4096), output=log_normal(median, p90, 8192), max_tokens=8192)


MIXES = {"mix-1, 20 % reasoning": 0.2, "mix-2, 70 % reasoning": 0.7}


def mixture(effort: Effort, num: int, share: float = 0.7, outputs: Lengths | None = None) -> Workload:
    """A fraction `share` of reasoning (0.7 is the paper's mix-2, 0.2 mix-1), otherwise Azure."""
    return Workload(
        num_requests=num,
        classes=(
            RequestClass(weight=share, category="reasoning", lengths=outputs or reasoning()),
            RequestClass(weight=1 - share, category="azure", lengths=azure(effort)),
        ),
    )


def drawn(
    workload: Workload,
    engine: Engine,
    load: float,
    seed: int,
    small: bool = False,
    process: Process = "poisson",
) -> Trace:
    """The workload with arrivals at a fraction of the estimated capacity of all replicas; `process` trace: at the times of
    the file with its lengths, all stretched by one factor."""
    capacity = saturation_rate_rps(workload.trace(seed), engine.limits(small), engine.step_time)
    rate = load * capacity * engine.replicas
    return replace(workload, arrivals=Arrivals(process=process, rate_rps=rate)).trace(seed)


def run(
    order: Order, trace: Trace, engine: Engine = A100, small: bool = False, *, measure_ran: bool = False
) -> Outcome:
    """Simulates one system on one trace."""
    predictions = oracle_predictions(trace) if order.oracle else None
    return simulate(engine.system(order, small), trace, predictions, measure_ran=measure_ran)


def measures(outcome: Outcome) -> dict[str, float]:
    """`MEASURES` of one run, and P50, P90 and P99.9."""
    values: dict[str, float] = {}
    for name, latencies in (
        ("E2E", [record.ttlt_s for record in outcome.records]),
        ("TTFT", [record.ttft_s for record in outcome.records]),
    ):
        values |= {f"{name} mean": sum(latencies) / len(latencies)}
        values |= {f"{name} P{share:g}": percentile(latencies, share) for share in (50, 90, 95, 99, 99.9)}
    gaps = outcome.gaps()
    summary = gaps.summary()
    assert summary is not None
    values |= {"TBT mean": summary["mean"]}
    values |= {f"TBT P{share:g}": gaps.quantile(share / 100) for share in (50, 90, 95, 99, 99.9)}
    start = min(record.arrival_s for record in outcome.records)
    values |= eviction_costs(outcome)
    values["tok/s"] = sum(record.output_tokens for record in outcome.records) / (outcome.end_s - start)
    return values


#: Names of `eviction_costs`.
PREEMPTIONS, ABOVE_BOUND, COPIED = "preemptions per request", "requests above the bound", "copies per token"


def eviction_costs(outcome: Outcome, bin_tokens: int = 256) -> dict[str, float]:
    """Preemptions per request; number of requests with more than 1 + floor(log2(S/k)) of them (section 3.3); and the tokens
    copied to the host, or back, per token S of prompts and outputs."""
    work = [record.prompt_tokens + record.output_tokens for record in outcome.records]
    bounds = [1 + int(math.log2(max(1.0, tokens / bin_tokens))) for tokens in work]
    nums = [record.num_preemptions for record in outcome.records]
    assert outcome.watch.steps is not None
    copied = outcome.watch.steps.columns(0)["num_swapped_tokens"].sum()
    return {
        PREEMPTIONS: sum(nums) / len(nums),
        ABOVE_BOUND: float(sum(num > bound for num, bound in zip(nums, bounds, strict=True))),
        COPIED: float(copied) / 2 / sum(work),
    }


def improvement(base: Mapping[str, float], value: Mapping[str, float], name: str) -> float:
    """Improvement in percent, positive is better: less latency, more throughput."""
    change = 100 * (value[name] / base[name] - 1)
    return change if name == "tok/s" else -change


def compared(
    effort: Effort,
    orders: Mapping[str, Order],
    workload: Workload,
    load: float,
    engine: Engine = A100,
    process: Process = "poisson",
) -> dict[str, dict[str, float]]:
    """Measures of each system, all on the same traces; means over the seeds."""

    def run_seed(seed: int) -> dict[str, dict[str, float]]:
        trace = drawn(workload, engine, load, seed, effort.quick, process)
        return {name: measures(run(order, trace, engine, effort.quick)) for name, order in orders.items()}

    return over_seeds(effort.seeds, run_seed)
