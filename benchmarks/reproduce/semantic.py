"""Semantic scheduling (Hua et al.): figures 2 and 3, tables 1 and 2."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from benchmarks.reproduce.simulate import Outcome, System, over_seeds, simulate
from benchmarks.reproduce.study import Effort, Findings
from scheduler_core.prediction.predictions import BucketPrediction, LengthPrediction, Prediction
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.step_time.quadratic import PRESETS
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.trace_predictions import Predictions
from scheduler_core.simulator.workloads.arrivals import Arrivals
from scheduler_core.simulator.workloads.lengths import Lengths, TokenDistribution
from scheduler_core.simulator.workloads.workload import Tiers, Workload

LEVELS = 5
#: Released code: lengths U{1..499}, buckets of 50 tokens, batches of 16, 20 spikes.
LONGEST, BUCKET, SEATS, SPIKES = 499, 50, 16, 20
#: Released code: tokens in the KV cache for an A100 with Qwen1.5-4B, in blocks of 32 tokens.
KV_TOKENS, BLOCK = 37_748, 32


#: Policy and batch former of each system; memory and batch are the same for all.
SYSTEMS = {
    "semantic": ("semantic", "stage_aware"),
    "HPJF": ("hpjf", "vllm"),
    "SJF": ("ssjf", "vllm"),
    "FCFS": ("fcfs", "vllm"),
}


#: Tokens in the KV cache by setting, from the released code.
ROOM = {"a100-4b": KV_TOKENS, "a100-7b": 4915, "a5000-4b": 5872}


def system(name: str, setting: str = "a100-4b") -> System:
    """One of `SYSTEMS` in one of the settings of `ROOM`, by default an A100 with Qwen1.5-4B."""
    policy, batching = SYSTEMS[name]
    limits = SchedulerConfig(
        batching=batching,
        max_num_seqs=SEATS,
        max_num_batched_tokens=SEATS * (LONGEST + 1) * 2,
        num_kv_blocks=ROOM[setting] // BLOCK,
        kv_block_tokens=BLOCK,
        preemption="swap",
    )
    return System(policy=policy, scheduler=limits, step_time=PRESETS[setting])


def spikes(gap_s: float, most: int, seed: int, scale: float = 1.0) -> Trace:
    """20 spikes of 0 to `most` requests, fewer with a scale below 1; category is the true level."""
    num = max(most, round(scale * SPIKES * most / 2))
    tokens = TokenDistribution(kind="uniform", low=1, high=LONGEST)
    workload = Workload(
        num_requests=num,
        arrivals=Arrivals(process="spikes", gap_s=gap_s, max_burst=most),
        lengths=Lengths(prompt=tokens, output=tokens, max_tokens=LONGEST + 1),
        tiers=Tiers(num_tiers=LEVELS),
    )
    trace = workload.trace(seed)
    return replace(trace, requests=tuple(replace(row, category=str(row.tier)) for row in trace.requests))


def bucket_predictions(trace: Trace, seed: int, error_rate: float = 0.0) -> Predictions:
    """The true bucket of 50 tokens, or another one for some requests; SJF gets the bucket's middle.

    A wrong bucket is off by `error_rate` of all buckets on average, the paper's "unified" error.
    """
    rng = np.random.default_rng([seed, 7])
    edges = tuple(float(edge) for edge in range(BUCKET, LONGEST + 1, BUCKET))
    answers: dict[str, Prediction] = {}
    for row in trace.requests:
        index = min(row.output_tokens // BUCKET, len(edges))
        if rng.random() < error_rate:
            index = _off(index, len(edges) + 1, error_rate, rng)
        share = [0.0] * (len(edges) + 1)
        share[index] = 1.0
        answers[row.request_id] = Prediction(bucket=BucketPrediction(tuple(share), edges))
    return Predictions("buckets", answers)


def wrong_levels(trace: Trace, error_rate: float, seed: int) -> Trace:
    """The requests with levels of a classifier with this error rate; category keeps the true level."""
    rng = np.random.default_rng([seed, 8])
    rows = [
        replace(row, tier=_off(row.tier, LEVELS, error_rate, rng)) if rng.random() < error_rate else row
        for row in trace.requests
    ]
    return replace(trace, requests=tuple(rows))


def _off(index: int, num: int, error_rate: float, rng: np.random.Generator) -> int:
    """Another index, about error_rate * num away, within the range."""
    distance = max(1, round(error_rate * num * rng.uniform(0.5, 1.5)))
    choices = [other for other in (index - distance, index + distance) if 0 <= other < num]
    if choices:
        return int(rng.choice(choices))
    return 0 if index > num - 1 - index else num - 1


def waits(outcome: Outcome) -> dict[str, float]:
    """Wait per token by true level and of all (section 3, released code); "LEVEL delay" ends at admission."""
    values: dict[str, float] = {}
    for level in (*map(str, range(LEVELS)), "all"):
        rows = [record for record in outcome.records if level in (record.category, "all")]
        tokens = max(1, sum(one.output_tokens for one in rows))
        values[level] = sum(one.ttlt_s for one in rows) / tokens
        values[f"{level} delay"] = sum(one.queueing_delay_s for one in rows) / tokens
    return values


def _run(
    name: str, trace: Trace, seed: int, error_rate: float = 0.0, setting: str = "a100-4b"
) -> dict[str, float]:
    predictions = bucket_predictions(trace, seed, error_rate) if name in ("semantic", "SJF") else None
    if name == "SJF" and predictions is not None:
        predictions = as_lengths(predictions, trace)
    return waits(simulate(system(name, setting), trace, predictions, seed=seed))


def as_lengths(predictions: Predictions, trace: Trace) -> Predictions:
    """Buckets as lengths (their middles), for policies that order by length."""
    answers: dict[str, Prediction] = {}
    for row in trace.requests:
        answer = predictions.by_id[row.request_id]
        assert answer is not None and answer.bucket is not None  # noqa: PT018
        length = LengthPrediction(math.log((answer.bucket.bucket + 0.5) * BUCKET), 0.1, 3.5)
        answers[row.request_id] = Prediction(length=length)
    return Predictions("buckets", answers)


#: Section 4.1: speed-ups of semantic scheduling for level 0, gap of 0.1 s, up to 100 concurrent requests.
PRINTED_SPIKES = {"HPJF": 1.7, "SJF": 6.1, "FCFS": 8.7}


def spike_response(effort: Effort) -> Findings:
    """Figure 2 (c) and (d): waiting of level 0 in spikes."""
    share = effort.num(100, 50) / 100
    findings = Findings(size=effort.size(20, 10, "spikes"))
    settings = (
        [(0.1, 100)] if effort.quick else [(gap, most) for gap in (0.1, 1.0) for most in (5, 10, 50, 100)]
    )
    for gap_s, most in settings:

        def run_seed(seed: int, gap_s: float = gap_s, most: int = most) -> dict[str, dict[str, float]]:
            trace = spikes(gap_s, most, seed, share)
            return {name: _run(name, trace, seed) for name in SYSTEMS}

        got = over_seeds(effort.seeds, run_seed)
        base = got["semantic"]
        where = f"figure 2 ({'c' if gap_s < 1 else 'd'}), gap {gap_s} s, up to {most}"
        exact = (gap_s, most) == (0.1, 100)
        findings.row(where, "semantic, level 0, s per token", base["0"], 0.08 if exact else None)
        for name, paper in PRINTED_SPIKES.items():
            delay = got[name]["0 delay"] / base["0 delay"] if base["0 delay"] > 0 else None
            more = {"all levels": got[name]["all"] / base["all"], "queueing delay per token": delay}
            findings.row(where, f"{name} / semantic, level 0", got[name]["0"] / base["0"],
                         paper if exact else None, neutral=1.0, more=more)  # fmt: skip
    return findings


#: Appendix A.1: (s per token for level 0, largest speed-up over any baseline) by setting and gap.
PRINTED_FIGURE_4 = {
    ("a100-7b", 0.1): (0.18, 6.5),
    ("a100-7b", 1.0): (0.16, 6.6),
    ("a5000-4b", 0.1): (0.37, 6.8),
    ("a5000-4b", 1.0): (0.32, 7.0),
}


def other_engines(effort: Effort) -> Findings:
    """Figure 4: the same spikes with another model, and on another GPU."""
    share = effort.num(100, 50) / 100
    findings = Findings(size=effort.size(20, 10, "spikes"))
    for (setting, gap_s), (wait, speedup) in PRINTED_FIGURE_4.items():
        if effort.quick and gap_s > 0.1:
            continue

        def run_seed(seed: int, setting: str = setting, gap_s: float = gap_s) -> dict[str, float]:
            trace = spikes(gap_s, 100, seed, share)
            return {name: _run(name, trace, seed, setting=setting)["0"] for name in SYSTEMS}

        got = over_seeds(effort.seeds, run_seed)
        where = f"figure 4, {setting}, gap {gap_s} s, up to 100"
        slowest = max(got, key=lambda name: got[name])
        more = {name: got[name] / got["semantic"] for name in PRINTED_SPIKES}
        findings.row(where, "semantic, level 0, s per token", got["semantic"], wait)
        findings.row(where, f"slowest of the others ({slowest}) / semantic, level 0",
                     got[slowest] / got["semantic"], speedup, neutral=1.0, more=more)  # fmt: skip
    return findings


#: Section 4.1: s per token at error rates 0.1 and 0.9, by level.
PRINTED_LEVEL_ERRORS = {"0": (0.02, 0.07), "1": (0.03, 0.22), "all": (0.13, 0.12)}
PRINTED_BUCKET_ERRORS = {
    "0": (0.01, 0.01),
    "1": (0.03, 0.04),
    "2": (0.08, 0.11),
    "3": (0.18, 0.21),
    "4": (0.30, 0.33),
}


def predictor_errors(effort: Effort) -> Findings:
    """Figure 2 (a) and (b): cost of wrong levels and wrong buckets."""
    share = effort.num(100, 50) / 100
    findings = Findings(size=effort.size(20, 10, "spikes"))
    rates = (0.1, 0.9) if effort.quick else (0.1, 0.3, 0.5, 0.7, 0.9)
    most = 50

    def run_seed(seed: int) -> dict[str, dict[float, dict[str, float]]]:
        trace = spikes(0.1, most, seed, share)
        return {
            "level": {rate: _run("semantic", wrong_levels(trace, rate, seed), seed) for rate in rates},
            "bucket": {rate: _run("semantic", trace, seed, rate) for rate in rates},
        }

    got = over_seeds(effort.seeds, run_seed)
    for kind, figure, printed in (
        ("level", "figure 2 (a)", PRINTED_LEVEL_ERRORS),
        ("bucket", "figure 2 (b)", PRINTED_BUCKET_ERRORS),
    ):
        for level, (low, high) in printed.items():
            first, last = (got[kind][rate][level] for rate in (rates[0], rates[-1]))
            where = f"{figure}, {'all levels' if level == 'all' else 'level ' + level}"
            more = {f"s per token at {rate}": got[kind][rate][level] for rate in rates}
            findings.row(
                where,
                "wait per token, error rate 0.9 / 0.1",
                last / first,
                high / low,
                neutral=1.0,
                more=more,
            )
    return findings


#: Tables 1 and 2: mean wait per token over all levels by (batching, latency or batch size).
PRINTED_LATENCY: dict[str, dict[float, float]] = {
    "full batching": {0.001: 0.21, 0.01: 0.61, 0.1: 1.23, 1.0: 2.46},
    "immediate": {0.001: 0.04, 0.01: 0.61, 0.1: 1.25, 1.0: 2.56},
}
PRINTED_BATCH: dict[str, dict[float, float]] = {
    "full batching": {4: 0.58, 16: 0.59, 32: 0.60, 64: 0.60},
    "immediate": {4: 0.58, 16: 0.58, 32: 0.59, 64: 0.58},
}


def delays(trace: Trace, latency_s: float, batch: int, full: bool) -> dict[str, float]:
    """Delay of each prediction from a predictor that processes one batch at a time.

    Full batching waits for `batch` requests (the last batch can be smaller). Immediate processing takes all
    waiting requests, up to `batch`, as soon as the predictor is free.
    """
    rows, free_s, place = list(trace.requests), 0.0, 0
    delay: dict[str, float] = {}
    while place < len(rows):
        if full:
            group = rows[place : place + batch]
            start_s = max(free_s, group[-1].arrival_s)
        else:
            start_s = max(free_s, rows[place].arrival_s)
            group = [row for row in rows[place : place + batch] if row.arrival_s <= start_s]
        free_s = start_s + latency_s
        delay |= {row.request_id: free_s - row.arrival_s for row in group}
        place += len(group)
    return delay


def _late_wait(effort: Effort, latency_s: float, batch: int, full: bool, gap_s: float = 1.0) -> float:
    """Wait per token if a request can only be scheduled after its prediction."""

    def run_seed(seed: int) -> dict[str, float]:
        trace = spikes(gap_s, 5, seed, effort.num(80, 20) / 20)
        late = delays(trace, latency_s, batch, full)
        rows = [replace(row, arrival_s=row.arrival_s + late[row.request_id]) for row in trace.requests]
        held = replace(trace, requests=tuple(sorted(rows, key=lambda row: row.arrival_s)))
        outcome = simulate(system("semantic"), held, bucket_predictions(held, seed), seed=seed)
        waited = sum(late[done.request_id] + done.ttlt_s for done in outcome.records)
        return {"all": waited / sum(done.output_tokens for done in outcome.records)}

    return over_seeds(effort.seeds, run_seed)["all"]


#: (heading, printed values, cells of (latency in s, batch size, value of the varied parameter)).
_GRIDS: tuple[tuple[str, Mapping[str, Mapping[float, float]], tuple[tuple[float, int, float], ...]], ...] = (
    ("table 1, latency {} s", PRINTED_LATENCY, tuple((x, 64, x) for x in (0.001, 0.01, 0.1, 1.0))),
    ("table 2, batch {:.0f}", PRINTED_BATCH, tuple((0.01, batch, float(batch)) for batch in (4, 16, 32, 64))),
)


def predictor_speed(effort: Effort) -> Findings:
    """Tables 1 and 2: cost of a slow predictor, by its latency and batch size."""
    findings = Findings(size=effort.size(80, 20, "arrival times"))
    mean: dict[tuple[str, str, float], float] = {}
    for where, printed, cells in _GRIDS:
        for latency_s, batch, varied in cells:
            for kind in ("full batching", "immediate"):
                got = _late_wait(effort, latency_s, batch, kind == "full batching")
                mean[where, kind, varied] = got
                what = f"{kind}, all levels, s per token"
                findings.row(where.format(varied), what, got, printed[kind][varied])
    busy = [_late_wait(effort, 0.01, 64, False, gap_s) for gap_s in (0.1, 0.01)]
    findings.notes.append(
        "The paper does not give the gap; here it is 1 s. Immediate processing at 0.01 s takes "
        f"{busy[0]:.3g} s per token with a gap of 0.1 s and {busy[1]:.3g} s with one of 0.01 s. The paper's "
        "0.6 s needs a longer queue than arrivals of at most 5 requests build up in a run of this size."
    )
    one, two = (where for where, _, _ in _GRIDS)
    fast = mean[one, "immediate", 0.001] < mean[one, "full batching", 0.001]
    grows = mean[two, "full batching", 4] < mean[two, "full batching", 64]
    flat = abs(mean[two, "immediate", 64] / mean[two, "immediate", 4] - 1)
    findings.claim("table 1", "immediate processing is better than full batches for a fast predictor", fast,
                   f"{mean[one, 'immediate', 0.001]:.3g} and {mean[one, 'full batching', 0.001]:.3g} s per token")  # fmt: skip
    findings.claim("table 2", "full batching waits longer with larger batches", grows,
                   f"{mean[two, 'full batching', 4]:.3g} to {mean[two, 'full batching', 64]:.3g} s per token")  # fmt: skip
    findings.claim(
        "table 2", "immediate processing hardly depends on the batch size", flat < 0.1, f"{100 * flat:.1f} %"
    )
    return findings
