"""How good any predictor could look on given data: the noise that a finite number of answers leaves.

Two bounds, each in the same metrics as a predictor:

- `seen_half`: each prompt's answers are split at random in two halves; a fit to one half is the prediction, the other
  half the test. What somebody knows who has already seen half of the answers to the very same prompt. It is no bound
  from above: parameters fitted to a handful of answers are themselves noisy, so a predictor that knows prompts well can
  beat it, above all in sigma.
- `true_parameters`: answers are drawn anew from each prompt's fit, as many as there are, and cut at the same caps; the
  parameters they were drawn from are the prediction, and fits to the drawn answers the test. What a perfect predictor
  would be given. R2 stays below 1 because the fits it is compared with are noisy. The fits it starts from are noisy
  themselves, so the truth is made to vary more than it does, and this bound is a little too high; in R2 of sigma more
  than in R2 of mu.

`reliability` is the correlation of the two halves' fits, stepped up to the full number of answers by Spearman and
Brown's 2 r / (1 + r): the R2 that the true parameters would have against the fits, as the data themselves show it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from training.evaluating.predictors import Prediction
from training.evaluating.rows import EvaluationRows
from training.fitting.families import MIN_SAMPLES
from training.fitting.fits import FittedGroups, fit_groups
from training.fitting.options import FitOptions
from training.fitting.reading.table import GroupedLengths


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A prediction and the rows it is to be judged on, which are not the data's own."""

    rows: EvaluationRows
    prediction: Prediction


def halves(rows: EvaluationRows, rng: np.random.Generator) -> tuple[EvaluationRows, EvaluationRows]:
    """Each prompt's answers in two random halves, fitted separately; prompts with too few answers are left out."""
    groups = rows.fits.groups
    enough = np.flatnonzero(groups.counts >= 2 * MIN_SAMPLES)
    groups = groups.take(enough)
    owner = np.repeat(np.arange(len(groups)), groups.counts)
    order = np.lexsort((rng.random(len(owner)), owner))
    place = np.arange(len(owner)) - groups.offsets[:-1][owner]
    in_first = place < (groups.counts // 2)[owner]
    options = FitOptions(nu=rows.fits.nu)
    return tuple(  # type: ignore[return-value]
        EvaluationRows.of(fit_groups(_chosen(groups, order[part], owner[part]), options))
        for part in (in_first, ~in_first)
    )


def true_parameters(rows: EvaluationRows, rng: np.random.Generator) -> Ceiling:
    """Parameters that answers were drawn from, against fits to the drawn answers.

    Args:
        rows: Rows; those without a fit are left out.
        rng: Draws the answers.

    Raises:
        InputError: No row has a fit.
    """
    if len(rows.compared) == 0:
        raise InputError("prompts with a fit", 0, "at least one")
    fits = rows.fits.take(rows.compared)
    caps = rows.answers.caps[rows.compared]
    groups = fits.groups
    owner = np.repeat(np.arange(len(fits)), groups.counts)
    with np.errstate(over="ignore"):
        drawn = np.exp(fits.mu[owner] + fits.sigma[owner] * rng.standard_t(fits.nu, len(owner)))
    # Whole tokens, at least one, and nothing beyond what an int holds.
    lengths = np.clip(np.rint(np.minimum(drawn, 1e9)), 1, None)
    cut = lengths >= caps[owner]
    lengths = np.where(cut, np.minimum(caps[owner], 1e9), lengths)
    simulated = dataclasses.replace(
        groups, flat_lengths=lengths.astype(np.int64), flat_finished=~cut, flat_weights=None
    )
    new = EvaluationRows.of(fit_groups(simulated, FitOptions(nu=fits.nu)))
    return Ceiling(new, Prediction(fits.mu, fits.sigma, fits.nu))


def reliability(first: FittedGroups, second: FittedGroups) -> dict[str, float | None]:
    """Spearman-Brown reliability of the fits to all answers, from fits to two halves of them [G]."""
    return {
        name: _stepped_up(np.asarray(one), np.asarray(other))
        for name, one, other in (
            ("mu", first.mu, second.mu),
            ("sigma", first.sigma, second.sigma),
            ("sigma_log1p", np.log1p(first.sigma), np.log1p(second.sigma)),
        )
    }


def ceilings(rows: EvaluationRows, seed: int) -> tuple[dict[str, Ceiling], dict[str, Any]]:
    """Both bounds by name, and the reliabilities; a bound that the data do not allow is missing.

    Args:
        rows: Rows with their fits.
        seed: Of the halves and of the drawn answers.
    """
    found: dict[str, Ceiling] = {}
    info: dict[str, Any] = {"seed": seed, "reliability": None}
    enough = rows.fits.groups.counts >= 2 * MIN_SAMPLES
    if enough.any():
        first, second = halves(rows, np.random.default_rng([seed, 1]))
        usable = np.intersect1d(first.compared, second.compared)
        if len(usable) > 1:
            info["reliability"] = reliability(first.fits.take(usable), second.fits.take(usable))
            fits = first.fits.take(usable)
            found["seen_half"] = Ceiling(
                EvaluationRows.of(second.fits.take(usable)), Prediction(fits.mu, fits.sigma, fits.nu)
            )
    if len(rows.compared):
        found["true_parameters"] = true_parameters(rows, np.random.default_rng([seed, 2]))
    return found, info


def _stepped_up(one: NDArray[np.float64], other: NDArray[np.float64]) -> float | None:
    if len(one) < 3 or one.std() == 0 or other.std() == 0:
        return None
    correlation = float(np.corrcoef(one, other)[0, 1])
    return 2 * correlation / (1 + correlation) if correlation > -1 else None


def _chosen(groups: GroupedLengths, answers: NDArray[np.intp], owner: NDArray[np.intp]) -> GroupedLengths:
    """The same groups with some of their answers; `answers` [S'] are in the order of their owners [S']."""
    offsets = np.searchsorted(owner, np.arange(len(groups) + 1)).astype(np.int64)
    return dataclasses.replace(
        groups,
        flat_lengths=groups.flat_lengths[answers],
        flat_finished=groups.flat_finished[answers],
        offsets=offsets,
        flat_weights=None,
    )
