"""Last lines of the commands of `simulate`: warnings about their results, and requests that were left out."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from scheduler_core.shell.command import report_left_out
from scheduler_core.simulator.config import SimulationConfig
from scheduler_core.simulator.steady_state import unsteady
from scheduler_core.statistics import MIN_VALUES

logger = logging.getLogger(__name__)


def merged_warnings(results: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The warnings of several simulations by kind (see `run.result_warnings`): the first text of each kind, with the number
    of simulations that have it unless all have the same."""
    merged = {}
    for kind in dict.fromkeys(kind for warnings in results for kind in warnings):
        texts = [warnings[kind] for warnings in results if kind in warnings]
        same = len(texts) == len(results) and len(set(texts)) == 1
        merged[kind] = (
            texts[0] if same else f"{len(texts)} of {len(results)} simulations, the first: {texts[0]}"
        )
    return merged


def seed_warnings(config: SimulationConfig, results: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The warnings of runs that only differ in their seed, from their `metrics` and `warnings`; together they show whether
    there is a steady state."""
    merged = merged_warnings([result.get("warnings", {}) for result in results])
    merged.pop("steady_state", None)
    measures = [measure for result in results if (measure := result["metrics"].get("steady_state"))]
    problem = unsteady(measures, config.trace_repeat)
    return {"steady_state": problem, **merged} if problem else merged


def few_seeds(num: int) -> dict[str, str]:
    """The warning that intervals over so few seeds are hardly meaningful; empty for one seed, which has none."""
    if not 1 < num < MIN_VALUES:
        return {}
    text = f"{num} seeds: intervals over so few are hardly meaningful; use --num_seeds {MIN_VALUES} or more"
    return {"few_seeds": text}


def end_with_warnings(
    warnings: Mapping[str, str],
    metrics: Sequence[Mapping[str, Any]],
    reason: str = "too large for the KV cache or a step",
) -> int:
    """Logs the last lines of a command: the warnings, then how many requests were not finished, failed or were refused, by
    the metrics of all its simulations, and why. Returns the exit code, see `report_left_out`."""
    for warning in warnings.values():
        logger.warning(warning)
    names = ("num_refused", "num_finished", "num_unfinished", "num_failed")
    num_refused, num_finished, num_unfinished, num_failed = (
        sum(one.get(name, 0) for one in metrics) for name in names
    )
    if num_unfinished:
        logger.warning("%d requests were not finished at the end (horizon_s, stop_after)", num_unfinished)
    num_given_up = sum(one["clients"]["num_given_up"] for one in metrics if "clients" in one)
    if num_given_up:
        logger.warning(
            "%d requests were given up by their clients (clients.timeout_s, max_retries); latencies are those of the others",
            num_given_up,
        )
    if num_failed > num_given_up:
        logger.warning(
            "%d requests failed with their replicas (cluster.max_retries, retry_started)",
            num_failed - num_given_up,
        )
    reasons = {reason: num_refused} if num_refused else {}
    return report_left_out(reasons, num_refused + num_finished + num_failed, "requests")
