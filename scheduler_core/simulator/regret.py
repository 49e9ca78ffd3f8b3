"""Regret: what a policy costs against the order by true length, and against arrival order, on the same requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scheduler_core.simulator.config import SimulationConfig
from scheduler_core.simulator.records import RequestRecord
from scheduler_core.simulator.run import SimulationResult, run_simulation
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.watch import RunWatch

#: Arrival order, and the shortest true length first.
BASELINE, ORACLE = "fcfs", "sjf"
#: Latencies whose means a regret is told of; the first is the one that papers report.
REGRETTED = ("per_token_latency_s", "ttft_s", "ttlt_s")


@dataclass(frozen=True, slots=True)
class Counterfactuals:
    """What would have become of the same requests.

    Attributes:
        baseline: In the order of arrival.
        oracle: Shortest true length first.
        informed: Under the same policy, had it known the true lengths; None if it reads no predicted lengths.
    """

    baseline: SimulationResult
    oracle: SimulationResult
    informed: SimulationResult | None


def counterfactuals(config: SimulationConfig, trace: Trace) -> Counterfactuals:
    """Simulates the trace again: three runs at most, with the same engine, cluster and arrivals.

    Raises:
        InputError: One of the orders does not go with the batch former.
    """

    def again(**changes: Any) -> SimulationResult:
        return run_simulation(
            replace(config, predictor_noise=0.0, **changes), trace=trace, watch=RunWatch(gaps=None)
        )

    plain: dict[str, Any] = {"policy_parameters": {}, "predictor_delay_s": None}
    return Counterfactuals(
        baseline=again(policy=BASELINE, predictor="none", **plain),
        oracle=again(policy=ORACLE, predictor=None, **plain),
        informed=None if config.prediction_source == "none" else again(predictor=_true_lengths(config)),
    )  # fmt: skip


def _true_lengths(config: SimulationConfig) -> str | None:
    """The predictor that knows: the default of a bound, the oracle for anything else."""
    return None if config.policy == ORACLE else "oracle"


def regret(result: SimulationResult, others: Counterfactuals) -> dict[str, Any]:
    """By latency, for the means over requests, in seconds:

    - `regret_s`: the policy less the oracle.
    - `share`: that over what arrival order costs against the oracle: 0 as good as the oracle, 1 no better than arrival
      order. None where arrival order is no worse than the oracle: there is nothing to gain then.
    - `of_predictions_s`, `of_order_s`: the two parts of `regret_s`: what wrong predictions cost the policy, and what is
      left if it knew the true lengths. None if it reads no predicted lengths.
    - `slower_share`: share of the requests that the oracle would have served faster.

    The oracle is best for the mean time in the system where all lengths are served at one speed. It need not be for the
    other latencies or where batches matter: then a regret can be below 0.

    Args:
        result: The run.
        others: Its counterfactuals.
    """
    known = None if others.informed is None else others.informed.metrics
    found: dict[str, Any] = {}
    for name in REGRETTED:
        mine, best, first = (
            float(one.metrics[name]["mean"]) for one in (result, others.oracle, others.baseline)
        )
        found[name] = parts(mine, best, first, None if known is None else float(known[name]["mean"]))
    found["slower_share"] = _slower_share(result.records, others.oracle.records)
    return found


def parts(policy: float, oracle: float, baseline: float, informed: float | None) -> dict[str, float | None]:
    """`regret` of one mean, from the means of the four runs, in seconds."""
    return {
        "regret_s": policy - oracle,
        "share": (policy - oracle) / (baseline - oracle) if baseline > oracle else None,
        "of_predictions_s": None if informed is None else policy - informed,
        "of_order_s": None if informed is None else informed - oracle,
    }


def _slower_share(mine: Sequence[RequestRecord], best: Sequence[RequestRecord]) -> float:
    by_id = {one.request_id: one.ttlt_s for one in best}
    slower = [one.ttlt_s > by_id[one.request_id] * (1 + 1e-12) for one in mine if one.request_id in by_id]
    return float(np.mean(slower))


def with_regret(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Results of a sweep with `metrics.regret` where the same point and seed was simulated in both other orders too.

    Args:
        results: What `run_cells` returns; `settings.policy` tells the orders apart.
    """
    orders: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for one in results:
        orders.setdefault(_where(one), {})[str(one["settings"].get("policy"))] = one["metrics"]
    told = []
    for one in results:
        others = orders[_where(one)]
        content = dict(one)
        if BASELINE in others and ORACLE in others:
            mine, best, first = one["metrics"], others[ORACLE], others[BASELINE]
            content["metrics"] = {
                **mine,
                "regret": {
                    name: parts(mine[name]["mean"], best[name]["mean"], first[name]["mean"], None)
                    for name in REGRETTED
                },
            }
        told.append(content)
    return told


def _where(result: Mapping[str, Any]) -> tuple[Any, ...]:
    """Everything but the policy, and its parameters."""
    return tuple(
        (name, value)
        for name, value in result["settings"].items()
        if name != "policy" and not name.startswith("policy_parameters")
    )
