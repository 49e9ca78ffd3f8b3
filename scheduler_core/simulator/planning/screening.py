"""Choices of a plan by cheap bounds and by simulations of one replica with its part of the log."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.planning.choices import Choice, variants
from scheduler_core.simulator.planning.planner import (
    MAX_REFUSED,
    MIN_GAIN,
    Candidate,
    PlanLevels,
    Planner,
    only,
    value_of,
)
from scheduler_core.simulator.planning.search import Probe, Search, highest_level, probe_level
from scheduler_core.simulator.planning.simulations import TrafficCell
from scheduler_core.simulator.planning.traffic import Traffic
from scheduler_core.simulator.step_time import prefill_s, saturation_rate_rps
from scheduler_core.simulator.step_time.base import StepTime, delays_of
from scheduler_core.simulator.trace import Trace, TraceRequest

#: Requests of a simulation of one replica.
_NUM_REQUESTS = 2500
#: Choices that are simulated at the same time, and those that are simulated with all of the log.
_WAVE, _NUM_FINAL = 3, 3
#: Relative precision of the highest load of a replica.
_PRECISION = 0.12
#: Load at which the search for it begins, over the estimated saturation, and the error of that estimate.
_FIRST_GUESS, _SATURATION_ERROR = 0.7, 1.25
#: Most replicas that are tried with some for prompts only, over the number that the estimated saturation asks for.
_MAX_OVER_GUESS = 4
#: Load over the saturation that counts as an idle engine.
_IDLE = 1 / 64
#: Sample from which bounds of the latency on an idle engine are computed, and margin for its error.
_SAMPLE, _SAMPLE_MARGIN = 300, 1.1


def candidates(planner: Planner) -> list[Candidate]:
    """Hardware on which the model fits and is fast enough when idle, by the price at saturation; `InputError` if there is
    none."""
    log, uncached = planner.log, _without_hits(planner.log)
    fitting: list[Candidate] = []
    distances: list[tuple[float, str]] = []
    for hardware in planner.config.hardware():
        choice = replace(hardware, order=planner.orders()[0], router=planner.routers()[0])
        try:
            simulation = choice.config(planner.base, 1)
            limits, step_time = simulation.limits, simulation.make_step_time()
        except InputError as error:
            if error.field != "tensor_parallel":  # an option that no hardware changes
                raise
            planner.exclude(choice, str(error))
            continue
        capacity = limits.capacity_blocks * limits.kv_block_tokens
        num_large = sum(row.prompt_tokens + row.max_tokens > capacity for row in log.requests)
        if num_large > MAX_REFUSED * len(log):
            planner.exclude(choice, f"{num_large} requests are longer than its KV cache of {capacity} tokens")
            continue
        slack, problem = _idle_slack(planner, limits, step_time)
        if slack > 1:
            planner.exclude(choice, problem)
            distances.append((slack, f"{problem} on {choice.hardware}"))
            continue
        fitting.append(Candidate(choice=choice, saturation=_saturation(planner, uncached, choice)))
    if not fitting and distances:
        raise InputError("target", str(planner.config.target), f"more; the closest: {min(distances)[1]}")
    if not fitting:
        reasons = "; ".join(f"{one['choice']}: {one['reason']}" for one in planner.excluded)
        allowed = f"devices on which the model fits ({reasons})"
        raise InputError("gpus", list(planner.config.prices), allowed)
    return sorted(fitting, key=lambda one: _lowest_price(planner, one))


def _saturation(planner: Planner, uncached: Trace, choice: Choice) -> float:
    """Multiple of the log's rate at which a replica is always busy with full batches of the requests `uncached`."""
    simulation = choice.config(planner.base, 1)
    rate_rps = saturation_rate_rps(uncached, simulation.limits, simulation.make_step_time())
    return rate_rps / planner.rate_rps


def _lowest_price(planner: Planner, one: Candidate) -> float:
    """Price per hour below which a choice surely misses the targets: all replicas saturated."""
    return planner.config.price(one.choice) * max(1.0, 1.0 / (_SATURATION_ERROR * one.saturation))


