"""Fits of many groups: parameters, tests and flags, beside the answers they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from training.fitting.estimate import Estimates, Sample, estimate
from training.fitting.families import FloatArray, compared_families
from training.fitting.goodness import bootstrap, group_seed, interval_columns, ks_p_values
from training.fitting.kernels import groups as kernel
from training.fitting.options import FitOptions
from training.fitting.reading.table import GroupedLengths

#: Flag -> what it says of a group.
FLAGS = {
    "constant": "all lengths are equal and none was cut; sigma is its floor",
    "sigma_floor": "the likelihood grows until sigma reaches its floor of 0.001 (shape its bound)",
    "all_censored": "every answer was cut: not fitted; mu is ln of the largest cap, a lower bound",
    "median_beyond_cap": "some answers were cut and the fit's median lies beyond the longest one: it extrapolates",
    "too_few_samples": "fewer than 3 answers: not fitted; mu is ln of the middle one, null without any",
    "nu_at_bound": "free nu ended at 1 or at infinity",
}
_BITS = {
    "constant": kernel.CONSTANT,
    "sigma_floor": kernel.SIGMA_FLOOR,
    "all_censored": kernel.ALL_CENSORED,
    "median_beyond_cap": kernel.MEDIAN_BEYOND_CAP,
    "too_few_samples": kernel.TOO_FEW_SAMPLES,
    "nu_at_bound": kernel.NU_AT_BOUND,
}
#: Flags of groups whose parameters are bounds or guesses, no fit.
NOT_FITTED = ("all_censored", "too_few_samples")


@dataclass(frozen=True, slots=True)
class FittedGroups:
    """Groups with their fits; arrays have one entry for each of G groups.

    Attributes:
        groups: Names and answers.
        parameters: Of the family, by name.
        log_likelihood, ks_stat, ks_p, ad_stat: Of each fit; NaN where not fitted.
        converged: See `estimate.Estimates`.
        flag_bits: Flags as bits.
        standard_errors: By parameter; NaN where the data do not determine one.
        extra: Further columns: other families, bootstrap.
    """

    groups: GroupedLengths
    parameters: dict[str, FloatArray]
    log_likelihood: FloatArray
    ks_stat: FloatArray
    ks_p: FloatArray
    ad_stat: FloatArray
    converged: NDArray[np.bool_]
    flag_bits: NDArray[np.int64]
    standard_errors: dict[str, FloatArray] = field(default_factory=dict)
    extra: dict[str, FloatArray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.flag_bits)

    @property
    def mu(self) -> FloatArray:
        """Location of the log-t, log tokens [G]."""
        return self._log_t("mu")

    @property
    def sigma(self) -> FloatArray:
        """Scale of the log-t, log tokens [G]."""
        return self._log_t("sigma")

    @property
    def nu(self) -> float:
        """Degrees of freedom, the same for all groups.

        Raises:
            InputError: They differ.
        """
        values = np.unique(self._log_t("nu"))
        if len(values) > 1:
            raise InputError(
                f"{self.groups.path.name}, column nu", f"{len(values)} values", "one value for all groups"
            )
        return float(values[0])

    def _log_t(self, name: str) -> FloatArray:
        if name not in self.parameters:
            raise InputError(
                f"{self.groups.path.name}, columns",
                list(self.parameters),
                "mu, sigma and nu: fits of the log-t",
            )
        return self.parameters[name]

    @property
    def flags(self) -> list[tuple[str, ...]]:
        """Names of each group's flags."""
        names = {
            bits: tuple(name for name, bit in _BITS.items() if bits & bit)
            for bits in np.unique(self.flag_bits).tolist()
        }
        return [names[bits] for bits in self.flag_bits.tolist()]

    def has_flag(self, *flags: str) -> NDArray[np.bool_]:
        """Whether each group has any of these flags, [G].

        Raises:
            InputError: There is no such flag.
        """
        return np.asarray((self.flag_bits & bits_of(flags)) != 0)

    def take(self, groups: Sequence[int] | NDArray[np.intp]) -> FittedGroups:
        """The groups at these positions."""
        at = np.asarray(groups, dtype=np.int64)
        return FittedGroups(
            groups=self.groups.take(at),
            parameters={name: values[at] for name, values in self.parameters.items()},
            log_likelihood=self.log_likelihood[at],
            ks_stat=self.ks_stat[at],
            ks_p=self.ks_p[at],
            ad_stat=self.ad_stat[at],
            converged=self.converged[at],
            flag_bits=self.flag_bits[at],
            standard_errors={name: values[at] for name, values in self.standard_errors.items()},
            extra={name: values[at] for name, values in self.extra.items()},
        )


