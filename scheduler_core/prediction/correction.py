"""Correction of predicted output lengths, for each served model, by the lengths of its outputs.

The prediction ln X = mu + sigma T of a request becomes ln X = mu' + sigma' T with

    mu' = mu + f.a,    ln sigma' = ln sigma + f.b,    f = (1, mu - 6, ln sigma + 1, ln prompt_tokens - 5),

f each feature clipped to +-4. Zero coefficients leave a prediction unchanged. The coefficients are a MAP estimate with
normal priors. With r = (ln x - mu') / sigma', w = (nu + 1) / (nu + r^2), an output of x tokens has

    score of mu'        g = w r / sigma'          information  i = w (nu + 1) / (nu + 3) / sigma'^2
    score of ln sigma'  g = h (w q^2 - 1)         information  i = 2 nu / (nu + 3)

(Lange, Little and Taylor 1989; if the parameters are correct, w has mean 1 and the mean of i is the expected
information). With A = sum of i f f^T, c = sum of (i f.a + g) f, P the precision of the prior and m its mean,

    a = (A + P)^-1 (c + P m).

`fit` repeats this step with all outputs until a and b converge. `Correction.observe` takes one such step with each output,
with A <- k A + i f f^T, c <- k c + (i f.a + g) f: recursive least squares, k = 1 - 1 / memory being the forgetting factor.
The weights bound the influence of one output. h is `RIGHT` for r > 0 and 2 - `RIGHT` for r < 0, which keeps the mean of the
score at 0: log lengths are skewed to the left, and schedulers need the sigma of the right side.
q^2 = r^2 / (1 + f.(A + P)^-1 f / sigma'^2) also replaces r^2 in the w of that score: while mu' is uncertain, its errors
hardly increase sigma'.

A censored output (truncated at max_tokens, or aborted) is longer than its x tokens. Its scores are the
expectations given that: hazard(r) instead of w r, r hazard(r) instead of w r^2 - 1. Its information has 1
instead of w, and only the fraction F(r) of lengths that x excludes.

Of a prediction given by quantiles, mu and sigma are those of the closest log-t; its quantiles keep their distances from mu
in units of sigma, and r is the value of Student's t at the level of x (`_residual`).

Two safeguards of `Correction` for each served model: (1) corrections are only applied while they have increased the
likelihood of the outputs in the window; the coefficients are always updated. (2) If the corrected predictions
fail the test of `drift`, only the fraction `KEPT_AT_ALARM` of the accumulated information is kept.
"""

import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.lengths import LogQuantiles
from scheduler_core.lengths.quantiles import LEVELS
from scheduler_core.lengths.standard import FloatArray
from scheduler_core.lengths.student_t import (
    student_t_cdf,
    student_t_hazard,
    student_t_quantile,
)
from scheduler_core.prediction.drift import DriftAlarm, DriftDetector
from scheduler_core.prediction.outcome import Outcome
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.ranges import FINITE, check_ranges
from scheduler_core.statistics import kendall_tau

