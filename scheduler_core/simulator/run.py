"""One simulation, from its configuration to its result."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any

import numpy as np

from scheduler_core.batching import BATCH_FORMERS
from scheduler_core.batching.rad import Rad
from scheduler_core.engine.decision_log import DecisionLog
from scheduler_core.errors import InputError
from scheduler_core.policies import policy_class
from scheduler_core.prediction.correction import Correction
from scheduler_core.prediction.predictor import PredictorAddress
from scheduler_core.report.page import format_cell, text_table
from scheduler_core.shell.versions import versions_of
from scheduler_core.simulator.config import BOUNDS, SimulationConfig
from scheduler_core.simulator.latencies import distribution_figure, group_field, latency_curves, latency_table
from scheduler_core.simulator.loop import Simulation
from scheduler_core.simulator.measurements.steps import Region
from scheduler_core.simulator.metrics import predictor_statistics, run_metrics, summary
from scheduler_core.simulator.records import RequestRecord
from scheduler_core.simulator.steady_state import unsteady
from scheduler_core.simulator.step_time import isolated_latency_s, saturation_rate_rps
from scheduler_core.simulator.step_time.roofline import RooflineStepTime
from scheduler_core.simulator.step_time.stability import rad_bounds
from scheduler_core.simulator.trace import Trace, TraceRequest, load_trace, waits_for
from scheduler_core.simulator.trace_predictions import (
    Predictions,
    Progress,
    fetch_predictions,
    oracle_predictions,
    trace_predictions,
)
from scheduler_core.simulator.watch import RunWatch
from scheduler_core.simulator.workloads.arrivals import check_rate

SCHEMA = "tailcast.simulation/5"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Result of one run.

    Attributes:
        config, versions: The resolved configuration; versions of tailcast, Python and numpy.
        trace: Source, hash, number of requests and mean arrival rate of the trace.
        metrics: See `metrics.run_metrics`; with several replicas also `cluster`: migrations and scaling; with
            clients that give up `clients`.
        predictor: See `metrics.predictor_statistics`; with online calibration also `online_calibration`:
            `Correction.metrics` by served model.
        records, refused, failed: Requests in the order of their end; reasons of the others by id.
        unserved: The rows of the others, with their actual arrivals.
        watch: Gaps between tokens, KV cache usage, and every step if requested.
        warnings: What may mislead in this result, as sentences by kind: see `result_warnings`.
    """

    config: dict[str, Any]
    versions: dict[str, str]
    trace: dict[str, Any]
    metrics: dict[str, Any]
    predictor: dict[str, Any]
    records: list[RequestRecord]
    refused: dict[str, str]
    failed: dict[str, str]
    unserved: list[TraceRequest]
    watch: RunWatch
    warnings: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """All fields except records, unserved and watch, as JSON content."""
        names = ("config", "versions", "trace", "metrics", "predictor", "refused", "failed", "warnings")
        return {"schema": SCHEMA, **{name: getattr(self, name) for name in names}}

    def table(self) -> str:
        """Latencies in seconds (slowdown: a ratio) as a text table, one row per latency; and with targets a second one, of the
        fraction of requests that met theirs and of their number per second, by SLO class."""
        latencies = text_table(*latency_table(self.metrics))
        if self.metrics["slo_attainment"] is None:
            return latencies
        classes = {"all requests": self.metrics} | self.metrics["groups"]["slo"]
        names = ("num_finished", "slo_attainment", "goodput_rps")
        rows = [[key or "no target", *map(values.get, names)] for key, values in classes.items()]
        return latencies + "\n\n" + text_table(["targets", "finished", "met", "goodput, requests/s"], rows)

    def plot(self) -> Any:
        """A `matplotlib.figure.Figure` of the distribution functions of TTFT, TBT and TTLT, by tier, tenant or category if
        there are several; needs matplotlib. `InputError` if the requests of the result were dropped, as in a sweep."""
        if not self.records:
            raise InputError("records", 0, "at least one finished request")
        field = group_field(self.metrics)
        figure, axes = distribution_figure(latency_curves(self.records, self.watch.gaps, field))
        if field is not None:
            axes[0].legend(frameon=False, fontsize=8)
        return figure

    def __str__(self) -> str:
        return "\n".join(
            [self._summary(), self.table(), *(f"Warning: {text}" for text in self.warnings.values())]
        )

    def _repr_html_(self) -> str:
        header, rows = latency_table(self.metrics)
        lines = [header, *([format_cell(cell) for cell in row] for row in rows)]
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
        notes = "".join(f"<p>Warning: {escape(text)}</p>" for text in self.warnings.values())
        return f"<div><p>{escape(self._summary())}</p><table>{body}</table>{notes}</div>"

    def _summary(self) -> str:
        num, refused, failed = (self.metrics[name] for name in ("num_finished", "num_refused", "num_failed"))
        failed = f", {failed} failed" if failed else ""
        source = f" of {self.trace['source']}" if self.trace["source"] else ""
        return f"{self.config['policy']}: {num} requests{source} finished, {refused} refused{failed}; latencies in seconds"


