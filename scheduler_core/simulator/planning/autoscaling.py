"""Auto-scaling of the replicas of a choice, and what it costs."""

import math
from collections.abc import Mapping
from typing import Any

from scheduler_core.simulator.planning.planner import Candidate, PlanLevels, Planner, headline, only, value_of
from scheduler_core.simulator.planning.simulations import TrafficCell
from scheduler_core.simulator.planning.traffic import Traffic, rate_profile

#: Requests per replica that the scaler keeps, over those in the busiest part of the log with a fixed number of replicas.
_FRACTIONS = (1.25, 1.0, 0.8, 0.6, 0.4)
#: Largest number of replicas over the fixed one.
_MAX_RATIO = 1.5
#: Number of parts of the log, and of start-ups that it lasts at least.
_BINS, _MIN_STARTUPS = 24, 10


def autoscaling_problem(planner: Planner, one: Candidate) -> str | None:
    """Why auto-scaling cannot be simulated or is of no use, as a sentence; None: it can, or is not an option."""
    config, log = planner.config, planner.log
    if config.min_replicas is None:
        return None
    span_s = (log.requests[-1].arrival_s - log.requests[0].arrival_s) * planner.num_repeats
    if one.choice.prefill_fraction:
        problem = "replicas for prompts only are not scaled"
    elif config.min_replicas >= one.num_replicas:
        problem = "no more than min_replicas are needed"
    elif len(log) > config.max_requests:
        problem = f"it needs all of the log; use --max_requests {len(log)}"
    elif span_s < _MIN_STARTUPS * config.startup_s:
        problem = f"the log is shorter than {_MIN_STARTUPS} times startup_s"
    else:
        return None
    return f"auto-scaling was not simulated: {problem}"


def autoscale(planner: Planner, one: Candidate) -> dict[str, Any] | None:
    """The cheapest auto-scaling that meets the targets, or the one with the most replicas if none does; None if it is not simulated.

    Its scaler is `TargetTracking` of the requests per replica (Kubernetes' HPA, KEDA). `price_per_hour` is that of the mean
    number of replicas that run or start.
    """
    config = planner.config
    if config.min_replicas is None or autoscaling_problem(planner, one) is not None:
        return None
    _, rates = rate_profile(planner.log, _BINS)
    per_replica = planner.metrics_of(one)["mean_requests_in_system"] / one.num_replicas
    busiest = per_replica * max(rates) / planner.rate_rps
    largest = min(config.max_replicas, math.ceil(_MAX_RATIO * one.num_replicas))

    def cell(target: float) -> TrafficCell:
        scaler = {"metric": "concurrency", "target": target}
        cluster: Mapping[str, Any] = {
            "min_replicas": config.min_replicas,
            "startup_s": config.startup_s,
            "scaler": "target_tracking",
            "scaler_parameters": scaler,
        }
        return planner.cell(one.choice, largest, Traffic(), cluster=cluster)

    targets = [float(f"{fraction * busiest:.2g}") for fraction in _FRACTIONS]
    cells = [cell(target) for target in targets]
    options: list[dict[str, Any]] = []
    for target, one_cell, [result] in zip(
        targets, cells, planner.run([only([each]) for each in cells]), strict=True
    ):
        levels = PlanLevels(targets=planner.targets, make=lambda *_, cell=one_cell: cell)
        meets = levels.problem([result]) is None and all(
            each.slack(value_of(result, each)) <= 1 for each in planner.targets
        )
        mean = float(result["metrics"]["mean_replicas"])
        options.append(
            {
                "min_replicas": config.min_replicas,
                "max_replicas": largest,
                "requests_per_replica": target,
                "startup_s": config.startup_s,
                "meets": meets,
                "mean_replicas": mean,
                "price_per_hour": config.price(one.choice) * mean,
                "metrics": headline(result["metrics"]),
            }
        )
    met = [option for option in options if option["meets"]]
    return min(met, key=lambda option: float(option["price_per_hour"])) if met else options[-1]
