"""Latencies and token deadlines of a run of `deadlines.py`, by class, and the simulation of the same requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.vllm.mixes import LONG_PREFILL, Mix
from benchmarks.vllm.results import CLOCK, Steps, Times, measured_capacity
from scheduler_core.batching import BATCH_FORMERS
from scheduler_core.batching.batch import Batch, still_running
from scheduler_core.batching.chunked_prefill import ChunkedPrefill
from scheduler_core.engine.pool import Pool
from scheduler_core.ranges import INTEGERS, check_ranges
from scheduler_core.simulator.config import SimulationConfig
from scheduler_core.simulator.run import SimulationResult, run_simulation
from scheduler_core.simulator.step_time.base import StepTime
from scheduler_core.simulator.trace import Trace, TraceRequest
from scheduler_core.simulator.trace_predictions import Predictions
from scheduler_core.simulator.watch import RunWatch

#: All requests of a run, beside their classes.
ALL = "all"
#: Copies of the requests in the simulation that gives the capacity.
COPIES = 10


@dataclass(kw_only=True, slots=True)
class LongPrefill(ChunkedPrefill):
    """Batches of vLLM with `--long-prefill-token-threshold`: a prompt gets at most `threshold` tokens of a step, unless its
    request is the only one."""

    threshold: int = 0

    def __post_init__(self) -> None:
        ChunkedPrefill.__post_init__(self)
        check_ranges(self, threshold=(1, INTEGERS))

    def form(self, pool: Pool, max_num_batched_tokens: int, now: float) -> Batch:
        batch = Batch(max_num_batched_tokens)
        prefilling, decodes = pool.by_phase()
        limit = self.threshold if pool.num_running + len(pool.waiting) > 1 else None
        if decodes:
            batch.add_decodes(batch.allocate(pool, decodes, now))
        for state in still_running(prefilling):
            if batch.budget > 0:
                batch.add_chunk(state, limit)
        while batch.budget > 0 and not batch.preempted:
            head = pool.waiting.peek()
            if head is None or not batch.admit(pool, head, now):
                break
            batch.add_chunk(head, limit)
        return batch

    def steady_chunks(self, batch: Batch, limit: int) -> int:
        return 1


def class_metrics(
    rows: Sequence[Mapping[str, Any]], requests: Mapping[str, TraceRequest], times: Times = CLOCK
) -> dict[str, dict[str, float]]:
    """Metrics of one run by class, and of all requests.

    TTFT and TTLT in seconds, in the time of `times`, from the due time; time per output token; TBT and the fraction of
    tokens (without first ones) that came within the limit of their request, both in seconds of the wall clock.
    """
    parts: dict[str, list[Mapping[str, Any]]] = {ALL: list(rows)}
    for row in rows:
        parts.setdefault(requests[row["request_id"]].tenant, []).append(row)
    arrival, first, finish = times
    metrics = {}
    for name, part in sorted(parts.items()):
        gaps = {row["request_id"]: np.diff(row["token_s"]) for row in part}
        values = _latencies(
            [row[first] - row[arrival] for row in part],
            [row[finish] - row[arrival] for row in part],
            [row["output_tokens"] for row in part],
        )
        values |= _gaps(np.concatenate(list(gaps.values())))
        in_time = [gaps[one] <= limit for one in gaps if (limit := requests[one].tbt_slo_s) is not None]
        if in_time:
            values["deadlines_kept"] = float(np.mean(np.concatenate(in_time)))
        metrics[name] = values
    return metrics


def _latencies(ttft: Sequence[float], ttlt: Sequence[float], tokens: Sequence[int]) -> dict[str, float]:
    values = {"num": float(len(ttft))}
    values["per_token_mean"] = float(np.mean(np.asarray(ttlt) / np.asarray(tokens)))
    for name, data in (("ttft", ttft), ("ttlt", ttlt)):
        values[f"{name}_mean"] = float(np.mean(data))
        values |= {f"{name}_p{level}": float(np.percentile(data, level)) for level in (50, 90, 99)}
        values[f"{name}_max"] = max(data)
    return values


def _gaps(gaps: np.ndarray) -> dict[str, float]:
    if not len(gaps):
        return {}
    return {
        "tbt_mean": float(gaps.mean()),
        **{f"tbt_p{at}": float(np.percentile(gaps, at)) for at in (50, 99)},
    }


def step_metrics(steps: Steps) -> dict[str, float]:
    """What the steps of a run contained, see `step_log.StepLog`: means over the steps, or over those with a prompt."""
    table = np.array([row[:12] for row in steps], float)
    seconds, prefill, decodes, held = table[:, 1], table[:, 2], table[:, 3], table[:, 8]
    mixed = prefill > 0
    tokens = table[:, 2].sum()
    return {
        "steps": float(len(table)),
        "step_s": float(seconds.mean()),
        "step_with_prompt_s": float(seconds[mixed].mean()) if mixed.any() else 0.0,
        "decode_step_s": float(seconds[~mixed].mean()) if (~mixed).any() else 0.0,
        "fraction_with_prompt": float(mixed.mean()),
        "prompt_tokens_per_step_with_prompt": float(tokens / max(mixed.sum(), 1)),
        "decodes_per_step": float(decodes.mean()),
        "decodes_per_step_with_prompt": float(decodes[mixed].mean()) if mixed.any() else 0.0,
        "fraction_of_decodes_held_back": float(held.sum() / max(held.sum() + decodes.sum(), 1.0)),
        "waiting": float(table[:, 9].mean()),
        "kv_use": float(table[:, 10].mean()),
        "max_kv_use": float(table[:, 10].max()),
        "preemptions": float(table[:, 11].sum()),
        "computed_prompt_tokens": float(tokens),
        "scheduling_ms": float(1e3 * table[:, 6].mean()),
    }


def simulated(
    mix: Mix, side: str, rows: Iterable[Mapping[str, Any]], step_time: StepTime
) -> dict[str, dict[str, float]]:
    """`class_metrics` of a simulation of a run's requests, at their arrivals in engine time."""
    by_id = {row.request_id: row for row in mix.rows}
    arrived = sorted(rows, key=lambda row: float(row["arrival_clock_s"]))
    requests = [replace(by_id[row["request_id"]], arrival_s=row["arrival_clock_s"]) for row in arrived]
    result = _simulate(mix, side, requests, step_time)
    limits = {row.tenant: row.tbt_slo_s for row in mix.rows}
    metrics = {}
    for name in (ALL, *sorted(limits)):
        records = [record for record in result.records if name in (ALL, record.tenant)]
        values = _latencies(
            [record.ttft_s for record in records],
            [record.ttlt_s for record in records],
            [record.output_tokens for record in records],
        )
        gaps = result.watch.gaps.merged(*(() if name == ALL else ("tenant", name)))
        values |= {"tbt_p50": gaps.quantile(0.5), "tbt_p99": gaps.quantile(0.99)}
        if (limit := limits.get(name)) is not None:
            at, fraction = gaps.curve()
            values["deadlines_kept"] = float(np.interp(limit, at, fraction, left=0.0))
        metrics[name] = values
    return metrics