def _idle_slack(planner: Planner, limits: SchedulerConfig, step_time: StepTime) -> tuple[float, str]:
    """How far the latencies on an idle engine are from the targets, at most, and the sentence about it. With shared prefixes,
    prompts count as cached."""
    rng = np.random.default_rng(0)
    rows = planner.log.requests
    if len(rows) > _SAMPLE:
        rows = tuple([rows[at] for at in rng.choice(len(rows), _SAMPLE, replace=False).tolist()])
    prompts_s = np.full(len(rows), delays_of(step_time).frontend_s)
    if not planner.shares_prefixes:
        prompts_s += [prefill_s(row.prompt_tokens, limits.max_num_batched_tokens, step_time) for row in rows]
    gaps = np.array([row.output_tokens - 1 for row in rows])
    decodes_s = np.array(
        [
            step_time.run([row.prompt_tokens], 0.0).end_s(num) if num else 0.0
            for row, num in zip(rows, gaps.tolist(), strict=True)
        ]
    )
    several = gaps > 0
    values = {
        "ttft_s": prompts_s,
        "ttlt_s": prompts_s + decodes_s,
        "tpot_s": decodes_s[several] / gaps[several],
    }
    worst, text = 0.0, ""
    for target in planner.targets:
        array = values.get(target.head)
        if array is None or not array.size or (target.level is None and not target.metric.endswith(".mean")):
            continue
        value = float(array.mean() if target.level is None else np.quantile(array, target.level))
        if target.slack(value / _SAMPLE_MARGIN) > worst:
            worst = target.slack(value / _SAMPLE_MARGIN)
            text = f"{target.metric} is {value:.3g} s for requests alone on an idle engine"
    shortest_s = float(prompts_s.min())
    if (timeout_s := planner.config.timeout_s) is not None and shortest_s > timeout_s * _SAMPLE_MARGIN:
        worst = max(worst, shortest_s / timeout_s)
        text = f"every client gives up, as first tokens take at least {shortest_s:.3g} s on an idle engine"
    return worst, text


def _cell(planner: Planner, choice: Choice, level: float, *, stop: bool = True) -> TrafficCell:
    """One replica with `level` times the log's rate."""
    size = min(_NUM_REQUESTS, len(planner.log))
    traffic = Traffic(fraction=min(level, 1.0), load=max(level, 1.0), num_requests=size)
    settings = {"share": level, "choice": str(choice)}
    return TrafficCell(choice.config(planner.base, 1), settings, traffic, planner.targets if stop else ())


def _least_share(planner: Planner) -> float:
    """Load of a replica below which max_replicas are surely not enough."""
    return 1.0 / (4 * planner.config.max_replicas)


def _search_share(planner: Planner, one: Candidate) -> Search[Candidate]:
    """Sets `share`; None if no load meets the targets."""
    levels = PlanLevels(targets=planner.targets, make=lambda level, _: _cell(planner, one.choice, level))

    def probe(level: float) -> Search[Probe]:
        return probe_level(levels, level, 1)

    least = max(_least_share(planner), one.saturation * _IDLE)
    level, step = min(one.share or _FIRST_GUESS * one.saturation, 1.0), 1.3
    good = bad = None
    while good is None or (bad is None and good < 1.0):
        if bad is not None and level < least:
            one.share = None
            return one
        if (yield from probe(level))["meets"]:
            good, level = level, min(level * step, 1.0)
        else:
            bad, level = level, level / step
        step = min(step**1.5, 3.0)
    if bad is not None:
        good, _, _ = yield from highest_level(probe, good, bad, _PRECISION)
    one.share = good
    return one


def screen(planner: Planner, fitting: Sequence[Candidate]) -> list[Candidate]:
    """The choices that may be the cheapest. Those that cost more when saturated than another one does with the targets met are
    not simulated. `InputError` if no load meets the targets."""
    best = math.inf
    screened: list[Candidate] = []
    for start in range(0, len(fitting), _WAVE):
        wave = fitting[start : start + _WAVE]
        promising = [one for one in wave if _lowest_price(planner, one) <= best]
        for one in wave:
            if one not in promising:
                price = _lowest_price(planner, one)
                planner.exclude(one.choice, f"costs at least {price:.2f} per hour, even when saturated")
        screened += planner.run([_search_share(planner, one) for one in promising])
        best = min([_price(planner, one, 1 + _PRECISION) for one in screened if one.share], default=math.inf)
    left = [one for one in screened if one.share]
    missing = [one for one in screened if one.share is None]
    for one, others in zip(missing, _with_prefill_replicas(planner, missing), strict=True):
        left += others
        if not others:
            planner.exclude(one.choice, "misses the targets at any load")
    if not left:
        raise _infeasible(planner, screened)
    left.sort(key=lambda one: _price(planner, one, 1.0))
    finals = [one for one in left if _price(planner, one, 1 / (1 + _PRECISION)) <= best][:_NUM_FINAL]
    for one in left:
        if one not in finals:
            planner.exclude(one.choice, f"needs about {_price(planner, one, 1.0):.2f} per hour")
    return finals


