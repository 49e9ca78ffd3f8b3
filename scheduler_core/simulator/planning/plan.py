"""The recommendation of a plan as JSON content and as a paragraph, and how far it can be trusted."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from scheduler_core.errors import InputError
from scheduler_core.report.page import format_cell
from scheduler_core.shell.versions import versions_of
from scheduler_core.simulator.metrics import metric
from scheduler_core.simulator.planning.autoscaling import autoscale, autoscaling_problem
from scheduler_core.simulator.planning.config import PlanConfig
from scheduler_core.simulator.planning.outlook import (
    MAX_LOAD,
    curves,
    margin,
    order_gain,
    sizes,
    what_if,
)
from scheduler_core.simulator.planning.planner import MIN_GAIN, Candidate, Planner, headline
from scheduler_core.simulator.planning.screening import candidates, screen, tune
from scheduler_core.simulator.planning.simulations import GIVEN_UP, Simulations
from scheduler_core.simulator.planning.targets import MAX_GIVEN_UP, Target
from scheduler_core.simulator.planning.traffic import drift, rate_profile, units_of
from scheduler_core.simulator.steady_state import MAX_GROWTH, MIN_TURNOVERS
from scheduler_core.simulator.step_time.accuracy import error_band, region_of
from scheduler_core.simulator.trace import Trace

SCHEMA = "tailcast.plan/1"
#: Largest number of replicas over the smallest one, within the uncertainty of the log, above which it does not decide; a
#: difference of one replica always does.
_MAX_SPREAD = 1.34
#: Bins of the rate over the duration of the log, and the least number of requests and mean latencies in one.
_BINS, _BIN_REQUESTS, _BIN_LATENCIES = 48, 20, 5


def make_plan(
    config: PlanConfig, log: Trace, path: str, simulations: Simulations, stage: Callable[[str], object]
) -> dict[str, Any]:
    """Plans for a log, which is also the trace at `path`. `stage` is called with the name of each step.

    Returns:
        The content of the result: `answer`, `text` (the paragraph), `unreliable` (why it is not: sentences), `warnings`,
        `candidates` with their curves of latency over load, `orders`, `autoscaling`, `what_if`, `profile` (the load over time), `excluded`
        and `log`.

    Raises:
        InputError: No choice meets the targets, with the closest one; or an option is invalid.
    """
    planner = Planner(config, log, path, simulations)
    stage("bounds")
    promising = candidates(planner)
    stage("choices")
    left = screen(planner, promising)
    stage("settings")
    tune(planner, left)
    stage("replicas")
    turnovers = planner.reach_steady_state(left)
    finished = planner.finish(left)
    stage("routers")
    planner.route(finished)
    finished.sort(key=lambda one: config.price(one.choice, one.num_replicas))
    best = finished[0]
    cost = _cost(planner, config.price(best.choice, best.num_replicas), planner.metrics_of(best))
    scaled = autoscale(planner, best)
    lowest = cost
    if scaled is not None and scaled["meets"]:
        lowest = min(cost, _cost(planner, scaled["price_per_hour"], scaled["metrics"]))
    if config.max_cost is not None and lowest > config.max_cost:
        allowed = f"more; the cheapest choice that meets the others, {_bought(best)}, costs {lowest:.3g}"
        raise InputError("target", f"cost_per_million_tokens<{config.max_cost:g}", allowed)
    stage("uncertainty")
    low, high, estimates = planner.replicas_interval(best)
    stage("load")
    met = margin(planner, best)
    curves(planner, finished, met)
    larger = sizes(planner, finished)
    orders = order_gain(planner, best)
    stage("what if")
    scenarios = what_if(planner, best)
    metrics = best.curve[1.0]["metrics"]
    load = 1.0 / (best.num_replicas * best.saturation)
    kv_usage, preempted = memory_pressure(metrics)
    purchase = {
        **_described(planner, best),
        "num_replicas_low": low,
        "num_replicas_high": high,
        "cost_per_million_tokens": cost,
        "estimates": estimates,
        "metrics": headline(metrics),
        "margin": met[-1],
        "load": load,
        "kv_usage": kv_usage,
        "error_band": asdict(error_band(region_of(load, kv_usage, preempted)))
        if config.step_time_parameters is None
        else None,
    }
    span_s = log.requests[-1].arrival_s - log.requests[0].arrival_s
    content = {
        "schema": SCHEMA,
        "config": asdict(config),
        "versions": versions_of(("numpy",)),
        "log": {
            "source": log.source,
            "num_requests": len(log),
            "num_units": len(units_of(log.requests)),
            "duration_s": span_s,
            "rate_rps": planner.rate_rps,
            "prompt_tokens": sum(row.prompt_tokens for row in log.requests) / len(log),
            "output_tokens": sum(row.output_tokens for row in log.requests) / len(log),
            "num_simulated": min(len(log), config.max_requests),
            "num_repeats": planner.num_repeats,
            "turnovers": turnovers,
            "num_refused": metrics["num_refused"] // planner.num_repeats,
        },
        "answer": purchase,
        "unreliable": _unreliable(planner, purchase, turnovers, span_s, best.curve[1.0]),
        "warnings": _warnings(planner, best),
        "candidates": [
            _described(planner, one) | {"curve": _curve(one), "sizes": points}
            for one, points in zip(finished, larger, strict=True)
        ],
        "orders": orders,
        "autoscaling": scaled,
        "what_if": scenarios,
        "profile": _profile(planner, best, met[-1], metrics),
        "excluded": planner.excluded,
    }
    return content | {"text": plan_text(content, planner.targets)}


def memory_pressure(metrics: Mapping[str, Any]) -> tuple[float, float]:
    """Mean fraction of the KV memory that running requests of a run use, and preemptions per request."""
    usage = metrics["kv_usage"]
    num = metrics["num_finished"] + metrics["num_unfinished"]
    return (0.0 if usage is None else usage["mean"]), metrics["num_preemptions"] / num


def _described(planner: Planner, one: Candidate) -> dict[str, Any]:
    return {
        "hardware": one.choice.hardware,
        "gpu": one.choice.gpu,
        "settings": one.choice.settings(),
        "num_replicas": one.num_replicas,
        "num_gpus": one.num_replicas * one.choice.devices,
        "price_per_hour": planner.config.price(one.choice, one.num_replicas),
    }


def _bought(one: Candidate) -> str:
    return f"{_replicas(one.num_replicas)} of {one.choice.hardware}"


def _replicas(num: int) -> str:
    return f"{num} replica{'s' * (num > 1)}"


def _cost(planner: Planner, price_per_hour: float, metrics: Mapping[str, Any]) -> float:
    """Price per million output tokens of the log, without those of requests that their clients gave up."""
    tokens = sum(row.output_tokens for row in planner.log.requests) / len(planner.log)
    per_hour = planner.rate_rps * tokens * 3600 * (1.0 - float(metrics.get(GIVEN_UP, 0.0)))
    return price_per_hour / per_hour * 1e6


def _curve(one: Candidate) -> list[dict[str, Any]]:
    return [{"load": load, **headline(one.curve[load]["metrics"])} for load in one.curve]


def _profile(planner: Planner, best: Candidate, margin: float, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Arrivals per second over time, and about how many replicas they need: in proportion to the rate, of which the replicas
    of the recommendation bear `margin` times the highest."""
    log = planner.log
    span_s = log.requests[-1].arrival_s - log.requests[0].arrival_s
    longest = max(_BIN_LATENCIES * float(metrics["ttlt_s"]["mean"]), span_s / len(log) * _BIN_REQUESTS)
    edges, rates = rate_profile(log, max(1, min(_BINS, int(span_s / longest))))
    full = max(rates) * margin
    return {
        "edges_s": edges,
        "rates_rps": rates,
        "num_replicas": [max(1, math.ceil(best.num_replicas * rate / full)) for rate in rates],
    }


