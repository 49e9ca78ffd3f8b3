"""Noise ceiling: the best scores that a finite number of outputs allows.

Two bounds, each in the same metrics as a predictor:

- `half_of_outputs`: each prompt's outputs are split at random in two halves; a fit to one half is the prediction, the
  other half the test. It is not an upper bound: parameters fitted to a few outputs are noisy, so a good predictor can
  beat it, above all in sigma.
- `true_parameters`: as many outputs are drawn from each prompt's fit, truncated at the same max_tokens; the parameters
  they were drawn from are the prediction, and fits to the drawn outputs the test: the scores of a perfect predictor.
  R2 stays below 1 because those fits are noisy. The fits it starts from are noisy too, so the truth varies more than
  it should, and this bound is a little too high; in R2 of sigma more than in R2 of mu.

`reliability` is the correlation of the two halves' fits, stepped up to the full number of outputs by Spearman and
Brown's 2 r / (1 + r): the R2 that the true parameters would have against the fits, estimated from the data.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.evaluating.predictors import PredictedRows
from training.evaluating.rows import EvaluationRows
from training.fitting.estimate import MIN_SAMPLES
from training.fitting.fits import NOT_FITTED, FitOptions, FittedGroups, fit_groups
from training.fitting.samples import GroupedLengths

#: Rows to score on, which are not those of the data, and predictions for them.
Bound = tuple[EvaluationRows, PredictedRows]


def halves(rows: EvaluationRows, rng: np.random.Generator) -> tuple[FittedGroups, FittedGroups]:
    """Fits to two random halves of each prompt's outputs; prompts without a fit to both are left out."""
    groups = rows.fits.groups.take(np.flatnonzero(rows.fits.groups.counts >= 2 * MIN_SAMPLES))
    owner = np.repeat(np.arange(len(groups)), groups.counts)
    order = np.lexsort((rng.random(len(owner)), owner))
    rank = np.arange(len(owner)) - groups.offsets[:-1][owner]
    in_first = rank < (groups.counts // 2)[owner]
    options = FitOptions(nu=rows.fits.nu)
    first, second = (
        fit_groups(_chosen(groups, order[part], owner[part]), options) for part in (in_first, ~in_first)
    )
    usable = np.flatnonzero(~(first.has_flag(*NOT_FITTED) | second.has_flag(*NOT_FITTED)))
    return first.take(usable), second.take(usable)


def true_parameters(rows: EvaluationRows, rng: np.random.Generator) -> Bound:
    """Parameters that outputs are drawn from, against fits to the drawn outputs; rows without a fit are left out."""
    fits = rows.fits.take(rows.compared)
    limits = rows.outputs.max_tokens[rows.compared]
    groups = fits.groups
    owner = np.repeat(np.arange(len(fits)), groups.counts)
    with np.errstate(over="ignore"):
        drawn = np.exp(fits.mu[owner] + fits.sigma[owner] * rng.standard_t(fits.nu, len(owner)))
    # At least one token, and no more than an integer holds.
    lengths = np.clip(np.rint(np.minimum(drawn, 1e9)), 1, None)
    truncated = lengths >= limits[owner]
    lengths = np.where(truncated, np.minimum(limits[owner], 1e9), lengths)
    simulated = dataclasses.replace(
        groups, flat_lengths=lengths.astype(np.int64), flat_finished=~truncated, flat_weights=None
    )
    new = EvaluationRows.of(fit_groups(simulated, FitOptions(nu=fits.nu)))
    return new, PredictedRows(fits.mu, fits.sigma, fits.nu)


def ceilings(rows: EvaluationRows, seed: int) -> tuple[dict[str, Bound], dict[str, Any]]:
    """Both bounds by name, and the reliabilities; a bound that the data do not allow is missing."""
    bounds: dict[str, Bound] = {}
    info: dict[str, Any] = {"seed": seed, "reliability": None}
    if (rows.fits.groups.counts >= 2 * MIN_SAMPLES).any():
        first, second = halves(rows, np.random.default_rng([seed, 1]))
        if len(first) > 1:
            pairs = {"mu": (first.mu, second.mu), "sigma": (first.sigma, second.sigma)}
            pairs["sigma_log1p"] = np.log1p(first.sigma), np.log1p(second.sigma)
            info["reliability"] = {name: _stepped_up(*pair) for name, pair in pairs.items()}
            bounds["half_of_outputs"] = (
                EvaluationRows.of(second),
                PredictedRows(first.mu, first.sigma, first.nu),
            )
    if len(rows.compared):
        bounds["true_parameters"] = true_parameters(rows, np.random.default_rng([seed, 2]))
    return bounds, info


def _stepped_up(one: NDArray[np.float64], other: NDArray[np.float64]) -> float | None:
    if len(one) < 3 or one.std() == 0 or other.std() == 0:
        return None
    correlation = float(np.corrcoef(one, other)[0, 1])
    return 2 * correlation / (1 + correlation) if correlation > -1 else None


def _chosen(groups: GroupedLengths, outputs: NDArray[np.intp], owner: NDArray[np.intp]) -> GroupedLengths:
    """The same groups with some of their outputs; `outputs` [S'] are in the order of their owners [S']."""
    offsets = np.searchsorted(owner, np.arange(len(groups) + 1)).astype(np.int64)
    return dataclasses.replace(
        groups,
        flat_lengths=groups.flat_lengths[outputs],
        flat_finished=groups.flat_finished[outputs],
        offsets=offsets,
        flat_weights=None,
    )
