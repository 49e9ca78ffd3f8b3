"""Constants of `RooflineStepTime`, fitted to measured runs, and the errors that they leave."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isnan, log, nan
from statistics import fmean
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.h100.runs import METRICS, WHOLE, Run, simulate
from scheduler_core.simulator.step_time.accuracy import REGIONS, region_of
from scheduler_core.simulator.step_time.base import StepWork
from scheduler_core.simulator.step_time.roofline import FITTED, RooflineStepTime
from scheduler_core.statistics import FloatArray

Constants = dict[str, float]
#: Latencies in ms by stage, for each run.
Latencies = dict[int, dict[str, float]]
#: Constants of the times between tokens, with their ranges.
_DECODE = {"memory_efficiency": (0.3, 1.0), "layer_s": (0.0, 3e-4), "link_efficiency": (0.02, 1.0)}
#: Below, prompts would run slower than vLLM is known to process them on this device.
_COMPUTE = (0.45, 0.5, 0.55, 0.6, 0.65, 0.7)
#: Loads, as fractions of the saturation rate, at which the propagated errors are computed, and requests of a simulation.
_LOADS, _LOADED_REQUESTS = {"near_saturation": 0.9, "overload": 1.2}, 2000


class Fit:
    """Fits to the runs of one workload. Each run is simulated twice, with the constants so far and with the first fit, and a
    mean-field estimate gives the effect of changes.

    - memory_efficiency, layer_s, link_efficiency: least squares of the relative errors of itl_mean of all stages.
    - frontend_s: the median difference of ttft_mean.
    - compute_efficiency: least squares of ln ttft_p99 of the first stage of dense models, whose slowest hundredth are prompts
      that are not cached yet. With experts, kernels are compiled in that stage.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = list(runs)
        self._uncached: dict[str, list[float]] = {}
        constants = dict(FITTED)
        for _ in range(2):
            self._simulate(constants | {"frontend_s": 0.0})
            constants = self.constants()
        constants["frontend_s"] = 0.0
        for run in self._runs:
            if not run.is_moe:
                first_stage = replace(run, stages={(first := min(run.stages)): run.stages[first]})
                self._uncached[run.model] = [
                    simulate(
                        first_stage,
                        run.step_time(**constants | {"compute_efficiency": value}),
                        first_stage.trace(),
                    )[first]["ttft_p99"]
                    for value in _COMPUTE
                ]

    def _simulate(self, constants: Constants) -> None:
        """Simulates the runs, and sets the ratios of their times between tokens to those of the mean-field estimate."""
        self._simulated = [simulate(run, run.step_time(**constants), run.trace()) for run in self._runs]
        self._ratios = [
            {
                number: latencies[number]["itl_mean"] / _itl_ms(run, number, constants, latencies[number])
                for number in run.stages
            }
            for run, latencies in zip(self._runs, self._simulated, strict=True)
        ]

    def constants(self, without: str | None = None) -> Constants:
        """The constants fitted to all models except one."""
        used = [
            (run, number, self._ratios[index][number], self._simulated[index][number])
            for index, run in enumerate(self._runs)
            if run.model != without
            for number in run.stages
        ]

        def errors(values: FloatArray) -> list[float]:
            constants = dict(zip(_DECODE, values, strict=True))
            measured = [run.stages[number].measured for run, number, *_ in used]
            return [
                log(_itl_ms(run, number, constants, latencies) * ratio / latencies["itl_mean"])
                for (run, number, ratio, _), latencies in zip(used, measured, strict=True)
            ]

        low, high = zip(*_DECODE.values(), strict=True)
        start = [FITTED[name] for name in _DECODE]
        values = least_squares(errors, start, bounds=(low, high), x_scale=start).x
        constants = {name: float(value) for name, value in zip(_DECODE, values, strict=True)}
        late, squares = [], np.zeros(len(_COMPUTE))
        for run, number, _, simulated in used:
            measured = run.stages[number].measured
            # The steps that a request waits for are as much longer as those between its tokens.
            steps_ms = simulated["ttft_mean"] * measured["itl_mean"] / simulated["itl_mean"]
            late.append(measured["ttft_mean"] - steps_ms)
        constants["frontend_s"] = float(np.median(late)) / 1e3
        for run, number, *_ in used:
            if number == min(run.stages) and run.model in self._uncached:
                ttft_ms = run.stages[number].measured["ttft_p99"] - 1e3 * constants["frontend_s"]
                squares += np.square(np.log(np.array(self._uncached[run.model]) / ttft_ms))
        if squares.any():
            constants["compute_efficiency"] = _COMPUTE[int(np.argmin(squares))]
        return FITTED | constants


