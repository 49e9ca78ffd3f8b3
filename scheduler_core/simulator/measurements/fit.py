"""Step times fitted to measured steps, with cross-validated errors and intervals of the parameters."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.ranges import check_choice
from scheduler_core.simulator.measurements.steps import StepMeasurement
from scheduler_core.simulator.step_time import make_step_time
from scheduler_core.simulator.step_time.base import StepTime, StepWork

FloatArray = NDArray[np.float64]

#: Steps whose relative error exceeds this multiple of the median error are outliers and left out, but at most half of those with
#: a prompt and half of the others: prompts are few, and decodes may fit so well that all prompts would be outliers.
OUTLIER = 5.0
#: Model -> its fitted parameters.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "linear": ("base_s", "per_prefill_token_s", "per_decode_s", "per_context_token_s"),
    "quadratic": ("alpha_1", "alpha_2", "gamma_1", "gamma_2"),
    "staircase": ("base_s", "linear_tile_s", "per_token_s", "decode_tile_s", "prefill_tile_s"),
    "roofline": ("compute_efficiency", "memory_efficiency", "layer_s"),
}
#: Models whose time is a sum of terms, each proportional to one parameter; the others have a maximum.
SUMS = frozenset({"linear", "staircase"})
#: Maximum number of measurements in a fit; of more, every n-th is used, with and without prompts separately.
MAX_POINTS = {True: 10_000, False: 1_000}
#: Consecutive parts of the measurements; each is predicted by a fit to the others.
FOLDS = 8
#: Student's t of a 95 % interval, FOLDS - 1 degrees of freedom.
STUDENT_T = 2.365


@dataclass(frozen=True, slots=True)
class StepTimeFit:
    """A model fitted to steps without outliers.

    Attributes:
        parameters: For `make_step_time`; fitted ones are in seconds, except efficiencies.
        num_samples, num_outliers: Measurements, and those of them left out of the fit.
        median_error: Median of |predicted - measured| / measured over all measurements.
        held_out_errors: The same with each part predicted from the others: `median` and `p90`; see `validated_fit`.
        intervals: 95 % intervals of the parameters by the jackknife over these parts.
        biases: Median of predicted / measured - 1 by kind of steps, each part predicted from the others.
    """

    step_time: StepTime
    name: str
    parameters: dict[str, Any]
    num_samples: int
    num_outliers: int
    median_error: float
    held_out_errors: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, list[float]] = field(default_factory=dict)
    biases: dict[str, float] = field(default_factory=dict)


def fit_step_time(
    measurements: Sequence[StepMeasurement], name: str = "linear", fixed: Mapping[str, Any] | None = None
) -> StepTimeFit:
    """Fits step times by non-negative least squares of relative errors, a second time without outliers.
    `InputError` if there are too few steps, a duration is not above 0, or the fit fails.

    `name` is a model of `PARAMETERS`; `fixed` has its other parameters, such as {model: ..., gpu: ...} of a roofline.

    The steps must include prompts and decodes of different sizes. Except for a roofline, the fit is then scaled to the measured
    total time of all steps, including outliers, because queues depend on the mean step time, and relative errors bias a fit
    to noisy steps towards short ones (E[1/s] / E[1/s^2] instead of E[s], for steps of one size).
    """
    return _fit(_Points(measurements, name, fixed or {}))


def _fit(points: _Points) -> StepTimeFit:
    values, regular = points.solve(np.ones(len(points.seconds), bool))
    errors = np.abs(points.expected_s(values) - points.seconds) / points.seconds
    parameters = points.parameters(values)
    return StepTimeFit(
        make_step_time(points.name, parameters),
        points.name,
        parameters,
        points.num_samples,
        int((~regular).sum()),
        float(np.median(errors)),
    )


def validated_fit(
    measurements: Sequence[StepMeasurement], name: str = "linear", fixed: Mapping[str, Any] | None = None
) -> StepTimeFit:
    """`fit_step_time` with `held_out_errors`, `intervals` and `biases`, from `FOLDS` consecutive parts of the measurements,
    which should be in the order of time."""
    points = _Points(measurements, name, fixed or {})
    fit = _fit(points)
    num = len(points.seconds)
    fold_of = np.arange(num) * FOLDS // num
    expected, values = np.empty(num), []
    for fold in range(FOLDS):
        inside = fold_of == fold
        own, _ = points.solve(~inside)
        expected[inside] = points.expected_s(own, inside)
        values.append(own)
    table = np.array(values)
    deviation = np.sqrt((FOLDS - 1) * table.var(axis=0))
    middle = np.array([fit.parameters[one] for one in points.names])
    low, high = np.maximum(middle - STUDENT_T * deviation, 0.0), middle + STUDENT_T * deviation
    ratios = expected / points.seconds - 1
    quantiles = _weighted_quantiles(np.abs(ratios), points.weights, (0.5, 0.9))
    return replace(
        fit,
        held_out_errors={"median": quantiles[0], "p90": quantiles[1]},
        intervals={one: [float(low[at]), float(high[at])] for at, one in enumerate(points.names)},
        biases=_biases(points.measurements, ratios),
    )


#: Minimum number of measurements, and of steps, of a kind whose bias is reported.
MIN_OF_KIND = 10


def _biases(measurements: Sequence[StepMeasurement], ratios: FloatArray) -> dict[str, float]:
    """Median of the ratios by powers of two: of the decodes in steps without a prompt, else of the prompt tokens."""
    kinds: defaultdict[str, list[int]] = defaultdict(list)
    for index, step in enumerate(measurements):
        value = step.prefill_tokens / min(1.0, step.prefills) if step.prefills else step.decodes
        power = int(math.log2(max(value, 1.0)))
        noun = "prompt tokens" if step.prefills else "decodes without a prompt"
        kinds[f"{2**power} to {2 ** (power + 1) - 1} {noun}"].append(index)
    weights = np.array([one.weight for one in measurements])
    return {
        kind: _weighted_quantiles(ratios[chosen], weights[chosen], (0.5,))[0]
        for kind, chosen in kinds.items()
        if len(chosen) >= MIN_OF_KIND and weights[chosen].sum() >= MIN_OF_KIND
    }


def _weighted_quantiles(values: FloatArray, weights: FloatArray, levels: Sequence[float]) -> list[float]:
    order = np.argsort(values)
    cumulative = np.cumsum(weights[order])
    ranks = np.searchsorted(cumulative, np.array(levels) * cumulative[-1])
    return [float(values[order[min(rank, len(values) - 1)]]) for rank in ranks]


class _Points:
    """Measurements [n] and a model of their durations."""

    def __init__(self, measurements: Sequence[StepMeasurement], name: str, fixed: Mapping[str, Any]) -> None:
        check_choice("step_time_model", name, PARAMETERS)
        self.name, self._fixed = name, dict(fixed)
        self.num_samples = len(measurements)
        self.names = [one for one in PARAMETERS[name] if one not in fixed]
        least = 2 * max(len(self.names), 2)
        if len(measurements) < least or not all(one.duration_s > 0 for one in measurements):
            raise InputError("measured steps", len(measurements), f"at least {least} with a time > 0")
        self.measurements = _thinned(measurements, MAX_POINTS[name in SUMS])
        self.seconds = np.array([one.duration_s for one in self.measurements])
        self.weights = np.array([one.weight for one in self.measurements])
        self._with_prompt = np.array([one.prefills > 0 for one in self.measurements])
        self._default = make_step_time(name, fixed)
        defaults = [getattr(self._default, one) for one in self.names]
        self._initial = np.array([0.5 if one is None else one for one in defaults], float)
        self._works: list[list[tuple[float, StepWork]]] = []
        if name == "linear":  # means of steps take the time of their mean work
            work = [(1, *one.linear_work) for one in self.measurements]
            chosen = [PARAMETERS[name].index(one) for one in self.names]
            self._features = np.array(work, float)[:, chosen]
            rest = [PARAMETERS[name].index(one) for one in fixed if one in PARAMETERS[name]]
            fixed_values = np.array([getattr(self._default, PARAMETERS[name][at]) for at in rest])
            self._rest = np.array(work, float)[:, rest] @ fixed_values
            return
        self._works = [list(one.works()) for one in self.measurements]
        if name in SUMS:
            rest_s = self._times(self._default)
            unit = [
                self._times(self._model({one: self._initial[at] + 1.0})) for at, one in enumerate(self.names)
            ]
            self._features = np.array(unit).T - rest_s[:, None]
            self._rest = rest_s - self._features @ self._initial

    def parameters(self, values: FloatArray) -> dict[str, Any]:
        fitted = {one: float(value) for one, value in zip(self.names, values, strict=True)}
        return self._fixed | fitted

    def expected_s(self, values: FloatArray, chosen: NDArray[np.bool_] | None = None) -> FloatArray:
        """Durations of all or the chosen measurements by the model with these parameters."""
        if self.name in SUMS:
            times: FloatArray = self._features @ values + self._rest
            return times if chosen is None else times[chosen]
        return self._times(make_step_time(self.name, self.parameters(values)), chosen)

    def solve(self, chosen: NDArray[np.bool_]) -> tuple[FloatArray, NDArray[np.bool_]]:
        """Parameters from the chosen measurements, and which of them are not outliers."""
        regular = chosen.copy()
        values = self._initial
        solve = self._least_sum if self.name in SUMS else self._least_maximum
        for _ in range(2):
            values = solve(values, regular)
            errors = np.abs(self.expected_s(values) - self.seconds) / self.seconds
            limit = OUTLIER * max(float(np.median(errors[chosen])), 1e-9)
            for kind in (chosen & self._with_prompt, chosen & ~self._with_prompt):
                if kind.any():
                    regular[kind] = errors[kind] <= max(limit, float(np.median(errors[kind])))
        if self.name != "roofline":
            weights = self.weights[chosen]
            total = float((weights * self.expected_s(values, chosen)).sum())
            values = values * float((weights * self.seconds[chosen]).sum()) / total
        return values, regular | ~chosen

    def _least_sum(self, _: FloatArray, chosen: NDArray[np.bool_]) -> FloatArray:
        from scipy.optimize import nnls  # the simulator itself does not need scipy

        scale = np.maximum(self._features.max(axis=0), 1e-300)
        factor = np.sqrt(self.weights[chosen]) / self.seconds[chosen]
        target = (self.seconds - self._rest)[chosen] * factor
        solution = nnls(self._features[chosen] / scale * factor[:, None], target)[0]
        values: FloatArray = solution / scale
        return values

    def _least_maximum(self, initial: FloatArray, chosen: NDArray[np.bool_]) -> FloatArray:
        """Least squares over the logarithms of the parameters."""
        from scipy.optimize import least_squares

        start = np.log(np.maximum(initial, 1e-12))
        upper = np.array([0.0 if one.endswith("efficiency") else math.inf for one in self.names])
        if self.name != "roofline":  # the magnitude first
            ratio = float((self.seconds[chosen] / self.expected_s(initial, chosen)).mean())
            start = start + math.log(ratio)
        root = np.sqrt(self.weights[chosen] / self.weights[chosen].mean())

        def residuals(logarithms: FloatArray) -> FloatArray:
            expected = self.expected_s(np.exp(np.minimum(logarithms, upper)), chosen)
            deviations: FloatArray = root * (expected / self.seconds[chosen] - 1)
            return deviations

        lower = np.full(len(start), -35.0)
        start = np.clip(start, lower + 1e-6, upper - 1e-6)
        solution = least_squares(
            residuals, start, bounds=(lower, upper), diff_step=1e-4, loss="soft_l1", f_scale=0.1, max_nfev=60
        )
        values: FloatArray = np.exp(solution.x)
        return values

    def _model(self, changes: Mapping[str, float]) -> StepTime:
        return make_step_time(self.name, self.parameters(self._initial) | dict(changes))

    def _times(self, model: StepTime, chosen: NDArray[np.bool_] | None = None) -> FloatArray:
        works = self._works if chosen is None else [self._works[at] for at in np.flatnonzero(chosen)]
        step_s = model.step_s
        return np.array([sum([part * step_s(work) for part, work in kinds]) for kinds in works])


def _thinned(measurements: Sequence[StepMeasurement], limit: int) -> list[StepMeasurement]:
    """At most about `limit` measurements: of those with and without a prompt every n-th, with n times the weight."""
    if len(measurements) <= limit:
        return list(measurements)
    chosen: list[tuple[int, StepMeasurement]] = []
    prompts = np.array([one.prefills > 0 for one in measurements])
    for part in (np.flatnonzero(prompts), np.flatnonzero(~prompts)):
        every = max(1, -(-2 * len(part) // limit))
        for index in part[::every]:
            one = measurements[index]
            chosen.append((index, replace(one, weight=one.weight * every)))
    return [one for _, one in sorted(chosen, key=lambda pair: pair[0])]
