"""The systems and the workload of multi-tier Llumnix (Vestrum et al., "Beyond Binary Priorities")."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from benchmarks.reproduce.data_sheets import data_sheets
from benchmarks.reproduce.simulate import Outcome, System, percentile
from scheduler_core.routing.base import RoutingRequest
from scheduler_core.routing.llumnix import Llumnix, full_freeness
from scheduler_core.routing.snapshot import ReplicaSnapshot
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.commands.tiers import TiersConfig
from scheduler_core.simulator.config import ClusterConfig
from scheduler_core.simulator.step_time.base import DecodeRun, StepTime, StepWork
from scheduler_core.simulator.workloads.arrivals import Arrivals
from scheduler_core.simulator.workloads.lengths import Lengths, TokenDistribution
from scheduler_core.simulator.workloads.workload import Tiers, Workload

#: Released code: 4 replicas of 128 blocks of 16 tokens, at most 64 requests in a batch.
REPLICAS, BLOCKS, SEATS = 4, 128, 64
QPS = 1250.0
STEP_TIME = data_sheets("llama-2-7b", "a100-80gb")
#: Released code: runs stop after this many seconds, and unfinished requests are excluded.
CUT_S = 60.0
#: Released code: attention of a larger batch is charged as one of this size.
CHARGED_BATCH = 32
MEASURES = ("prefill P99", "prefill mean", "E2E P99", "E2E mean")


@dataclass(frozen=True, slots=True)
class ReleasedCost:
    """A step-time model that charges the attention of at most `CHARGED_BATCH` decodes, as the released code does.

    Used only for the column `as-released accounting`; no other cost is clamped.

    Attributes:
        model: Correct step-time model.
    """

    model: StepTime

    def step_s(self, work: StepWork) -> float:
        """See `StepTime`."""
        return self.model.step_s(
            StepWork(work.prefills, self._charged(work.contexts), work.num_swapped_tokens)
        )

    def run(self, contexts: Sequence[int], start_s: float) -> DecodeRun:
        """See `StepTime`."""
        return self.model.run(self._charged(contexts), start_s)

    @staticmethod
    def _charged(contexts: Sequence[int]) -> Sequence[int]:
        return (*contexts[:CHARGED_BATCH], *(0,) * (len(contexts) - CHARGED_BATCH))


def workload(num: int, num_tiers: int, mix: str, rate_rps: float = QPS) -> Workload:
    """The paper's lengths and arrivals as in its code: Zipf on 64 to 512 tokens, gaps up to 3 means."""
    return Workload(
        num_requests=num,
        arrivals=Arrivals(rate_rps=rate_rps, max_gap_ratio=3.0),
        lengths=Lengths(
            total=TokenDistribution(kind="zipf", low=64, high=512, theta=1.2), prompt_fraction=2 / 3
        ),
        tiers=Tiers(num_tiers=num_tiers, mix=mix),  # type: ignore[arg-type]
    )


def limits(batching: str, blocks: int = BLOCKS, seats: int = SEATS) -> SchedulerConfig:
    """Limits of one replica."""
    return SchedulerConfig(
        batching=batching, num_kv_blocks=blocks, max_num_seqs=seats, max_num_batched_tokens=max(4096, seats)
    )


def baseline() -> System:
    """INFaaS in front of vLLM: no tiers, no migration."""
    cluster = ClusterConfig(num_replicas=REPLICAS, router="infaas")
    return System(policy="fcfs", scheduler=limits("vllm"), step_time=STEP_TIME, cluster=cluster)


def proposed(num_tiers: int, migration: bool = True) -> System:
    """Llumnix in front of Llumlets, with headroom as in the released code."""
    decay = 2.5 / (num_tiers - 1) if num_tiers > 1 else 1.0
    cluster = ClusterConfig(
        num_replicas=REPLICAS,
        router="llumnix",
        num_tiers=num_tiers,
        headroom_decay=decay,
        migration=migration,
    )
    return System(policy="llumlet", scheduler=limits("vllm"), step_time=STEP_TIME, cluster=cluster)


def whole_queue(system: System) -> System:
    """Our variant with `queue_freeness`: dispatch counts all waiting requests, not only the first."""
    headroom = system.cluster.headroom()
    return replace(system, router=lambda: Llumnix(headroom=headroom, whole_queue=True))


@dataclass(kw_only=True, slots=True)
class DeficitFreeness(Llumnix):
    """Dispatch by the paper's freeness, but a negative remainder is not divided by the batch size."""

    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        def freeness(replica: ReplicaSnapshot) -> float:
            value = full_freeness(replica, self.headroom)
            return value if value >= 0 else value * max(replica.num_running, 1)

        return max(replicas, key=lambda one: (freeness(one), -one.num_requests)).replica_id


def undivided_deficit(system: System) -> System:
    """Our variant with `DeficitFreeness`, to isolate the effect of the division in Eq. 1."""
    headroom = system.cluster.headroom()
    return replace(system, router=lambda: DeficitFreeness(headroom=headroom))


def tiers_on_round_robin() -> System:
    """Tier-ordered replicas behind round robin, to isolate the effect of the order."""
    return replace(proposed(1), cluster=ClusterConfig(num_replicas=REPLICAS, router="round_robin"))


def as_released(system: System, num: int) -> System:
    """The proposed system without the limits that its code ignores: memory, batch, attention cost."""
    num_blocks = num * 512 // 16 + 1
    return replace(
        system,
        scheduler=limits("vllm", blocks=num_blocks, seats=num),
        step_time=ReleasedCost(system.step_time),
    )


def search(num: int, mix: str, tiers: Sequence[int], headrooms: Sequence[float], seeds: range) -> TiersConfig:
    """The search of `simulate tiers` over K and headroom, with lambda = 1 as in figure 3."""
    return TiersConfig(
        json="",
        workload=workload(num, 1, mix),
        scheduler=limits("vllm"),
        step_time_model="roofline",
        step_time_parameters=asdict(STEP_TIME),
        cluster=ClusterConfig(num_replicas=REPLICAS, router="llumnix", migration=True),
        tiers=list(tiers),
        headroom_fractions=list(headrooms),
        seed=seeds[0],
        num_seeds=len(seeds),
    )


def latencies(outcome: Outcome, limit_s: float = math.inf) -> tuple[float, float, float, float]:
    """Prefill P99 and mean, E2E P99 and mean; with `limit_s`, only of work that finished by then."""
    first = [record.ttft_s for record in outcome.records if record.first_token_s <= limit_s]
    last = [record.ttlt_s for record in outcome.records if record.finish_s <= limit_s]
    return percentile(first, 99), sum(first) / len(first), percentile(last, 99), sum(last) / len(last)
