"""Outlook of a plan: other loads, sizes, orders and scenarios with the recommended replicas."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from scheduler_core.simulator.planning.planner import Candidate, PlanLevels, Planner, headline, only, value_of
from scheduler_core.simulator.planning.search import Probe, Search, highest_level, probe_level
from scheduler_core.simulator.planning.traffic import Traffic

#: Largest load at which the targets are tried, and the precision of the one at which they break.
MAX_LOAD, _PRECISION = 4.0, 0.03
#: Smallest load of the curves.
_LOW_LOAD = 0.5


def margin(planner: Planner, one: Candidate) -> list[float]:
    """Multiples of the log's load at which the targets were met, in order; they break somewhat above the last one."""
    met = [1.0]
    levels = PlanLevels(
        targets=planner.targets,
        make=lambda load, _: planner.cell(one.choice, one.num_replicas, Traffic(load=load)),
    )

    def probe(load: float) -> Search[Probe]:
        probe = yield from probe_level(levels, load, 1)
        if probe["meets"]:
            met.append(load)
        return probe

    def search() -> Search[None]:
        bad, step = None, 1.15
        while bad is None and met[-1] < MAX_LOAD:
            load = met[-1] * step
            if (yield from probe(load))["meets"]:
                step **= 1.5
            else:
                bad = load
        if bad is not None:
            yield from highest_level(probe, met[-1], bad, _PRECISION)

    planner.run([search()])
    return met


def curves(planner: Planner, candidates: Sequence[Candidate], met: Sequence[float]) -> None:
    """Sets the results of each candidate with its replicas at half the load, at that of the log, and at the margin; of the first
    one at all loads of `met` (see `margin`), and somewhat above the last one."""
    margin = met[-1]
    few = {_LOW_LOAD, 1.0, margin}
    if margin > 1 / _LOW_LOAD:
        few.add(margin**0.5)
    pairs = [
        (one, load)
        for one in candidates
        for load in sorted(few if one is not candidates[0] else {_LOW_LOAD, *met, 1.12 * margin})
    ]
    results = planner.run(
        [only([planner.cell(one.choice, one.num_replicas, _at(load), stop=False)]) for one, load in pairs]
    )
    for (one, load), [result] in zip(pairs, results, strict=True):
        one.curve[load] = result


def _at(load: float) -> Traffic:
    """A load; a lower one has fewer sessions, which takes less time than later ones."""
    return Traffic(fraction=load) if load < 1 else Traffic(load=load)


def sizes(planner: Planner, candidates: Sequence[Candidate]) -> list[list[dict[str, Any]]]:
    """For each candidate the metrics with a replica more than necessary."""

    def search(one: Candidate) -> Search[list[dict[str, Any]]]:
        num = one.num_replicas + 1
        [result] = yield [planner.cell(one.choice, num, Traffic(), stop=False)]
        price = planner.config.price(one.choice, num)
        return [{"num_replicas": num, "price_per_hour": price} | headline(result["metrics"])]

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
        left, needs = one.num_replicas - failed, 2 if one.choice.prefill_fraction else 1
        cluster: dict[str, Any] = {}
        if "restart_s" in scenario:
            cluster["failures"] = planner.failures(failed, scenario["restart_s"], traffic)
            left, needs, failed = one.num_replicas, max(needs, failed), 0  # they run again
        metrics, meets = None, False
        if left >= needs:
            cell = planner.cell(one.choice, left, traffic, stop=False, cluster=cluster)
            [result] = yield [cell]
            metrics = headline(result["metrics"])
            meets = all(target.slack(value_of(result, target)) <= 1 for target in planner.targets)
            meets = (
                meets and PlanLevels(targets=planner.targets, make=lambda *_: cell).problem([result]) is None
            )
        guess = math.ceil(one.num_replicas * traffic.load * traffic.outputs)
        best, _ = yield from planner.search_replicas(one.choice, guess, traffic, cluster)
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
