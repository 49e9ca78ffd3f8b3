"""`simulate calibrate`: measures a live engine and fits a model of its step times to it, with the error on another load."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.files import write_json
from scheduler_core.plan import PrefillChunk
from scheduler_core.policies import make_policy
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.engine_probe import (
    Endpoint,
    ProbedRequest,
    ProbeRequest,
    probe,
    random_prompt,
)
from scheduler_core.simulator.fetch import no_predictions
from scheduler_core.simulator.fitting import Fit, Kind, StepSample, fit_step_time
from scheduler_core.simulator.loop import Simulation
from scheduler_core.simulator.step_time import StepTime, StepWork
from scheduler_core.simulator.step_times import make_step_time
from scheduler_core.simulator.trace import Trace, TraceRequest

SCHEMA = "tailcast.calibration/1"


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    """Measure a live OpenAI-compatible engine at one load, fit step times, and predict another load.

    Raises:
        InputError: A value is outside its range.
    """

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
    """Parts of each load, measured in turn with the other's, so that a machine that gets slower does so for both."""
    prompt_words: tuple[int, int] = (8, 512)
    """Shortest and longest prompt in words, about as many tokens; drawn evenly on a logarithmic scale."""
    output_tokens: tuple[int, int] = (8, 128)
    """Smallest and largest cap of an answer, drawn likewise."""
    model: Kind = "linear"
    """What is fitted: linear, staircase (RAD, Eq. 7)."""
    timeout_s: float = 60.0
    """An answer that is silent for so many seconds has failed."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request; {ignore_eos: true} makes vLLM generate all tokens it may."""
    seed: int = 0
    """Seed of prompts and arrivals."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """Limits of the engine that is measured, as it was started."""

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
        Endpoint(url=self.url, model=self.served_model, timeout_s=self.timeout_s)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Measured and simulated latencies of the same requests, means in seconds.

    Attributes:
        num_requests: Requests answered.
        num_failed: Requests that failed, left out on both sides.
        measured: ttft_s, ttlt_s, tpot_s of the engine.
        simulated: The same of the simulator.
        error: (simulated - measured) / measured.
    """

    num_requests: int
    num_failed: int
    measured: dict[str, float]
    simulated: dict[str, float]
    error: dict[str, float]


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """A fitted model and how good it is.

    Attributes:
        config: The resolved configuration.
        fit: The model and its error on the steps it was fitted to.
        fitted: Latencies of the load it was fitted to.
        held_out: Latencies of the load it had not seen.
        held_out_step_error: Median relative error of a step of that load.
    """

    config: dict[str, Any]
    fit: Fit
    fitted: Comparison
    held_out: Comparison
    held_out_step_error: float

    def to_json(self) -> dict[str, Any]:
        """All of it, ready to be written; `step_time` is what `make_step_time` takes."""
        return {
            "schema": SCHEMA,
            "config": self.config,
            "step_time": {"name": self.config["model"], "parameters": self.fit.parameters},
            "num_steps": self.fit.num_samples,
            "num_outliers": self.fit.num_outliers,
            "median_step_error": self.fit.median_error,
            "held_out_median_step_error": self.held_out_step_error,
            "fitted": asdict(self.fitted),
            "held_out": asdict(self.held_out),
        }

    def write(self, path: str | Path) -> None:
        """Writes the JSON result."""
        write_json(path, self.to_json())


def run_calibration(
    config: CalibrateConfig, *, api_key: str | None = None, progress: Callable[[int], None] | None = None
) -> CalibrationResult:
    """Measures both loads in turn, and fits the model to the first.

    Args:
        config: What to measure.
        api_key: Of the engine; never written anywhere.
        progress: Called with 1 after each answer, from several threads.

    Raises:
        TailcastError: The engine answers nobody.
        InputError: Too little was measured to fit the model.
    """
    endpoint = Endpoint(
        url=config.url,
        model=config.served_model,
        api_key=api_key,
        timeout_s=config.timeout_s,
        extra_body=config.extra_body,
    )
    asked = [
        draw_requests(config, rate, np.random.default_rng([config.seed, number]))
        for number, rate in enumerate((config.rate, config.held_out_rate))
    ]
    parts: list[list[list[ProbedRequest]]] = [[], []]
    for turn in range(config.rounds):
        for number, requests in enumerate(asked):
            part = part_of(requests, turn, config.rounds)
            parts[number].append(probe(endpoint, part, progress=progress))
    loads = [joined(measured) for measured in parts]
    fit = fit_calibration(step_samples(loads[0]), config.model)
    unseen = step_samples(loads[1])
    errors = [abs(fit.step_time.step_s(one.work) - one.seconds) / one.seconds for one in unseen]
    return CalibrationResult(
        asdict(config),
        fit,
        compare(loads[0], fit.step_time, config.scheduler),
        compare(loads[1], fit.step_time, config.scheduler),
        float(np.median(errors)),
    )


def fit_calibration(samples: Sequence[StepSample], kind: Kind = "linear") -> Fit:
    """`fit_step_time`, scaled so that all steps together take as long as they did, hiccups included.

    The fit minimises relative errors, which noise pulls towards the short steps (E[1/s] / E[1/s^2] instead of E[s], for
    one kind of step), and it leaves hiccups out. Queues are as long as the mean of all steps makes them.

    Args:
        samples: Measured steps.
        kind: linear or staircase.

    Raises:
        InputError: See `fit_step_time`.
    """
    fit = fit_step_time(samples, kind)
    total = sum(fit.step_time.step_s(one.work) for one in samples)
    scale = sum(one.seconds for one in samples) / total
    parameters = {name: scale * value for name, value in fit.parameters.items()}
    model = make_step_time(kind, parameters)
    errors = [abs(model.step_s(one.work) - one.seconds) / one.seconds for one in samples]
    return replace(fit, step_time=model, parameters=parameters, median_error=float(np.median(errors)))


