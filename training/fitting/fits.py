"""Fits of many groups: parameters, tests and flags, together with their samples.

A table or Parquet file `fits/2` has one row for each group:

| column | type | meaning |
|---|---|---|
| group keys | as in the samples | by default prompt_id, model |
| prompt, category, dataset, prompt_tokens, temperature | as in the samples | if the samples have them |
| mu, sigma, nu | double | log-t and log-normal (nu = inf): log tokens |
| shape, scale | double | gamma and Weibull; the exponential has scale only; tokens |
| num_samples, num_censored | int32 | number of samples and of censored samples |
| max_tokens | int32 | limit of the samples; null if unknown |
| log_likelihood | double | of all samples, x in tokens; null if not fitted |
| ks_stat, ks_p | double | plain Kolmogorov-Smirnov test; null if not fitted |
| ad_stat | double | Anderson-Darling statistic |
| se_mu, se_sigma, ... | double | standard errors from the observed information; null if undetermined |
| converged | bool | see `estimate.Estimates` |
| flags | list of string | see `FLAGS` |
| FAMILY_log_likelihood, _ks_stat, _ks_p, _ad_stat | double | the same for each compared family |
| ks_p_boot, ad_p_boot | double | p-values of the parametric bootstrap |
| output_tokens | list of int32 | output lengths; the truncated length for censored samples |
| finished | list of bool | false: censored |
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.prediction.prompt_text import LAST_TEXT, PromptForm
from scheduler_core.shell.table_files import convertible, read_parquet
from training.fitting.estimate import (
    MIN_SAMPLES,
    Estimates,
    FamilyName,
    FloatArray,
    Solver,
    SortedLengths,
    compared_families,
    estimate,
    family_of,
)
from training.fitting.goodness import bootstrap, group_seed, ks_p_values
from training.fitting.samples import CheckedTable, GroupedLengths, group_table, with_conversations

log = logging.getLogger(__name__)

SCHEMA_NAME = "fits/2"
#: Metadata key of a file: number of failed samples that were left out.
NUM_ERRORS = b"tailcast.num_errors"
#: Flag of a group -> its meaning.
FLAGS = {
    "constant": "all lengths are equal and none is censored; sigma is its floor",
    "sigma_floor": "the likelihood increases down to the lower bound of sigma, 0.001 (or the bound of shape)",
    "all_censored": "every sample is censored: not fitted; mu is ln of the largest limit, a lower bound",
    "median_beyond_cap": "some samples are censored and the fitted median exceeds the longest sample: extrapolation",
    "too_few_samples": "fewer than 3 samples: not fitted; mu is ln of the median length, null without samples",
    "nu_at_bound": "free nu ended at 1 or at infinity",
}
#: Flag -> its bit in the kernels.
_BITS = {name: 1 << number for number, name in enumerate(FLAGS)}
#: Flags of groups without a fit, whose parameters are bounds or guesses.
NOT_FITTED = ("all_censored", "too_few_samples")
#: Flags of groups whose goodness of fit cannot be tested.
NOT_TESTED = ("constant", *NOT_FITTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """Grouping and fitting options; see the options of `fit-dist` (nu None: free; keys: group_by)."""

    family: FamilyName = "log-t"
    nu: float | None = 3.5
    censoring: Literal["right", "none"] = "right"
    integers: bool = False
    solver: Solver = "batched"
    keys: tuple[str, ...] = ("prompt_id", "model")
    max_tokens: int | None = None
    alternatives: bool = False
    bootstrap: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bootstrap and not 19 <= self.bootstrap <= 100_000:
            raise InputError("bootstrap", self.bootstrap, "0 for none, or 19 to 100000 replicates")


@dataclass(frozen=True, slots=True)
class FittedGroups:
    """G groups with their fits.

    `columns` holds the columns of the table `fits/2` from log_likelihood on; empty if the fits were read from a file.
    """

    groups: GroupedLengths
    parameters: dict[str, FloatArray]
    flag_bits: NDArray[np.int64]
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.flag_bits)

    @property
    def mu(self) -> FloatArray:
        """Location of the log-t, log tokens [G]."""
        return self.parameters["mu"]

    @property
    def sigma(self) -> FloatArray:
        """Scale of the log-t, log tokens [G]."""
        return self.parameters["sigma"]

    @property
    def nu(self) -> float:
        """Degrees of freedom, the same for all groups; InputError if they differ."""
        values = np.unique(self.parameters["nu"])
        if len(values) > 1:
            where = f"{self.groups.path.name}, column nu"
            raise InputError(where, f"{len(values)} values", "one value for all groups")
        return float(values[0])

    @property
    def flags(self) -> list[tuple[str, ...]]:
        """Names of the flags of each group."""
        names = {
            bits: tuple(name for name, bit in _BITS.items() if bits & bit)
            for bits in np.unique(self.flag_bits).tolist()
        }
        return [names[bits] for bits in self.flag_bits.tolist()]

    def has_flag(self, *flags: str) -> NDArray[np.bool_]:
        """Whether each group has any of these flags [G]."""
        return np.asarray((self.flag_bits & _bits_of(flags)) != 0)

    def take(self, groups: Sequence[int] | NDArray[np.intp]) -> FittedGroups:
        """The groups at these positions."""
        at = np.asarray(groups, dtype=np.int64)
        return FittedGroups(
            self.groups.take(at),
            {name: values[at] for name, values in self.parameters.items()},
            self.flag_bits[at],
            {name: values[at] for name, values in self.columns.items()},
        )


def _bits_of(flags: Sequence[str]) -> int:
    if unknown := set(flags) - _BITS.keys():
        raise InputError("flag", min(unknown, key=str), ", ".join(_BITS))
    return sum(_BITS[flag] for flag in set(flags))


def fit_groups(groups: GroupedLengths, options: FitOptions) -> FittedGroups:
    """Fits each group independently and tests the goodness of fit."""
    finished = groups.flat_finished if options.censoring == "right" else np.ones_like(groups.flat_finished)
    sample = SortedLengths.of(groups.flat_lengths, finished, groups.offsets)
    counts = groups.counts
    family = family_of(options.family, options.nu)
    fits = estimate(sample, family, solver=options.solver, integers=options.integers)
    parameters, errors = family.parameters(fits.solution)
    columns = _measures(sample, counts, fits)
    columns |= {f"se_{name}": error for name, error in errors.items() if name != "nu" or family.nu is None}
    columns["converged"] = fits.converged
    if options.alternatives:
        for label, other in compared_families(options.nu).items():
            if label != family.label:
                compared = estimate(sample, other, solver=options.solver, integers=options.integers)
                columns |= _measures(sample, counts, compared, f"{label}_")
    if options.bootstrap:
        result = bootstrap(
            sample,
            fits,
            replicates=options.bootstrap,
            integers=options.integers,
            solver=options.solver,
            limits=_censoring_limits(groups, options),
            seeds=[group_seed(options.seed, groups.name(g)) for g in range(len(groups))],
        )
        columns |= {"ks_p_boot": result.ks_p, "ad_p_boot": result.ad_p}
    return FittedGroups(groups, parameters, fits.flags, columns)


def _measures(
    sample: SortedLengths, counts: NDArray[np.int64], fits: Estimates, prefix: str = ""
) -> dict[str, NDArray[Any]]:
    ks, ad = fits.distances(sample)
    return {
        f"{prefix}log_likelihood": fits.log_likelihood,
        f"{prefix}ks_stat": ks,
        f"{prefix}ks_p": ks_p_values(ks, counts),
        f"{prefix}ad_stat": ad,
    }


def _group_sums(values: NDArray[Any], offsets: NDArray[np.int64]) -> FloatArray:
    """Sum of the flat values [S] over each group [G]; 0 for an empty group."""
    # Summed group by group, so that rounding errors do not carry over to other groups.
    count = len(offsets) - 1
    owners = np.repeat(np.arange(count), np.diff(offsets))
    return np.asarray(np.bincount(owners, weights=values, minlength=count), dtype=np.float64)


def _censoring_limits(groups: GroupedLengths, options: FitOptions) -> FloatArray:
    """Length above which samples of each group are censored [G]: max_tokens, else the longest censored length, else inf."""
    limits = np.array([np.nan if limit is None else limit for limit in groups.max_tokens], dtype=np.float64)
    longest = np.zeros(len(groups))
    owners = np.repeat(np.arange(len(groups)), groups.counts)
    np.maximum.at(longest, owners, np.where(groups.flat_finished, 0, groups.flat_lengths))
    limits = np.where(np.isnan(limits), longest, limits)
    return np.where((limits == 0) | (options.censoring == "none"), np.inf, limits)


def fits_table(fits: FittedGroups) -> pa.Table:
    """The table `fits/2` of fitted groups."""
    groups = fits.groups
    columns = {name: _doubles(values) for name, values in fits.parameters.items()} | {
        "num_samples": pa.array(groups.counts, pa.int32()),
        "num_censored": pa.array(_group_sums(~groups.flat_finished, groups.offsets).astype(np.int32)),
        "max_tokens": pa.array(groups.max_tokens, pa.int32()),
        **{
            name: _doubles(values) if name != "converged" else pa.array(values)
            for name, values in fits.columns.items()
        },
        "flags": pa.array([list(flags) for flags in fits.flags], pa.list_(pa.string())),
        "output_tokens": _lists(groups.flat_lengths, groups.offsets, pa.int32()),
        "finished": _lists(groups.flat_finished, groups.offsets, pa.bool_()),
    }
    table = groups.rows
    for name, column in columns.items():
        table = table.append_column(name, column)
    return table.replace_schema_metadata({"tailcast.schema": SCHEMA_NAME})


def _doubles(values: FloatArray) -> pa.Array:
    return pa.array(values, pa.float64(), from_pandas=True)


def _lists(values: NDArray[Any], offsets: NDArray[np.int64], kind: pa.DataType) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values).cast(kind))


def read_fits_or_fit(
    path: str | Path,
    options: FitOptions,
    *,
    field: str = "data",
    where: dict[str, str] | None = None,
    min_samples: int = MIN_SAMPLES,
    form: PromptForm = LAST_TEXT,
) -> FittedGroups:
    """Reads a fits file, or reads output lengths (samples or lists) and fits them.

    Groups whose samples all failed are left out and reported in the log.

    Args:
        path: Parquet file.
        options: Grouping and fitting options; for a fits file only the keys are used.
        field: Name of the option with the path, for error messages.
        where: Column -> value; only rows with these values are used.
        min_samples: Minimum size of the largest group; groups with fewer than 3 samples are not fitted.
        form: What the predictor reads of a row with messages (`with_conversations`).

    Raises:
        InputError: As in `group_table`; or parameters of a fits file are not finite, or no row remains.
    """
    path = Path(path)
    table = filtered(read_parquet(path, field), path, where or {})
    if form.conversations:
        table = with_conversations(table, path, form)
    is_fits = {"mu", "sigma", "nu"} <= set(table.column_names)
    groups = group_table(
        table,
        path,
        keys=options.keys,
        max_tokens=None if is_fits else options.max_tokens,
        min_samples=min_samples,
    )
    if is_fits and len(groups) != table.num_rows:
        allowed = f"each {', '.join(groups.keys)} once in a fits file"
        raise InputError(f"{path.name}, rows", table.num_rows, allowed)
    filled = np.flatnonzero(groups.counts)
    if len(filled) < len(groups):
        log.info("%s: %d groups without samples left out", field, len(groups) - len(filled))
        groups = groups.take(filled)
    if not is_fits:
        return fit_groups(groups, options)
    return _stored_fits(table.take(pa.array(filled)), groups, path)


def filtered(table: pa.Table, path: Path, where: dict[str, str]) -> pa.Table:
    for name, value in where.items():
        if name not in table.column_names:
            raise InputError(f"{path.name}, columns", table.column_names, f"also {name}")
        values = table.column(name).cast(pa.string())
        rows = pc.equal(values, value)
        if not pc.any(rows).as_py():
            existing = ", ".join(sorted(map(str, values.unique().to_pylist()))[:20])
            raise InputError(f"{path.name}, column {name}", value, f"one of {existing}")
        table = table.filter(rows)
    return table


def _stored_fits(table: pa.Table, groups: GroupedLengths, path: Path) -> FittedGroups:
    source = CheckedTable(table, path)
    parameters = {}
    for name in ("mu", "sigma", "nu"):
        values = source.numbers(source.array(name), name)
        good = np.isfinite(values) & ((values > 0) | (name == "mu"))
        source.require(good, name, "a finite number" if name == "mu" else "a finite number above 0", values)
        parameters[name] = values
    bits = np.zeros(len(table), dtype=np.int64)
    if "flags" in table.column_names:
        with convertible(path.name):
            flags = table.column("flags").cast(pa.list_(pa.string())).to_pylist()
        bits[:] = [_bits_of(names or ()) for names in flags]
    return FittedGroups(groups, parameters, bits)