def bits_of(flags: Sequence[str]) -> int:
    """Flags as bits.

    Raises:
        InputError: There is no such flag.
    """
    bits = 0
    for flag in flags:
        if flag not in _BITS:
            raise InputError("flag", flag, ", ".join(_BITS))
        bits |= _BITS[flag]
    return bits


def sample_of(groups: GroupedLengths, options: FitOptions) -> Sample:
    """The answers as the likelihood is told about them."""
    finished = groups.flat_finished
    if options.censoring == "none":
        finished = np.ones_like(finished)
    return Sample.of(groups.flat_lengths, finished, groups.offsets, groups.flat_weights)


def fit_groups(groups: GroupedLengths, options: FitOptions) -> FittedGroups:
    """Fits each group by itself and tests the fit; a group's result does not depend on the others."""
    sample = sample_of(groups, options)
    counts = _effective_counts(sample)
    family = options.fitted_family
    fits = estimate(sample, family, solver=options.solver, integers=options.integers)
    ks, ad = fits.distances(sample)
    parameters, errors = family.parameters(fits.solution)
    extra: dict[str, FloatArray] = {}
    if options.alternatives:
        for label, other in compared_families(options.nu).items():
            if label != family.label:
                extra |= _compared(sample, counts, label, estimate(sample, other, integers=options.integers))
    if options.bootstrap:
        found = bootstrap(
            sample,
            fits,
            ks,
            ad,
            replicates=options.bootstrap,
            confidence=options.confidence,
            integers=options.integers,
            caps=caps_of(groups, options),
            seeds=np.array(
                [group_seed(options.seed, groups.name(g)) for g in range(len(groups))], dtype=np.uint64
            ),
        )
        extra |= {"ks_p_boot": found.ks_p, "ad_p_boot": found.ad_p} | interval_columns(fits, found)
    return FittedGroups(
        groups=groups,
        parameters=parameters,
        log_likelihood=fits.log_likelihood,
        ks_stat=ks,
        ks_p=ks_p_values(ks, counts),
        ad_stat=ad,
        converged=fits.converged,
        flag_bits=fits.flags,
        standard_errors={
            name: values for name, values in errors.items() if name != "nu" or family.nu is None
        },
        extra=extra,
    )


def _compared(
    sample: Sample, counts: NDArray[np.int64], label: str, fits: Estimates
) -> dict[str, FloatArray]:
    ks, ad = fits.distances(sample)
    return {
        f"{label}_log_likelihood": fits.log_likelihood,
        f"{label}_ks_stat": ks,
        f"{label}_ks_p": ks_p_values(ks, counts),
        f"{label}_ad_stat": ad,
    }


def _effective_counts(sample: Sample) -> NDArray[np.int64]:
    """Answers of each group; with weights their effective number (sum w)^2 / sum w^2, rounded down."""
    if not sample.weights.size:
        return np.diff(sample.offsets)
    sums, squares = (group_sums(values, sample.offsets) for values in (sample.weights, sample.weights**2))
    return np.asarray(np.maximum(sums**2 / np.maximum(squares, 1e-300) + 1e-9, 1), dtype=np.int64)


def group_sums(values: NDArray[Any], offsets: NDArray[np.int64]) -> FloatArray:
    """Sum of the flat values [S] of each group [G]; 0 for a group without any."""
    # Group by group, so that no rounding of one reaches another.
    count = len(offsets) - 1
    owners = np.repeat(np.arange(count), np.diff(offsets))
    return np.asarray(np.bincount(owners, weights=values, minlength=count), dtype=np.float64)


def caps_of(groups: GroupedLengths, options: FitOptions) -> FloatArray:
    """Length at which each group's answers are cut [G]: its cap, else its longest cut answer, else inf."""
    caps = np.full(len(groups), np.inf)
    if options.censoring == "none":
        return caps
    for number, cap in enumerate(groups.max_tokens):
        rows = slice(groups.offsets[number], groups.offsets[number + 1])
        cut = groups.flat_lengths[rows][~groups.flat_finished[rows]]
        if cap is not None:
            caps[number] = cap
        elif len(cut):
            caps[number] = cut.max()
    return caps
