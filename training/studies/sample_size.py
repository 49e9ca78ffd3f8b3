"""TIE, appendix D.2 and figure 7: how far fits to k answers are from the fit to all of them, or from the truth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.lengths import LogT
from training.fitting.estimate import Estimates, Sample, estimate
from training.fitting.families import MIN_SAMPLES, FloatArray, family_of
from training.fitting.kernels.groups import CONSTANT, SIGMA_FLOOR
from training.progress import tracked
from training.studies import paper
from training.studies.draws import as_ended, cut_at, log_t_draws, subsets
from training.studies.families import mean
from training.studies.groups import StudyGroups, require_groups

DEFAULT_COUNTS = (3, 4, 5, 7, 10, 15, 20, 30, 50, 70, 100)
_WITHIN = 1.96


@dataclass(frozen=True, slots=True)
class Truth:
    """What the fits to k answers are measured against, arrays [G].

    Attributes:
        mu, sigma: Log-t parameters, log tokens.
        expected: E[min(X, M)], tokens.
        limits: M of each group, tokens.
        counts: Answers that the subsets are taken from; None if drawn from the distribution itself.
        cut_caps: Length that the share to cut lies beyond, tokens; None if nothing is to be cut.
    """

    mu: FloatArray
    sigma: FloatArray
    expected: FloatArray
    limits: FloatArray
    counts: NDArray[np.int64] | None
    cut_caps: FloatArray | None


def study_sample_size(
    groups: StudyGroups,
    counts: Sequence[int] = DEFAULT_COUNTS,
    *,
    nu: float = 3.5,
    repeats: int = 20,
    min_samples: int | None = None,
    cut_share: float = 0.3,
    simulate: bool = False,
    max_groups: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> dict[str, Any]:
    """Fits random parts of each group's answers, and measures how far the fits are from that to all answers.

    Args:
        groups: The groups; those that are constant, at sigma's floor or not fitted as a whole are left out.
        counts: Numbers of answers k, each at least 3; larger ones than any group has are left out.
        nu: Degrees of freedom of the log-t.
        repeats: Parts for each group and k.
        min_samples: Fewest answers of a group, unless simulated; None = 20, or the most that any group has.
        cut_share: Share of each group's longest answers to cut as well, to show what that does; 0 = do not.
        simulate: Draw the answers from the fits, so that the truth is known and k has no limit.
        max_groups: At most so many groups, drawn by seed.
        seed: Of everything drawn.
        progress: Whether to show it.

    Returns:
        For JSON: groups, rows (one for each k), and what they mean.

    Raises:
        InputError: A bad argument, or no group has enough answers.
    """
    _check(counts, repeats, cut_share)
    if nu is None or not nu > 0:
        raise InputError("nu", nu, "a number above 0")
    family = family_of("log-t", nu)
    fits = estimate(groups.sample, family)
    usable = fits.fitted & ((fits.flags & (CONSTANT | SIGMA_FLOOR)) == 0)
    needed = MIN_SAMPLES if simulate else _needed_samples(groups, usable, min_samples)
    rows = groups.random_order(seed, "sample-size")
    rows = rows[(usable & (groups.counts >= needed))[rows]]
    require_groups(len(rows), groups, f"group with {needed} answers and a fit above sigma's floor")
    rows = np.sort(rows[:max_groups])
    chosen = groups.take(rows)
    truth = _truth(chosen, fits.solution.m[rows], np.exp(fits.solution.s[rows]), nu, cut_share, simulate)
    most = None if simulate else int(chosen.counts.max())
    grid = [count for count in sorted(counts) if most is None or count <= most]
    if not grid:
        raise InputError("counts", list(counts), f"also a number up to {most}, the most answers of a group")
    result = []
    for count in tracked(grid, "sample sizes", progress):
        rng = np.random.default_rng([seed, count])
        part = np.arange(len(chosen)) if truth.counts is None else np.flatnonzero(truth.counts >= count)
        result.append(_row(chosen.take(part), _part_of(truth, part), count, nu, repeats, rng))
    return {
        "groups": {
            "num_in_file": groups.num_in_file,
            "num_groups": len(groups),
            "num_studied": len(chosen),
            "min_samples": None if simulate else needed,
            "max_samples": most,
            "censored_share": mean(chosen.cut),
        },
        "simulated": simulate,
        "nu": nu,
        "repeats": repeats,
        "cut_share": cut_share,
        "rows": result,
        "paper": {"source": paper.SOURCE, "chosen_num_samples": paper.NUM_SAMPLES},
    }


def _check(counts: Sequence[int], repeats: int, cut_share: float) -> None:
    if not counts or len(set(counts)) < len(counts) or min(counts) < MIN_SAMPLES:
        raise InputError("counts", list(counts), f"whole numbers of at least {MIN_SAMPLES}, each once")
    if repeats < 1:
        raise InputError("repeats", repeats, "a whole number of at least 1")
    if not 0 <= cut_share < 0.9:
        raise InputError("cut_share", cut_share, "a number from 0 (nothing) to below 0.9")


def _needed_samples(groups: StudyGroups, usable: NDArray[np.bool_], min_samples: int | None) -> int:
    most = int(groups.counts[usable].max()) if usable.any() else 0
    if min_samples is None:
        return max(MIN_SAMPLES, min(paper.NUM_SAMPLES, most))
    if not MIN_SAMPLES <= min_samples <= max(most, MIN_SAMPLES):
        raise InputError(
            "min_samples",
            min_samples,
            f"{MIN_SAMPLES} to {most}, the most answers of a group that can be fitted",
        )
    return min_samples


def _truth(
    groups: StudyGroups, mu: FloatArray, sigma: FloatArray, nu: float, cut_share: float, simulate: bool
) -> Truth:
    # Without a cap the mean of a log-t is infinite; the longest answer of the file stands in for an unknown one.
    limits = np.where(np.isinf(groups.caps), float(groups.lengths.max()), groups.caps)
    law = LogT(mu, sigma, nu)
    caps = None
    if cut_share > 0 and simulate:
        caps = np.floor(law.ppf(1.0 - cut_share))
    elif cut_share > 0:
        # The answer that this share of the group's answers is longer than.
        rank = np.ceil((1.0 - cut_share) * groups.counts).astype(np.int64) - 1
        caps = groups.lengths[groups.sample.offsets[:-1] + np.maximum(rank, 0)].astype(np.float64)
    return Truth(
        mu,
        sigma,
        np.asarray(law.expected(limits)),
        limits,
        None if simulate else groups.counts,
        None if caps is None else np.maximum(caps, 1.0),
    )


def _part_of(truth: Truth, rows: NDArray[np.int64]) -> Truth:
    counts, caps = truth.counts, truth.cut_caps
    return Truth(
        truth.mu[rows],
        truth.sigma[rows],
        truth.expected[rows],
        truth.limits[rows],
        None if counts is None else counts[rows],
        None if caps is None else caps[rows],
    )


def _row(
    groups: StudyGroups, truth: Truth, count: int, nu: float, repeats: int, rng: np.random.Generator
) -> dict[str, Any]:
    """All that is measured with k = `count` answers."""
    if truth.counts is None:
        sample = log_t_draws(truth.mu, truth.sigma, nu, groups.caps, count, repeats, rng)
        rest = np.ones(len(truth.mu))
    else:
        sample = subsets(groups.sample, count, repeats, rng)
        rest = 1.0 - count / truth.counts
    family = family_of("log-t", nu)
    fits = estimate(sample, family)
    row: dict[str, Any] = {
        "num_answers": count,
        "num_groups": len(groups),
        "num_fits": len(sample),
        "share_not_fitted": mean(~fits.fitted),
        "share_degenerate": mean((fits.flags & (CONSTANT | SIGMA_FLOOR)) != 0),
    }
    row |= _errors(fits, truth, nu, repeats) | _standard_errors(fits, truth, rest, repeats)
    if truth.cut_caps is not None:
        cut = cut_at(sample, np.repeat(truth.cut_caps, repeats))
        row["cut"] = {
            "share": mean((cut.keys & 1) == 1),
            "right": _cut_errors(cut, truth, nu, repeats),
            "none": _cut_errors(as_ended(cut), truth, nu, repeats),
        }
    return row


def _cut_errors(sample: Sample, truth: Truth, nu: float, repeats: int) -> dict[str, Any]:
    fits = estimate(sample, family_of("log-t", nu))
    return {"share_not_fitted": mean(~fits.fitted)} | _errors(fits, truth, nu, repeats)


def _errors(fits: Estimates, truth: Truth, nu: float, repeats: int) -> dict[str, Any]:
    """Errors of the fits there are; those of ln sigma, which may be of any size at the floor, of the regular ones."""
    rows = fits.fitted
    mu, sigma = np.repeat(truth.mu, repeats)[rows], np.repeat(truth.sigma, repeats)[rows]
    found_mu, found_s = fits.solution.m[rows], fits.solution.s[rows]
    by_mu, by_sigma = found_mu - mu, np.exp(found_s) / sigma - 1.0
    regular = (fits.flags[rows] & (CONSTANT | SIGMA_FLOOR)) == 0
    by_log_sigma = (found_s - np.log(sigma))[regular]
    expected = np.repeat(truth.expected, repeats)[rows]
    # A fit to few answers may be wide beyond the range of the integral; E[min(X, M)] is then M for all that matters.
    law = LogT(found_mu, np.minimum(np.exp(found_s), 50.0), nu)
    by_expected = np.asarray(law.expected(np.repeat(truth.limits, repeats)[rows])) / expected - 1.0
    above_one = mu > 0
    return {
        "mu_relative": mean(np.abs(by_mu[above_one]) / mu[above_one]),
        "mu_rmse": _rms(by_mu),
        "mu_bias": mean(by_mu),
        "sigma_relative": mean(np.abs(by_sigma)),
        "sigma_relative_p90": float(np.quantile(np.abs(by_sigma), 0.9)) if len(by_sigma) else None,
        "log_sigma_rmse": _rms(by_log_sigma),
        "log_sigma_bias": mean(by_log_sigma),
        "expected_relative": mean(np.abs(by_expected)),
        "expected_bias": mean(by_expected),
    }


def _standard_errors(fits: Estimates, truth: Truth, rest: FloatArray, repeats: int) -> dict[str, Any]:
    """What the observed information says the errors are, and how often they are within 1.96 of it.

    A part of N answers differs from the fit to all N by less than from the truth: by a variance of 1/k - 1/N.
    """
    shrink = np.sqrt(np.repeat(rest, repeats))
    se_mu, se_log_sigma = fits.solution.se_m * shrink, fits.solution.se_s * shrink
    rows = fits.fitted & np.isfinite(se_mu) & np.isfinite(se_log_sigma) & (shrink > 0)
    by_mu = np.abs(fits.solution.m - np.repeat(truth.mu, repeats))[rows]
    by_log_sigma = np.abs(fits.solution.s - np.log(np.repeat(truth.sigma, repeats)))[rows]
    return {
        "mu_predicted": _rms(se_mu[rows]),
        "log_sigma_predicted": _rms(se_log_sigma[rows]),
        "mu_within": mean(by_mu <= _WITHIN * se_mu[rows]),
        "log_sigma_within": mean(by_log_sigma <= _WITHIN * se_log_sigma[rows]),
    }


def _rms(values: FloatArray) -> float | None:
    return math.sqrt(float(np.mean(values**2))) if len(values) else None
