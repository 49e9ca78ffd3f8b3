"""RAD (Bari et al.): stable below the bound of theorem 1; no scheduler is stable above it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.reproduce.simulate import System, over_seeds, simulate
from benchmarks.reproduce.study import Effort, Findings, listed
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.step_time import rad_bounds
from scheduler_core.simulator.step_time.base import DecodeRun, PolynomialRun, StepWork
from scheduler_core.simulator.workloads.arrivals import Arrivals
from scheduler_core.simulator.workloads.lengths import Lengths, TokenDistribution
from scheduler_core.simulator.workloads.workload import Workload

#: Tiles: a small t_col keeps cycles and runs short; t_lcm = 32.
T_ROW, T_COL, T_RED = 32, 32, 32
#: Distance of the load from the bound; theorem 2 derives the requests n per cycle from it.
EPSILON = 0.1
#: Prompts are whole tiles, so that no scheduler gains by filling a tile.
LENGTHS = Lengths(
    prompt=TokenDistribution(kind="fixed", low=256, high=256),
    output=TokenDistribution(kind="uniform", low=8, high=128),
)


@dataclass(frozen=True, slots=True)
class Staircase:
    """First two terms of Eq. 7: ceil(tau / t_col) tile_s + tau token_s for a step of tau tokens.

    There is no attention term, so that T_R is exact.

    Attributes:
        tile_s: Seconds per tile of t_col tokens.
        token_s: Seconds per token.
    """

    tile_s: float = 0.02
    token_s: float = 5e-5

    def step_s(self, work: StepWork) -> float:
        """See `StepTime`."""
        return -(-work.num_tokens // T_COL) * self.tile_s + work.num_tokens * self.token_s

    def run(self, contexts: Sequence[int], start_s: float) -> DecodeRun:
        """See `StepTime`."""
        return PolynomialRun(start_s, self.step_s(StepWork((), contexts)), 0.0)


STEP_TIME = Staircase()


SYSTEMS = {
    "RAD": SchedulerConfig(
        batching="rad",
        batching_parameters={"t_row": T_ROW, "t_red": T_RED},
        max_num_seqs=T_COL,
        max_num_batched_tokens=T_ROW,
        num_kv_blocks=100_000,
    ),
    "Sarathi, 64 tokens": SchedulerConfig(
        max_num_seqs=T_COL, max_num_batched_tokens=64, num_kv_blocks=100_000
    ),
}


def stability(effort: Effort) -> Findings:
    """Growth of waiting times at loads 0.9 and 1.1 of the bound."""
    num = effort.num(20_000, 2500)
    findings = Findings(size=effort.size(20_000, 2500))
    late: dict[tuple[str, float], float] = {}
    for name, limits in SYSTEMS.items():
        for load in (0.9, 1.1):

            def run_seed(seed: int, limits: SchedulerConfig = limits, load: float = load) -> dict[str, float]:
                workload = Workload(num_requests=num, lengths=LENGTHS)
                bounds = rad_bounds(workload.trace(seed), SYSTEMS["RAD"], STEP_TIME, EPSILON)
                if limits.batching == "rad":
                    parameters = {**limits.batching_parameters, "n": bounds.num_per_cycle}
                    limits = replace(limits, batching_parameters=parameters)
                bound = 1.0 / bounds.expected_s
                drawn = Workload(
                    num_requests=num, lengths=LENGTHS, arrivals=Arrivals(rate_rps=load * bound)
                ).trace(seed)
                outcome = simulate(System(scheduler=limits, step_time=STEP_TIME), drawn, seed=seed)
                rows = sorted(outcome.records, key=lambda record: record.arrival_s)
                parts = {"first": rows[: len(rows) // 4], "last": rows[len(rows) * 3 // 4 :]}
                return {
                    name: float(np.mean([row.queueing_delay_s for row in part]))
                    for name, part in parts.items()
                }

            got = over_seeds(effort.seeds, run_seed)
            late[name, load] = got["last"] / got["first"]
            more = {"first quarter, s": got["first"], "last quarter, s": got["last"]}
            what = f"{name}, mean wait of the last quarter / of the first"
            findings.row(f"theorems 1 and 2, load {load}", what, late[name, load], more=more)
    findings.claim("theorem 2", "RAD is stable at load 0.9: waiting does not grow", late["RAD", 0.9] < 3,
                   f"last quarter / first: {late['RAD', 0.9]:.2f}")  # fmt: skip
    above = {name: late[name, 1.1] for name in SYSTEMS}
    findings.claim("theorem 1", "above the bound waiting grows without end, whatever the scheduler",
                   min(above.values()) > 3, listed(above, "{:.2f}"))  # fmt: skip
    return findings
