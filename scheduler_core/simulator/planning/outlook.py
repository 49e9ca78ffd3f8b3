"""Outlook of a plan: other loads, sizes, orders and scenarios with the recommended replicas."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from scheduler_core.simulator.planning.planner import Candidate, PlanLevels, Planner, headline, only, value_of
from scheduler_core.simulator.planning.search import Search, highest_level, probe_level
from scheduler_core.simulator.planning.traffic import Traffic

#: Largest load at which the targets are tried, and the precision of the one at which they break.
MAX_LOAD, _PRECISION = 4.0, 0.03


def margin(planner: Planner, one: Candidate) -> float:
    """Multiple of the load at which the targets break, at least; 1 is the log's."""
    levels = PlanLevels(
        targets=planner.targets,
        make=lambda load, _: planner.cell(one.choice, one.num_replicas, Traffic(load=load)),
    )

    def search() -> Search[float]:
        good, bad, step = 1.0, None, 1.15
        while bad is None and good < MAX_LOAD:
            if (yield from probe_level(levels, good * step, 1))["meets"]:
                good, step = good * step, step**1.5
            else:
                bad = good * step
        if bad is not None:
            good, _, _ = yield from highest_level(
                lambda load: probe_level(levels, load, 1), good, bad, _PRECISION
            )
        return good

    return planner.run([search()])[0]


def curves(planner: Planner, candidates: Sequence[Candidate], load_margin: float) -> None:
    """Sets the results at loads up to somewhat above the margin of each candidate with its replicas."""
    loads = sorted({0.5, 0.75, 1.0, load_margin**0.5, load_margin, 1.12 * load_margin})
    cells = [
        planner.cell(one.choice, one.num_replicas, Traffic(load=load), stop=False)
        for one in candidates
        for load in loads
    ]
    results = iter(planner.run([only([cell]) for cell in cells]))
    for one in candidates:
        one.curve = {load: next(results)[0] for load in loads}


def sizes(planner: Planner, candidates: Sequence[Candidate]) -> list[list[dict[str, Any]]]:
    """For each candidate the metrics with more replicas than necessary."""

    def search(one: Candidate) -> Search[list[dict[str, Any]]]:
        numbers = sorted({one.num_replicas + 1, math.ceil(1.5 * one.num_replicas)})
        results = yield [planner.cell(one.choice, num, Traffic(), stop=False) for num in numbers]
        return [
            {"num_replicas": num, "price_per_hour": planner.config.price(one.choice, num)}
            | headline(result["metrics"])
            for num, result in zip(numbers, results, strict=True)
        ]

    return planner.run([search(one) for one in candidates])


def order_gain(planner: Planner, one: Candidate) -> list[dict[str, Any]]:
    """Every order at the same number of replicas, with the load of the log and with the highest one of the curves, and the
    number of replicas that it needs."""
    highest = max(one.curve)

    def search(order: str) -> Search[dict[str, Any]]:
        choice = replace(one.choice, order=order)
        loads = (1.0, highest)
        results = yield [
            planner.cell(choice, one.num_replicas, Traffic(load=load), stop=False) for load in loads
        ]
        best, _ = yield from planner.search_replicas(choice, one.num_replicas, Traffic())
        metrics, beyond = (headline(result["metrics"]) for result in results)
        return {
            "order": order,
            "num_replicas": None if best is None else int(best["level"]),
            "metrics": metrics,
            "highest_load": {"load": highest, "metrics": beyond},
        }

    return planner.run([search(order) for order in planner.orders()])


def what_if(planner: Planner, one: Candidate) -> list[dict[str, Any]]:
    """For each scenario the metrics with the recommended replicas, and the number of replicas that it needs."""

    def search(text: str, scenario: Mapping[str, float]) -> Search[dict[str, Any]]:
        traffic = Traffic(load=scenario.get("traffic", 1.0), outputs=scenario.get("outputs", 1.0))
        failed = int(scenario.get("failed_replicas", 0))
        left = one.num_replicas - failed
        metrics, meets = None, False
        if left >= 1:
            cell = planner.cell(one.choice, left, traffic, stop=False)
            [result] = yield [cell]
            metrics = headline(result["metrics"])
            meets = all(target.slack(value_of(result, target)) <= 1 for target in planner.targets)
            meets = (
                meets and PlanLevels(targets=planner.targets, make=lambda *_: cell).problem([result]) is None
            )
        guess = math.ceil(one.num_replicas * traffic.load * traffic.outputs)
        best, _ = yield from planner.search_replicas(one.choice, guess, traffic)
        needed = None if best is None else int(best["level"]) + failed
        price = None if needed is None else planner.config.price(one.choice, needed)
        return {
            "scenario": text,
            "meets": meets,
            "metrics": metrics,
            "num_replicas": needed,
            "price_per_hour": price,
        }

    return planner.run([search(text, scenario) for text, scenario in planner.config.scenarios().items()])
