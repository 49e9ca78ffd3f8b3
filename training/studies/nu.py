"""TIE, appendix D.3 and figure 8: how well the log-t fits, by its degrees of freedom nu."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scheduler_core.errors import InputError
from training.fitting.estimate import estimate
from training.fitting.families import FloatArray, family_of
from training.fitting.goodness import ks_p_values
from training.fitting.kernels.groups import CONSTANT, SIGMA_FLOOR
from training.progress import tracked
from training.studies import paper
from training.studies.draws import log_t_draws
from training.studies.families import PASS_ABOVE, mean
from training.studies.groups import StudyGroups, require_groups

_DRAWS = 2_000
DEFAULT_GRID = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, math.inf)


@dataclass(frozen=True, slots=True)
class NuStudy:
    """Fits over a grid of nu.

    Attributes:
        free_nu: Maximum-likelihood nu of each regular group, in [1, 100] or inf.
        content: Everything for JSON; nu = inf is the text "inf" there.
    """

    free_nu: FloatArray
    content: dict[str, Any]


def study_nu(
    groups: StudyGroups,
    grid: Sequence[float] = DEFAULT_GRID,
    *,
    integers: bool = False,
    seed: int = 0,
    progress: bool = False,
) -> NuStudy:
    """Fits the log-t with each nu of the grid, and with free nu, to all groups.

    Kolmogorov-Smirnov is over all groups that can be tested. Likelihood and Anderson-Darling are over those of them
    that converged with sigma above its floor for each nu: at the floor, where equal answers make the likelihood unbounded, they
    measure the floor.

    Raises:
        InputError: No group can be tested, or a nu is not above 0.
    """
    if not grid or len(set(grid)) < len(grid):
        raise InputError("grid", list(grid), "one or more numbers above 0, each once")
    order = sorted(grid)
    fits = [
        estimate(groups.sample, family_of("log-t", nu), integers=integers)
        for nu in tracked(order, "nu", progress)
    ]
    free = estimate(groups.sample, family_of("log-t", None), integers=integers)
    tested = fits[0].fitted & ((fits[0].flags & CONSTANT) == 0)
    require_groups(int(tested.sum()), groups, "group with 3 answers that are not all equal and not all cut")
    regular = tested & np.all(
        [
            found.converged & ((found.flags & SIGMA_FLOOR) == 0) & np.isfinite(found.log_likelihood)
            for found in (*fits, free)
        ],
        axis=0,
    )
    answers = int(groups.counts[regular].sum())
    rows = []
    for nu, found in zip(order, fits, strict=True):
        ks, ad = found.distances(groups.sample)
        p = ks_p_values(ks, groups.counts)[tested]
        rows.append(
            {
                "nu": shown_nu(nu),
                "ks_mean_p": mean(p),
                "ks_pass_rate": mean(p > PASS_ABOVE),
                "ad_mean": mean(ad[regular]),
                "log_likelihood_per_answer": float(found.log_likelihood[regular].sum() / answers)
                if answers
                else None,
                "share_at_floor": mean((found.flags[tested] & SIGMA_FLOOR) != 0),
            }
        )
    free_nu = free.solution.nu[regular]
    content = {
        "groups": {
            "num_in_file": groups.num_in_file,
            "num_groups": len(groups),
            "num_samples": int(groups.counts.sum()),
            "num_censored": int(groups.cut.sum()),
            "num_tested": int(tested.sum()),
            "num_regular": int(regular.sum()),
        },
        "grid": rows,
        "best": {
            "ks_mean_p": _best(rows, "ks_mean_p", max),
            "ks_pass_rate": _best(rows, "ks_pass_rate", max),
            "log_likelihood_per_answer": _best(rows, "log_likelihood_per_answer", max),
            "ad_mean": _best(rows, "ad_mean", min),
        },
        "free_nu": {
            "share_at_1": mean(free_nu == 1.0),
            "share_at_inf": mean(np.isinf(free_nu)),
            "share_at_inf_if_true": {
                str(shown_nu(nu)): _share_at_infinity(nu, int(np.median(groups.counts[tested])), seed)
                for nu in (paper.BEST_NU, math.inf)
            },
            "quartiles": [shown_nu(float(value)) for value in _quartiles(free_nu)],
            "log_likelihood_per_answer": float(free.log_likelihood[regular].sum() / answers)
            if answers
            else None,
        },
        "paper": {"source": paper.SOURCE, "best_nu": paper.BEST_NU},
    }
    return NuStudy(free_nu, content)


def shown_nu(nu: float) -> float | str:
    """nu for JSON, which has no infinity."""
    return "inf" if math.isinf(nu) else nu


def _share_at_infinity(nu: float, count: int, seed: int) -> float:
    """Share of groups of `count` answers from a log-t of this nu whose own nu is found at infinity."""
    one = np.ones(1)
    rng = np.random.default_rng([seed, count])
    # Lengths so large and wide that whole numbers are as good as real ones.
    sample = log_t_draws(20.0 * one, 0.5 * one, nu, np.inf * one, count, _DRAWS, rng)
    return float(np.mean(np.isinf(estimate(sample, family_of("log-t", None)).solution.nu)))


def _best(rows: list[dict[str, Any]], name: str, choose: Any) -> float | str | None:
    known = [row for row in rows if row[name] is not None]
    if len({row[name] for row in known}) < 2 and len(rows) > 1:
        return None  # nothing to choose by
    found: float | str = choose(known, key=lambda row: row[name])["nu"]
    return found


def _quartiles(values: FloatArray) -> FloatArray:
    # Order statistics: between a finite value and inf nothing can be interpolated.
    return np.quantile(values, [0.25, 0.5, 0.75], method="inverted_cdf") if len(values) else np.empty(0)
