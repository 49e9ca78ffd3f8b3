"""Measured runs of vLLM on H100 GPUs, and the same runs in the simulator."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scheduler_core.policies import make_policy
from scheduler_core.request import Segment
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.loop import Simulation
from scheduler_core.simulator.records import RequestRecord
from scheduler_core.simulator.step_time.roofline import RooflineStepTime
from scheduler_core.simulator.trace import Trace, TraceRequest
from scheduler_core.simulator.trace_predictions import Predictions

GPU = "h100-80gb"
#: Seconds without arrivals between two stages.
PAUSE_S = 60.0
#: Latencies of a run or stage in ms, in the order of the tables; itl: end-to-end without TTFT, per further output token.
METRICS = ("e2e_mean", "e2e_p99", "ttft_mean", "ttft_p99", "itl_mean")
WHOLE = -1
#: Columns in which the stages of a run are equal.
_SETTING = (
    "model", "tensor_parallel", "workload", "prompt_tokens_min", "prompt_tokens_max", "output_tokens", "unique_prompts",
    "max_num_seqs", "max_num_batched_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a run with a constant rate, and its measured latencies in ms, by name in `METRICS`."""

    rate_rps: float
    duration_s: float
    measured: dict[str, float]


@dataclass(frozen=True, slots=True)
class Run:
    """A measured run: a model under a workload.

    Attributes:
        prompt_tokens: Smallest and largest prompt.
        unique_prompts: Number of prompts that are sent over and over.
        stages: By number.
        measured: Latencies of the whole run.
    """

    model: str
    tensor_parallel: int
    workload: str
    prompt_tokens: tuple[int, int]
    output_tokens: int
    unique_prompts: int
    max_num_seqs: int
    max_num_batched_tokens: int
    stages: dict[int, Stage]
    measured: dict[str, float]

    @property
    def is_moe(self) -> bool:
        return bool(self.step_time().size.expert_parameters)

    def step_time(self, **constants: float) -> RooflineStepTime:
        """Step times of the deployment from data sheets."""
        return RooflineStepTime(model=self.model, gpu=GPU, tensor_parallel=self.tensor_parallel, **constants)  # type: ignore[arg-type]

    def limits(self) -> SchedulerConfig:
        """Limits of the engine; its KV cache is what the memory leaves."""
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        blocks = self.step_time().num_kv_blocks(16, seqs, tokens)
        return SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens, num_kv_blocks=blocks)

    def trace(self) -> Trace:
        """Requests with exponential gaps, normalized to the duration of each stage; `category` is the stage."""
        rng = np.random.default_rng(0)
        lengths = rng.integers(self.prompt_tokens[0], self.prompt_tokens[1] + 1, self.unique_prompts)
        rows: list[TraceRequest] = []
        start_s = 0.0
        for number, stage in sorted(self.stages.items()):
            gaps = rng.exponential(size=max(2, round(stage.rate_rps * stage.duration_s)))
            for time_s in start_s + np.cumsum(gaps) * (stage.duration_s / gaps.sum()):
                prompt = len(rows) % self.unique_prompts
                tokens = int(lengths[prompt])
                rows.append(
                    TraceRequest(
                        request_id=str(len(rows)),
                        arrival_s=float(time_s),
                        prompt_tokens=tokens,
                        output_tokens=self.output_tokens,
                        max_tokens=self.output_tokens,
                        category=str(number),
                        content=(Segment(f"prompt {prompt}", tokens),),
                    )
                )
            start_s += stage.duration_s + PAUSE_S
        return Trace(tuple(rows))


def read_runs(path: Path) -> list[Run]:
    """The runs in a CSV file, see h100_runs.md beside it."""
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            groups.setdefault(tuple(row[name] for name in _SETTING), []).append(row)
    runs = []
    for rows in groups.values():
        measured = {
            int(row["stage"]): {name: float(row.get(name) or "nan") for name in METRICS} for row in rows
        }
        stages = {
            int(row["stage"]): Stage(
                float(row["rate_rps"]), float(row["duration_s"]), measured[int(row["stage"])]
            )
            for row in rows
            if int(row["stage"]) != WHOLE
        }
        first = rows[0]
        runs.append(
            Run(
                model=first["model"],
                tensor_parallel=int(first["tensor_parallel"]),
                workload=first["workload"],
                prompt_tokens=(int(first["prompt_tokens_min"]), int(first["prompt_tokens_max"])),
                output_tokens=int(first["output_tokens"]),
                unique_prompts=int(first["unique_prompts"]),
                max_num_seqs=int(first["max_num_seqs"]),
                max_num_batched_tokens=int(first["max_num_batched_tokens"]),
                stages=stages,
                measured=measured.get(WHOLE, dict.fromkeys(METRICS, math.nan)),
            )
        )
    return runs


def simulate(run: Run, step_time: RooflineStepTime, trace: Trace) -> dict[int, dict[str, float]]:
    """Latencies in ms by stage, `WHOLE` for all together."""
    core = Scheduler(run.limits(), make_policy("fcfs"))
    records = Simulation(trace, core, step_time, Predictions()).run().records
    latencies = {WHOLE: latencies_ms(records)}
    for number in run.stages:
        latencies[number] = latencies_ms([record for record in records if record.category == str(number)])
    return latencies


def latencies_ms(records: Sequence[RequestRecord]) -> dict[str, float]:
    """`METRICS` of requests."""
    e2e = 1e3 * np.array([record.ttlt_s for record in records])
    ttft = 1e3 * np.array([record.ttft_s for record in records])
    itl = 1e3 * np.array([record.tpot_s for record in records], np.float64)
    values = (e2e.mean(), np.quantile(e2e, 0.99), ttft.mean(), np.quantile(ttft, 0.99), itl.mean())
    return {name: float(value) for name, value in zip(METRICS, values, strict=True)}
