"""Fitted groups and their file, `fits/1`: one row for each group.

| column | type | meaning |
|---|---|---|
| group keys | as in the samples | by default prompt_id, model |
| prompt, category, dataset, prompt_tokens, temperature | as in the samples | only if the samples have them |
| mu, sigma, nu | double | log-t parameters, log tokens |
| num_samples, num_censored | int32 | answers, and how many of them were cut |
| max_tokens | int32 | cap on the answers; null if unknown |
| log_likelihood | double | of all answers, x in tokens |
| ks_stat, ks_p | double | plain Kolmogorov-Smirnov test; null if all answers were cut |
| converged | bool | see `training.fitting.log_t` |
| flags | list of string | "constant", "sigma_floor", "all_censored", "median_beyond_cap" |
| output_tokens | list of int32 | the answer lengths; of a cut answer the length it was cut at |
| finished | list of bool | false: cut |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.files import atomic_file
from scheduler_core.lengths import LogT
from training.fitting.goodness import ks_p_values, ks_statistic
from training.fitting.log_t import MIN_SAMPLES, LogTFit, fit_log_t
from training.fitting.table import GroupedLengths, group_table, read_parquet
from training.fitting.threads import one_blas_thread

SCHEMA_NAME = "fits/1"
Censoring = Literal["right", "none"]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """How groups are made and fitted.

    Attributes:
        nu: Degrees of freedom of the log-t distribution.
        censoring: "right" counts cut answers as at least as long, "none" as ended (the paper's way, biased low).
        keys: Columns that name a group.
        max_tokens: Cap on all answers, see `group_table`.
    """

    nu: float = 3.5
    censoring: Censoring = "right"
    keys: tuple[str, ...] = ("prompt_id", "model")
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.nu < float("inf"):
            raise InputError("nu", self.nu, "a finite number above 0")
        if self.censoring not in get_args(Censoring):
            raise InputError("censoring", self.censoring, "right or none")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InputError("max_tokens", self.max_tokens, "a whole number of at least 1, or unset")


@dataclass(frozen=True, slots=True)
class FittedGroups:
    """Groups with their fits; arrays have one entry for each of G groups.

    Attributes:
        groups: Names and answers.
        mu, sigma: Parameters in log tokens.
        nu: Degrees of freedom, the same for all.
        log_likelihood, ks_stat, ks_p: Of each fit; the KS test is NaN where all answers were cut.
        converged: See `training.fitting.log_t`.
        flags: Flags of each fit.
    """

    groups: GroupedLengths
    mu: FloatArray
    sigma: FloatArray
    nu: float
    log_likelihood: FloatArray
    ks_stat: FloatArray
    ks_p: FloatArray
    converged: NDArray[np.bool_]
    flags: list[tuple[str, ...]]

    def __len__(self) -> int:
        return len(self.mu)

    def has_flag(self, *flags: str) -> NDArray[np.bool_]:
        """Whether each group has any of these flags, [G]."""
        return np.array([bool(set(flags) & set(found)) for found in self.flags], dtype=bool)

    def take(self, groups: Sequence[int] | NDArray[np.intp]) -> FittedGroups:
        """The groups at these positions."""
        at = np.asarray(groups, dtype=np.int64)
        return FittedGroups(
            groups=self.groups.take(at),
            mu=self.mu[at],
            sigma=self.sigma[at],
            nu=self.nu,
            log_likelihood=self.log_likelihood[at],
            ks_stat=self.ks_stat[at],
            ks_p=self.ks_p[at],
            converged=self.converged[at],
            flags=[self.flags[group] for group in at],
        )


def fit_groups(
    groups: GroupedLengths,
    options: FitOptions,
    *,
    track: Callable[[Iterable[int]], Iterable[int]] = lambda numbers: numbers,
) -> FittedGroups:
    """Fits each group by itself and tests the fit.

    Args:
        groups: Answers by group.
        options: Degrees of freedom and censoring.
        track: Wraps the loop over group numbers, e.g. in a progress bar.
    """
    fits: list[LogTFit] = []
    statistics = np.full(len(groups), np.nan)
    with one_blas_thread():
        for number in track(range(len(groups))):
            lengths = groups.lengths[number]
            finished = seen_as_finished(groups.finished[number], options.censoring)
            fit = fit_log_t(lengths, finished, options.nu)
            if "all_censored" not in fit.flags:
                statistics[number] = ks_statistic(lengths, finished, LogT(fit.mu, fit.sigma, fit.nu).cdf)
            fits.append(fit)
    counts = np.array([len(lengths) for lengths in groups.lengths])
    return FittedGroups(
        groups=groups,
        mu=np.array([fit.mu for fit in fits]),
        sigma=np.array([fit.sigma for fit in fits]),
        nu=options.nu,
        log_likelihood=np.array([fit.log_likelihood for fit in fits]),
        ks_stat=statistics,
        ks_p=ks_p_values(statistics, counts),
        converged=np.array([fit.converged for fit in fits]),
        flags=[fit.flags for fit in fits],
    )


def seen_as_finished(finished: NDArray[np.bool_], censoring: Censoring) -> NDArray[np.bool_]:
    """What the likelihood is told about the ends of answers [N]."""
    return finished if censoring == "right" else np.ones_like(finished)


def write_fits(path: str | Path, fits: FittedGroups) -> None:
    """Writes `fits/1` as Parquet (zstd), atomically."""
    groups = fits.groups
    table = groups.rows
    columns = {
        "mu": pa.array(fits.mu),
        "sigma": pa.array(fits.sigma),
        "nu": pa.array(np.full(len(fits), fits.nu)),
        "num_samples": pa.array([len(lengths) for lengths in groups.lengths], pa.int32()),
        "num_censored": pa.array([int((~finished).sum()) for finished in groups.finished], pa.int32()),
        "max_tokens": pa.array(groups.max_tokens, pa.int32()),
        "log_likelihood": pa.array(fits.log_likelihood),
        "ks_stat": pa.array(fits.ks_stat, from_pandas=True),
        "ks_p": pa.array(fits.ks_p, from_pandas=True),
        "converged": pa.array(fits.converged),
        "flags": pa.array([list(flags) for flags in fits.flags], pa.list_(pa.string())),
        "output_tokens": pa.array([lengths.tolist() for lengths in groups.lengths], pa.list_(pa.int32())),
        "finished": pa.array([finished.tolist() for finished in groups.finished], pa.list_(pa.bool_())),
    }
    for name, column in columns.items():
        table = table.append_column(name, column)
    table = table.replace_schema_metadata({"tailcast.schema": SCHEMA_NAME})
    with atomic_file(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def read_fits_or_fit(
    path: str | Path,
    options: FitOptions,
    *,
    field: str = "data",
    where: dict[str, str] | None = None,
    track: Callable[[Iterable[int]], Iterable[int]] = lambda numbers: numbers,
) -> FittedGroups:
    """Fits out of a `fits/1` file as they are; any other answer lengths are fitted now.

    Args:
        path: Parquet file: fits, samples or lists.
        options: Used to make and fit groups; of a fits file only the keys are used.
        field: Name of the option that gave the path, for messages.
        where: Column -> value: only rows with it.
        track: Wraps the loop over group numbers.

    Raises:
        InputError: As `group_table`; or parameters of a fits file are not finite numbers, or no row is left.
    """
    table = read_parquet(path, field)
    table = _filtered(table, Path(path), where or {})
    is_fits = {"mu", "sigma", "nu"} <= set(table.column_names)
    groups = group_table(
        table,
        Path(path),
        keys=options.keys,
        max_tokens=None if is_fits else options.max_tokens,
        min_samples=1 if is_fits else MIN_SAMPLES,
    )
    if not is_fits:
        return fit_groups(groups, options, track=track)
    return _stored_fits(table, groups, Path(path))


def _filtered(table: pa.Table, path: Path, where: dict[str, str]) -> pa.Table:
    for name, value in where.items():
        if name not in table.column_names:
            raise InputError(f"{path.name}, columns", table.column_names, f"also {name}")
        found = table.column(name).to_pylist()
        rows = [row for row, entry in enumerate(found) if entry == value]
        if not rows:
            known = ", ".join(sorted(map(str, set(found)))[:20])
            raise InputError(f"{path.name}, column {name}", value, f"one of {known}")
        table = table.take(pa.array(rows))
    return table


def _stored_fits(table: pa.Table, groups: GroupedLengths, path: Path) -> FittedGroups:
    if len(groups) != table.num_rows:
        raise InputError(
            f"{path.name}, rows", table.num_rows, f"each {', '.join(groups.keys)} once in a fits file"
        )
    mu, sigma, nu = (_finite(table, name, path) for name in ("mu", "sigma", "nu"))
    if (sigma <= 0).any():
        row = int(np.argmax(sigma <= 0))
        raise InputError(f"{path.name}, row {row}, column sigma", float(sigma[row]), "a number above 0")
    if len(np.unique(nu)) > 1:
        raise InputError(f"{path.name}, column nu", np.unique(nu).tolist(), "one value in the whole file")
    flags = _optional(table, "flags", [[]] * len(mu))
    return FittedGroups(
        groups=groups,
        mu=mu,
        sigma=sigma,
        nu=float(nu[0]),
        log_likelihood=np.array(_optional(table, "log_likelihood", [None] * len(mu)), dtype=np.float64),
        ks_stat=np.array(_optional(table, "ks_stat", [None] * len(mu)), dtype=np.float64),
        ks_p=np.array(_optional(table, "ks_p", [None] * len(mu)), dtype=np.float64),
        converged=np.array(_optional(table, "converged", [True] * len(mu)), dtype=bool),
        flags=[tuple(found or ()) for found in flags],
    )


def _finite(table: pa.Table, name: str, path: Path) -> FloatArray:
    column = table.column(name)
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        raise InputError(f"{path.name}, column {name}", str(column.type), "numbers")
    values = np.array(column.to_pylist(), dtype=np.float64)
    if not np.isfinite(values).all():
        row = int(np.argmin(np.isfinite(values)))
        raise InputError(f"{path.name}, row {row}, column {name}", column[row].as_py(), "a finite number")
    return values


def _optional(table: pa.Table, name: str, default: list[Any]) -> list[Any]:
    return list(table.column(name).to_pylist()) if name in table.column_names else default
