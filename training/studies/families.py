"""TIE, table 1 and section 3.1: which family of distributions fits each prompt's answer lengths, and their tails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.fitting.estimate import Estimates, estimate
from training.fitting.families import Family, FloatArray, compared_families
from training.fitting.goodness import bootstrap, group_seed, ks_p_values
from training.fitting.kernels.groups import CONSTANT, SIGMA_FLOOR
from training.progress import tracked
from training.studies import paper
from training.studies.groups import StudyGroups, require_groups
from training.studies.heavy_tail import heavy_tail
from training.studies.likelihood_ratio import LEVEL, free_nu_points

PASS_ABOVE = 0.05
#: log-t of fixed nu, and the log-normal: what the others are compared with.
FIRST, NORMAL, FREE = "log_t", "log_normal", "log_t_free"
_RATIO_DRAWS = 10_000
# Groups bootstrapped between two moves of the progress bar.
_CHUNK = 20


@dataclass(frozen=True, slots=True)
class FamilyFit:
    """One family's fits to G groups, their distances and p-values, [G] each.

    Attributes:
        family: What was fitted.
        fits: Its estimates.
        ks_p: Plain Kolmogorov-Smirnov p-values.
        ad: Anderson-Darling statistics.
        ks_p_boot, ad_p_boot: By parametric bootstrap; NaN where there was none.
    """

    family: Family
    fits: Estimates
    ks: FloatArray
    ks_p: FloatArray
    ad: FloatArray
    ks_p_boot: FloatArray
    ad_p_boot: FloatArray


@dataclass(frozen=True, slots=True)
class FamiliesStudy:
    """All families on the same groups.

    Attributes:
        by_label: Family label -> its fits.
        tested: Groups with fits to test: not all answers equal, not all cut, at least 3; [G].
        regular: Those of them where every family's fit converged with sigma above its floor, so that likelihoods and AD
            compare; [G].
        bootstrapped: Those of `tested` that were bootstrapped; [G].
        content: Everything for JSON.
    """

    by_label: dict[str, FamilyFit]
    tested: NDArray[np.bool_]
    regular: NDArray[np.bool_]
    bootstrapped: NDArray[np.bool_]
    content: dict[str, Any]


def study_families(
    groups: StudyGroups,
    *,
    nu: float = 3.5,
    integers: bool = False,
    replicates: int = 200,
    bootstrap_groups: int = 500,
    seed: int = 0,
    progress: bool = False,
) -> FamiliesStudy:
    """Fits and tests every family of table 1 on all groups.

    Args:
        groups: The groups.
        nu: Fixed degrees of freedom of the first log-t.
        integers: Likelihood of whole numbers instead of densities.
        replicates: Of the bootstrap for each group and family; 0 = none.
        bootstrap_groups: At most so many groups are bootstrapped, drawn by seed.
        seed: Of everything drawn.
        progress: Whether to show it.

    Raises:
        InputError: No group can be tested.
    """
    families = compared_families(nu)
    fits = {
        label: estimate(groups.sample, family, integers=integers)
        for label, family in tracked(families.items(), "families", progress)
    }
    tested = fits[FIRST].fitted & ((fits[FIRST].flags & CONSTANT) == 0)
    require_groups(int(tested.sum()), groups, "group with 3 answers that are not all equal and not all cut")
    floor = np.any([(found.flags & SIGMA_FLOOR) != 0 for found in fits.values()], axis=0)
    chosen = np.zeros(len(groups), dtype=bool)
    if replicates:
        order = groups.random_order(seed, "bootstrap")
        chosen[order[tested[order]][:bootstrap_groups]] = True
    by_label = {}
    for label, found in fits.items():
        ks, ad = found.distances(groups.sample)
        boot = _bootstrap(groups, found.family, chosen, replicates, integers, seed, progress)
        by_label[label] = FamilyFit(found.family, found, ks, ks_p_values(ks, groups.counts), ad, *boot)
    solved = np.all([found.converged & np.isfinite(found.log_likelihood) for found in fits.values()], axis=0)
    regular = tested & ~floor & solved
    content = {
        "groups": _group_counts(groups, tested, regular, chosen),
        "families": _rows(groups, by_label, tested, regular),
        "likelihood_ratio_tests": _ratio_tests(groups, by_label, regular, nu, seed),
        "heavy_tail": heavy_tail(groups, fits[FIRST], tested),
        "paper": {
            "source": paper.SOURCE,
            "ks_pass_rate": paper.KS_PASS_RATE,
            "heavy_tail": paper.HEAVY_TAIL,
        },
    }
    return FamiliesStudy(by_label, tested, regular, chosen, content)


def _bootstrap(
    groups: StudyGroups,
    family: Family,
    chosen: NDArray[np.bool_],
    replicates: int,
    integers: bool,
    seed: int,
    progress: bool,
) -> tuple[FloatArray, FloatArray]:
    ks_p, ad_p = np.full(len(groups), np.nan), np.full(len(groups), np.nan)
    rows = np.flatnonzero(chosen)
    chunks = [rows[at : at + _CHUNK] for at in range(0, len(rows), _CHUNK)]
    for chunk in tracked(chunks, f"bootstrap {family.label}", progress and bool(chunks)):
        part = groups.take(chunk)
        fits = estimate(part.sample, family, integers=integers)
        found = bootstrap(
            part.sample,
            fits,
            *fits.distances(part.sample),
            replicates=replicates,
            confidence=0.9,
            integers=integers,
            caps=part.caps,
            seeds=np.array([group_seed(seed, name) for name in part.names], dtype=np.uint64),
        )
        ks_p[chunk], ad_p[chunk] = found.ks_p, found.ad_p
    return ks_p, ad_p


def _group_counts(
    groups: StudyGroups, tested: NDArray[np.bool_], regular: NDArray[np.bool_], chosen: NDArray[np.bool_]
) -> dict[str, Any]:
    counts = groups.counts
    return {
        "num_in_file": groups.num_in_file,
        "num_groups": len(groups),
        "num_samples": int(counts.sum()),
        "num_censored": int(groups.cut.sum()),
        "samples_per_group": [int(counts.min()), float(np.median(counts)), int(counts.max())],
        "num_tested": int(tested.sum()),
        "num_regular": int(regular.sum()),
        "num_bootstrapped": int(chosen.sum()),
    }


def _rows(
    groups: StudyGroups,
    by_label: dict[str, FamilyFit],
    tested: NDArray[np.bool_],
    regular: NDArray[np.bool_],
) -> dict[str, dict[str, Any]]:
    """One row of table 1 for each family."""
    likelihoods = {label: found.fits.log_likelihood[regular] for label, found in by_label.items()}
    aic = {
        label: 2.0 * found.family.num_parameters - 2.0 * likelihoods[label]
        for label, found in by_label.items()
    }
    best = np.min(np.stack(list(aic.values())), axis=0)
    answers = groups.counts[regular]
    rows = {}
    for label, found in by_label.items():
        p = found.ks_p[tested]
        values = likelihoods[label]
        rows[label] = {
            "num_parameters": found.family.num_parameters,
            "num_not_converged": int(np.sum(~found.fits.converged[tested])),
            "ks_pass_rate": mean(p > PASS_ABOVE),
            "ks_mean_p": mean(p),
            "ks_pass_rate_boot": _pass_rate(found.ks_p_boot),
            "ad_mean": mean(found.ad[regular]),
            "ad_pass_rate_boot": _pass_rate(found.ad_p_boot),
            "mean_log_likelihood": mean(values),
            "log_likelihood_per_answer": float(values.sum() / answers.sum()) if len(values) else None,
            f"log_ratio_to_{FIRST}": mean(values - likelihoods[FIRST]),
            f"log_ratio_to_{NORMAL}": mean(values - likelihoods[NORMAL]),
            f"share_above_{FIRST}": mean(values > likelihoods[FIRST]),
            f"share_above_{NORMAL}": mean(values > likelihoods[NORMAL]),
            "mean_aic": mean(aic[label]),
            "best_aic": mean(aic[label] <= best + 1e-9),
        }
    return rows


def _ratio_tests(
    groups: StudyGroups, by_label: dict[str, FamilyFit], regular: NDArray[np.bool_], nu: float, seed: int
) -> list[dict[str, Any]]:
    """Free nu against each fixed one, where no answer was cut: there the 5 % point depends on their number only."""
    num_cut = np.add.reduceat(groups.cut.astype(np.int64), groups.sample.offsets[:-1])
    rows = regular & (num_cut == 0)
    counts = groups.counts[rows]
    free = by_label[FREE].fits.log_likelihood[rows]
    tests = []
    for label in (FIRST, NORMAL):
        null_nu = nu if label == FIRST else np.inf
        statistic = 2.0 * (free - by_label[label].fits.log_likelihood[rows])
        points = free_nu_points(counts, null_nu, draws=_RATIO_DRAWS, seed=seed) if len(counts) else counts
        tests.append(
            {
                "null": label,
                "alternative": FREE,
                "num_groups": len(counts),
                "mean_statistic": mean(statistic),
                "share_rejected": mean(statistic > points),
                "expected_share": LEVEL,
                "median_point": float(np.median(points)) if len(counts) else None,
            }
        )
    return tests


def _pass_rate(p_values: FloatArray) -> float | None:
    return mean(p_values[~np.isnan(p_values)] > PASS_ABOVE)


def mean(values: Any) -> float | None:
    """Mean as a plain number; None of nothing."""
    return float(np.mean(values)) if len(values) else None
