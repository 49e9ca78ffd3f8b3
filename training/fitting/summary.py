"""What a fit of many groups says as a whole: counts, flags, and how often each family passes the KS test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.fitting.alternatives import FAMILIES, fit_alternatives
from training.fitting.fits import Censoring, FittedGroups, seen_as_finished
from training.fitting.goodness import ks_p_values, ks_statistic
from training.fitting.threads import one_blas_thread

PASS_ABOVE = 0.05
# Nothing can be tested where all answers are equal or all were cut.
NOT_TESTED = ("constant", "all_censored")


def compare_families(
    fits: FittedGroups,
    censoring: Censoring,
    *,
    track: Callable[[Iterable[int]], Iterable[int]] = lambda numbers: numbers,
) -> dict[str, NDArray[np.float64]]:
    """Plain KS p-values by family, "log_t" first; each [tested groups], the groups the same for all families.

    Not tested: groups with the flag "constant" or "all_censored", and groups whose finished answers are all equal.
    """
    groups = fits.groups
    tested = [
        number
        for number in np.flatnonzero(~fits.has_flag(*NOT_TESTED)).tolist()
        if len(np.unique(groups.lengths[number])) > 1
    ]
    statistics = {name: np.full(len(tested), np.nan) for name in FAMILIES}
    with one_blas_thread():
        for at, number in enumerate(track(tested)):
            lengths = groups.lengths[number]
            finished = seen_as_finished(groups.finished[number], censoring)
            for name, fit in fit_alternatives(lengths, finished).items():
                statistics[name][at] = ks_statistic(lengths, finished, fit.cdf)
    counts = np.array([len(groups.lengths[number]) for number in tested], dtype=np.int64)
    return {"log_t": fits.ks_p[tested]} | {
        name: ks_p_values(values, counts) for name, values in statistics.items()
    }


def summarize(fits: FittedGroups, p_values: dict[str, NDArray[np.float64]]) -> dict[str, Any]:
    """Counts, flags, quantiles of the parameters and KS pass rates, ready for JSON (None where there is no number)."""
    groups = fits.groups
    flags = Counter(flag for found in fits.flags for flag in found)
    usable = ~fits.has_flag("all_censored")
    return {
        "num_groups": len(fits),
        "num_samples": sum(len(lengths) for lengths in groups.lengths),
        "num_censored": sum(int((~finished).sum()) for finished in groups.finished),
        "num_errors_left_out": groups.num_errors,
        "num_not_converged": int((~fits.converged).sum()),
        "flags": dict(sorted(flags.items())),
        "nu": fits.nu,
        "mu": _quantiles(fits.mu[usable]),
        "sigma": _quantiles(fits.sigma[usable]),
        "ks": {name: _ks(values) for name, values in p_values.items()},
    }


def ks_table(summary: dict[str, Any]) -> str:
    """The KS part of a summary as lines of text."""
    lines = [f"{'family':<12} {'KS p > 0.05':>12} {'mean p':>8} {'tested':>8}"]
    for name, row in summary["ks"].items():
        rate = "-" if row["pass_rate"] is None else f"{100 * row['pass_rate']:.1f} %"
        mean = "-" if row["mean_p"] is None else f"{row['mean_p']:.3f}"
        lines.append(f"{name:<12} {rate:>12} {mean:>8} {row['num_tested']:>8}")
    return "\n".join(lines)


def _quantiles(values: NDArray[np.float64]) -> dict[str, float] | None:
    if len(values) == 0:
        return None
    levels = {"p05": 0.05, "p50": 0.5, "p95": 0.95, "max": 1.0}
    return {name: float(np.quantile(values, level)) for name, level in levels.items()}


def _ks(p: NDArray[np.float64]) -> dict[str, Any]:
    return {
        "num_tested": len(p),
        "pass_rate": float((p > PASS_ABOVE).mean()) if len(p) else None,
        "mean_p": float(p.mean()) if len(p) else None,
    }
