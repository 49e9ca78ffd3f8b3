"""`simulate calibrate`: measures a live engine and fits a model of its step times to it, with the error on another load."""

from __future__ import annotations

import logging
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.files import writable_target, write_json
from scheduler_core.plan import PrefillChunk
from scheduler_core.policies import make_policy
from scheduler_core.ranges import FINITE, POSITIVE, check_choice, check_ranges
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.commands import progress_bar
from scheduler_core.simulator.engine_probe import Endpoint, Probe, random_prompt, send
from scheduler_core.simulator.loop import Simulation
from scheduler_core.simulator.predictions import Predictions
from scheduler_core.simulator.step_time import make_step_time
from scheduler_core.simulator.step_time.base import StepTime, StepWork
from scheduler_core.simulator.step_time.staircase import StaircaseStepTime
from scheduler_core.simulator.trace import Trace, TraceRequest

logger = logging.getLogger(__name__)

SCHEMA = "tailcast.calibration/1"
Kind = Literal["linear", "staircase"]

#: Steps further from the fit than so many median deviations are hiccups of the machine and left out.
OUTLIER = 5.0
#: Fitted parameters by model.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "linear": ("base_s", "per_prefill_token_s", "per_decode_s", "per_context_token_s"),
    "staircase": ("base_s", "linear_tile_s", "per_token_s", "decode_tile_s", "prefill_tile_s"),
}