def _unreliable(
    planner: Planner,
    purchase: Mapping[str, Any],
    turnovers: float,
    span_s: float,
    result: Mapping[str, Any],
) -> list[str]:
    """Why the recommendation cannot be relied on, with what is necessary; `result` is that of its simulation."""
    log, reasons = planner.log, []
    for target in planner.targets:
        if len(log) < target.min_requests:
            needed_s = target.min_requests / planner.rate_rps
            reasons.append(
                f"{target.metric} needs a log of at least {target.min_requests:,} requests, which is {duration(needed_s)} at its "
                f"rate; it has {len(log)}"
            )
    if turnovers < MIN_TURNOVERS:
        needed_s = span_s * MIN_TURNOVERS / turnovers
        reasons.append(
            f"the log lasts {duration(span_s)}, which is {turnovers:.2g} mean latencies; a steady state needs {MIN_TURNOVERS:g}, "
            f"a log of {duration(needed_s)}"
        )
    num, low, high = (purchase[name] for name in ("num_replicas", "num_replicas_low", "num_replicas_high"))
    if high is None or (high - low > 1 and high / low > _MAX_SPREAD):
        ratio = (1.5 * num + 1 if high is None else high) / max(low, 1)
        factor = max(2.0, (math.log(ratio) / math.log(_MAX_SPREAD)) ** 2)
        reasons.append(
            f"the log allows {low} to {high or f'more than {math.ceil(1.5 * num) + 1}'} replicas; one of about "
            f"{duration(span_s * factor)} would decide"
        )
    reasons += [text for kind, text in result["warnings"].items() if kind in ("region", "kv_cache")]
    growth = result["metrics"]["steady_state"]["relative_growth"]
    if planner.shares_prefixes and growth is not None and growth < -MAX_GROWTH:
        advice = "a higher --max_requests" if len(log) > planner.config.max_requests else "a longer log"
        reasons.append(
            f"caches are cold at the start of the simulated part, so fewer replicas may be enough; use {advice}"
        )
    if purchase["error_band"] and purchase["error_band"]["region"] == "overload":
        reasons.append(
            "the replicas are overloaded, where no engine was measured; targets of TTFT or of end-to-end latency avoid this"
        )
    return reasons


