"""Fits of many groups: parameters, tests and flags, with the samples they come from.

As a table, and as a Parquet file `fits/2`, there is one row for each group:

| column | type | meaning |
|---|---|---|
| group keys | as in the samples | by default prompt_id, model |
| prompt, category, dataset, prompt_tokens, temperature | as in the samples | only if the samples have them |
| mu, sigma, nu | double | log-t and log-normal (nu = inf): log tokens |
| shape, scale | double | gamma and Weibull; the exponential has scale only; tokens |
| num_samples, num_censored | int32 | samples, and how many of them are censored |
| max_tokens | int32 | limit of the samples; null if unknown |
| log_likelihood | double | of all samples, x in tokens; null if not fitted |
| ks_stat, ks_p | double | plain Kolmogorov-Smirnov test; null if not fitted |
| ad_stat | double | Anderson-Darling statistic |
| se_mu, se_sigma, ... | double | standard errors by the observed information; null where there is none |
| converged | bool | see `estimate.Estimates` |
| flags | list of string | see `FLAGS` |
| FAMILY_log_likelihood, _ks_stat, _ks_p, _ad_stat | double | of the families it is compared with |
| ks_p_boot, ad_p_boot, mu_low, mu_high, ... | double | by parametric bootstrap |
| output_tokens | list of int32 | the output lengths; of a censored sample the length that it exceeds |
| finished | list of bool | false: censored |
| weights | list of double | how many samples each one counts as; only if the fit had weights |
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
from scheduler_core.table_files import convertible, read_parquet
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
from training.fitting.goodness import bootstrap, group_seed, interval_columns, ks_p_values
from training.fitting.samples import CheckedTable, GroupedLengths, group_table, with_conversations

log = logging.getLogger(__name__)

SCHEMA_NAME = "fits/2"
#: Metadata of a file: failed samples that were left out.
NUM_ERRORS = b"tailcast.num_errors"
#: Flag -> what it means for a group.
FLAGS = {
    "constant": "all lengths are equal and none is censored; sigma is its floor",
    "sigma_floor": "the likelihood grows until sigma reaches its floor of 0.001 (shape its bound)",
    "all_censored": "every sample is censored: not fitted; mu is ln of the largest limit, a lower bound",
    "median_beyond_cap": "some samples are censored and the fit's median lies beyond the longest one: it extrapolates",
    "too_few_samples": "fewer than 3 samples: not fitted; mu is ln of the middle one, null without any",
    "nu_at_bound": "free nu ended at 1 or at infinity",
}
#: In the order of the kernels' bits.
_BITS = {name: 1 << number for number, name in enumerate(FLAGS)}
#: Flags of groups whose parameters are bounds or guesses, no fit.
NOT_FITTED = ("all_censored", "too_few_samples")
#: Flags of groups without a fit that could be tested.
NOT_TESTED = ("constant", *NOT_FITTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """How groups are made and fitted, as the options of `fit-dist` say (nu None: free; keys: its group_by)."""

    family: FamilyName = "log-t"
    nu: float | None = 3.5
    censoring: Literal["right", "none"] = "right"
    integers: bool = False
    solver: Solver = "batched"
    keys: tuple[str, ...] = ("prompt_id", "model")
    max_tokens: int | None = None
    weights: str | None = None
    alternatives: bool = False
    bootstrap: int = 0
    confidence: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bootstrap and not 19 <= self.bootstrap <= 100_000:
            raise InputError("bootstrap", self.bootstrap, "0 for none, or 19 to 100000 replicates")
        if not 0 < self.confidence < 1:
            raise InputError("confidence", self.confidence, "a number between 0 and 1")


@dataclass(frozen=True, slots=True)
class FittedGroups:
    """Groups with their fits; arrays have one entry for each of G groups.

    `columns` are those of the table `fits/2` from log_likelihood on, by name; none if the fits were read.
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
        """Names of each group's flags."""
        names = {
            bits: tuple(name for name, bit in _BITS.items() if bits & bit)
            for bits in np.unique(self.flag_bits).tolist()
        }
        return [names[bits] for bits in self.flag_bits.tolist()]

    def has_flag(self, *flags: str) -> NDArray[np.bool_]:
        """Whether each group has any of these flags, [G]."""
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
    """Fits each group by itself and tests the fit; a group's result does not depend on the others."""
    finished = groups.flat_finished if options.censoring == "right" else np.ones_like(groups.flat_finished)
    sample = SortedLengths.of(groups.flat_lengths, finished, groups.offsets, groups.flat_weights)
    counts = _effective_counts(sample)
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
            confidence=options.confidence,
            integers=options.integers,
            solver=options.solver,
            limits=_censoring_limits(groups, options),
            seeds=[group_seed(options.seed, groups.name(g)) for g in range(len(groups))],
        )
        columns |= {"ks_p_boot": result.ks_p, "ad_p_boot": result.ad_p} | interval_columns(fits, result)
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


def _effective_counts(sample: SortedLengths) -> NDArray[np.int64]:
    """Samples of each group; with weights their effective number (sum w)^2 / sum w^2, rounded down."""
    if not sample.weights.size:
        return np.diff(sample.offsets)
    sums, squares = (_group_sums(values, sample.offsets) for values in (sample.weights, sample.weights**2))
    return np.asarray(np.maximum(sums**2 / np.maximum(squares, 1e-300) + 1e-9, 1), dtype=np.int64)


def _group_sums(values: NDArray[Any], offsets: NDArray[np.int64]) -> FloatArray:
    """Sum of the flat values [S] of each group [G]; 0 for a group without any."""
    # Group by group, so that no rounding of one reaches another.
    count = len(offsets) - 1
    owners = np.repeat(np.arange(count), np.diff(offsets))
    return np.asarray(np.bincount(owners, weights=values, minlength=count), dtype=np.float64)


def _censoring_limits(groups: GroupedLengths, options: FitOptions) -> FloatArray:
    """Length beyond which each group's samples are censored [G]: max_tokens, else the longest censored one, else inf."""
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
    if groups.flat_weights is not None:
        columns["weights"] = _lists(groups.flat_weights, groups.offsets, pa.float64())
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
    conversations: bool = False,
) -> FittedGroups:
    """Fits out of a fits file as they are; any other output lengths (samples or lists) are fitted now.

    Groups all of whose samples failed are left out, with a line in the log.

    Args:
        path: Parquet file.
        options: Used to make and fit groups; of a fits file only the keys are used.
        field: Name of the option with the path, for messages.
        where: Column -> value: only rows with it.
        min_samples: Smallest allowed size of the largest group; groups with fewer than 3 samples are not fitted.
        conversations: Take whole conversations for prompts (`with_conversations`).

    Raises:
        InputError: As `group_table`; or parameters of a fits file are not finite numbers, or no row is left.
    """
    path = Path(path)
    table = filtered(read_parquet(path, field), path, where or {})
    if conversations:
        table = with_conversations(table, path)
    is_fits = {"mu", "sigma", "nu"} <= set(table.column_names)
    groups = group_table(
        table,
        path,
        keys=options.keys,
        max_tokens=None if is_fits else options.max_tokens,
        weights="weights" if is_fits and "weights" in table.column_names else options.weights,
        min_samples=min_samples,
    )
    if is_fits and len(groups) != table.num_rows:
        allowed = f"each {', '.join(groups.keys)} once in a fits file"
        raise InputError(f"{path.name}, rows", table.num_rows, allowed)
    filled = np.flatnonzero(groups.counts)
    if len(filled) < len(groups):
        log.info("%s: %d groups without any sample left out", field, len(groups) - len(filled))
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
