"""Fits as a table and a file, `fits/2`: one row for each group.

| column | type | meaning |
|---|---|---|
| group keys | as in the samples | by default prompt_id, model |
| prompt, category, dataset, prompt_tokens, temperature | as in the samples | only if the samples have them |
| mu, sigma, nu | double | log-t and log-normal (nu = inf): log tokens |
| shape, scale | double | gamma and Weibull; the exponential has scale only; tokens |
| num_samples, num_censored | int32 | answers, and how many of them were cut |
| max_tokens | int32 | cap on the answers; null if unknown |
| log_likelihood | double | of all answers, x in tokens; null if not fitted |
| ks_stat, ks_p | double | plain Kolmogorov-Smirnov test; null if not fitted |
| ad_stat | double | Anderson-Darling statistic |
| se_mu, se_sigma, ... | double | standard errors by the observed information; null where there is none |
| converged | bool | see `estimate.Estimates` |
| flags | list of string | see `fits.FLAGS` |
| FAMILY_log_likelihood, _ks_stat, _ks_p, _ad_stat | double | of the families it is compared with |
| ks_p_boot, ad_p_boot, mu_low, mu_high, ... | double | by parametric bootstrap |
| output_tokens | list of int32 | the answer lengths; of a cut answer the length it was cut at |
| finished | list of bool | false: cut |
| weights | list of double | how many answers each one counts as; only if weights were asked for |
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from data_gen.tables import convertible
from scheduler_core.errors import InputError
from scheduler_core.files import atomic_file
from training.fitting.families import MIN_SAMPLES, FloatArray
from training.fitting.fits import FittedGroups, bits_of, fit_groups, group_sums
from training.fitting.options import FitOptions
from training.fitting.reading.conversations import with_conversations
from training.fitting.reading.table import GroupedLengths, group_table, read_parquet

SCHEMA_NAME = "fits/2"
log = logging.getLogger(__name__)


def fits_table(fits: FittedGroups) -> pa.Table:
    """The table `fits/2` of fitted groups."""
    groups = fits.groups
    table = groups.rows
    flags = fits.flags
    columns = {name: _doubles(values) for name, values in fits.parameters.items()} | {
        "num_samples": pa.array(np.diff(groups.offsets), pa.int32()),
        "num_censored": pa.array(
            group_sums(~groups.flat_finished, groups.offsets).astype(np.int32), pa.int32()
        ),
        "max_tokens": pa.array(groups.max_tokens, pa.int32()),
        "log_likelihood": _doubles(fits.log_likelihood),
        "ks_stat": _doubles(fits.ks_stat),
        "ks_p": _doubles(fits.ks_p),
        "ad_stat": _doubles(fits.ad_stat),
        **{f"se_{name}": _doubles(values) for name, values in fits.standard_errors.items()},
        "converged": pa.array(fits.converged),
        "flags": pa.array([list(found) for found in flags], pa.list_(pa.string())),
        **{name: _doubles(values) for name, values in fits.extra.items()},
        "output_tokens": _lists(groups.flat_lengths, groups.offsets, pa.int32()),
        "finished": _lists(groups.flat_finished, groups.offsets, pa.bool_()),
    }
    if groups.flat_weights is not None:
        columns["weights"] = _lists(groups.flat_weights, groups.offsets, pa.float64())
    for name, column in columns.items():
        table = table.append_column(name, column)
    return table.replace_schema_metadata({"tailcast.schema": SCHEMA_NAME})


def _doubles(values: FloatArray) -> pa.Array:
    return pa.array(values, pa.float64(), from_pandas=True)


def _lists(values: NDArray[Any], offsets: NDArray[np.int64], kind: pa.DataType) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values).cast(kind))


def write_fits(path: str | Path, fits: FittedGroups) -> None:
    """Writes `fits/2` as Parquet (zstd), atomically."""
    with atomic_file(path) as temporary:
        pq.write_table(fits_table(fits), temporary, compression="zstd")


def read_fits_or_fit(
    path: str | Path,
    options: FitOptions,
    *,
    field: str = "data",
    where: dict[str, str] | None = None,
    min_samples: int = MIN_SAMPLES,
    conversations: bool = False,
) -> FittedGroups:
    """Fits out of a fits file as they are; any other answer lengths are fitted now.

    Args:
        path: Parquet file: fits, samples or lists.
        options: Used to make and fit groups; of a fits file only the keys are used.
        field: Name of the option that gave the path, for messages.
        where: Column -> value: only rows with it.
        min_samples: How many answers at least one group must have; groups with fewer than 3 are not fitted.
        conversations: Take whole conversations for prompts (`with_conversations`).

    Returns:
        The fits; groups all of whose answers failed are left out, with a line in the log.

    Raises:
        InputError: As `group_table`; or parameters of a fits file are not finite numbers, or no row is left.
    """
    table = read_parquet(path, field)
    table = _filtered(table, Path(path), where or {})
    if conversations:
        table = with_conversations(table, Path(path))
    is_fits = {"mu", "sigma", "nu"} <= set(table.column_names)
    max_tokens = None if is_fits else options.max_tokens
    weights = "weights" if is_fits and "weights" in table.column_names else options.weights
    groups = group_table(
        table,
        Path(path),
        keys=options.keys,
        max_tokens=max_tokens,
        weights=weights,
        min_samples=min_samples,
    )
    if is_fits and len(groups) != table.num_rows:
        raise InputError(
            f"{Path(path).name}, rows", table.num_rows, f"each {', '.join(groups.keys)} once in a fits file"
        )
    answered = np.flatnonzero(groups.counts)
    if len(answered) < len(groups):
        log.info("%s: %d groups without any answer left out", field, len(groups) - len(answered))
        groups = groups.take(answered)
    if not is_fits:
        return fit_groups(groups, options)
    return _stored_fits(table.take(pa.array(answered)), groups, Path(path))


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
    mu, sigma, nu = (_finite(table, name, path) for name in ("mu", "sigma", "nu"))
    if (sigma <= 0).any():
        row = int(np.argmax(sigma <= 0))
        raise InputError(f"{path.name}, row {row}, column sigma", float(sigma[row]), "a number above 0")
    with convertible(path.name):
        numbers: dict[str, Any] = {
            name: np.array(_optional(table, name, pa.float64(), None), dtype=np.float64)
            for name in ("log_likelihood", "ks_stat", "ks_p", "ad_stat")
        }
        converged = np.array(_optional(table, "converged", pa.bool_(), True), dtype=bool)
        flags = _optional(table, "flags", pa.list_(pa.string()), None)
    return FittedGroups(
        groups=groups,
        parameters={"mu": mu, "sigma": sigma, "nu": nu},
        **numbers,
        converged=converged,
        flag_bits=np.array([bits_of(found or ()) for found in flags], dtype=np.int64),
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


def _optional(table: pa.Table, name: str, kind: pa.DataType, default: Any) -> list[Any]:
    if name not in table.column_names:
        return [default] * table.num_rows
    return list(table.column(name).cast(kind).to_pylist())