def _warnings(planner: Planner, best: Candidate) -> dict[str, str]:
    """What may mislead in the recommendation, by kind."""
    warnings: dict[str, str | None] = {"drift": drift(planner.log), "trace": planner.log.problem}
    warnings["autoscaling"] = autoscaling_problem(planner, best)
    num = len(planner.log)
    if num > planner.config.max_requests:
        warnings["part"] = f"simulated are the busiest {planner.config.max_requests} of {num} requests"
    if planner.num_repeats > 1:
        warnings["repeated"] = (
            f"the log was simulated {planner.num_repeats} times in a row to reach a steady state"
        )
    if (given_up := best.curve[1.0]["metrics"].get(GIVEN_UP, 0.0)) > MAX_GIVEN_UP:
        warnings["clients"] = (
            f"{given_up:.1%} of the clients give up, which the targets allow; a target of P99 avoids this"
        )
    skipped = [order for order in planner.config.orders if order not in planner.orders()]
    if skipped:
        warnings["orders"] = (
            f"not simulated, because the log has no prompts to predict lengths from: {', '.join(skipped)}; "
            "--predictor oracle assumes true lengths"
        )
    return {kind: text for kind, text in warnings.items() if text}


def duration(seconds: float) -> str:
    """A duration in the largest unit of which it has two."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} seconds"


_LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "tbt_s": "ITL", "ttlt_s": "end-to-end latency"}


def metric_name(name: str) -> str:
    """A metric in words, such as P99 of TTFT."""
    head, _, statistic = name.partition(".")
    if not statistic:
        return "goodput"
    return f"{statistic.upper() if statistic[0] == 'p' else statistic} of {_LATENCIES.get(head, head)}"


def metric_text(name: str, value: float) -> str:
    """A value with its unit."""
    return f"{value:.1%}" if "." not in name else f"{format_cell(float(f'{value:.3g}'))} s"


def plan_text(content: Mapping[str, Any], targets: Sequence[Target]) -> str:
    """The recommendation as a paragraph: what to buy and to set, what the order gains, what it costs, how far the cliff is, and how
    accurate this is. `targets` are those of latencies and of goodput."""
    purchase, settings = content["answer"], content["answer"]["settings"]
    num = purchase["num_replicas"]
    reached = "; ".join(
        f"{metric_name(target.metric)} is {metric_text(target.metric, metric(purchase['metrics'], target.metric))}, target "
        f"{metric_text(target.metric, target.bound)}"
        for target in targets
    )
    parts = []
    if content["unreliable"]:
        parts.append(f"Not reliable: {'; '.join(content['unreliable'])}. What the log says:")
    low, high = purchase["num_replicas_low"], purchase["num_replicas_high"]
    span = "" if low == high == num else f" ({low} to {high or 'more'} within the uncertainty of the log)"
    parts.append(
        f"Buy {_replicas(num)} of {purchase['hardware']}{span}: {purchase['num_gpus']} GPU{'s' * (purchase['num_gpus'] > 1)}, "
        f"{purchase['price_per_hour']:.2f} per hour, {purchase['cost_per_million_tokens']:.2f} per million output tokens. {_first_upper(reached)}."
    )
    if (given_up := purchase["metrics"].get(GIVEN_UP)) is not None:
        timeout_s = content["config"]["timeout_s"]
        clients = f"{given_up:.2%} of the clients give up" if given_up else "No client gives up"
        retries = content["config"]["client_retries"]
        more = f" and {retries} {'retry' if retries == 1 else 'retries'}" if retries else ""
        parts.append(f"{clients} after {timeout_s:g} s without a token{more}.")
    parts.append(f"Set {settings_text(settings, num)}.")
    parts += _order_sentences(content, targets[0])
    if content["autoscaling"] is not None:
        parts.append(_autoscaling_sentence(content["autoscaling"], purchase["price_per_hour"]))
    if purchase["margin"] >= MAX_LOAD:
        parts.append(f"The targets hold at {MAX_LOAD:g} times the load.")
    elif purchase["margin"] > 1:
        parts.append(f"The targets hold up to {purchase['margin']:.2f} times the load of the log.")
    else:
        parts.append("There is no margin: a few percent more load break the targets.")
    parts.append(_band_sentence(purchase))
    return " ".join(parts)


def settings_text(settings: Mapping[str, Any], num_replicas: int) -> str:
    """What to set, in words."""
    words = [
        f"max_num_seqs {settings['max_num_seqs']}",
        f"max_num_batched_tokens {settings['max_num_batched_tokens']}",
        f"prefix caching {'on' if settings['prefix_caching'] else 'off'}",
        f"order {settings['order']}",
    ]
    if settings.get("prefill_fraction"):
        words.append(f"{settings['prefill_fraction']:.0%} of the replicas for prompts only")
    elif num_replicas > 1:
        words.append(f"router {settings['router']}")
    return ", ".join(words)


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _order_sentences(content: Mapping[str, Any], target: Target) -> list[str]:
    """What the chosen order gains over fcfs, or the best other one over it."""
    orders = {one["order"]: one for one in content["orders"]}
    chosen = orders.get(content["answer"]["settings"]["order"])
    others = [one for one in orders.values() if one is not chosen]
    if chosen is None or not others:
        return []
    base = orders.get("fcfs", others[0]) if chosen["order"] != "fcfs" else others[0]
    own, other = (metric(one["metrics"], target.metric) for one in (chosen, base))
    mean, other_mean = (one["metrics"]["ttlt_s"]["mean"] for one in (chosen, base))
    changes = max(abs(other / own - 1) if own else 0.0, abs(other_mean / mean - 1))
    if changes < 0.01 and base["num_replicas"] == chosen["num_replicas"]:
        beyond = [one["highest_load"]["metrics"]["ttlt_s"]["mean"] for one in (chosen, base)]
        text = f"Order {base['order']} changes nothing at this load"
        load = f"{chosen['highest_load']['load']:.2f} times the load"
        if abs(beyond[1] / beyond[0] - 1) < 0.01:
            return [f"{text}, nor at {load}."]
        return [
            f"{text}; at {load} its mean end-to-end latency is {beyond[1]:.3g} s instead of {beyond[0]:.3g} s."
        ]
    text = (
        f"With order {base['order']} the same replicas have {metric_name(target.metric)} {metric_text(target.metric, other)} "
        f"and a mean end-to-end latency of {other_mean:.3g} s instead of {metric_text(target.metric, own)} and {mean:.3g} s"
    )
    needed = base["num_replicas"]
    if needed != chosen["num_replicas"]:
        text += f", and {_replicas(needed) if needed else 'more than max_replicas'} would be necessary"
    return [text + "."]


def _autoscaling_sentence(scaled: Mapping[str, Any], price_per_hour: float) -> str:
    text = (
        f"Auto-scaling from {scaled['min_replicas']} to {scaled['max_replicas']} replicas, at {scaled['requests_per_replica']:g} "
        f"requests per replica and with {scaled['startup_s']:g} s to start one,"
    )
    if not scaled["meets"]:
        return f"{text} misses the targets."
    if scaled["price_per_hour"] > price_per_hour * (1 - MIN_GAIN):
        return f"{text} saves nothing."
    return (
        f"{text} meets the targets with {scaled['mean_replicas']:.3g} on average: {scaled['price_per_hour']:.2f} per hour instead of "
        f"{price_per_hour:.2f}."
    )


def _band_sentence(purchase: Mapping[str, Any]) -> str:
    band = purchase["error_band"]
    if band is None:
        return "The error of the simulator is that of the calibration."
    region = str(band["region"]).replace("_", " ")
    text = (
        f"The replicas run at {purchase['load']:.0%} of their saturation, with {purchase['kv_usage']:.0%} of their KV memory in use "
        f"({region}), where the simulator's mean error is "
        f"{band['ttft_p99']:.0%} for P99 of TTFT, {band['e2e_p99']:.0%} for P99 and {band['e2e_mean']:.0%} for the mean of "
        f"end-to-end latency, {band['itl_mean']:.0%} for ITL and {band['max_rate']:.0%} for the highest rate"
    )
    if purchase["margin"] < 1 + band["max_rate"]:
        text += ", which is more than the margin: one more replica is the safe choice"
    return text + "."


def lines_of(content: Mapping[str, Any]) -> list[str]:
    """The paragraph, and a line for each scenario."""
    lines = [content["text"]]
    for one in content["what_if"]:
        text = (
            "the recommended replicas meet the targets"
            if one["meets"]
            else "the recommended replicas miss the targets"
        )
        if one["num_replicas"] is None:
            text += ", and so do max_replicas"
        else:
            text += f"; {_replicas(one['num_replicas'])} would do ({one['price_per_hour']:.2f} per hour)"
        if one["metrics"] and GIVEN_UP in one["metrics"]:
            text += f"; {one['metrics'][GIVEN_UP]:.2%} of the clients give up"
        lines.append(f"{one['scenario']}: {text}")
    return lines