def prepare_trace(config: SimulationConfig) -> Trace:
    """Reads or draws the requests, at the rate or load of the configuration."""
    workload, rate = config.workload, config.rate
    if workload is None:
        assert config.trace is not None
        need_arrivals = rate is None and config.load is None
        trace = load_trace(
            config.trace,
            need_arrivals=need_arrivals,
            default_max_tokens=config.default_max_tokens,
        )
        if config.repeat > 1:
            trace = trace.repeated(config.repeat)
    elif rate is None:
        trace = workload.trace(config.seed)
    if config.load is not None:
        # Lengths do not depend on the rate, so any rate can be used to compute the load.
        rate = config.load * _saturation_rate_rps(config, trace)
    elif rate is None:
        return trace
    num_requests = len(trace) if workload is None else workload.num_requests
    check_rate("rate" if config.load is None else "load, as a rate", rate, num_requests)
    if workload is None:
        return trace.with_poisson_arrivals(rate, np.random.default_rng(config.seed))
    return replace(workload, arrivals=replace(workload.arrivals, rate_rps=rate)).trace(config.seed)


def _saturation_rate_rps(config: SimulationConfig, trace: Trace) -> float:
    """Saturation rate of all replicas together."""
    rate = saturation_rate_rps(trace, config.limits, config.make_step_time())
    return rate * config.cluster.num_replicas


def _with_cycle_length(config: SimulationConfig, trace: Trace) -> SimulationConfig:
    """The configuration with the requests per cycle of RAD's theorem 2 for the trace, if it has none."""
    limits = config.scheduler
    if not issubclass(BATCH_FORMERS[limits.batching], Rad) or "n" in limits.batching_parameters:
        return config
    num = rad_bounds(trace, limits, config.make_step_time()).num_per_cycle
    parameters = {**limits.batching_parameters, "n": num}
    return replace(config, scheduler=replace(limits, batching_parameters=parameters))


def prepare_predictions(
    config: SimulationConfig, trace: Trace, progress: Progress | None = None
) -> Predictions:
    """Predictions for every request, from the source in the configuration."""
    source = config.prediction_source
    if source == "none":
        return Predictions()
    if source == "trace":
        return trace_predictions(trace)
    if source == "oracle":
        return oracle_predictions(trace, config.predictor_noise, np.random.default_rng([config.seed, 2]))
    PredictorAddress.of(source, others="none, trace, oracle, ")
    return fetch_predictions(
        trace, source, access=config, served_model=config.served_model, progress=progress
    )