def _with_prefill_replicas(planner: Planner, missing: Sequence[Candidate]) -> list[list[Candidate]]:
    """For each choice that misses the targets when all replicas do both, those that meet them with replicas for prompts only."""

    def search(one: Candidate, fraction: float) -> Search[Candidate | None]:
        choice = replace(one.choice, prefill_fraction=fraction)
        guess = max(2, math.ceil(1.0 / (_FIRST_GUESS * one.saturation)))
        best, _ = yield from planner.search_replicas(choice, guess, Traffic(), most=_MAX_OVER_GUESS * guess)
        if best is None:
            return None
        return Candidate(choice=choice, saturation=one.saturation, share=1.0 / best["level"])

    config = planner.config
    fractions = [fraction for fraction in config.prefill_fractions if fraction and config.max_replicas > 1]
    results = iter(planner.run([search(one, fraction) for one in missing for fraction in fractions]))
    return [[other for _ in fractions if (other := next(results)) is not None] for _ in missing]


def _price(planner: Planner, one: Candidate, factor: float) -> float:
    """Price per hour of the replicas, if `factor` times as many as estimated are necessary."""
    assert one.share is not None
    return planner.config.price(one.choice, math.ceil(factor / one.share - 0.01) or 1)


def _infeasible(planner: Planner, fitting: Sequence[Candidate]) -> InputError:
    """The refusal of targets that no load meets, with the closest choice."""
    cells = [_cell(planner, one.choice, min(one.saturation * _IDLE, 1.0), stop=False) for one in fitting]
    distances = []
    for one, [result] in zip(fitting, planner.run([only([cell]) for cell in cells]), strict=True):
        slack, target = max(
            [(target.slack(value_of(result, target)), target) for target in planner.targets],
            key=lambda pair: pair[0],
        )
        value = value_of(result, target)
        distances.append((slack, f"{target.metric} is {value:.3g} at low load on {one.choice.hardware}"))
    slack, closest = min(distances)
    if slack <= 1:
        allowed = f"more; a replica bears less than {_least_share(planner):.2g} of the load: {closest}"
        return InputError("max_replicas", planner.config.max_replicas, allowed)
    return InputError("target", str(planner.config.target), f"more; the closest: {closest}")


def tune(planner: Planner, fitting: Sequence[Candidate]) -> None:
    """Changes each setting to the value with which a replica is closest to the targets at a load somewhat above its highest
    one, if that increases the highest load."""
    settings: dict[str, Sequence[Any]] = {
        "max_num_seqs": planner.config.max_num_seqs,
        "max_num_batched_tokens": planner.config.max_num_batched_tokens,
        "prefix_caching": planner.config.prefix_caching,
        "order": planner.orders(),
    }

    def distance(one: Candidate, choice: Choice) -> Search[float]:
        assert one.share is not None
        [result] = yield [_cell(planner, choice, one.share * (1 + _PRECISION / 2), stop=False)]
        return max(target.slack(value_of(result, target)) for target in planner.targets)

    # One replica cannot tell anything about those with others for prompts only.
    fitting = [one for one in fitting if not one.choice.prefill_fraction]
    pairs = [(one, choice) for one in fitting for choice in (one.choice, *variants(one.choice, settings))]
    pairs = [(one, choice) for one, choice in pairs if _fits(planner, choice)]
    distances = planner.run([distance(one, choice) for one, choice in pairs])
    tuned: list[tuple[Candidate, Candidate]] = []
    for one in fitting:
        own = {choice: value for (other, choice), value in zip(pairs, distances, strict=True) if other is one}
        best = one.choice
        for name in settings:
            changed = [choice for choice in own if getattr(choice, name) != getattr(one.choice, name)]
            choice = min(changed, key=lambda choice: own[choice], default=one.choice)
            if own[choice] < own[one.choice] * (1 - MIN_GAIN):
                best = replace(best, **{name: getattr(choice, name)})
        if best != one.choice and _fits(planner, best):
            tuned.append((one, Candidate(choice=best, saturation=one.saturation, share=one.share)))
    planner.run([_search_share(planner, other) for _, other in tuned])
    uncached = _without_hits(planner.log)
    for one, other in tuned:
        if other.share is not None and one.share is not None and other.share >= one.share:
            one.choice, one.share = other.choice, other.share
            one.saturation = _saturation(planner, uncached, one.choice)


def _fits(planner: Planner, choice: Choice) -> bool:
    try:
        return choice.config(planner.base, 1).limits.capacity_blocks > 0
    except TailcastError:
        return False


def _without_hits(log: Trace) -> Trace:
    """The log with prompts without what an infinite prefix cache would have."""
    lengths: dict[str, int] = {}
    rows: list[TraceRequest] = []
    for row in log.requests:
        cached = 0
        for key, num_tokens in row.content:
            num_shared = lengths.get(key, 0)
            cached += min(num_shared, num_tokens)
            if num_shared < num_tokens:
                break
        for key, num_tokens in row.content:
            lengths[key] = max(lengths.get(key, 0), num_tokens)
        if row.content:
            lengths[row.content[-1].key] += row.output_tokens
        rows.append(replace(row, prompt_tokens=max(1, row.prompt_tokens - cached)) if cached else row)
    return replace(log, requests=tuple(rows))
