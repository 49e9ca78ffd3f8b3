"""`simulate calibrate`: measures a live engine and fits a model of its step times to it, with the error on another load."""

from __future__ import annotations

import logging
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.files import writable_target, write_json
from scheduler_core.plan import PrefillChunk
from scheduler_core.policies import make_policy
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.commands import progress_bar
from scheduler_core.simulator.engine_probe import (
    Endpoint,
    ProbeRequest,
    ProbeResponse,
    probe,
    random_prompt,
)
from scheduler_core.simulator.fitting import Kind, StepSample, fit_step_time
from scheduler_core.simulator.loop import Simulation
from scheduler_core.simulator.predictions import no_predictions
from scheduler_core.simulator.step_time import StepTime, StepWork
from scheduler_core.simulator.trace import Trace, TraceRequest

logger = logging.getLogger(__name__)

SCHEMA = "tailcast.calibration/1"


@dataclass(frozen=True, kw_only=True)
class EngineCalibrationConfig:
    """Measure a live OpenAI-compatible engine at one load, fit step times, and predict another load.

    An API key is taken from the environment, OPENAI_API_KEY.
    """

    OUTPUTS = ("json",)

    json: str
    """Where to write the result: the model and its parameters for simulate run, and the errors on both loads."""
    url: str
    """Base address of the engine, such as http://127.0.0.1:8000/v1."""
    served_model: str
    """Name of the served model."""
    rate: float = 1.0
    """Requests per second of the load that the model is fitted to."""
    held_out_rate: float = 2.0
    """Requests per second of the load that the fitted model has to predict."""
    num_requests: int = 60
    """Requests of each load."""
    rounds: int = 3
    """Parts of each load, measured alternately, so that a machine that gets slower does so for both."""
    prompt_words: tuple[int, int] = (8, 512)
    """Shortest and longest prompt in words, about as many tokens; drawn evenly on a logarithmic scale."""
    output_tokens: tuple[int, int] = (8, 128)
    """Smallest and largest max_tokens, drawn likewise."""
    model: Kind = "linear"
    """The fitted model: linear, staircase (RAD, Eq. 7)."""
    timeout_s: float = 60.0
    """A response that is silent for so many seconds has failed."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request; {ignore_eos: true} makes vLLM generate max_tokens tokens."""
    seed: int = 0
    """Seed of prompts and arrivals."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """Limits of the measured engine, as it was started."""

    def __post_init__(self) -> None:
        for name in ("rate", "held_out_rate", "timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(name, getattr(self, name), "numbers > 0")
        if self.num_requests < 10:
            raise InputError("num_requests", self.num_requests, "integers >= 10")
        if not 1 <= self.rounds <= self.num_requests // 3:
            raise InputError("rounds", self.rounds, f"1 to {self.num_requests // 3}: three requests each")
        for name in ("prompt_words", "output_tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise InputError(name, (low, high), "two integers > 0, the smaller one first")
        if self.model not in ("linear", "staircase"):
            raise InputError("model", self.model, "linear, staircase")
        self.endpoint(None)

    def endpoint(self, api_key: str | None) -> Endpoint:
        """The engine."""
        return Endpoint(
            url=self.url,
            model=self.served_model,
            api_key=api_key,
            timeout_s=self.timeout_s,
            extra_body=self.extra_body,
        )


@dataclass(frozen=True, slots=True)
class LatencyError:
    """Mean measured and simulated latencies of the same requests in seconds: ttft_s, ttlt_s, tpot_s.

    Attributes:
        num_requests: Requests that succeeded.
        num_failed: Requests that failed, left out on both sides.
        error: (simulated - measured) / measured.
    """

    num_requests: int
    num_failed: int
    measured: dict[str, float]
    simulated: dict[str, float]
    error: dict[str, float]


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """A fitted model and its errors.

    Attributes:
        config: The resolved configuration.
        step_time: Arguments of `make_step_time`.
        num_steps: Steps that the model was fitted to.
        num_outliers: Steps left out as hiccups.
        median_step_error: Median relative error of a step that it was fitted to.
        held_out_median_step_error: Median relative error of a step of the other load.
        fitted: Latencies of the load it was fitted to.
        held_out: Latencies of the other load.
    """

    config: dict[str, Any]
    step_time: dict[str, Any]
    num_steps: int
    num_outliers: int
    median_step_error: float
    held_out_median_step_error: float
    fitted: LatencyError
    held_out: LatencyError


def run(config: EngineCalibrationConfig) -> None:
    """Carries out `simulate calibrate`."""
    target = writable_target(config.json, "json")
    with progress_bar(2 * config.num_requests, "measuring") as bar:
        api_key = os.environ.get("OPENAI_API_KEY")
        result = run_calibration(config, api_key=api_key, progress=bar.update)
    write_json(target, {"schema": SCHEMA, **asdict(result)})
    error = result.held_out.error["ttlt_s"]
    logger.info("%s: mean ttlt of the held-out load off by %+.1f %%", config.model, 100 * error)


def run_calibration(
    config: EngineCalibrationConfig,
    *,
    api_key: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> CalibrationResult:
    """Measures both loads alternately, and fits the model to the first.

    Args:
        config: The measurement.
        api_key: Of the engine; never written anywhere.
        progress: Called with 1 after each response, from several threads.

    Raises:
        TailcastError: All requests failed.
        InputError: Too little was measured to fit the model.
    """
    endpoint = config.endpoint(api_key)
    loads = [
        draw_requests(config, rate, np.random.default_rng([config.seed, number]))
        for number, rate in enumerate((config.rate, config.held_out_rate))
    ]
    parts: list[list[list[ProbeResponse]]] = [[], []]
    for index in range(config.rounds):
        for number, requests in enumerate(loads):
            part = part_of(requests, index, config.rounds)
            parts[number].append(probe(endpoint, part, progress=progress))
    first, second = (joined(measured) for measured in parts)
    fit = fit_step_time(step_samples(first), config.model, keep_total=True)
    errors = [abs(fit.step_time.step_s(one.work) / one.seconds - 1) for one in step_samples(second)]
    return CalibrationResult(
        config=asdict(config),
        step_time={"name": config.model, "parameters": fit.parameters},
        num_steps=fit.num_samples,
        num_outliers=fit.num_outliers,
        median_step_error=fit.median_error,
        held_out_median_step_error=float(np.median(errors)),
        fitted=latency_error(first, fit.step_time, config.scheduler),
        held_out=latency_error(second, fit.step_time, config.scheduler),
    )


def draw_requests(
    config: EngineCalibrationConfig, rate: float, rng: np.random.Generator
) -> list[ProbeRequest]:
    """Requests with Poisson arrivals."""
    arrivals = np.cumsum(rng.exponential(1 / rate, config.num_requests)).tolist()
    words, max_tokens = (
        np.rint(np.exp(rng.uniform(math.log(low), math.log(high), config.num_requests))).astype(int).tolist()
        for low, high in (config.prompt_words, config.output_tokens)
    )
    return [
        ProbeRequest(f"r{index}", arrival_s, random_prompt(words[index], rng), max_tokens[index])
        for index, arrival_s in enumerate(arrivals)
    ]


def part_of(requests: Sequence[ProbeRequest], index: int, num_parts: int) -> list[ProbeRequest]:
    """One of several consecutive parts, with arrivals counted from the end of the previous part."""
    first, last = (len(requests) * bound // num_parts for bound in (index, index + 1))
    start_s = requests[first - 1].arrival_s if first else 0.0
    return [replace(one, arrival_s=one.arrival_s - start_s) for one in requests[first:last]]


def joined(parts: Sequence[Sequence[ProbeResponse]]) -> list[ProbeResponse]:
    """Separate measurements as one: each begins a second after the end of the one before."""
    responses: list[ProbeResponse] = []
    start_s = 0.0
    for part in parts:
        responses += [
            replace(one, sent_s=one.sent_s + start_s, token_s=[at_s + start_s for at_s in one.token_s])
            for one in part
        ]
        start_s = 1.0 + max((max([one.sent_s, *one.token_s]) for one in responses), default=start_s)
    return responses


def step_samples(responses: Sequence[ProbeResponse]) -> list[StepSample]:
    """Steps of the engine, as far as the times of tokens show them.

    The time between two tokens of a request is one step, in which every other request between its first and its last
    token generates a token too, and every request whose first token comes at its end had its prompt processed. The time
    to the first token of a request that met an idle engine is the step of its prompt. Responses in which chunks held
    several tokens show no steps and only count for the others.
    """
    complete = [one for one in responses if one.error is None]
    samples = []
    for one in complete:
        others = [other for other in complete if other is not one]
        if not any(other.sent_s < one.token_s[0] and other.token_s[-1] > one.sent_s for other in others):
            chunk = PrefillChunk(one.request_id, 0, one.prompt_tokens, True)
            samples.append(StepSample(one.token_s[0] - one.sent_s, StepWork((chunk,))))
        if len(one.token_s) == one.output_tokens:
            for before_s, after_s in pairwise(one.token_s):
                if after_s > before_s:
                    samples.append(StepSample(after_s - before_s, _work(complete, before_s, after_s)))
    return samples


def _work(responses: Sequence[ProbeResponse], before_s: float, after_s: float) -> StepWork:
    """The work of the engine between two tokens of a request."""
    middle_s, late_s = (before_s + after_s) / 2, after_s + (after_s - before_s) / 2
    chunks, contexts = [], []
    for one in responses:
        first_s, last_s = one.token_s[0], one.token_s[-1]
        if first_s <= middle_s < last_s:
            contexts.append(one.prompt_tokens + bisect_right(one.token_s, middle_s) - 1)
        elif middle_s < first_s <= late_s and one.sent_s < middle_s:
            chunks.append(PrefillChunk(one.request_id, 0, one.prompt_tokens, True))
    return StepWork(tuple(chunks), contexts)


def latency_error(
    responses: Sequence[ProbeResponse], step_time: StepTime, limits: SchedulerConfig
) -> LatencyError:
    """Simulates the measured requests with their arrivals, first come first served.

    Raises:
        TailcastError: The engine's limits are too small for a request that it did serve.
    """
    complete = [one for one in responses if one.error is None]
    rows = tuple(
        TraceRequest(
            request_id=one.request_id,
            arrival_s=one.sent_s,
            prompt_tokens=one.prompt_tokens,
            output_tokens=one.output_tokens,
            max_tokens=max(one.max_tokens, one.output_tokens),
        )
        for one in complete
    )
    scheduler = Scheduler(limits, make_policy("fcfs"))
    outcome = Simulation(Trace(rows), scheduler, step_time, no_predictions()).run()
    if outcome.refused:
        reason = next(iter(outcome.refused.values()))
        raise TailcastError(f"scheduler: these are not the engine's limits: {reason}")
    simulated = {
        "ttft_s": _mean([record.ttft_s for record in outcome.records]),
        "ttlt_s": _mean([record.ttlt_s for record in outcome.records]),
        "tpot_s": _mean([record.tpot_s for record in outcome.records if record.tpot_s is not None]),
    }
    gaps = [
        (one.token_s[-1] - one.token_s[0]) / (one.output_tokens - 1)
        for one in complete
        if one.output_tokens > 1
    ]
    measured = {
        "ttft_s": _mean([one.token_s[0] - one.sent_s for one in complete]),
        "ttlt_s": _mean([one.token_s[-1] - one.sent_s for one in complete]),
        "tpot_s": _mean(gaps),
    }
    error = {name: (simulated[name] - value) / value for name, value in measured.items() if value > 0}
    return LatencyError(len(complete), len(responses) - len(complete), measured, simulated, error)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan
