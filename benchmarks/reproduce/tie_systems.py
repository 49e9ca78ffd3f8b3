"""Policies, engines and loads for the studies of TIE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.reproduce.data_sheets import data_sheets, num_kv_blocks
from benchmarks.reproduce.simulate import Outcome, System, over_seeds, percentile, simulate
from benchmarks.reproduce.study import Effort
from benchmarks.reproduce.tie_requests import Order, Requests, requests, told
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.step_time import saturation_rate_rps
from scheduler_core.simulator.step_time.roofline import RooflineStepTime
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.workloads.arrivals import Arrivals

#: vLLM's slots and tokens per step.
SEATS, BUDGET = 256, 2048
#: Mean TTFT of FCFS is 127.55 s at 100 requests per second, 7.42 times that at 30; arrivals over 60 s at an
#: engine that serves 19 requests per second yield both numbers.
ARRIVALS_S, PAPER_CAPACITY_RPS = 60, 19.0


def same_outputs(name: str) -> str:
    """Name of a system of `SAME_OUTPUTS`."""
    return name if name == "FCFS" else f"{name}, same outputs"


#: With the paper's budget: SSJF and LTR learn from one output of each prompt, TIE from several of a part of the prompts.
PAPER_SYSTEMS = {
    "FCFS": Order("fcfs", told="nothing"),
    "SSJF": Order("ssjf", told="equal budget tokens"),
    "LTR": Order("ssjf", told="equal budget rank"),
    "TIE": Order("tie", told="equal budget"),
}
#: The same, when all learn from the same outputs of all prompts.
SAME_OUTPUTS = {
    "FCFS": PAPER_SYSTEMS["FCFS"],
    "SSJF": Order("ssjf", told="regression_tokens"),
    "LTR": Order("ssjf", told="rank"),
    "TIE": Order("tie", told="same outputs"),
}
#: TIE with the shipped predictor. Compared with it: SSJF with its median, to isolate the order; TIE with the sigma within a
#: prompt, as the paper's predictor is trained to give it; LTR as in its own paper, preemptive, with promotion after 200 steps
#: of waiting (the paper's baselines are non-preemptive, section 6); the true lengths.
SHIPPED = "TIE, shipped"
MORE_SYSTEMS = {
    SHIPPED: Order("tie"),
    "SSJF, TIE's median": Order("ssjf", told="median"),
    "TIE, sigma within a prompt": Order("tie", told="within"),
    "LTR, preemptive": Order("ltr", told="rank"),
    "SJF, true lengths": Order("ssjf", told="truth"),
}
COMPARED = {
    **PAPER_SYSTEMS,
    **{same_outputs(name): order for name, order in SAME_OUTPUTS.items() if name != "FCFS"},
}
SYSTEMS = COMPARED | MORE_SYSTEMS


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A served model on its GPUs, and a set of prompts.

    Attributes:
        served_model: Served model of the outputs in CASTILLO.
        dataset: Data set of the prompts in CASTILLO; None: all.
        model: Data sheet of the model.
        devices: Number of A6000 GPUs.
    """

    served_model: str
    dataset: str | None
    model: str
    devices: int

    @property
    def step_time(self) -> RooflineStepTime:
        """Step times from data sheets."""
        return data_sheets(self.model, "a6000-48gb", self.devices)

    def limits(self, share: float) -> SchedulerConfig:
        """Limits of an engine with a fraction `share` of the slots and memory, for as many requests."""
        return SchedulerConfig(
            max_num_seqs=max(8, round(SEATS * share)),
            max_num_batched_tokens=BUDGET,
            num_kv_blocks=round(num_kv_blocks(self.step_time) * share),
        )


_MODELS = {
    "8B": ("meta-llama/Llama-3.1-8B-Instruct", "llama-3-8b", 1),
    "70B": ("meta-llama/Llama-3.3-70B-Instruct", "llama-3-70b", 8),
    "Mistral-7B": ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b", 1),
}
#: Settings by their names in the paper. CASTILLO has no LMSYS prompts; all of its prompts replace them.
SETTINGS = {
    f"{prompts} {size}": Setting(served_model=served_model, dataset=dataset, model=model, devices=devices)
    for prompts, dataset in {"LMSYS": None, "ShareGPT": "ShareGPT", "Alpaca": "Alpaca"}.items()
    for size, (served_model, model, devices) in _MODELS.items()
}
LMSYS_8B = SETTINGS["LMSYS 8B"]


def num_online(effort: Effort, rate_rps: float) -> int:
    """Number of requests that arrive in 60 s at the paper's rate; a tenth of them in the quick version."""
    return round(effort.num(round(100 * ARRIVALS_S), 600) * rate_rps / 100)


def run(
    order: Order, data: Requests, setting: Setting, rate_rps: float | None, share: float, seed: int
) -> Outcome:
    """Simulates online, at the paper's load relative to its engine, or offline with all requests at once.

    Args:
        order: The policy.
        data: The requests.
        setting: The engine.
        rate_rps: The paper's rate; None: offline.
        share: Fraction of the engine and of the paper's requests.
        seed: Seed of the arrival times.
    """
    limits, step_time = setting.limits(share), setting.step_time
    if rate_rps is None:
        arrivals = Arrivals(process="at_once")
    else:
        capacity = saturation_rate_rps(data.trace, limits, step_time)
        arrivals = Arrivals(rate_rps=rate_rps / PAPER_CAPACITY_RPS * capacity)
    times = arrivals.times(len(data.trace), np.random.default_rng([seed, 4]))
    rows = tuple(
        replace(row, arrival_s=float(time)) for row, time in zip(data.trace.requests, times, strict=True)
    )
    engine = System(policy=order.policy, parameters=order.parameters, scheduler=limits, step_time=step_time)
    return simulate(engine, Trace(rows), told(order, data), seed=seed)


def online(outcome: Outcome) -> dict[str, float]:
    """Per-token latency and TTFT, mean and P90."""
    token = [record.normalized_latency_s for record in outcome.records]
    first = [record.ttft_s for record in outcome.records]
    return {
        "token mean": sum(token) / len(token),
        "token P90": percentile(token, 90),
        "ttft mean": sum(first) / len(first),
        "ttft P90": percentile(first, 90),
    }


def offline(outcome: Outcome) -> dict[str, float]:
    """Time until 3 of 10 samples are finished, and the number finished after three minutes."""
    ends = sorted(record.finish_s for record in outcome.records)
    return {
        "time": ends[max(0, round(0.3 * len(ends)) - 1)],
        "in 180 s": float(sum(end <= 180.0 for end in ends)),
    }


def measured(
    effort: Effort, setting: Setting, rate_rps: float | None, orders: Mapping[str, Order]
) -> dict[str, dict[str, float]]:
    """Measures of each system, online or offline, all on the same requests; means over the seeds."""
    full = 10_000 if rate_rps is None else round(ARRIVALS_S * rate_rps)
    num = effort.num(10_000, 1000) if rate_rps is None else num_online(effort, rate_rps)
    measures = offline if rate_rps is None else online

    def run_seed(seed: int) -> dict[str, dict[str, float]]:
        data = requests(effort, num, seed, setting.served_model, setting.dataset)
        return {
            name: measures(run(order, data, setting, rate_rps, num / full, seed))
            for name, order in orders.items()
        }

    return over_seeds(effort.seeds, run_seed)
