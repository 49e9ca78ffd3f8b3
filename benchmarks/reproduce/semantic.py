"""Semantic scheduling (Hua et al.): figures 2 and 4, tables 1 and 2."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from benchmarks.reproduce.simulate import Outcome, System, over_seeds, simulate
from benchmarks.reproduce.study import NO_EFFECT, Effort, Findings, listed
from scheduler_core.prediction.predictions import (
    BucketPrediction,
    LengthPrediction,
    Prediction,
    UrgencyPrediction,
)
from scheduler_core.request import DEFAULT_TIER
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

#: The paper's order in the batches of the baselines.
ORDER_ALONE = "the same order in vLLM's batches"
#: Policy and batch former of each system; memory and batch are the same for all.
SYSTEMS = {
    "semantic": ("semantic", "stage_aware"),
    "HPJF": ("hpjf", "vllm"),
    "SJF": ("ssjf", "vllm"),
    "FCFS": ("fcfs", "vllm"),
    ORDER_ALONE: ("semantic", "vllm"),
}
#: Systems that order by the predicted level, as the paper without limit.
BY_LEVEL = ("semantic", "HPJF", ORDER_ALONE)


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
    parameters = {"max_promotion": LEVELS} if name in BY_LEVEL else {}
    return System(policy=policy, parameters=parameters, scheduler=limits, step_time=PRESETS[setting])


def spikes(gap_s: float, most: int, seed: int, scale: float = 1.0, num_spikes: int = SPIKES) -> Trace:
    """Spikes of 0 to `most` requests, fewer with a scale below 1; category is the true level, no tier is declared."""
    num = max(most, round(scale * num_spikes * most / 2))
    tokens = TokenDistribution(kind="uniform", low=1, high=LONGEST)
    workload = Workload(
        num_requests=num,
        arrivals=Arrivals(process="spikes", gap_s=gap_s, max_burst=most),
        lengths=Lengths(prompt=tokens, output=tokens, max_tokens=LONGEST + 1),
        tiers=Tiers(num_tiers=LEVELS),
    )
    trace = workload.trace(seed)
    rows = [replace(row, category=str(row.tier), tier=DEFAULT_TIER) for row in trace.requests]
    return replace(trace, requests=tuple(rows))


def predictions(trace: Trace, seed: int, level_error: float = 0.0, bucket_error: float = 0.0) -> Predictions:
    """Levels, and buckets of 50 tokens: the true ones, or others for some requests.

    A wrong one is off by the error rate times the number of levels or buckets on average, the paper's "unified" error.
    """
    of_levels, of_buckets = np.random.default_rng([seed, 8]), np.random.default_rng([seed, 7])
    edges = tuple(float(edge) for edge in range(BUCKET, LONGEST + 1, BUCKET))
    by_id: dict[str, Prediction] = {}
    for row in trace.requests:
        level = _predicted(int(row.category), LEVELS, level_error, of_levels)
        bucket = min(row.output_tokens // BUCKET, len(edges))
        bucket = _predicted(bucket, len(edges) + 1, bucket_error, of_buckets)
        by_id[row.request_id] = Prediction(
            urgency=UrgencyPrediction(_certain(level, LEVELS)),
            bucket=BucketPrediction(_certain(bucket, len(edges) + 1), edges),
        )
    return Predictions("levels and buckets", by_id)


def _certain(index: int, num: int) -> tuple[float, ...]:
    """Probabilities of a class that is predicted with certainty."""
    return tuple(float(other == index) for other in range(num))


def _predicted(index: int, num: int, error_rate: float, rng: np.random.Generator) -> int:
    """The class, or another one with probability `error_rate`."""
    return _off(index, num, error_rate, rng) if rng.random() < error_rate else index


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
    name: str,
    trace: Trace,
    seed: int,
    setting: str = "a100-4b",
    level_error: float = 0.0,
    bucket_error: float = 0.0,
) -> dict[str, float]:
    heads = predictions(trace, seed, level_error, bucket_error)
    used = {"SJF": as_lengths(heads), "FCFS": None}.get(name, heads)
    return waits(simulate(system(name, setting), trace, used, seed=seed))


def as_lengths(predictions: Predictions) -> Predictions:
    """Buckets as lengths (their middles), for policies that order by length."""
    by_id: dict[str, Prediction] = {}
    for name, prediction in predictions.by_id.items():
        assert prediction is not None and prediction.bucket is not None  # noqa: PT018
        length = LengthPrediction(math.log((prediction.bucket.bucket + 0.5) * BUCKET), 0.1, 3.5)
        by_id[name] = Prediction(length=length)
    return Predictions("buckets", by_id)


#: Section 4.1: speed-ups of semantic scheduling for level 0, up to 100 concurrent requests: gap of 0.1 s, and "up to"
#: against any baseline with a gap of 1 s.
PRINTED_SPIKES = {"HPJF": 1.7, "SJF": 6.1, "FCFS": 8.7}
PRINTED_LARGEST = 9.1


def _speedups(got: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Wait of level 0 under each baseline, relative to semantic scheduling."""
    return {name: got[name]["0"] / got["semantic"]["0"] for name in PRINTED_SPIKES}