def _simulate(mix: Mix, side: str, requests: Sequence[TraceRequest], step_time: StepTime) -> SimulationResult:
    own = mix.sides[side]
    with patch.dict(BATCH_FORMERS, {LONG_PREFILL: LongPrefill}):
        config = SimulationConfig(
            trace="engine",
            policy=own.policy,
            policy_parameters=dict(own.parameters),
            scheduler=own.limits(mix.limits),
            step_time=step_time,  # type: ignore[arg-type]
        )
        trace = Trace(tuple(requests), "engine")
        return run_simulation(config, trace=trace, predictions=Predictions(), watch=RunWatch())


def capacity_rps(mix: Mix, side: str, step_time: StepTime, seed: int) -> float:
    """Requests per second that end while requests always wait: `results.measured_capacity` of a simulation with `COPIES`
    copies of the requests, all present from the start, in one random order."""
    copies = [
        replace(row, request_id=f"{row.request_id}-{copy}") for copy in range(COPIES) for row in mix.rows
    ]
    order = np.random.default_rng([seed, 3]).permutation(len(copies))
    result = _simulate(mix, side, [copies[index] for index in order], step_time)
    rows = [{"finish_s": record.finish_s} for record in result.records]
    return measured_capacity(rows, min(mix.limits.max_num_seqs, len(rows) // 4))
