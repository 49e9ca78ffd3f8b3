"""Regret: the cost of a policy compared with the order by true length, and with arrival order, on the same requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from scheduler_core.simulator.config import SimulationConfig
from scheduler_core.simulator.records import RequestRecord
from scheduler_core.simulator.run import SimulationResult, run_simulation
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.watch import RunWatch

#: Arrival order, and the shortest true length first.
BASELINE, ORACLE = "fcfs", "sjf"
#: Latencies whose means have a regret; the first is the one that papers report.
REGRETTED = ("normalized_latency_s", "ttft_s", "ttlt_s")


def simulated_regret(config: SimulationConfig, trace: Trace, result: SimulationResult) -> dict[str, Any]:
    """Simulates the trace again, at most three times, with the same engine, cluster and arrivals: in arrival order, by true
    length, and (if the policy uses predicted lengths) under the same policy with true lengths.

    By latency, for the means over requests, see `regret_of_means`; and `slower_fraction`: fraction of the requests that
    the oracle would have served faster.

    The oracle is best for the mean time in the system where all lengths are served at one speed. It need not be for the
    other latencies or where batches matter: then a regret can be below 0.

    Raises:
        InputError: One of the orders does not go with the batch former.
    """

    def simulate(**changes: Any) -> SimulationResult:
        changed = replace(config, predictor_noise=0.0, **changes)
        return run_simulation(changed, trace=trace, watch=RunWatch(gaps=None))

    plain: dict[str, Any] = {"policy_parameters": {}, "predictor_delay_s": None}
    baseline = simulate(policy=BASELINE, predictor="none", **plain)
    oracle = simulate(policy=ORACLE, predictor=None, **plain)
    informed = None
    if config.prediction_source != "none":
        informed = simulate(predictor=None if config.policy == ORACLE else "oracle")

    def mean(one: SimulationResult, name: str) -> float:
        return float(one.metrics[name]["mean"])

    regret: dict[str, Any] = {
        name: regret_of_means(
            mean(result, name),
            mean(oracle, name),
            mean(baseline, name),
            None if informed is None else mean(informed, name),
        )
        for name in REGRETTED
    }
    return regret | {"slower_fraction": _slower_fraction(result.records, oracle.records)}


def regret_of_means(
    policy: float, oracle: float, baseline: float, informed: float | None = None
) -> dict[str, float | None]:
    """The regret of one mean, from the means of the four runs, in seconds.

    - `regret_s`: the policy less the oracle.
    - `fraction`: that over the cost of arrival order: 0 as good as the oracle, 1 no better than arrival order. None where
      arrival order is no worse than the oracle: there is nothing to gain then.
    - `of_predictions_s`, `of_order_s`: the two parts of `regret_s`: the cost of wrong predictions, and the rest, with true
      lengths. None if the policy uses no predicted lengths.
    """
    return {
        "regret_s": policy - oracle,
        "fraction": (policy - oracle) / (baseline - oracle) if baseline > oracle else None,
        "of_predictions_s": None if informed is None else policy - informed,
        "of_order_s": None if informed is None else informed - oracle,
    }


def _slower_fraction(records: Sequence[RequestRecord], oracle: Sequence[RequestRecord]) -> float:
    by_id = {one.request_id: one.ttlt_s for one in oracle}
    pairs = [(one.ttlt_s, by_id[one.request_id]) for one in records if one.request_id in by_id]
    return float(np.mean([own > best * (1 + 1e-12) for own, best in pairs]))


def with_regret(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Results of a sweep with `metrics.regret` where the same point and seed was simulated in both other orders too."""
    orders: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for one in results:
        orders.setdefault(_point(one), {})[str(one["settings"].get("policy"))] = one["metrics"]
    extended = []
    for one in results:
        own, others = one["metrics"], orders[_point(one)]
        if BASELINE in others and ORACLE in others:
            means = {
                name: [tree[name]["mean"] for tree in (own, others[ORACLE], others[BASELINE])]
                for name in REGRETTED
            }
            own = {**own, "regret": {name: regret_of_means(*values) for name, values in means.items()}}
        extended.append({**one, "metrics": own})
    return extended


def _point(result: Mapping[str, Any]) -> tuple[Any, ...]:
    """All settings but the policy and its parameters."""
    settings = result["settings"].items()
    return tuple((name, value) for name, value in settings if not name.startswith("policy"))