def spike_response(effort: Effort) -> Findings:
    """Figure 2 (c) and (d): waiting of level 0 in spikes."""
    share = effort.num(100, 50) / 100
    findings = Findings(size=effort.size(SPIKES, 10, "spikes"))
    settings = (
        [(0.1, 100)] if effort.quick else [(gap, most) for gap in (0.1, 1.0) for most in (5, 10, 50, 100)]
    )
    speedups: dict[tuple[float, int], dict[str, float]] = {}
    for gap_s, most in settings:

        def run_seed(seed: int, gap_s: float = gap_s, most: int = most) -> dict[str, dict[str, float]]:
            trace = spikes(gap_s, most, seed, share)
            return {name: _run(name, trace, seed) for name in SYSTEMS}

        got = over_seeds(effort.seeds, run_seed)
        base, ratios = got["semantic"], _speedups(got)
        speedups[gap_s, most] = ratios
        where = f"figure 2 ({'c' if gap_s < 1 else 'd'}), gap {gap_s} s, up to {most}"
        exact = (gap_s, most) == (0.1, 100)
        in_vllm = got[ORDER_ALONE]["0"] / base["0"]
        findings.row(where, "semantic, level 0, s per token", base["0"], 0.08 if exact else None)
        findings.row(where, f"{ORDER_ALONE} / semantic, level 0", in_vllm)
        for name, paper in PRINTED_SPIKES.items():
            delay = got[name]["0 delay"] / base["0 delay"] if base["0 delay"] > 0 else None
            more = {"all levels": got[name]["all"] / base["all"], "queueing delay per token": delay}
            findings.row(where, f"{name} / semantic, level 0", ratios[name],
                         paper if exact else None, neutral=1.0, more=more)  # fmt: skip
        findings.check(
            "section 3.3", "stage-aware batches serve level 0 no later than vLLM's batches with the same order",
            in_vllm > 1 / NO_EFFECT, f"{in_vllm:.2f} times its wait in vLLM's batches", case=where,
            cause="While the first request decodes, they take no prompt of lower priority, also of level 0, although a slot is free.",
        )  # fmt: skip
        if most >= 50:
            findings.claim(
                "section 4.1",
                "FCFS, SJF and HPJF struggle to handle large bursts, whereas semantic scheduling mitigates these bottlenecks",
                min(ratios.values()) > NO_EFFECT, listed(ratios, "{:.2f} times its wait"), case=where,
                cause="With up to 50 requests a second the 16 slots hold nearly all of level 0, so that its order by length gains nothing "
                "on HPJF's order of arrival.",
            )  # fmt: skip
    slow = {cell: max(ratios.values()) for cell, ratios in speedups.items() if cell[0] == 1.0}
    if slow:
        findings.row("section 4.1, gap 1.0 s", "largest speed-up over a baseline, level 0", max(slow.values()), PRINTED_LARGEST,
                     neutral=1.0)  # fmt: skip
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
    findings = Findings(size=effort.size(SPIKES, 10, "spikes"))
    for (setting, gap_s), (wait, speedup) in PRINTED_FIGURE_4.items():
        if effort.quick and gap_s > 0.1:
            continue

        def run_seed(seed: int, setting: str = setting, gap_s: float = gap_s) -> dict[str, dict[str, float]]:
            trace = spikes(gap_s, 100, seed, share)
            return {name: _run(name, trace, seed, setting) for name in ("semantic", *PRINTED_SPIKES)}

        got = over_seeds(effort.seeds, run_seed)
        ratios = _speedups(got)
        where = f"figure 4, {setting}, gap {gap_s} s, up to 100"
        slowest = max(ratios, key=lambda name: ratios[name])
        findings.row(where, "semantic, level 0, s per token", got["semantic"]["0"], wait)
        findings.row(where, f"slowest of the others ({slowest}) / semantic, level 0",
                     ratios[slowest], speedup, neutral=1.0, more=ratios)  # fmt: skip
        findings.claim(
            "appendix A.1", "semantic scheduling achieves the lowest normalized waiting time and outperforms all baselines",
            min(ratios.values()) > NO_EFFECT, listed(ratios, "{:.2f} times its wait"), case=where,
        )  # fmt: skip
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
#: Section 4: "non-spike settings" have at most 5 requests at a time. The paper gives neither gap nor number of
#: arrival times; with these, all levels together wait about as long as in the paper, 0.13 s per token.
CALM_GAP_S, CALM_MOST, CALM_SPIKES = 0.1, 5, 110


