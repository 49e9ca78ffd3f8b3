"""`simulate calibrate`: fits linear step times to a live engine, and validates it on another load."""

from __future__ import annotations

import logging
import math
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from scheduler_core.engine.plan import PrefillChunk
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.policies import make_policy
from scheduler_core.ranges import FINITE, POSITIVE, check_ranges
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.shell.command import CHECK_FAILED, report_left_out
from scheduler_core.shell.files import writable_target, write_json
from scheduler_core.shell.progress import progress_bar
from scheduler_core.simulator.engine_probe import Endpoint, Probe, random_prompt, send
from scheduler_core.simulator.loop import Simulation
from scheduler_core.simulator.step_time.base import LinearStepTime, StepTime, StepWork
from scheduler_core.simulator.trace import Trace, TraceRequest
from scheduler_core.simulator.trace_predictions import Predictions

logger = logging.getLogger(__name__)

SCHEMA = "tailcast.calibration/1"
#: Steps whose relative error exceeds this multiple of the median error are outliers and left out.
OUTLIER = 5.0
#: Fitted parameters of `LinearStepTime`.
PARAMETERS = ("base_s", "per_prefill_token_s", "per_decode_s", "per_context_token_s")
#: Each load is measured in so many parts, alternately with the other, so that a slowdown of the machine affects both.
ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class EngineCalibrationConfig(Endpoint):
    """Measure a live OpenAI-compatible engine at one load, fit step times, and predict another load.

    The API key is read from the environment variable OPENAI_API_KEY.
    """

    OUTPUTS = ("json",)

    json: str
    """Path of the result: the model with its parameters for simulate run, and the errors on both loads."""
    overwrite: bool = False
    """Replace existing output files."""
    rate: float = 1.0
    """Requests per second of the load to which the model is fitted."""
    held_out_rate: float = 2.0
    """Requests per second of the load that the fitted model predicts."""
    num_requests: int = 60
    """Number of requests of each load."""
    prompt_words: tuple[int, int] = (8, 512)
    """Minimum and maximum length of prompts in words (about as many tokens), log-uniformly distributed."""
    output_tokens: tuple[int, int] = (8, 128)
    """Minimum and maximum of max_tokens, log-uniformly distributed."""
    seed: int = 0
    """Seed of prompts and arrivals."""
    max_error: float = 0.3
    """Largest relative error of the mean TTLT of the held-out load; beyond it the command ends with an error and exit code 3."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """Limits of the measured engine, as configured at its start."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = dict.fromkeys(("rate", "held_out_rate", "timeout_s", "max_error"), (POSITIVE, FINITE))
        check_ranges(self, num_requests=(10, 1_000_000), **positive)
        for name in ("prompt_words", "output_tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise InputError(name, (low, high), "two integers > 0 in ascending order")


def run(config: EngineCalibrationConfig) -> int:
    """Runs `simulate calibrate`; the exit code is 3 if the held-out error is too large, or most requests failed."""
    target = writable_target(config.json, "json")
    with progress_bar(2 * config.num_requests, "req", enabled=None, desc="measuring") as bar:
        api_key = os.environ.get("OPENAI_API_KEY")
        result = run_calibration(config, api_key=api_key, progress=bar.update)
    error = result["held_out"]["error"].get("ttlt_s", math.inf)
    text = f"error of the mean ttlt of the held-out load {100 * error:+.1f} %"
    warnings = {}
    if not abs(error) <= config.max_error:
        warnings["held_out_error"] = (
            f"{text}, more than {100 * config.max_error:g} %: these step times do not describe the engine; check the limits "
            "--scheduler.*, use more requests, or rates nearer to those to simulate"
        )
    write_json(target, {"schema": SCHEMA, **result, "warnings": warnings})
    if warnings:
        logger.error(warnings["held_out_error"])
    else:
        logger.info(text)
    loads = [result["fitted"], result["held_out"]]
    num_failed, num = (sum(load[name] for load in loads) for name in ("num_failed", "num_requests"))
    reasons = {result["first_failure"] or "": num_failed} if num_failed else {}
    code = report_left_out(reasons, num + num_failed, "requests")
    return CHECK_FAILED if warnings else code


def run_calibration(
    config: EngineCalibrationConfig,
    *,
    api_key: str | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Measures both loads alternately, and fits the model to the first.

    The result has `step_time` (name and parameters, for `make_step_time`), `num_steps` and `num_outliers`
    (measured steps, and those left out of the fit), `median_step_error` and `held_out_median_step_error`
    (relative, for a step of each load), `fitted` and `held_out` (`latency_error` of each load), `first_failure` (the reason
    of the first failed request, None without one), and `config`.
    """
    generators = [np.random.default_rng([config.seed, number]) for number in range(2)]
    start_s = time.perf_counter()
    first: list[Probe] = []
    second: list[Probe] = []
    loads = (first, config.rate, generators[0]), (second, config.held_out_rate, generators[1])
    for index in range(ROUNDS):
        for probes, rate, rng in loads:
            part = draw_probes(config, rate, index, rng)
            send(config, part, start_s, api_key=api_key, progress=progress)
            probes += part
    fit = fit_step_time(step_samples(first))
    errors = [abs(fit.step_time.step_s(step.work) / step.seconds - 1) for step in step_samples(second)]
    return {
        "config": asdict(config),
        "step_time": {"name": "linear", "parameters": fit.parameters},
        "num_steps": fit.num_samples,
        "num_outliers": fit.num_outliers,
        "median_step_error": fit.median_error,
        "held_out_median_step_error": float(np.median(errors)),
        "fitted": latency_error(first, fit.step_time, config.scheduler),
        "held_out": latency_error(second, fit.step_time, config.scheduler),
        "first_failure": next((probe.error for probe in (*first, *second) if probe.error is not None), None),
    }


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


def step_samples(responses: Sequence[Probe]) -> list[StepSample]:
    """Steps of the engine, inferred from the times of tokens.

    The time between two tokens of a request is one step. Its decodes are all requests between their first and
    last token; its prefills are the requests whose first token is at its end. The time to the first token of
    a request on an idle engine is the step of its prompt. Responses with several tokens in a chunk yield no
    steps, but are part of the work of other steps.
    """
    complete = [probe for probe in responses if probe.error is None]
    samples = []
    for probe in complete:
        others = [other for other in complete if other is not probe]
        if not any(other.sent_s < probe.token_s[0] and other.token_s[-1] > probe.sent_s for other in others):
            chunk = PrefillChunk(probe.request_id, 0, probe.prompt_tokens, True)
            samples.append(StepSample(probe.token_s[0] - probe.sent_s, StepWork((chunk,))))
        if len(probe.token_s) == probe.output_tokens:
            for before_s, after_s in pairwise(probe.token_s):
                if after_s > before_s:
                    samples.append(StepSample(after_s - before_s, _work(complete, before_s, after_s)))
    return samples


def _work(responses: Sequence[Probe], before_s: float, after_s: float) -> StepWork:
    """The work of the engine between two tokens of a request."""
    middle_s, late_s = (before_s + after_s) / 2, after_s + (after_s - before_s) / 2
    chunks, contexts = [], []
    for probe in responses:
        first_s, last_s = probe.token_s[0], probe.token_s[-1]
        if first_s <= middle_s < last_s:
            contexts.append(probe.prompt_tokens + bisect_right(probe.token_s, middle_s) - 1)
        elif middle_s < first_s <= late_s and probe.sent_s < middle_s:
            chunks.append(PrefillChunk(probe.request_id, 0, probe.prompt_tokens, True))
    return StepWork(tuple(chunks), contexts)


def latency_error(responses: Sequence[Probe], step_time: StepTime, limits: SchedulerConfig) -> dict[str, Any]:
    """Simulates the measured requests with their arrivals under FCFS. `TailcastError` if the configured
    limits are too small for a request that the engine has served.

    The result has `num_requests` (successful) and `num_failed` (left out); the means of ttft_s, ttlt_s and
    tpot_s in seconds, `measured` and `simulated`; and `error`: (simulated - measured) / measured.
    """
    complete = [probe for probe in responses if probe.error is None]
    rows = tuple(
        TraceRequest(
            request_id=probe.request_id,
            arrival_s=probe.sent_s,
            prompt_tokens=probe.prompt_tokens,
            output_tokens=probe.output_tokens,
            max_tokens=max(probe.max_tokens, probe.output_tokens),
        )
        for probe in complete
    )
    scheduler = Scheduler(limits, make_policy("fcfs"))
    outcome = Simulation(Trace(rows), scheduler, step_time, Predictions()).run()
    if outcome.refused:
        reason = next(iter(outcome.refused.values()))
        raise TailcastError(f"scheduler: these are not the engine's limits: {reason}")
    measured = _means([(p.sent_s, p.token_s[0], p.token_s[-1], p.output_tokens) for p in complete])
    simulated = _means([(r.arrival_s, r.first_token_s, r.finish_s, r.output_tokens) for r in outcome.records])
    return {
        "num_requests": len(complete),
        "num_failed": len(responses) - len(complete),
        "measured": measured,
        "simulated": simulated,
        "error": {name: (simulated[name] - value) / value for name, value in measured.items() if value > 0},
    }


def _means(rows: Sequence[tuple[float, float, float, int]]) -> dict[str, float]:
    """Mean latencies; rows are arrival, first and last token in seconds, and number of tokens."""
    arrival_s, first_s, last_s, tokens = np.array(rows, float).T
    several = tokens > 1
    gaps = (last_s - first_s)[several] / (tokens[several] - 1)
    tpot_s = float(gaps.mean()) if len(gaps) else math.nan
    ttft_s, ttlt_s = float((first_s - arrival_s).mean()), float((last_s - arrival_s).mean())
    return {"ttft_s": ttft_s, "ttlt_s": ttlt_s, "tpot_s": tpot_s}


@dataclass(frozen=True, slots=True)
class StepSample:
    """A measured step: its duration and its work."""

    seconds: float
    work: StepWork


@dataclass(frozen=True, slots=True)
class StepTimeFit:
    """A model fitted to steps without outliers; `parameters` are in seconds, `median_error` is the median of
    |predicted - measured| / measured over all steps."""

    step_time: StepTime
    parameters: dict[str, float]
    num_samples: int
    num_outliers: int
    median_error: float


def fit_step_time(samples: Sequence[StepSample]) -> StepTimeFit:
    """Fits step times by non-negative least squares of relative errors, a second time without outliers.
    `InputError` if there are too few steps, a duration is not above 0, or the fit fails.

    The steps must include prompts and decodes of different sizes. The fit is then scaled to the measured total time of all
    steps, including outliers, because queues depend on the mean step time, and relative errors bias a fit to noisy steps
    towards short ones (E[1/s] / E[1/s^2] instead of E[s], for steps of one size).
    """
    from scipy.optimize import nnls  # the simulator itself does not need scipy

    seconds = np.array([sample.seconds for sample in samples])
    if len(samples) < 2 * len(PARAMETERS) or not bool((seconds > 0).all()):
        raise InputError("measured steps", len(samples), f"at least {2 * len(PARAMETERS)} with a time > 0")
    works = [sample.work for sample in samples]
    features = np.array(
        [(1, one.num_prefill_tokens, len(one.contexts), one.num_context_tokens) for one in works], float
    )
    scale = np.maximum(features.max(axis=0), 1e-300)
    regular = np.ones(len(samples), bool)
    for _ in range(2):
        relative = features[regular] / scale / seconds[regular, None]
        weights = nnls(relative, np.ones(len(relative)))[0] / scale
        errors = np.abs(features @ weights - seconds) / seconds
        regular = errors <= OUTLIER * max(float(np.median(errors)), 1e-9)
    weights = weights * seconds.sum() / float((features @ weights).sum())
    errors = np.abs(features @ weights - seconds) / seconds
    parameters = {name: float(value) for name, value in zip(PARAMETERS, weights, strict=True)}
    return StepTimeFit(
        LinearStepTime(**parameters),
        parameters,
        len(samples),
        int((~regular).sum()),
        float(np.median(errors)),
    )