def draw_requests(config: CalibrateConfig, rate: float, rng: np.random.Generator) -> list[ProbeRequest]:
    """Requests with Poisson arrivals."""
    arrivals = np.cumsum(rng.exponential(1 / rate, config.num_requests))
    words, caps = (
        np.rint(np.exp(rng.uniform(math.log(low), math.log(high), config.num_requests))).astype(int)
        for low, high in (config.prompt_words, config.output_tokens)
    )
    return [
        ProbeRequest(
            f"r{index}", float(arrivals[index]), random_prompt(int(words[index]), rng), int(caps[index])
        )
        for index in range(config.num_requests)
    ]


def part_of(requests: Sequence[ProbeRequest], turn: int, rounds: int) -> list[ProbeRequest]:
    """One of `rounds` consecutive parts, with arrivals counted from where the part before it ends."""
    first, last = (len(requests) * place // rounds for place in (turn, turn + 1))
    start_s = requests[first - 1].arrival_s if first else 0.0
    return [replace(one, arrival_s=one.arrival_s - start_s) for one in requests[first:last]]


def joined(parts: Sequence[Sequence[ProbedRequest]]) -> list[ProbedRequest]:
    """Measurements with nothing under way between them as one: each begins a second after the end of the one before."""
    found: list[ProbedRequest] = []
    start_s = 0.0
    for part in parts:
        found += [
            replace(one, sent_s=one.sent_s + start_s, token_s=[at_s + start_s for at_s in one.token_s])
            for one in part
        ]
        start_s = 1.0 + max((max([one.sent_s, *one.token_s]) for one in found), default=start_s)
    return found


def step_samples(measured: Sequence[ProbedRequest]) -> list[StepSample]:
    """Steps of the engine, as far as the times of tokens show them.

    The time between two tokens of a request is one step, in which every other request between its first and its last
    token generates a token too, and every request whose first token comes at its end had its prompt processed. The time
    to the first token of a request that met an idle engine is the step of its prompt. Answers in which chunks held
    several tokens show no steps and are counted with the others alone.
    """
    answered = [one for one in measured if one.error is None]
    samples = []
    for one in answered:
        others = [other for other in answered if other is not one]
        if not any(other.sent_s < one.token_s[0] and other.token_s[-1] > one.sent_s for other in others):
            chunk = PrefillChunk(one.request_id, 0, one.prompt_tokens, True)
            samples.append(StepSample(one.token_s[0] - one.sent_s, StepWork((chunk,))))
        if len(one.token_s) != one.output_tokens:
            continue
        for before_s, after_s in zip(one.token_s, one.token_s[1:], strict=False):
            if after_s > before_s:
                samples.append(StepSample(after_s - before_s, _work(answered, before_s, after_s)))
    return samples


def _work(answered: Sequence[ProbedRequest], before_s: float, after_s: float) -> StepWork:
    """What the engine did between two tokens of a request."""
    middle_s, late_s = (before_s + after_s) / 2, after_s + (after_s - before_s) / 2
    chunks, contexts = [], []
    for one in answered:
        first_s, last_s = one.token_s[0], one.token_s[-1]
        if first_s <= middle_s < last_s:
            contexts.append(one.prompt_tokens + bisect_right(one.token_s, middle_s) - 1)
        elif middle_s < first_s <= late_s and one.sent_s < middle_s:
            chunks.append(PrefillChunk(one.request_id, 0, one.prompt_tokens, True))
    return StepWork(tuple(chunks), contexts)


def compare(measured: Sequence[ProbedRequest], step_time: StepTime, limits: SchedulerConfig) -> Comparison:
    """Simulates the requests that were measured, as they came, first come first served.

    Raises:
        TailcastError: The engine's limits are too small for a request that it did serve.
    """
    answered = [one for one in measured if one.error is None]
    trace = Trace(
        tuple(
            TraceRequest(
                request_id=one.request_id,
                arrival_s=one.sent_s,
                prompt_tokens=one.prompt_tokens,
                output_tokens=one.output_tokens,
                max_tokens=max(one.max_tokens, one.output_tokens),
            )
            for one in answered
        )
    )
    out = Simulation(trace, Scheduler(limits, make_policy("fcfs")), step_time, no_predictions()).run()
    if out.refused:
        raise TailcastError(
            f"scheduler: these are not the engine's limits: {next(iter(out.refused.values()))}"
        )
    simulated = {
        "ttft_s": _mean([record.ttft_s for record in out.records]),
        "ttlt_s": _mean([record.ttlt_s for record in out.records]),
        "tpot_s": _mean([record.tpot_s for record in out.records if record.tpot_s is not None]),
    }
    gaps = [one for one in answered if one.output_tokens > 1]
    seen = {
        "ttft_s": _mean([one.token_s[0] - one.sent_s for one in answered]),
        "ttlt_s": _mean([one.token_s[-1] - one.sent_s for one in answered]),
        "tpot_s": _mean([(one.token_s[-1] - one.token_s[0]) / (one.output_tokens - 1) for one in gaps]),
    }
    error = {name: (simulated[name] - seen[name]) / seen[name] for name in seen if seen[name] > 0}
    return Comparison(len(answered), len(measured) - len(answered), seen, simulated, error)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan
