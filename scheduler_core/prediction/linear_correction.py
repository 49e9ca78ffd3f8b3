"""Linear correction of predicted output lengths: eight coefficients, their fit and its online update.

The prediction ln X = mu + sigma T of a request becomes ln X = mu' + sigma' T with

    mu' = mu + f.a,    ln sigma' = ln sigma + f.b,    f = (1, mu - 6, ln sigma + 1, ln prompt_tokens - 5),

f each feature clipped to +-4. Zero coefficients leave a prediction unchanged. The coefficients are a MAP estimate with
normal priors. With r = (ln x - mu') / sigma', w = (nu + 1) / (nu + r^2), an output of x tokens has

    score of mu'        g = w r / sigma'          information  i = w (nu + 1) / (nu + 3) / sigma'^2
    score of ln sigma'  g = h (w q^2 - 1)         information  i = 2 nu / (nu + 3)

(Lange, Little and Taylor 1989; if the parameters are correct, w has mean 1 and the mean of i is the expected
information). With A = sum of i f f^T, c = sum of (i f.a + g) f, P the precision of the prior and m its mean,

    a = (A + P)^-1 (c + P m).

`fit` repeats this step with all outputs until a and b converge. `Estimate.update` takes one such step with each output,
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
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from scheduler_core.lengths.quantiles import LEVELS
from scheduler_core.lengths.student_t import (
    student_t_cdf,
    student_t_hazard,
    student_t_quantile,
)
from scheduler_core.prediction.outcome import Outcome
from scheduler_core.prediction.predictions import LengthPrediction

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
Features = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The coefficients a (`location`) and b (`log_scale`) of the features f; zeros leave predictions unchanged."""

    location: Features = (0.0, 0.0, 0.0, 0.0)
    log_scale: Features = (0.0, 0.0, 0.0, 0.0)

    def corrected(self, prediction: LengthPrediction, features: Features) -> LengthPrediction:
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


def features_of(prediction: LengthPrediction, prompt_tokens: int | None) -> Features:
    """f of a prediction; `prompt_tokens` is the length of the prompt, None if unknown."""
    log_prompt = CENTERS[2] if prompt_tokens is None else math.log(max(prompt_tokens, 1))
    columns = (prediction.mu, math.log(prediction.sigma), log_prompt)
    x, y, z = (
        min(max(value - center, -MAX_FEATURE), MAX_FEATURE)
        for value, center in zip(columns, CENTERS, strict=True)
    )
    return 1.0, x, y, z


class Estimate:
    """Sums of the scoring equations, and their solution: the coefficients, and the covariance [4, 4] of those of mu'."""

    def __init__(self, mean: Coefficients | None = None) -> None:
        mean = mean or Coefficients()
        self._prior = (_PRECISION @ np.array([mean.location, mean.log_scale])[:, :, None])[:, :, 0]
        #: A [2, 4, 4] and c [2, 4], of mu' and of ln sigma'.
        self.information, self.response = np.zeros((2, 4, 4)), np.zeros((2, 4))
        self.solve()

    def add(
        self, raw: LengthPrediction, corrected: LengthPrediction, outcome: Outcome, features: Features
    ) -> None:
        """Adds an output, with the scores under the present coefficients."""
        information, response = self._scores(raw, corrected, outcome, features)
        f = np.array(features)
        self.information += np.array(information)[:, None, None] * (f[:, None] * f)
        self.response += np.array(response)[:, None] * f

    def update(
        self,
        raw: LengthPrediction,
        corrected: LengthPrediction,
        outcome: Outcome,
        features: Features,
        decay: float,
    ) -> None:
        """Adds an output after multiplying the weight of all earlier ones by `decay`, and solves."""
        self.scale(decay)
        self.add(raw, corrected, outcome, features)
        self.solve()

    def scale(self, factor: float) -> None:
        """Multiplies the weight of all outputs by a factor."""
        self.information *= factor
        self.response *= factor

    def state(self) -> dict[str, Any]:
        """The sums and the prior as JSON content."""
        arrays = {"information": self.information, "response": self.response, "prior": self._prior}
        return {name: values.tolist() for name, values in arrays.items()}

    def restore(self, content: Mapping[str, Any]) -> None:
        """Restores a `state`; raises an error if the content is invalid."""
        information, response, prior = (
            np.array(content[name], float) for name in ("information", "response", "prior")
        )
        for name, sums in (("response", response), ("prior", prior)):
            if sums.shape != (2, 4) or not np.isfinite(sums).all():
                raise ValueError(name)
        if information.shape != (2, 4, 4):
            raise ValueError("information")
        if not (np.isfinite(information).all() and np.allclose(information, information.mT)):
            raise ValueError("information")
        if np.linalg.eigvalsh(information).min() <= -1e-6:
            raise ValueError("information")
        self.information, self.response, self._prior = information, response, prior
        self.solve()

    def _scores(
        self, raw: LengthPrediction, corrected: LengthPrediction, outcome: Outcome, features: Features
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

    def _variance(self, features: Features) -> float:
        f = np.array(features)
        return float(f @ self._covariance @ f)

    def solve(self) -> None:
        """Computes the coefficients anew."""
        inverse = np.linalg.inv(self.information + _PRECISION)
        self._covariance = inverse[0]
        location, log_scale = (inverse @ (self.response + self._prior)[:, :, None])[:, :, 0].tolist()
        self.coefficients = Coefficients(tuple(location), tuple(log_scale))


def fit(outcomes: Sequence[Outcome], mean: Coefficients | None = None) -> Coefficients:
    """The coefficients that fit all outputs together. The outcomes have a prediction and at least one token; `mean` is that of
    the prior, for example the fit to several served models (pooling)."""
    estimate = Estimate(mean)
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


def log_likelihood(prediction: LengthPrediction, log_length: float, finished: bool) -> float:
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
    standard = student_t_quantiles(prediction.nu, LEVELS)
    index = min(max(bisect_right(quantiles, log_length), 1), len(quantiles) - 1)
    start, end = standard[index - 1], standard[index]
    slope = (end - start) / max(quantiles[index] - quantiles[index - 1], MIN_GAP)
    return start + slope * (log_length - quantiles[index - 1]), slope


def student_t_quantiles(nu: float, levels: tuple[float, ...]) -> tuple[float, ...]:
    """Quantiles of Student's t at the levels, for nu rounded to two digits."""
    return _cached_student_t(float(f"{nu:.2g}"), levels)


@lru_cache(maxsize=1024)
def _cached_student_t(nu: float, levels: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(student_t_quantile(level, nu) for level in levels)