COVERAGE_LEVELS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
#: Subtracted from mu, ln sigma and ln prompt_tokens in f.
CENTERS = (6.0, -1.0, 5.0)
#: P: standard deviations of the coefficients of f, for mu' and for ln sigma'.
_PRECISION = np.stack(
    [np.diag(np.array(deviations) ** -2.0) for deviations in ((0.4, 0.25, 0.25, 0.1), (0.25, 0.1, 0.1, 0.05))]
)
MAX_FEATURE = 4.0
#: Lower bound of sigma' in the scores, and of the gap between two quantiles in the likelihood.
MIN_SIGMA, MIN_GAP = 0.01, 1e-3
RIGHT = 1.5
#: Maximum number of steps of `fit`, and the change of coefficients at which it ends. After the first `FULL_STEPS` it takes
#: half steps: whole ones can go to and fro without end if nearly all outputs are censored.
MAX_STEPS, FULL_STEPS, CONVERGED = 100, 20, 1e-4
#: Outputs since the start or the last alarm before the test begins.
MIN_OUTPUTS = 50
MAX_WINDOW = 100_000
#: Minimum outputs of a served model that replaces another one, and maximum characters of its name.
ADMITTED_OUTPUTS, MAX_NAME_CHARS = 20, 256
#: Fraction of the information that is kept at an alarm.
KEPT_AT_ALARM = 0.2
#: The first levels are for the CRPS, twice the mean loss of their quantiles; the others are for coverage.
NUM_LEVELS = 32
_LEVELS = (*((number + 0.5) / NUM_LEVELS for number in range(NUM_LEVELS)), *COVERAGE_LEVELS.values())
STATE_FORMAT = "tailcast-online-calibration/1"
_COUNTS = ("num_outputs", "num_censored", "num_alarms")
_Features = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The coefficients a (`location`) and b (`log_scale`) of the features f; zeros leave predictions unchanged."""

    location: _Features = (0.0, 0.0, 0.0, 0.0)
    log_scale: _Features = (0.0, 0.0, 0.0, 0.0)

    def corrected(self, prediction: LengthPrediction, features: _Features) -> LengthPrediction:
        """The prediction with mu' and sigma', clipped to their ranges; quantiles are moved accordingly."""
        _, x, y, z = features
        a, b = self.location, self.log_scale
        mu = prediction.mu + a[0] + a[1] * x + a[2] * y + a[3] * z
        log_sigma = math.log(prediction.sigma) + b[0] + b[1] * x + b[2] * y + b[3] * z
        sigma = math.exp(min(max(log_sigma, -20.0), 3.9))
        return prediction.moved(min(max(mu, -50.0), 50.0), sigma)

    def halfway(self, other: "Coefficients") -> "Coefficients":
        """The coefficients in the middle of these and `other`."""
        middle = 0.5 * (
            np.array([self.location, self.log_scale]) + np.array([other.location, other.log_scale])
        )
        return Coefficients(*map(tuple, middle.tolist()))

    def distance(self, other: "Coefficients") -> float:
        """Largest difference of a coefficient."""
        pairs = zip(self.location + self.log_scale, other.location + other.log_scale, strict=True)
        return max(abs(one - two) for one, two in pairs)


def features_of(prediction: LengthPrediction, prompt_tokens: int | None) -> _Features:
    """f of a prediction; `prompt_tokens` is the length of the prompt, None if unknown."""
    log_prompt = CENTERS[2] if prompt_tokens is None else math.log(max(prompt_tokens, 1))
    columns = (prediction.mu, math.log(prediction.sigma), log_prompt)
    x, y, z = (
        min(max(value - center, -MAX_FEATURE), MAX_FEATURE)
        for value, center in zip(columns, CENTERS, strict=True)
    )
    return 1.0, x, y, z


class _Estimate:
    """Sums of the scoring equations, and their solution: the coefficients, and the covariance [4, 4] of those of mu'."""

    def __init__(self, mean: Coefficients | None = None) -> None:
        mean = mean or Coefficients()
        self._prior = (_PRECISION @ np.array([mean.location, mean.log_scale])[:, :, None])[:, :, 0]
        #: A [2, 4, 4] and c [2, 4], of mu' and of ln sigma'.
        self.information, self.response = np.zeros((2, 4, 4)), np.zeros((2, 4))
        self.solve()

    def add(
        self, raw: LengthPrediction, corrected: LengthPrediction, outcome: Outcome, features: _Features
    ) -> None:
        """Adds an output, with the scores under the present coefficients."""
        information, response = self._scores(raw, corrected, outcome, features)
        f = np.array(features)
        self.information += np.array(information)[:, None, None] * (f[:, None] * f)
        self.response += np.array(response)[:, None] * f

    def _scores(
        self, raw: LengthPrediction, corrected: LengthPrediction, outcome: Outcome, features: _Features
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        """i and i f.a + g of mu' and of ln sigma'."""
        log_length = math.log(outcome.output_tokens)
        nu, sigma = corrected.nu, max(corrected.sigma, MIN_SIGMA)
        residual = (
            _residual(corrected, log_length)[0]
            if corrected.quantiles
            else (log_length - corrected.mu) / sigma
        )
        if outcome.is_finished:
            fraction, weight = 1.0, (nu + 1) / (nu + residual * residual)
            weighted = weight * residual
            square = residual * residual / (1.0 + self._variance(features) / (sigma * sigma))
            growth = (nu + 1) * square / (nu + square) - 1.0
        else:
            fraction, weighted = student_t_cdf(residual, nu), student_t_hazard(residual, nu)
            weight = 1.0
            growth = weighted * residual
        growth *= RIGHT if residual > 0 else 2.0 - RIGHT
        of_mu = fraction * weight * (nu + 1) / (nu + 3) / (sigma * sigma)
        of_sigma = fraction * 2 * nu / (nu + 3)
        shift, log_factor = corrected.mu - raw.mu, math.log(corrected.sigma / raw.sigma)
        return (of_mu, of_sigma), (of_mu * shift + weighted / sigma, of_sigma * log_factor + growth)

    def _variance(self, features: _Features) -> float:
        f = np.array(features)
        return float(f @ self._covariance @ f)

    def solve(self) -> None:
        """Recomputes the coefficients."""
        inverse = np.linalg.inv(self.information + _PRECISION)
        self._covariance = inverse[0]
        location, log_scale = (inverse @ (self.response + self._prior)[:, :, None])[:, :, 0].tolist()
        self.coefficients = Coefficients(tuple(location), tuple(log_scale))


def fit(outcomes: Sequence[Outcome], mean: Coefficients | None = None) -> Coefficients:
    """The coefficients that fit all outputs together. The outcomes have a prediction and at least one token; `mean` is that of
    the prior, for example the fit to several served models (pooling)."""
    estimate = _Estimate(mean)
    rows = [
        (outcome.prediction, outcome, features_of(outcome.prediction, outcome.prompt_tokens))
        for outcome in outcomes
        if outcome.prediction is not None
    ]
    for number in range(MAX_STEPS):
        before = estimate.coefficients
        estimate.information[:], estimate.response[:] = 0.0, 0.0
        for raw, outcome, features in rows:
            estimate.add(raw, before.corrected(raw, features), outcome, features)
        estimate.solve()
        if before.distance(estimate.coefficients) < CONVERGED:
            break
        if number >= FULL_STEPS:
            estimate.coefficients = before.halfway(estimate.coefficients)
    return estimate.coefficients


def fit_each(outcomes: Iterable[Outcome]) -> dict[str, Coefficients]:
    """Served model -> the coefficients that fit its outputs, with those that fit all outputs ("") as the mean of their prior."""
    by_model: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_model.setdefault(outcome.served_model or "", []).append(outcome)
    together = fit([outcome for part in by_model.values() for outcome in part])
    return {"": together} | {name: fit(part, together) for name, part in by_model.items() if name}


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Parameters of `Correction`.

    Attributes:
        memory: Number of outputs after which the weight of an output has decayed to 1/e.
        window: Number of latest outputs for metrics and for the comparison with the uncorrected predictions.
        arl: Lower bound of the mean number of outputs to a false drift alarm (average run length).
        max_models: Maximum number of served models. A further one replaces the least used one once it has had
            `ADMITTED_OUTPUTS` outputs, and as many as that one: names that a client invents displace no model.
    """

    memory: int = 5000
    window: int = 500
    arl: float = 100_000.0
    max_models: int = 64

    def __post_init__(self) -> None:
        check_ranges(self, memory=(10, 1_000_000), window=(MIN_OUTPUTS, MAX_WINDOW))
        check_ranges(self, arl=(10.0, FINITE), max_models=(1, 100_000))


class _ServedModel(_Estimate):
    """State of the correction of one served model."""

    def __init__(self, config: CorrectionConfig) -> None:
        super().__init__()
        self.num_outputs = self.num_censored = self.num_alarms = self.num_since_alarm = 0
        #: Outputs, halved after every `memory` outputs of all models.
        self.use = 0
        self.detector = DriftDetector(config.arl)
        self.decay = 1.0 - 1.0 / config.memory
        #: Gain in ln likelihood by the correction, for each output of the window.
        self.gains: deque[float] = deque()
        self.gain_sum = 0.0
        #: mu, sigma, mu', sigma', ln x, ln max_tokens, finished, and (q - mu) / sigma of the quantiles q at `_LEVELS`.
        self.rows = np.zeros((config.window, 7 + len(_LEVELS)))
        self.num_rows = 0

    @property
    def is_used(self) -> bool:
        """Whether the correction has increased the likelihood over the window."""
        return self.gain_sum > 0.0

    def observe(self, prediction: LengthPrediction, outcome: Outcome) -> DriftAlarm | None:
        """Scores, tests and learns an output."""
        features = features_of(prediction, outcome.prompt_tokens)
        corrected = self.coefficients.corrected(prediction, features)
        self._score(prediction, corrected, outcome)
        alarm = self._test(corrected, outcome)
        self.num_outputs += 1
        self.num_censored += not outcome.is_finished
        self.information *= self.decay
        self.response *= self.decay
        self.add(prediction, corrected, outcome, features)
        self.solve()
        return alarm

    def _score(self, raw: LengthPrediction, corrected: LengthPrediction, outcome: Outcome) -> None:
        """Updates the likelihood gain with an output; adds it to the metric rows unless it was aborted below its limit."""
        log_length, finished, limit = math.log(outcome.output_tokens), outcome.is_finished, outcome.limit
        gain = _log_likelihood(corrected, log_length, finished) - _log_likelihood(raw, log_length, finished)
        self.gains.append(gain)
        self.gain_sum += gain - (self.gains.popleft() if len(self.gains) > len(self.rows) else 0.0)
        if finished or outcome.output_tokens == limit:
            row = self.rows[self.num_rows % len(self.rows)]
            row[:4] = raw.mu, raw.sigma, corrected.mu, corrected.sigma
            row[4:7] = log_length, math.inf if limit is None else math.log(limit), finished
            row[7:] = _standard_quantiles(raw)
            self.num_rows += 1

    def _test(self, corrected: LengthPrediction, outcome: Outcome) -> DriftAlarm | None:
        """Updates the drift test with an output; at an alarm, reduces the information to `KEPT_AT_ALARM`."""
        self.num_since_alarm += 1
        if self.num_since_alarm <= MIN_OUTPUTS:
            return None
        alarm = self.detector.observe(corrected, outcome.output_tokens, finished=outcome.is_finished)
        if alarm is not None:
            self.num_alarms += 1
            self.num_since_alarm = 0
            self.information *= KEPT_AT_ALARM
            self.response *= KEPT_AT_ALARM
        return alarm

    def state(self) -> dict[str, Any]:
        arrays = {"information": self.information.tolist(), "response": self.response.tolist()}
        return {name: getattr(self, name) for name in (*_COUNTS, "gain_sum")} | arrays

    def restore(self, content: Mapping[str, Any]) -> None:
        """Restores a `state`; raises an error if the content is invalid."""
        for name in _COUNTS:
            if type(content[name]) is not int or not 0 <= content[name] < 2**53:
                raise ValueError(name)
            setattr(self, name, content[name])
        self.use = self.num_outputs
        self.gain_sum = float(content["gain_sum"])
        self.gains = deque([self.gain_sum])
        self.information = np.array(content["information"], float)
        self.response = np.array(content["response"], float)
        shapes = self.information.shape, self.response.shape
        if shapes != ((2, 4, 4), (2, 4)) or not np.isfinite([self.gain_sum, *self.response.flat]).all():
            raise ValueError("response, gain_sum")
        if not (np.isfinite(self.information).all() and np.allclose(self.information, self.information.mT)):
            raise ValueError("information")
        if np.linalg.eigvalsh(self.information).min() <= -1e-6:
            raise ValueError("information")
        self.solve()


class Correction:
    """Corrected predictions for each served model; constant memory, no I/O.

    Not for several threads at once, except for `correct`, which may run while one other thread observes.
    """

    def __init__(self, config: CorrectionConfig | None = None) -> None:
        self._config = config or CorrectionConfig()
        self._models: OrderedDict[str, _ServedModel] = OrderedDict()
        #: Outputs of served models that have not been admitted, at most `max_models` of them.
        self._candidates: dict[str, int] = {}
        self._num_outputs = 0

    @property
    def served_models(self) -> tuple[str, ...]:
        """Served models with a correction, the least recently observed one first."""
        return tuple(self._models)

    def coefficients(self, served_model: str) -> Coefficients | None:
        """The coefficients in use for a served model; None while there are none."""
        model = self._models.get(served_model)
        return None if model is None or not model.is_used else model.coefficients

    def correct(
        self, served_model: str, prediction: LengthPrediction, prompt_tokens: int | None = None
    ) -> LengthPrediction:
        """The corrected prediction; `prediction` itself while no correction is in use for the served model.

        `prompt_tokens` is the length of the prompt, None if unknown.
        """
        coefficients = self.coefficients(served_model)
        if coefficients is None:
            return prediction
        return coefficients.corrected(prediction, features_of(prediction, prompt_tokens))

    def observe(self, served_model: str, outcome: Outcome) -> DriftAlarm | None:
        """Updates the correction with an ended request; returns the alarm, if any.

        `served_model` has at most `MAX_NAME_CHARS` characters, see `CorrectionConfig.max_models`. The outcome has the
        uncorrected prediction and at least one token. Outputs aborted below their limit are not in the metrics. `InputError`
        for an invalid number.
        """
        prediction = outcome.prediction
        if prediction is None:
            raise InputError("an outcome without a prediction cannot be learned")
        _check_tokens("output_tokens", outcome.output_tokens, 1)
        if outcome.prompt_tokens is not None:
            _check_tokens("prompt_tokens", outcome.prompt_tokens, 0)
        if len(served_model) > MAX_NAME_CHARS:
            raise InputError("served_model", served_model, f"at most {MAX_NAME_CHARS} characters")
        model = self._used_model(served_model)
        return None if model is None else model.observe(prediction, outcome)

    def _used_model(self, served_model: str) -> _ServedModel | None:
        """The state of a served model with a further output; None while it is a candidate."""
        self._num_outputs += 1
        if self._num_outputs % self._config.memory == 0:
            for other in self._models.values():
                other.use //= 2
            self._candidates = {name: use // 2 for name, use in self._candidates.items() if use > 1}
        model = self._models.get(served_model)
        if model is None:
            if len(self._models) >= self._config.max_models and not self._replaces(served_model):
                return None
            model = self._models[served_model] = _ServedModel(self._config)
            model.use = self._candidates.pop(served_model, 0)
        model.use += 1
        self._models.move_to_end(served_model)
        return model

    def _replaces(self, served_model: str) -> bool:
        """Counts an output of a candidate, and drops the least used model if the candidate may replace it."""
        use = self._candidates.get(served_model, 0) + 1
        least = min(self._models, key=lambda name: self._models[name].use)
        if use >= max(ADMITTED_OUTPUTS, self._models[least].use):
            del self._models[least]
            return True
        if use == 1 and len(self._candidates) >= self._config.max_models:
            del self._candidates[min(self._candidates, key=self._candidates.__getitem__)]
        self._candidates[served_model] = use
        return False

    def metrics(self, served_model: str) -> dict[str, Any]:
        """Prediction quality of a served model over the window. `InputError` if it has no outputs yet.

        Keys: num_outputs, num_censored, num_alarms (since the start); is_used (whether corrections are in use);
        num_window; before and after (without and with correction), each with coverage (level -> fraction of outputs not
        longer than the quantile, among those whose quantile is below max_tokens), tau (Kendall's tau-b of mu and length)
        and crps (of ln min(X, max_tokens)); None if unknown. The correction of an output is the one before its update.
        """
        model = self._models.get(served_model)
        if model is None:
            raise InputError("served_model", served_model, ", ".join(self._models) or "none yet")
        rows = model.rows[: model.num_rows]
        return {name: getattr(model, name) for name in (*_COUNTS, "is_used")} | {
            "num_window": len(rows),
            "before": _scores(rows, 0),
            "after": _scores(rows, 1),
        }

    def state(self) -> dict[str, Any]:
        """The learned state as JSON content, without the metrics window and the running drift tests."""
        return {
            "format": STATE_FORMAT,
            "served_models": {name: model.state() for name, model in self._models.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a `state`. `InputError`, without any change, if it is invalid."""
        if not isinstance(state, Mapping) or state.get("format") != STATE_FORMAT:
            raise InputError("state", state, f"a mapping of format {STATE_FORMAT}")
        models: OrderedDict[str, _ServedModel] = OrderedDict()
        try:
            items = [item for item in state["served_models"].items() if len(str(item[0])) <= MAX_NAME_CHARS]
            for name, content in items[-self._config.max_models :]:
                models[str(name)] = _ServedModel(self._config)
                models[str(name)].restore(content)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"state cannot be used: {error!r}") from error
        self._models = models
        self._candidates.clear()


def is_model_name(name: str) -> bool:
    """Whether a text of a log or request is the name of a served model: printable, 1 to `MAX_NAME_CHARS` characters."""
    return 0 < len(name) <= MAX_NAME_CHARS and name.isprintable()


def _check_tokens(name: str, value: int, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 2**53:
        raise InputError(name, value, f"integers from {low} to 2^53")


def _log_likelihood(prediction: LengthPrediction, log_length: float, finished: bool) -> float:
    """ln density at ln x up to a constant of nu; for a censored output ln P(X > x)."""
    residual, slope = _residual(prediction, log_length)
    nu = prediction.nu
    if finished:
        return math.log(slope) - 0.5 * (nu + 1) * math.log1p(residual * residual / nu)
    return math.log(max(student_t_cdf(-residual, nu), 1e-300))


def _residual(prediction: LengthPrediction, log_length: float) -> tuple[float, float]:
    """r, which is Student's t if the prediction is correct, and its derivative by ln x. For quantiles it is linear in ln x
    between those of Student's t at the same levels."""
    quantiles = prediction.quantiles
    if not quantiles:
        return (log_length - prediction.mu) / prediction.sigma, 1.0 / prediction.sigma
    standard = _student_t(prediction.nu, LEVELS)
    index = min(max(bisect_right(quantiles, log_length), 1), len(quantiles) - 1)
    start, end = standard[index - 1], standard[index]
    slope = (end - start) / max(quantiles[index] - quantiles[index - 1], MIN_GAP)
    return start + slope * (log_length - quantiles[index - 1]), slope


def _standard_quantiles(prediction: LengthPrediction) -> FloatArray:
    """(q - mu) / sigma of the predicted quantiles q of ln x at `_LEVELS`."""
    if prediction.quantiles:
        quantiles = LogQuantiles(prediction.quantiles).logppf(_LEVELS)
        return np.asarray((quantiles - prediction.mu) / prediction.sigma)
    return np.array(_student_t(prediction.nu, _LEVELS))


def _student_t(nu: float, levels: tuple[float, ...]) -> tuple[float, ...]:
    """Quantiles of Student's t at the levels, for nu rounded to two digits."""
    return _cached_student_t(float(f"{nu:.2g}"), levels)


@lru_cache(maxsize=1024)
def _cached_student_t(nu: float, levels: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(student_t_quantile(level, nu) for level in levels)


def _scores(rows: FloatArray, corrected: int) -> dict[str, Any]:
    """Scores for `Correction.metrics` of the uncorrected (0) or corrected (1) predictions."""
    if not len(rows):
        return {"coverage": dict.fromkeys(COVERAGE_LEVELS), "tau": None, "crps": None}
    mu, sigma = rows[:, 2 * corrected : 2 * corrected + 2].T
    log_length, log_limit, finished = rows[:, 4:7].T
    quantiles = mu[:, None] + sigma[:, None] * rows[:, 7:]
    gaps = log_length[:, None] - np.minimum(quantiles[:, :NUM_LEVELS], log_limit[:, None])
    coverage: dict[str, float | None] = {}
    for name, quantile in zip(COVERAGE_LEVELS, quantiles[:, NUM_LEVELS:].T, strict=True):
        is_observed = quantile < log_limit
        covered = (finished > 0) & (log_length <= quantile)
        coverage[name] = float(covered[is_observed].mean()) if is_observed.any() else None
    losses = np.array(_LEVELS[:NUM_LEVELS]) * gaps - np.minimum(gaps, 0.0)
    return {"coverage": coverage, "tau": kendall_tau(mu, log_length), "crps": 2.0 * float(losses.mean())}
