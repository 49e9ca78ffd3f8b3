"""`simulate calibrate`: fits step times to measurements of an engine, with their errors and missing points."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.policies import make_policy
from scheduler_core.ranges import FINITE, POSITIVE, check_choice, check_ranges
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.shell.command import CHECK_FAILED, report_left_out
from scheduler_core.shell.files import writable_target, write_json
from scheduler_core.shell.progress import progress_bar
from scheduler_core.simulator.engine_probe import Endpoint, Probe, random_prompt, send
from scheduler_core.simulator.loop import Simulation
from scheduler_core.simulator.measurements.fit import PARAMETERS, StepTimeFit, fit_step_time, validated_fit
from scheduler_core.simulator.measurements.prometheus import watch_metrics
from scheduler_core.simulator.measurements.requests import request_measurements
from scheduler_core.simulator.measurements.sources import MeasurementSource, metrics_source, read_sources
from scheduler_core.simulator.measurements.steps import Region, StepMeasurement, missing_points
from scheduler_core.simulator.records import RequestRecord
from scheduler_core.simulator.step_time import make_step_time
from scheduler_core.simulator.step_time.base import StepTime
from scheduler_core.simulator.trace import MAX_TIME_S, Trace, TraceRequest
from scheduler_core.simulator.trace_predictions import Predictions

logger = logging.getLogger(__name__)

SCHEMA = "tailcast.calibration/1"
#: Each load is measured in so many parts, alternately with the other, so that a slowdown of the machine affects both.
ROUNDS = 3
#: Models with the delays of requests beside their steps, see `EngineDelays`.
DELAYED = frozenset({"linear", "roofline"})


@dataclass(frozen=True, kw_only=True)
class EngineCalibrationConfig:
    """Fit step times to measurements of an engine: what it or its clients have written, or a load that this command sends.

    With several files of requests, each is predicted from the others. Give one source: measurements, metrics_url, or url.
    """

    INPUTS = ("measurements",)
    OUTPUTS = ("json",)

    json: str
    """Path of the result: the model with its parameters for simulate run, its errors, and what it was measured on."""
    overwrite: bool = False
    """Replace existing output files."""
    measurements: list[str] = field(default_factory=list)
    """Files, recognized by their content: results of vllm bench serve --save-detailed (one for each rate); the feedback log of
    tailcast-proxy in front of one engine, or its folder; the log of vLLM's server, best with --enable-logging-iteration-details; two or more scrapes
    of its /metrics, in one file or several; a range query of Prometheus for {__name__=~"vllm:.*"} (JSON)."""
    metrics_url: str | None = None
    """Address of /metrics of a running vLLM, which is scraped for duration_s."""
    duration_s: float = 300.0
    """metrics_url: seconds of the measurement."""
    interval_s: float = 10.0
    """metrics_url: seconds between two scrapes."""
    url: str | None = None
    """Base address of an engine with an OpenAI-compatible API, such as http://127.0.0.1:8000/v1, to which two loads are sent:
    the fitted model of the first predicts the second. The API key is read from the environment variable OPENAI_API_KEY."""
    served_model: str | None = None
    """url: name of the served model."""
    timeout_s: float = 60.0
    """Seconds without data after which a response has failed."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """url: further fields of each request; {ignore_eos: true} makes vLLM generate max_tokens tokens."""
    rate: float = 1.0
    """url: requests per second of the load to which the model is fitted."""
    held_out_rate: float = 2.0
    """url: requests per second of the load that the fitted model predicts."""
    num_requests: int = 60
    """url: number of requests of each load."""
    prompt_words: tuple[int, int] = (8, 512)
    """url: minimum and maximum length of prompts in words (about as many tokens), log-uniformly distributed."""
    output_tokens: tuple[int, int] = (8, 128)
    """url: minimum and maximum of max_tokens, log-uniformly distributed."""
    seed: int = 0
    """url: seed of prompts and arrivals."""
    step_time_model: str = "linear"
    """Model to fit: linear, quadratic, staircase, or roofline (its efficiencies and time per layer)."""
    step_time_parameters: dict[str, Any] = field(default_factory=dict)
    """Parameters that are not fitted, such as {model: llama-3-8b, gpu: h100-80gb} for roofline."""
    max_error: float = 0.2
    """Largest relative error; beyond it the command ends with exit code 3. It is compared with the median error of held-out
    steps, the median bias of each kind of steps, and the error of the mean TTLT of held-out requests."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """Limits of the measured engine, as configured at its start."""

    def __post_init__(self) -> None:
        sources = [name for name in ("measurements", "metrics_url", "url") if getattr(self, name)]
        if len(sources) != 1:
            raise InputError("measurements, metrics_url, url", sources, "one of them")
        positive = ("rate", "held_out_rate", "timeout_s", "max_error")
        check_ranges(self, num_requests=(10, 1_000_000), **dict.fromkeys(positive, (POSITIVE, FINITE)))
        check_ranges(self, interval_s=(0.001, MAX_TIME_S), duration_s=(self.interval_s, MAX_TIME_S))
        for name in ("prompt_words", "output_tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise InputError(name, (low, high), "two integers > 0 in ascending order")
        check_choice("step_time_model", self.step_time_model, PARAMETERS)
        if self.url is not None:
            self.endpoint()

    def endpoint(self) -> Endpoint:
        """The live engine; `InputError` without a served model, or if the address is not one."""
        if not self.served_model:
            raise InputError("served_model", self.served_model, "the name of the served model, with url")
        return Endpoint(
            url=str(self.url),
            served_model=self.served_model,
            timeout_s=self.timeout_s,
            extra_body=self.extra_body,
        )


def run(config: EngineCalibrationConfig) -> int:
    """Runs `simulate calibrate`; the exit code is 3 if an error is too large, or most of the input was left out."""
    target = writable_target(config.json, "json")
    if config.url is not None:
        with progress_bar(2 * config.num_requests, "req", enabled=None, desc="measuring") as bar:
            api_key = os.environ.get("OPENAI_API_KEY")
            sources = probe_engine(config, api_key=api_key, progress=bar.update)
        result = calibrate(config, sources[:1], sources[1:])
    elif config.metrics_url is not None:
        logger.info("scraping %s for %g s", config.metrics_url, config.duration_s)
        url, timeout_s = config.metrics_url, config.timeout_s
        scrapes = watch_metrics(url, config.duration_s, config.interval_s, timeout_s)
        sources = [metrics_source(scrapes, config.scheduler)]
        result = calibrate(config, sources)
    else:
        sources = read_sources(config.measurements, config.scheduler)
        result = calibrate(config, sources)
    write_json(target, {"schema": SCHEMA, **result})
    for name, text in result["summary"].items():
        logger.info("%s: %s", name, text)
    for kind, text in result["warnings"].items():
        logger.log(logging.ERROR if kind.startswith("error") else logging.WARNING, "%s", text)
    left_out: Counter[str] = sum((source.left_out for source in sources), Counter())
    code = report_left_out(left_out, sum(source.num_rows for source in sources), "rows")
    return CHECK_FAILED if any(kind.startswith("error") for kind in result["warnings"]) else code


def calibrate(
    config: EngineCalibrationConfig,
    sources: Sequence[MeasurementSource],
    held_out: Sequence[MeasurementSource] = (),
) -> dict[str, Any]:
    """Fits the model to the steps of the sources, and predicts the requests of each source that has them.

    Requests of `held_out` are predicted by the fit, and those of a source by a fit to the others, if there are others.
    The result has `step_time` (name and parameters, for `make_step_time`), `intervals`, `num_steps`, `num_outliers`,
    `median_step_error`, `held_out_step_errors` (see `validated_fit`), `biases`, `region`, `kv_tokens` (size of the KV cache, if it is known), `loads` (`latency_error` of each
    source with requests, with its name, and whether it is held out), `summary`, `warnings` by kind, and `config`. Errors
    beyond `max_error` are warnings whose kind begins with "error".
    """
    limits = config.scheduler
    fit = validated_fit(_steps_of(sources), config.step_time_model, config.step_time_parameters)
    parameters = fit.parameters | fitted_delays(config, sources, fit.parameters)
    step_time = make_step_time(fit.name, parameters)
    region = Region.of(_steps_of(sources))
    loads = [load_error(source, step_time, limits) | {"held_out": True} for source in held_out]
    for source in sources:
        if source.probes and source.measurements:
            own, is_held_out = step_time, False
            with suppress(InputError):  # the others have too few steps
                own, is_held_out = fit_to(config, [other for other in sources if other is not source]), True
            loads.append(load_error(source, own, limits) | {"held_out": is_held_out})
    kv_tokens = max((source.kv_tokens or 0 for source in sources), default=0) or None
    result = {
        "config": asdict(config),
        "step_time": {"name": fit.name, "parameters": parameters},
        "intervals": fit.intervals,
        "num_steps": fit.num_samples,
        "num_outliers": fit.num_outliers,
        "median_step_error": fit.median_error,
        "held_out_step_errors": fit.held_out_errors,
        "biases": fit.biases,
        "region": region.to_json(),
        "kv_tokens": kv_tokens,
        "loads": loads,
    }
    return result | {
        "summary": _summary(fit, parameters, region, loads),
        "warnings": _problems(fit, loads, config) | missing_points(region, limits, kv_tokens),
    }


def _steps_of(sources: Sequence[MeasurementSource]) -> list[StepMeasurement]:
    return [step for source in sources for step in source.measurements]


def fit_to(config: EngineCalibrationConfig, sources: Sequence[MeasurementSource]) -> StepTime:
    """The model fitted to some sources, with the delays of their requests."""
    fit = fit_step_time(_steps_of(sources), config.step_time_model, config.step_time_parameters)
    return make_step_time(fit.name, fit.parameters | fitted_delays(config, sources, fit.parameters))


def fitted_delays(
    config: EngineCalibrationConfig, sources: Sequence[MeasurementSource], parameters: Mapping[str, Any]
) -> dict[str, Any]:
    """The parameters `frontend_s` and `async_scheduling` with which the simulation has the most similar times to the first
    token, for requests that only wait for the next steps, or the half that waits least. At which time of a step a request
    comes differs between simulation and engine, so that a limit within a step would select short waits of the simulation
    only. Empty without requests, for a model that has no delays, and if the configuration has one of them."""
    names, name = ("frontend_s", "async_scheduling"), config.step_time_model
    probes = [_complete(source.probes) for source in sources if source.probes]
    if name not in DELAYED or not any(probes) or any(one in config.step_time_parameters for one in names):
        return {}
    longest_s = max([step.duration_s for step in _steps_of(sources)], default=0.0)
    choices = []
    for is_ahead in (False, True):
        step_time = make_step_time(name, {**parameters, "frontend_s": 0.0, "async_scheduling": is_ahead})
        rows = []
        for part in filter(None, probes):
            records = _simulated(part, step_time, config.scheduler)
            for probe, record in zip(part, records, strict=True):
                waited_s = record.first_scheduled_s - record.arrival_s
                simulated_s = record.first_token_s - record.arrival_s
                rows.append((waited_s, probe.token_s[0] - probe.sent_s - simulated_s))
        waited, missing = np.array(rows).T
        missing = missing[waited <= max(2 * longest_s, float(np.median(waited)))]
        frontend_s = max(float(np.median(missing)), 0.0)
        choices.append((float(np.abs(missing - frontend_s).mean()), frontend_s, is_ahead))
    _, frontend_s, is_ahead = min(choices)
    return {"frontend_s": frontend_s, "async_scheduling": is_ahead}


def _summary(
    fit: StepTimeFit, all_parameters: Mapping[str, Any], region: Region, loads: Sequence[dict[str, Any]]
) -> dict[str, str]:
    """What a person should read of a fit, by name."""
    parameters = ", ".join(
        f"{name} {fit.parameters[name]:.3g} ({low:.3g} to {high:.3g})"
        for name, (low, high) in fit.intervals.items()
    )
    if "frontend_s" in all_parameters and "frontend_s" not in fit.parameters:
        ahead = "ahead" if all_parameters["async_scheduling"] else "not ahead"
        parameters += f"; frontend_s {all_parameters['frontend_s']:.3g}, steps planned {ahead}"
    errors = {name: 100 * value for name, value in fit.held_out_errors.items()}
    ranges = ", ".join(f"{name} {low:,.0f} to {high:,.0f}" for name, (low, high) in region.to_json().items())
    summary = {
        f"{fit.name} (95 % intervals)": parameters,
        "held-out steps": f"median error {errors['median']:.1f} %, P90 {errors['p90']:.1f} %, of {fit.num_samples}",
        "measured region, per step": ranges,
    }
    for load in loads:
        parts = [f"{name} {100 * value:+.1f} %" for name, value in load["error"].items()]
        kind = "held out" if load["held_out"] else "fitted"
        summary[f"{load['name']} ({kind}), errors of means"] = ", ".join(parts)
    return summary


def _problems(
    fit: StepTimeFit, loads: Sequence[dict[str, Any]], config: EngineCalibrationConfig
) -> dict[str, str]:
    """The errors that are too large, as sentences by kind."""
    limit, problems = config.max_error, {}
    advice = (
        f"more than {100 * limit:g} %: a {fit.name} model does not describe this engine; check --scheduler.*, or fit another "
        "--step_time_model"
    )
    if not fit.held_out_errors["median"] <= limit:
        problems["error_steps"] = (
            f"the median error of held-out steps is {100 * fit.held_out_errors['median']:.0f} %, {advice}"
        )
    kind, bias = max(fit.biases.items(), key=lambda item: abs(item[1]), default=("", 0.0))
    if not abs(bias) <= limit:
        problems["error_kind"] = f"steps with {kind} are predicted {100 * bias:+.0f} % off, {advice}"
    for load in loads:
        error = load["error"].get("ttlt_s", math.inf)
        if not abs(error) <= limit:
            problems[f"error_{load['name']}"] = (
                f"the mean TTLT of {load['name']} is predicted {100 * error:+.0f} % off, {advice}, unless its speed changed"
            )
    return problems


def probe_engine(
    config: EngineCalibrationConfig,
    *,
    api_key: str | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[MeasurementSource]:
    """Sends both loads alternately to the live engine: the sources of the first and the held-out load."""
    endpoint = config.endpoint()
    generators = [np.random.default_rng([config.seed, number]) for number in range(2)]
    start_s = time.perf_counter()
    rates = config.rate, config.held_out_rate
    pairs: list[tuple[list[Probe], float, np.random.Generator]] = [
        ([], rate, rng) for rate, rng in zip(rates, generators, strict=True)
    ]
    for index in range(ROUNDS):
        for probes, rate, rng in pairs:
            part = draw_probes(config, rate, index, rng)
            send(endpoint, part, start_s, api_key=api_key, progress=progress)
            probes += part
    sources = []
    for probes, rate, _ in pairs:
        steps, left_out = request_measurements(probes, config.scheduler.max_num_batched_tokens)
        sources.append(MeasurementSource(f"{rate:g} requests/s", steps, probes, left_out))
    return sources


def draw_probes(
    config: EngineCalibrationConfig, rate: float, index: int, rng: np.random.Generator
) -> list[Probe]:
    """The requests of one round, with Poisson arrivals."""
    first, last = (config.num_requests * bound // ROUNDS for bound in (index, index + 1))
    arrivals = np.cumsum(rng.exponential(1 / rate, last - first)).tolist()
    words, max_tokens = (
        np.rint(np.exp(rng.uniform(math.log(low), math.log(high), last - first))).astype(int).tolist()
        for low, high in (config.prompt_words, config.output_tokens)
    )
    return [
        Probe(request_id=f"r{number}", arrival_s=at_s, prompt=random_prompt(num_words, rng), max_tokens=limit)
        for number, at_s, num_words, limit in zip(
            range(first, last), arrivals, words, max_tokens, strict=True
        )
    ]


def load_error(source: MeasurementSource, step_time: StepTime, limits: SchedulerConfig) -> dict[str, Any]:
    """`latency_error` of a source, with its name."""
    return {"name": source.name} | latency_error(source.probes, step_time, limits)


def latency_error(responses: Sequence[Probe], step_time: StepTime, limits: SchedulerConfig) -> dict[str, Any]:
    """Simulates the measured requests with their arrivals under FCFS. `TailcastError` if the configured
    limits are too small for a request that the engine has served.

    The result has `num_requests` (successful) and `num_failed` (left out); the means of ttft_s, ttlt_s and
    tpot_s in seconds, `measured` and `simulated`; and `error`: (simulated - measured) / measured.
    """
    complete = _complete(responses)
    records = _simulated(complete, step_time, limits)
    measured = _means([(p.sent_s, p.token_s[0], p.token_s[-1], p.output_tokens) for p in complete])
    simulated = _means([(r.arrival_s, r.first_token_s, r.finish_s, r.output_tokens) for r in records])
    return {
        "num_requests": len(complete),
        "num_failed": len(responses) - len(complete),
        "measured": measured,
        "simulated": simulated,
        "error": {name: (simulated[name] - value) / value for name, value in measured.items() if value > 0},
    }


def _complete(responses: Sequence[Probe]) -> list[Probe]:
    """The successful requests in the order of arrival."""
    return sorted((one for one in responses if one.error is None), key=lambda one: one.sent_s)


def _simulated(probes: Sequence[Probe], step_time: StepTime, limits: SchedulerConfig) -> list[RequestRecord]:
    """The records of simulated requests, in their order. `TailcastError` if a request is refused."""
    rows = tuple(
        TraceRequest(
            request_id=str(number),
            arrival_s=probe.sent_s,
            prompt_tokens=max(probe.prompt_tokens, 1),
            output_tokens=probe.output_tokens,
            max_tokens=max(probe.max_tokens, probe.output_tokens),
        )
        for number, probe in enumerate(probes)
    )
    scheduler = Scheduler(limits, make_policy("fcfs"))
    outcome = Simulation(Trace(rows), scheduler, step_time, Predictions()).run()
    if outcome.refused:
        reason = next(iter(outcome.refused.values()))
        raise TailcastError(f"scheduler: these are not the engine's limits: {reason}")
    return sorted(outcome.records, key=lambda record: int(record.request_id))


def _means(rows: Sequence[tuple[float, float, float, int]]) -> dict[str, float]:
    """Mean latencies; rows are arrival, first and last token in seconds, and number of tokens."""
    arrival_s, first_s, last_s, tokens = np.array(rows, float).T
    several = tokens > 1
    gaps = (last_s - first_s)[several] / (tokens[several] - 1)
    tpot_s = float(gaps.mean()) if len(gaps) else math.nan
    ttft_s, ttlt_s = float((first_s - arrival_s).mean()), float((last_s - arrival_s).mean())
    return {"ttft_s": ttft_s, "ttlt_s": ttlt_s, "tpot_s": tpot_s}