def predictor_errors(effort: Effort) -> Findings:
    """Figure 2 (a) and (b): cost of wrong levels and wrong buckets."""
    share = effort.num(100, 50) / 100
    findings = Findings(size=effort.size(CALM_SPIKES, CALM_SPIKES // 2, "arrival times"))
    rates = (0.1, 0.9) if effort.quick else (0.1, 0.3, 0.5, 0.7, 0.9)

    def run_seed(seed: int) -> dict[str, dict[float, dict[str, float]]]:
        trace = spikes(CALM_GAP_S, CALM_MOST, seed, share, CALM_SPIKES)
        return {
            "level": {rate: _run("semantic", trace, seed, level_error=rate) for rate in rates},
            "bucket": {rate: _run("semantic", trace, seed, bucket_error=rate) for rate in rates},
        }

    got = over_seeds(effort.seeds, run_seed)
    growth: dict[tuple[str, str], float] = {}
    for kind, figure, printed in (
        ("level", "figure 2 (a)", PRINTED_LEVEL_ERRORS),
        ("bucket", "figure 2 (b)", PRINTED_BUCKET_ERRORS),
    ):
        for level, (low, high) in printed.items():
            first, last = (got[kind][rate][level] for rate in (rates[0], rates[-1]))
            growth[kind, level] = last / first
            where = f"{figure}, {'all levels' if level == 'all' else 'level ' + level}"
            more = {f"s per token at {rate}": got[kind][rate][level] for rate in rates}
            findings.row(
                where,
                "wait per token, error rate 0.9 / 0.1",
                growth[kind, level],
                high / low,
                neutral=1.0,
                more=more,
            )
    _error_claims(findings, growth)
    return findings


def _error_claims(findings: Findings, growth: Mapping[tuple[str, str], float]) -> None:
    """The sentences of section 4.1 about figure 2 (a) and (b)."""
    grows = "{:.2f} times"
    wrong = {f"level {level}": growth["level", level] for level in ("0", "1")}
    findings.claim(
        "section 4.1", "when accuracy is low, critical requests may be misclassified, increasing their waiting time",
        min(wrong.values()) > NO_EFFECT, listed(wrong, grows),
    )  # fmt: skip
    every = growth["level", "all"]
    findings.claim("section 4.1", "the overall waiting time over all urgency levels slightly decreases with wrong levels",
                   every < 1, grows.format(every))  # fmt: skip
    buckets = {f"level {level}": growth["bucket", level] for level in PRINTED_BUCKET_ERRORS if level != "0"}
    findings.claim("section 4.1", "as length errors increase, the waiting time of levels 1 to 4 increases",
                   min(buckets.values()) > NO_EFFECT, listed(buckets, grows))  # fmt: skip
    first = growth["bucket", "0"]
    findings.claim(
        "section 4.1", "with length errors, the waiting time of urgency 0 is consistently the same", first < 1.1, grows.format(first),
        cause="Here level 0 has a queue, whose order wrong buckets reverse; the paper's 0.01 s per token is the time to decode alone.",
    )  # fmt: skip


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
    rows, free_s, first = list(trace.requests), 0.0, 0
    delay: dict[str, float] = {}
    while first < len(rows):
        if full:
            group = rows[first : first + batch]
            start_s = max(free_s, group[-1].arrival_s)
        else:
            start_s = max(free_s, rows[first].arrival_s)
            group = [row for row in rows[first : first + batch] if row.arrival_s <= start_s]
        free_s = start_s + latency_s
        delay |= {row.request_id: free_s - row.arrival_s for row in group}
        first += len(group)
    return delay


def _late_wait(
    effort: Effort, latency_s: float, batch: int, full: bool, gap_s: float = 1.0
) -> dict[str, float]:
    """Wait per token by level if a request can only be scheduled after its prediction."""

    def run_seed(seed: int) -> dict[str, float]:
        trace = spikes(gap_s, 5, seed, effort.num(80, 20) / 20)
        late = delays(trace, latency_s, batch, full)
        rows = [replace(row, arrival_s=row.arrival_s + late[row.request_id]) for row in trace.requests]
        held = replace(trace, requests=tuple(sorted(rows, key=lambda row: row.arrival_s)))
        outcome = simulate(system("semantic"), held, predictions(held, seed), seed=seed)
        values = {}
        for level in (*map(str, range(LEVELS)), "all"):
            done = [record for record in outcome.records if level in (record.category, "all")]
            waited = sum(late[record.request_id] + record.ttlt_s for record in done)
            values[level] = waited / max(1, sum(record.output_tokens for record in done))
        return values

    return over_seeds(effort.seeds, run_seed)


#: (heading, printed values, cells of (latency in s, batch size, value of the varied parameter)).
_GRIDS: tuple[tuple[str, Mapping[str, Mapping[float, float]], tuple[tuple[float, int, float], ...]], ...] = (
    ("table 1, latency {} s", PRINTED_LATENCY, tuple((x, 64, x) for x in (0.001, 0.01, 0.1, 1.0))),
    ("table 2, batch {:.0f}", PRINTED_BATCH, tuple((0.01, batch, float(batch)) for batch in (4, 16, 32, 64))),
)


def predictor_speed(effort: Effort) -> Findings:
    """Tables 1 and 2: cost of a slow predictor, by its latency and batch size."""
    findings = Findings(size=effort.size(80, 20, "arrival times"))
    waited: dict[tuple[str, str], dict[float, dict[str, float]]] = {}
    for where, printed, cells in _GRIDS:
        for latency_s, batch, varied in cells:
            for kind in ("full batching", "immediate"):
                got = _late_wait(effort, latency_s, batch, kind == "full batching")
                waited.setdefault((where, kind), {})[varied] = got
                more = {f"level {level}": got[str(level)] for level in range(LEVELS)}
                what = f"{kind}, all levels, s per token"
                findings.row(where.format(varied), what, got["all"], printed[kind][varied], more=more)
    busy = [_late_wait(effort, 0.01, 64, False, gap_s)["all"] for gap_s in (0.1, 0.01)]
    findings.notes.append(
        "The paper does not give the gap; here it is 1 s. Immediate processing at 0.01 s takes "
        f"{busy[0]:.3g} s per token with a gap of 0.1 s and {busy[1]:.3g} s with one of 0.01 s. The paper's "
        "0.6 s needs a longer queue than arrivals of at most 5 requests build up in a run of this size."
    )
    _latency_claims(findings, *(waited[_GRIDS[0][0], kind] for kind in ("full batching", "immediate")))
    _batch_claims(findings, *(waited[_GRIDS[1][0], kind] for kind in ("full batching", "immediate")))
    return findings


#: Waits per token by the varied parameter, then by level.
Waits = Mapping[float, Mapping[str, float]]


def _texts(waits: Waits) -> str:
    return " / ".join(f"{one['all']:.3g}" for one in waits.values()) + " s per token"


def _latency_claims(findings: Findings, full: Waits, immediate: Waits) -> None:
    """The sentences of section 4.1 about table 1."""
    for kind, waits_ in (("full batching", full), ("immediate", immediate)):
        first, *_, last = waits_.values()
        findings.claim(
            "section 4.1",
            "with the predictor's latency, the waiting time for all urgency levels in general increases",
            all(last[level] > first[level] for level in first),
            _texts(waits_),
            case=kind,
        )
    fast, slow = min(full), max(full)
    both = "{:.3g} (full) and {:.3g} s per token"
    findings.claim(
        "section 4.1", "when the predictor latency is low, immediate processing outperforms full batching",
        immediate[fast]["all"] < full[fast]["all"], both.format(full[fast]["all"], immediate[fast]["all"]),
    )  # fmt: skip
    findings.claim(
        "section 4.1", "as predictor latency increases, immediate processing becomes less efficient than full batching",
        immediate[slow]["all"] > full[slow]["all"], both.format(full[slow]["all"], immediate[slow]["all"]),
        cause="At most 5 requests a second fill a batch of 64 in 26 s on average, which delays each request more than a "
        "latency of 1 s; the paper's waits hardly change with the time to fill a batch.",
    )  # fmt: skip


def _batch_claims(findings: Findings, full: Waits, immediate: Waits) -> None:
    """The sentences of section 4.1 about table 2."""
    grow = all(
        [one[level] for one in full.values()] == sorted(one[level] for one in full.values())
        for level in next(iter(full.values()))
    )
    findings.claim(
        "section 4.1", "for full batching, the waiting time of all urgency levels monotonically increases as the batch size "
        "increases", grow, _texts(full),
    )  # fmt: skip
    sizes = [one["all"] for one in immediate.values()]
    findings.claim("section 4.1", "immediate processing is insensitive to batch changes",
                   max(sizes) / min(sizes) < 1.1, _texts(immediate))  # fmt: skip
    better = sum(immediate[size]["all"] < full[size]["all"] for size in full)
    findings.claim("section 4.1", "immediate processing is more efficient than full batching across a majority of settings",
                   better > len(full) / 2, f"in {better} of {len(full)} batch sizes")  # fmt: skip
