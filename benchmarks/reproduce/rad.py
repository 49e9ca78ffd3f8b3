"""RAD (Bari et al.): stable below the bound of theorem 1, above which no scheduler is, and what its assumption is worth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.reproduce.simulate import System, over_seeds, simulate
from benchmarks.reproduce.study import Effort, Findings, listed
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.step_time.stability import max_rate_rps, rad_bounds
from scheduler_core.simulator.step_time.staircase import StaircaseStepTime
from scheduler_core.simulator.workloads.arrivals import Arrivals
from scheduler_core.simulator.workloads.lengths import Lengths, TokenDistribution
from scheduler_core.simulator.workloads.workload import Workload

#: Tiles: a small t_col keeps cycles and runs short; t_lcm = 32.
T_ROW, T_COL, T_RED = 32, 32, 32
#: Distance of the load from the bound; theorem 2 derives the requests n per cycle from it.
EPSILON = 0.1
#: Prompts are whole tiles (assumption 3), so that no scheduler gains by filling a tile.
LENGTHS = Lengths(
    prompt=TokenDistribution(kind="fixed", low=256, high=256),
    output=TokenDistribution(kind="uniform", low=8, high=128),
)
#: Eq. 7 without attention, and the same with a time per step that does not depend on its tokens.
STEP_TIMES = {
    "Eq. 7": StaircaseStepTime(
        base_s=0.0, linear_tile_s=0.02, per_token_s=5e-5, decode_tile_s=0.0, prefill_tile_s=0.0,
        t_row=T_ROW, t_col=T_COL, t_red=T_RED,
    )
}  # fmt: skip
STEP_TIMES["Eq. 7 and a fixed time"] = replace(STEP_TIMES["Eq. 7"], base_s=0.01)
LIMITS = SchedulerConfig(max_num_seqs=T_COL, max_num_batched_tokens=4 * T_COL, num_kv_blocks=100_000)
SYSTEMS = {
    "RAD": replace(LIMITS, batching="rad", batching_parameters={"t_row": T_ROW, "t_red": T_RED}),
    "Sarathi, 128 tokens": LIMITS,
}
#: Loads by model, relative to the bound of RAD and to that of any scheduler.
CELLS = {
    "Eq. 7": ((0.9, "T_R"), (1.1, "T_R")),
    "Eq. 7 and a fixed time": ((1.1, "T_R"), (1.1, "any scheduler")),
}


def bounds(trace_seed: int, num: int, step_time: StaircaseStepTime) -> tuple[dict[str, float], int]:
    """Both bounds in requests per second, and theorem 2's n, for the requests of a seed."""
    trace = Workload(num_requests=num, lengths=LENGTHS).trace(trace_seed)
    of_rad = rad_bounds(trace, SYSTEMS["RAD"], step_time, EPSILON)
    rates = {"T_R": 1.0 / of_rad.expected_s, "any scheduler": max_rate_rps(trace, LIMITS, step_time)}
    return rates, of_rad.num_per_cycle


def stability(effort: Effort) -> Findings:
    """Growth of waiting times below and above the bounds."""
    num = effort.num(20_000, 2500)
    findings = Findings(size=effort.size(20_000, 2500))
    growth: dict[tuple[str, str, float, str], float] = {}
    for model, cells in CELLS.items():
        step_time = STEP_TIMES[model]
        for name, limits in SYSTEMS.items():
            for load, bound in cells:

                def run_seed(
                    seed: int,
                    limits: SchedulerConfig = limits,
                    load: float = load,
                    bound: str = bound,
                    step_time: StaircaseStepTime = step_time,
                ) -> dict[str, float]:
                    rates, num_per_cycle = bounds(seed, num, step_time)
                    if limits.batching == "rad":
                        parameters = {**limits.batching_parameters, "n": num_per_cycle}
                        limits = replace(limits, batching_parameters=parameters)
                    arrivals = Arrivals(rate_rps=load * rates[bound])
                    drawn = Workload(num_requests=num, lengths=LENGTHS, arrivals=arrivals).trace(seed)
                    outcome = simulate(System(scheduler=limits, step_time=step_time), drawn, seed=seed)
                    rows = sorted(outcome.records, key=lambda record: record.arrival_s)
                    parts = {"first": rows[: len(rows) // 4], "last": rows[len(rows) * 3 // 4 :]}
                    waits = {
                        part: float(np.mean([row.queueing_delay_s for row in some]))
                        for part, some in parts.items()
                    }
                    return waits | rates

                got = over_seeds(effort.seeds, run_seed)
                growth[model, name, load, bound] = got["last"] / got["first"]
                more = {"first quarter, s": got["first"], "last quarter, s": got["last"],
                        "1 / T_R, 1/s": got["T_R"], "bound of any scheduler, 1/s": got["any scheduler"]}  # fmt: skip
                what = f"{name}, mean wait of the last quarter / of the first"
                where = f"theorems 1 and 2, {model}, load {load} of the bound of {bound}"
                findings.row(where, what, growth[model, name, load, bound], more=more)
    _claims(findings, growth)
    return findings


def _claims(findings: Findings, growth: dict[tuple[str, str, float, str], float]) -> None:
    below = growth["Eq. 7", "RAD", 0.9, "T_R"]
    findings.claim("section 4.3", "theorem 2: if lambda T_R <= 1 - epsilon, RAD with n > (t_col - 1) T_max / (epsilon T_R) is stable",
                   below < 3, f"load 0.9, last quarter / first: {below:.2f}")  # fmt: skip
    above = {name: growth["Eq. 7", name, 1.1, "T_R"] for name in SYSTEMS}
    findings.claim("section 4.3", "theorem 1: if lambda T_R > 1, the number of pending requests grows under any scheduler "
                   "(its assumption: a step takes no time but that of its tiles and tokens, Eq. 7)",
                   min(above.values()) > 3, f"load 1.1, {listed(above, '{:.2f}')}")  # fmt: skip
    model = "Eq. 7 and a fixed time"
    between = {name: growth[model, name, 1.1, "T_R"] for name in SYSTEMS}
    findings.check("section 4.3", "if a step also has a fixed time, Sarathi is stable above 1 / T_R, where RAD is not",
                   between["RAD"] > 3 > between["Sarathi, 128 tokens"],
                   f"load 1.1 of 1 / T_R, {listed(between, '{:.2f}')}")  # fmt: skip
    beyond = {name: growth[model, name, 1.1, "any scheduler"] for name in SYSTEMS}
    findings.check("section 4.3", "and above the bound of any scheduler for these step times neither is",
                   min(beyond.values()) > 3, f"load 1.1 of that bound, {listed(beyond, '{:.2f}')}")  # fmt: skip
