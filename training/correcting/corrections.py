"""Corrections of predicted length distributions for one served model, fitted to the lengths of finished requests.

With x = (1, mu, sigma, ln n), where n is the number of encoded tokens of the prompt, and h the encoder features that
the heads use,

    mu' = mu + terms . x + weights . h,    sigma' = scale sigma^power.

Encoder and heads are unchanged, so this needs neither torch nor a checkpoint and works on int8 graphs. A served model
that the artifact does not have gets the corrected predictions of its `base`: the unknown model, or the known model
whose corrected predictions fit best.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats
from sklearn.decomposition import PCA

from data_gen.splits import unit_hash
from training.evaluating.scores import OutputLengths, OutputScores, score_outputs

FloatArray = NDArray[np.float64]
#: Kind of correction -> number of fitted terms, and whether feature weights are fitted.
KINDS: Mapping[str, tuple[int, bool]] = {
    "shift and scale": (1, False),
    "linear": (4, False),
    "features": (4, True),
}
FOLDS = 5
NUM_COMPONENTS = 64
#: Standard deviations of the normal priors, which limit overfitting to a few dozen requests: shift in log tokens; effect of
#: one standard deviation of a column of x; joint effect of the standardized features; ln scale; power.
_PRIOR_SHIFT, _PRIOR_SLOPE, _PRIOR_FEATURES, _PRIOR_LOG_SCALE, _PRIOR_POWER = 2.0, 0.3, 1.0, 0.5, 0.3


def _empty() -> FloatArray:
    return np.zeros(0)


def _empty_rows() -> FloatArray:
    return np.zeros((0, 0))


@dataclass(frozen=True, slots=True)
class Requests:
    """N finished requests and the lengths predicted for them."""

    # prompts, prompt_ids: text and id [N].
    prompts: NDArray[np.object_]
    prompt_ids: NDArray[np.object_]
    served_models: NDArray[np.object_]  # names, empty where the log has none [N]
    temperatures: FloatArray  # of sampling, NaN where unknown [N]
    lengths: FloatArray  # output tokens [N]; the truncated length for truncated outputs
    finished: NDArray[np.bool_]  # False where the output was truncated [N]
    max_tokens: FloatArray  # limit of the output, infinite if there is none [N]
    # Number of encoded tokens of the prompt [N]; this and the following fields are empty before prediction.
    num_tokens: FloatArray = field(default_factory=_empty)
    # mu, sigma, nu: predicted [N].
    mu: FloatArray = field(default_factory=_empty)
    sigma: FloatArray = field(default_factory=_empty)
    nu: FloatArray = field(default_factory=_empty)
    # Predicted quantiles of ln tokens [N, K]; K is 0 for a log-t.
    quantiles: FloatArray = field(default_factory=_empty_rows)
    # h of each prompt [N, F]; F is 0 if the graph does not expose features.
    features: FloatArray = field(default_factory=_empty_rows)

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> Requests:
        """The selected requests."""
        return Requests(*(getattr(self, each.name)[rows] for each in fields(self)))

    @property
    def x(self) -> FloatArray:
        """1, mu, sigma and ln n of each request [N, 4]."""
        return np.stack([np.ones(len(self)), self.mu, self.sigma, np.log(self.num_tokens)], axis=1)

    def corrected(self, correction: Correction) -> Requests:
        """The requests with corrected predictions."""
        mu = self.mu + self.x @ np.array(correction.terms)
        if len(correction.weights):
            mu = mu + self.features @ correction.weights
        sigma = correction.scale * self.sigma**correction.power
        quantiles = self.quantiles
        if quantiles.shape[1]:
            quantiles = mu[:, None] + (quantiles - self.mu[:, None]) * (sigma / self.sigma)[:, None]
        return replace(self, mu=mu, sigma=sigma, quantiles=quantiles)

    def scores(self) -> OutputScores:
        """Scores of the predictions."""
        outputs = OutputLengths(np.arange(len(self)), self.lengths, self.finished, self.max_tokens)
        quantiles = self.quantiles if self.quantiles.shape[1] else None
        return score_outputs(self.mu, self.sigma, self.nu, outputs, quantiles)


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """A correction for one served model; by default the identity."""

    base: str  # served model whose predictions are corrected; empty: the unknown model
    kind: str = "identity"  # one of KINDS, or identity
    terms: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)  # coefficients of x [4]
    # scale > 0, power: sigma' = scale sigma^power.
    scale: float = 1.0
    power: float = 1.0
    # Coefficients of the features [F]; empty: the features are not used.
    weights: FloatArray = field(default_factory=_empty)

    def to_json(self) -> dict[str, Any]:
        """JSON content, without the weights."""
        return {name: getattr(self, name) for name in ("base", "kind", "terms", "scale", "power")}


def select_correction(
    bases: Mapping[str, Requests], seed: int, kinds: Collection[str] = tuple(KINDS)
) -> tuple[Correction, dict[str, float]]:
    """Selects the correction with the smallest cross-validated CRPS of ln tokens and fits it to all requests.

    Shift and scale are then calibrated on the out-of-fold predictions.

    Args:
        bases: Base -> the requests with the predictions for that served model; the first is the artifact's default.
        seed: Seed of the folds, which are drawn by prompt.
        kinds: Kinds of correction to try in addition to the identity.

    Returns:
        The correction, and the cross-validated CRPS of each "base, kind".
    """
    held_out: dict[tuple[str, str], Requests] = {}
    for base, requests in bases.items():
        fold = np.array([int(FOLDS * unit_hash(f"fold\x00{seed}\x00{text}")) for text in requests.prompts])
        held_out[base, "identity"] = requests
        for kind, (_, has_weights) in KINDS.items():
            if kind not in kinds or (has_weights and not requests.features.shape[1]):
                continue
            mu, sigma, quantiles = (each.copy() for each in (requests.mu, requests.sigma, requests.quantiles))
            for number in np.unique(fold):
                rows = fold == number
                corrected = requests.take(rows).corrected(_fit(requests.take(~rows), base, kind))
                mu[rows], sigma[rows] = corrected.mu, corrected.sigma
                quantiles[rows] = corrected.quantiles
            predicted = replace(requests, mu=mu, sigma=sigma, quantiles=quantiles)
            if has_weights:
                predicted = predicted.corrected(_fit(predicted, base, "shift and scale"))
            held_out[base, kind] = predicted
    trials = {candidate: float(part.scores().crps_log.mean()) for candidate, part in held_out.items()}
    base, kind = min(trials, key=trials.__getitem__)
    names = {f"{base or 'unknown'}, {kind}": value for (base, kind), value in trials.items()}
    if kind == "identity":
        return Correction(base), names
    fitted = _fit(bases[base], base, kind)
    calibrated = _fit(held_out[base, kind], base, "shift and scale")
    shift, *slopes = fitted.terms
    terms = (shift + calibrated.terms[0], *slopes)
    return replace(fitted, terms=terms, scale=fitted.scale * calibrated.scale), names


def _fit(requests: Requests, base: str, kind: str) -> Correction:
    """Maximum a posteriori estimate of terms, weights and ln scale under right-censored log-t lengths."""
    num_terms, has_weights = KINDS[kind]
    x = requests.x[:, :num_terms]
    center, width = np.append(0.0, x[:, 1:].mean(axis=0)), np.append(1.0, x[:, 1:].std(axis=0))
    width[width < 1e-6] = np.inf  # a constant column has no effect
    columns = (x - center) / width
    deviations = np.array([_PRIOR_SHIFT, *[_PRIOR_SLOPE] * (num_terms - 1)])
    if not has_weights:
        effects, scale = _posterior_mode(requests, columns, deviations, fits_power=num_terms > 1)
        weights = np.zeros(0)
    else:
        # With as many weights as requests the residual scale would shrink to 0, so it is estimated without the weights.
        _, scale = _posterior_mode(requests, columns, deviations, fits_power=True)
        middle, size = requests.features.mean(axis=0), requests.features.std(axis=0)
        size = np.where(size < 1e-6, np.inf, size * np.sqrt(requests.features.shape[1]))
        standardized = (requests.features - middle) / size
        num_components = min(NUM_COMPONENTS, *standardized.shape)
        axes = PCA(num_components, svd_solver="randomized", random_state=0).fit(standardized).components_
        columns = np.hstack([columns, standardized @ axes.T])
        deviations = np.append(deviations, np.full(num_components, _PRIOR_FEATURES))
        effects, _ = _posterior_mode(requests, columns, deviations, scale=scale)
        weights = effects[num_terms:] @ axes / size
    terms = np.zeros(4)
    terms[:num_terms] = effects[:num_terms] / width
    terms[0] -= terms[:num_terms] @ center
    if has_weights:
        terms[0] -= weights @ middle
    return Correction(base, kind, tuple(terms.tolist()), *scale, weights)


def _posterior_mode(
    requests: Requests,
    columns: FloatArray,
    deviations: FloatArray,
    *,
    fits_power: bool = False,
    scale: tuple[float, float] | None = None,
) -> tuple[FloatArray, tuple[float, float]]:
    """Maximum a posteriori estimate of effects [C], and scale and power of sigma, under right-censored log-t lengths.

    Args:
        requests: Requests whose mu changes by columns @ effects.
        columns, deviations: Design matrix [N, C], and standard deviations of the priors of the effects [C].
        fits_power: Whether the power is fitted; otherwise it is 1.
        scale: Fixed (scale, power); None: both are fitted.
    """
    gap, nu, finished = np.log(requests.lengths) - requests.mu, requests.nu, requests.finished
    logs = np.log(requests.sigma)
    center = logs.mean()
    deviations = np.append(deviations, (_PRIOR_LOG_SCALE, _PRIOR_POWER))
    # The scale is parameterized at the mean of ln sigma, which nearly decorrelates it from the power.
    fixed = None if scale is None else (np.log(scale[0]) + (scale[1] - 1) * center, scale[1])
    start = np.append(np.zeros(columns.shape[1]), (0.0, 1.0) if fixed is None else fixed)
    means = np.append(np.zeros(columns.shape[1] + 1), 1.0)

    def loss(parameters: FloatArray) -> tuple[float, FloatArray]:
        """Negative log posterior and its gradient."""
        *effects, log_scale, power = parameters
        log_sigma = log_scale + center + power * (logs - center)
        sigma = np.exp(log_sigma)
        z = (gap - columns @ np.array(effects)) / sigma
        log_pdf, log_sf = stats.t.logpdf(z, nu), stats.t.logsf(z, nu)
        value = np.where(finished, log_sigma - log_pdf, -log_sf).sum()
        slope = np.where(finished, (nu + 1) * z / (nu + z * z), np.exp(log_pdf - log_sf))
        by_sigma = finished - slope * z
        gradient = np.concatenate([-(slope / sigma) @ columns, [by_sigma.sum(), by_sigma @ (logs - center)]])
        penalty = (parameters - means) / deviations
        return float(value + 0.5 * penalty @ penalty), gradient + penalty / deviations

    bounds: list[tuple[float | None, float | None]] = [(None, None)] * columns.shape[1]
    if fixed is not None:
        bounds += [(value, value) for value in fixed]
    else:
        bounds += [(-5.0, 15.0), (0.0, 2.0) if fits_power else (1.0, 1.0)]
    best = optimize.minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds).x
    power = float(best[-1])
    return best[:-2], (float(np.exp(best[-2] + (1 - power) * center)), power)