def _itl_ms(run: Run, number: int, constants: Constants, latencies: Mapping[str, float]) -> float:
    """Time of a step with the mean number of requests that one of them sees, by Little's law and with itself."""
    num = run.stages[number].rate_rps * latencies["e2e_mean"] / 1e3 + 1
    context = round(sum(run.prompt_tokens) / 2 + run.output_tokens / 2)
    step_time, low = run.step_time(**constants), int(num)
    low_s, high_s = (step_time.step_s(StepWork((), [context] * size)) for size in (low, low + 1))
    return 1e3 * (low_s + (num - low) * (high_s - low_s))


def relative_errors(run: Run, latencies: Latencies) -> dict[int, dict[str, float]]:
    """(simulated - measured) / measured of each latency, by stage."""
    measured = {number: stage.measured for number, stage in run.stages.items()} | {WHOLE: run.measured}
    return {
        number: {name: latencies[number][name] / values[name] - 1 for name in METRICS}
        for number, values in measured.items()
    }


def saturation_rps(run: Run, step_time: RooflineStepTime) -> float:
    """Rate at which all batches are full, with cached prompts: as `saturation_rate_rps` without their time."""
    context, limits = round(sum(run.prompt_tokens) / 2 + run.output_tokens / 2), run.limits()
    num = min(run.max_num_seqs, limits.capacity_blocks * limits.kv_block_tokens // context)
    return num / (run.output_tokens * step_time.step_s(StepWork((), [context] * num)))


def mean_errors(errors: Iterable[Mapping[str, float]]) -> Constants:
    """Mean absolute errors, by latency, of those that were measured; NaN without any."""
    rows = list(errors)
    values = {name: [abs(row[name]) for row in rows if not isnan(row[name])] for name in METRICS}
    return {name: fmean(of_name) if of_name else nan for name, of_name in values.items()}


def scaled(step_time: RooflineStepTime, factor: float) -> RooflineStepTime:
    """Step times that are longer by a factor."""
    return replace(
        step_time,
        compute_efficiency=(step_time.compute_efficiency or FITTED["compute_efficiency"]) / factor,
        memory_efficiency=step_time.memory_efficiency / factor,
        link_efficiency=step_time.link_efficiency / factor,
        layer_s=step_time.layer_s * factor,
    )


def propagated_errors(
    runs: Sequence[Run], region: str, error: float, constants: Constants
) -> list[dict[str, float]]:
    """Errors of simulations in a region whose steps take longer or shorter by `error`."""
    rows = []
    for run in runs:
        step_time = run.step_time(**constants)
        rate = _LOADS[region] * saturation_rps(run, step_time)
        stage = replace(run.stages[max(run.stages)], rate_rps=rate, duration_s=_LOADED_REQUESTS / rate)
        loaded = replace(run, stages={0: stage})
        trace = loaded.trace()
        base = simulate(loaded, step_time, trace)[WHOLE]
        for factor in (1 / (1 + error), 1 + error):
            other = simulate(loaded, scaled(step_time, factor), trace)[WHOLE]
            rows.append({name: other[name] / base[name] - 1 for name in METRICS})
    return rows


def _rounded(values: Constants) -> Constants:
    return {name: round(value, 3) for name, value in values.items()}


def error_bands(
    runs: Sequence[Run], left_out: Mapping[int, dict[int, dict[str, float]]], constants: Constants
) -> dict[str, dict[str, Any]]:
    """Errors by region for accuracy.json: those of models left out of the fit where runs were in it, else propagated from
    their mean error of the time between tokens. `left_out`: errors by index of the run."""
    rows: dict[str, list[dict[str, float]]] = {region: [] for region in REGIONS}
    for index, errors in left_out.items():
        run = runs[index]
        saturation = saturation_rps(run, run.step_time(**constants))
        for number, stage in run.stages.items():
            rows[region_of(stage.rate_rps / saturation)].append(errors[number])
    step = mean_errors(row for of_region in rows.values() for row in of_region)["itl_mean"]
    one_per_model = {run.model: run for run in reversed(runs)}.values()
    bands: dict[str, dict[str, Any]] = {}
    for region, measured in rows.items():
        basis = "measured" if measured else "propagated"
        used = measured or propagated_errors(list(one_per_model), region, step, constants)
        bands[region] = {
            "basis": basis,
            "num_runs": len(used),
            **_rounded(mean_errors(used) | {"max_rate": step}),
        }
    return bands