@dataclass(frozen=True, kw_only=True)
class EngineCalibrationConfig(Endpoint):
    """Measure a live OpenAI-compatible engine at one load, fit step times, and predict another load.

    An API key is taken from the environment, OPENAI_API_KEY.
    """

    OUTPUTS = ("json",)

    json: str
    """Where to write the result: the model and its parameters for simulate run, and the errors on both loads."""
    overwrite: bool = False
    """Replace files at the outputs."""
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
    seed: int = 0
    """Seed of prompts and arrivals."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """Limits of the measured engine, as it was started."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = dict.fromkeys(("rate", "held_out_rate", "timeout_s"), (POSITIVE, FINITE))
        check_ranges(
            self, num_requests=(10, 1_000_000), rounds=(1, max(1, self.num_requests // 3)), **positive
        )
        for name in ("prompt_words", "output_tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise InputError(name, (low, high), "two integers > 0, the smaller one first")
        check_choice("model", self.model, PARAMETERS)


def run(config: EngineCalibrationConfig) -> None:
    """Carries out `simulate calibrate`."""
    target = writable_target(config.json, "json")
    with progress_bar(2 * config.num_requests, "measuring") as bar:
        api_key = os.environ.get("OPENAI_API_KEY")
        result = run_calibration(config, api_key=api_key, progress=bar.update)
    write_json(target, {"schema": SCHEMA, **result})
    error = result["held_out"]["error"]["ttlt_s"]
    logger.info("%s: mean ttlt of the held-out load off by %+.1f %%", config.model, 100 * error)


def run_calibration(
    config: EngineCalibrationConfig,
    *,
    api_key: str | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Measures both loads alternately, and fits the model to the first.

    The result has `step_time` (name and parameters, for `make_step_time`), `num_steps` that it was fitted to, `num_outliers`
    among them left out as hiccups, `median_step_error` and `held_out_median_step_error` (relative, of a step of each load),
    `fitted` and `held_out` (`latency_error` of each load), and `config`.
    """
    generators = [np.random.default_rng([config.seed, number]) for number in range(2)]
    parts: list[list[list[Probe]]] = [[], []]
    for index in range(config.rounds):
        for rate, rng, measured in zip((config.rate, config.held_out_rate), generators, parts, strict=True):
            measured.append(draw_probes(config, rate, index, rng))
            send(config, measured[-1], api_key=api_key, progress=progress)
    first, second = map(joined, parts)
    fit = fit_step_time(step_samples(first), config.model)
    errors = [abs(fit.step_time.step_s(one.work) / one.seconds - 1) for one in step_samples(second)]
    return {
        "config": asdict(config),
        "step_time": {"name": config.model, "parameters": fit.parameters},
        "num_steps": fit.num_samples,
        "num_outliers": fit.num_outliers,
        "median_step_error": fit.median_error,
        "held_out_median_step_error": float(np.median(errors)),
        "fitted": latency_error(first, fit.step_time, config.scheduler),
        "held_out": latency_error(second, fit.step_time, config.scheduler),
    }


def draw_probes(
    config: EngineCalibrationConfig, rate: float, index: int, rng: np.random.Generator
) -> list[Probe]:
    """The requests of one round, with Poisson arrivals."""
    first, last = (config.num_requests * bound // config.rounds for bound in (index, index + 1))
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


def joined(parts: Sequence[Sequence[Probe]]) -> list[Probe]:
    """Separate measurements as one: each begins a second after the end of the one before."""
    responses: list[Probe] = []
    start_s = 0.0
    for part in parts:
        responses += [
            replace(one, sent_s=one.sent_s + start_s, token_s=[at_s + start_s for at_s in one.token_s])
            for one in part
        ]
        start_s = 1.0 + max((max([one.sent_s, *one.token_s]) for one in responses), default=start_s)
    return responses


def step_samples(responses: Sequence[Probe]) -> list[StepSample]:
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


def _work(responses: Sequence[Probe], before_s: float, after_s: float) -> StepWork:
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


def latency_error(responses: Sequence[Probe], step_time: StepTime, limits: SchedulerConfig) -> dict[str, Any]:
    """Simulates the measured requests with their arrivals, first come first served; `TailcastError` if the engine's limits
    are too small for a request that it did serve.

    The result has `num_requests` that succeeded, `num_failed`, which are left out; means of ttft_s, ttlt_s and tpot_s,
    `measured` and `simulated` in seconds, and `error`: (simulated - measured) / measured.
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
    outcome = Simulation(Trace(rows), scheduler, step_time, Predictions()).run()
    if outcome.refused:
        reason = next(iter(outcome.refused.values()))
        raise TailcastError(f"scheduler: these are not the engine's limits: {reason}")
    measured = _means([(one.sent_s, one.token_s[0], one.token_s[-1], one.output_tokens) for one in complete])
    records = outcome.records
    simulated = _means(
        [(one.arrival_s, one.first_token_s, one.finish_s, one.output_tokens) for one in records]
    )
    return {
        "num_requests": len(complete),
        "num_failed": len(responses) - len(complete),
        "measured": measured,
        "simulated": simulated,
        "error": {name: (simulated[name] - value) / value for name, value in measured.items() if value > 0},
    }


def _means(rows: Sequence[tuple[float, float, float, int]]) -> dict[str, float]:
    """Mean latencies of requests: arrival, first and last token in seconds, number of tokens."""
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
    """A model fitted to steps, some of them left out as hiccups; `parameters` are in seconds, `median_error` is the median
    over all steps of |predicted - measured| / measured."""

    step_time: StepTime
    parameters: dict[str, float]
    num_samples: int
    num_outliers: int
    median_error: float


def fit_step_time(samples: Sequence[StepSample], kind: Kind = "linear") -> StepTimeFit:
    """Least squares of relative errors with no negative time, twice: the second time without hiccups. `InputError` if there
    are too few steps, a duration is not above 0, or nothing could be fitted.

    Both prompts and decodes must be among the steps, of different sizes. The fit is then scaled so that all steps together
    take as long as measured, hiccups included: queues are as long as the mean of all steps makes them, and relative errors
    pull a fit to noisy steps towards the short ones (E[1/s] / E[1/s^2] instead of E[s], for one kind of step). `staircase`
    has its default tiles.
    """
    from scipy.optimize import nnls  # the simulator alone needs no scipy

    names = PARAMETERS[kind]
    seconds = np.array([sample.seconds for sample in samples])
    if len(samples) < 2 * len(names) or not bool((seconds > 0).all()):
        raise InputError("measured steps", len(samples), f"at least {2 * len(names)} with a time > 0")
    features = np.array([_features(sample.work, kind) for sample in samples], float)
    scale = np.maximum(features.max(axis=0), 1e-300)
    regular = np.ones(len(samples), bool)
    for _ in range(2):
        relative = features[regular] / scale / seconds[regular, None]
        weights = nnls(relative, np.ones(len(relative)))[0] / scale
        errors = np.abs(features @ weights - seconds) / seconds
        regular = errors <= OUTLIER * max(float(np.median(errors)), 1e-9)
    weights = weights * seconds.sum() / float((features @ weights).sum())
    errors = np.abs(features @ weights - seconds) / seconds
    parameters = {name: float(value) for name, value in zip(names, weights, strict=True)}
    model = make_step_time(kind, parameters)
    return StepTimeFit(model, parameters, len(samples), int((~regular).sum()), float(np.median(errors)))


def _features(work: StepWork, kind: Kind) -> list[float]:
    """The factor of each parameter."""
    if kind == "linear":
        return [1.0, work.num_prefill_tokens, len(work.contexts), work.num_context_tokens]
    tiles = StaircaseStepTime()
    return [
        1.0,
        -(-work.num_tokens // tiles.t_col),
        work.num_tokens,
        sum(tiles.decode_tiles(context) for context in work.contexts),
        sum(tiles.chunk_tiles(chunk.start_token, chunk.num_tokens) for chunk in work.prefills),
    ]