def run_simulation(
    config: SimulationConfig,
    *,
    trace: Trace | None = None,
    predictions: Predictions | None = None,
    log: DecisionLog | None = None,
    progress: Callable[[int], None] | None = None,
    watch: RunWatch | None = None,
    is_decided: Callable[[RequestRecord | TraceRequest], bool] | None = None,
) -> SimulationResult:
    """Simulates one policy until every request has finished.

    To compare policies with the same arrivals and predictions, call `prepare_trace` and `prepare_predictions`
    once and pass the results to every run.

    Args:
        trace: Requests with their arrivals; None: `prepare_trace(config)`.
        predictions: None: `prepare_predictions(config, trace)`, as always for references such as sjf.
        log: Records all decisions; only for one replica.
        progress: Called with the number of requests that ended since the last call.
        watch: Observes the run; None: gaps between tokens and KV cache usage.
        is_decided: Called with each request that finished or was given up; the run ends when it returns True, see `Simulation`.

    Raises:
        TailcastError: The configuration or trace is invalid, no request fits into the engine, or calls to the
            predictor fail.
    """
    cluster = config.cluster
    fails = cluster.failure_plan is not None
    if log is not None and (cluster.num_replicas > 1 or fails):
        allowed = "one replica without failures, with a decision log"
        raise InputError("decisions", cluster.num_replicas, allowed)
    config = replace(config, scheduler=config.limits)
    if trace is None:
        trace = prepare_trace(config)
    config = _with_cycle_length(config, trace)
    if predictions is None or config.policy in BOUNDS:
        predictions = prepare_predictions(config, trace)
    watch = watch or RunWatch()
    delayed = predictions
    if config.predictor_delay_s is not None:
        delays = dict.fromkeys(predictions.by_id, config.predictor_delay_s)
        delayed = replace(predictions, latency_s=delays)
    schedulers = {name: config.make_scheduler(log) for name in cluster.replica_ids}
    step_time = config.make_step_time()
    calibration = Correction() if config.online_calibration else None
    outcome = Simulation(
        trace,
        schedulers,
        step_time,
        delayed,
        horizon_s=config.horizon_s,
        stop_after=config.stop_after,
        is_decided=is_decided,
        exact_steps=config.exact_steps,
        calibration=calibration,
        served_model=config.served_model,
        watch=watch,
        progress=progress,
        clients=config.clients,
        **cluster.simulation_arguments(config.seed, step_time),
    ).run()
    if not outcome.records:
        if outcome.refused:
            reason = next(iter(outcome.refused.values()))
            raise InputError(
                "trace", f"{len(trace)} requests, none of which fits: {reason}", "a larger KV cache"
            )
        reason = next(iter(outcome.failed.values()), "the end was earlier")
        allowed = "a later horizon_s, a longer clients.timeout_s, or fewer cluster.failures"
        raise InputError("trace", f"{len(trace)} requests, none of which finished: {reason}", allowed)
    for record in outcome.records:
        record.max_tbt_s = watch.gaps.longest_s.get(record.request_id)
    isolated = {
        row.request_id: isolated_latency_s(row, config.scheduler, step_time) for row in trace.requests
    }
    metrics = run_metrics(outcome, schedulers, watch, isolated)
    if cluster.num_replicas > 1 or fails:
        metrics["cluster"] = {
            "num_migrations": outcome.num_migrations,
            "num_migrated_blocks": outcome.num_migrated_blocks,
            "migration_pause_s": summary(outcome.migration_pauses_s),
            "aborted_migrations": {reason.value: num for reason, num in outcome.aborted_migrations.items()},
            "num_scalings": len(outcome.scaling),
            "num_failures": outcome.num_failures,
            "num_killed": outcome.num_killed,
            "num_retried": outcome.num_retried,
            "num_retries": outcome.num_retries,
            "num_lost_tokens": outcome.num_lost_tokens,
        }
    predictor = predictor_statistics(predictions, schedulers)
    if config.clients.timeout_s is not None:
        metrics["clients"] = {
            "num_given_up": outcome.num_given_up,
            "num_retries": outcome.num_client_retries,
            "num_aborted_tokens": outcome.num_aborted_tokens,
        }
    warnings = result_warnings(config, trace, metrics, predictor, outcome.records)
    if calibration is not None:
        predictor["online_calibration"] = {
            name: calibration.metrics(name) for name in calibration.served_models
        }
    return SimulationResult(
        config=asdict(config) | {"policy": config.policy_name, "predictor": predictions.source},
        versions=versions_of(("numpy",)),
        trace={
            "source": trace.source,
            "sha256": trace.sha256,
            "num_requests": len(trace),
            "arrival_rate_rps": trace.mean_rate_rps,
            "saturation_rate_rps": _saturation_rate_rps(config, trace),
        },
        metrics=metrics,
        predictor=predictor,
        records=outcome.records,
        refused=outcome.refused,
        failed=outcome.failed,
        unserved=outcome.unserved,
        watch=watch,
        warnings=warnings,
    )


def result_warnings(
    config: SimulationConfig,
    trace: Trace,
    metrics: Mapping[str, Any],
    predictor: Mapping[str, Any],
    records: Sequence[RequestRecord],
) -> dict[str, str]:
    """What may mislead in the result of a run, as sentences by kind.

    - trace: what of its source is not in it, see `Trace.problem`.
    - closed_loop: agents had no more turns before the horizon, so that fewer sessions competed.
    - kv_cache: it is larger than the memory of the device of a roofline.
    - region: steps are larger than those to which the step times are fitted.
    - tiers: the router orders by tier and the replicas' queues do not; headroom without targets that it could adapt to.
    - steady_state: see `unsteady`.
    - predictions: requests without one although there is a predictor.
    """
    warnings: dict[str, str | None] = {"trace": trace.problem}
    if config.horizon_s is not None and config.workload is not None and config.workload.agents is not None:
        awaited = {name for names in waits_for(trace.requests).values() for name in names}
        if any(record.request_id not in awaited for record in records):
            warnings["closed_loop"] = (
                "some agents had no more turns before horizon_s; use more workload.num_requests"
            )
    warnings["kv_cache"] = _kv_cache_problem(config)
    warnings["region"] = _extrapolation(config, metrics, records)
    warnings["tiers"] = _tiers_problem(config, records)
    warnings["steady_state"] = unsteady([metrics["steady_state"]], config.trace_repeat)
    num, parts = len(trace), []
    if predictor["num_without_prompt"]:
        parts.append(
            f"{predictor['num_without_prompt']} of {num} requests have no prompt and were simulated with an unknown length"
        )
    if predictor["num_failed"]:
        reason = predictor["first_error"] or "no mu, sigma and nu in the trace"
        parts.append(f"{predictor['num_failed']} of {num} predictions failed ({reason})")
    if predictor["num_partial"]:
        parts.append(
            f"{predictor['num_partial']} of {num} predictions lack a part ({predictor['first_error']})"
        )
    warnings["predictions"] = "; ".join(parts)
    return {kind: text for kind, text in warnings.items() if text}


def _extrapolation(
    config: SimulationConfig, metrics: Mapping[str, Any], records: Sequence[RequestRecord]
) -> str | None:
    """Says that steps were larger than those measured by `simulate calibrate`, from the most requests of a replica at a time."""
    if not isinstance(config.step_time_parameters, str):
        return None
    region, limits = Region.of_file(config.step_time_parameters), config.scheduler
    if region is None or not records:
        return None
    at_once = {}
    for name in {record.replica_id for record in records}:
        own = [record for record in records if record.replica_id == name]
        times = np.array([record.first_scheduled_s for record in own] + [record.finish_s for record in own])
        changes = np.repeat([1, -1], len(own))[np.lexsort((np.repeat([1, 0], len(own)), times))]
        at_once[name] = int(np.cumsum(changes).max())
    prompt = max(record.prompt_tokens for record in records)
    largest = {
        "decodes": min(max(at_once.values()), limits.max_num_seqs),
        "context_tokens": metrics["peak_kv_usage"] * limits.capacity_blocks * limits.kv_block_tokens,
        "prefill_tokens": min(prompt, limits.max_num_batched_tokens),
    }
    return region.exceeded(largest)


def _kv_cache_problem(config: SimulationConfig) -> str | None:
    """Says that the KV cache does not fit into the memory of the simulated device, whose step times are used."""
    step_time, scheduler = config.make_step_time(), config.scheduler
    if not isinstance(step_time, RooflineStepTime):
        return None
    block = scheduler.kv_block_tokens
    fitting = step_time.num_kv_blocks(block, scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    if scheduler.capacity_blocks <= fitting:
        return None
    devices = f"{step_time.num_devices} x {step_time.gpu} with the weights of {step_time.model}"
    return (
        f"the KV cache of {scheduler.capacity_blocks * block} tokens does not fit: {devices} have memory for "
        f"{fitting * block}; use --scheduler.num_kv_blocks {fitting}"
    )


def _tiers_problem(config: SimulationConfig, records: Sequence[RequestRecord]) -> str | None:
    """Says that a part of multi-tier Llumnix has no effect."""
    cluster = config.cluster
    if cluster.router != "llumnix" or cluster.num_replicas == 1:
        return None
    has_tiers = len({record.tier for record in records}) > 1
    if has_tiers and "tier" not in policy_class(config.order_policy).inputs:
        return (
            f"router llumnix dispatches by tier, but policy {config.policy_name} orders the queue of each replica without "
            "tiers, so urgent requests wait behind others; leave policy unset, or use llumlet"
        )
    if cluster.headroom_window_s is not None and all(record.ttft_slo_s is None for record in records):
        return "the headroom did not adapt, because no request has ttft_slo_s; see workload.classes"
    return None
