"""Single rows of a fits file of any size: a random part of its numbers, and chosen rows with their answers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.lengths import Exponential, Gamma, LengthDistribution, LogT, Weibull
from training.fitting.estimate import Estimates, Sample, estimate
from training.fitting.families import Family, FloatArray, compared_families, family_of
from training.fitting.fits import NOT_FITTED
from training.fitting.reading.table import CARRIED

# Flags of rows that say nothing of a fit's quality.
_SHOWS_NOTHING = ("constant", *NOT_FITTED)
_PARAMETERS = ("mu", "sigma", "nu", "shape", "scale")
_NUMBERS = ("num_samples", "num_censored", "ks_p", "ks_p_boot")
_DRAWN_BY = 20_260_101


@dataclass(frozen=True, slots=True)
class FitsScan:
    """What one pass over a fits file keeps.

    Attributes:
        names: Columns of the file.
        num_rows: Rows of the file.
        rows: Row numbers of a random part of the fitted rows, in the order drawn, [K].
        numbers: Numeric columns of those rows, NaN for null, [K] each.
        usable: Whether each of them is a fit whose quality can be judged, [K].
        worst: Row numbers of the usable rows of lowest p-value (by bootstrap if there is one), lowest first.
    """

    names: list[str]
    num_rows: int
    rows: NDArray[np.int64]
    numbers: dict[str, FloatArray]
    usable: NDArray[np.bool_]
    worst: NDArray[np.int64]

    @property
    def parameters(self) -> list[str]:
        """Names of the family's parameters."""
        return [name for name in _PARAMETERS if name in self.numbers]

    @property
    def typical(self) -> FloatArray:
        """ln of a typical length of each row, [K]."""
        if "mu" in self.numbers:
            return self.numbers["mu"]
        shape = self.numbers.get("shape", np.ones(1))
        return np.log(self.numbers["scale"] * shape)


def scan_fits(path: str | Path, *, keep: int = 20_000, worst: int = 10) -> FitsScan:
    """Reads the numbers of all rows once and holds those of `keep` random ones.

    Raises:
        InputError: The file is no fits file.
    """
    file = pq.ParquetFile(path)
    names = file.schema_arrow.names
    if "scale" not in names and not {"mu", "sigma", "nu"} <= set(names):
        raise InputError(f"{Path(path).name}, columns", names, "those of a fits file: mu, sigma, nu or scale")
    wanted = [name for name in names if name in (*_PARAMETERS, *_NUMBERS) or name.startswith("se_")]
    p_name = "ks_p_boot" if "ks_p_boot" in names else "ks_p"
    rng = np.random.default_rng(_DRAWN_BY)
    columns: dict[str, FloatArray] = {}
    low_p: tuple[FloatArray, NDArray[np.int64]] = (np.empty(0), np.empty(0, dtype=np.int64))
    start = 0
    for batch in file.iter_batches(batch_size=65_536, columns=[*wanted, "flags"]):
        part = {name: _floats(batch.column(name)) for name in wanted}
        fitted = ~_flagged(batch.column("flags"), NOT_FITTED)
        part["row"] = np.arange(start, start + batch.num_rows, dtype=np.float64)
        usable = ~_flagged(batch.column("flags"), _SHOWS_NOTHING)
        part["usable"] = usable.astype(np.float64)
        part["order"] = rng.random(batch.num_rows)
        start += batch.num_rows
        judged = usable & ~np.isnan(part[p_name])
        low_p = _lowest(low_p, part[p_name][judged], part["row"][judged].astype(np.int64), worst)
        for name, values in part.items():
            columns[name] = np.concatenate([columns.get(name, np.empty(0)), values[fitted]])
        first = np.argsort(columns["order"], kind="stable")[:keep]
        columns = {name: values[first] for name, values in columns.items()}
    return FitsScan(
        names,
        start,
        columns["row"].astype(np.int64),
        {name: columns[name] for name in wanted},
        columns["usable"] > 0,
        low_p[1],
    )


def _floats(column: pa.Array) -> FloatArray:
    return np.asarray(column.cast(pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)


def _flagged(column: pa.Array, flags: Iterable[str]) -> NDArray[np.bool_]:
    found = np.zeros(len(column), dtype=bool)
    hits = pc.is_in(pc.list_flatten(column), pa.array(list(flags)))
    found[pc.list_parent_indices(column).to_numpy()[hits.to_numpy(zero_copy_only=False)]] = True
    return found


def _lowest(
    held: tuple[FloatArray, NDArray[np.int64]], p: FloatArray, rows: NDArray[np.int64], count: int
) -> tuple[FloatArray, NDArray[np.int64]]:
    both, numbers = np.concatenate([held[0], p]), np.concatenate([held[1], rows])
    first = np.argsort(both, kind="stable")[:count]
    return both[first], numbers[first]


@dataclass(frozen=True, slots=True)
class FitRow:
    """One row of a fits file with its answers.

    Attributes:
        row: Its number.
        title: Its prompt, or what names it.
        parameters: Of the family.
        numbers: log_likelihood, ks_p, ks_p_boot where the file has them; NaN for null.
        lengths, finished, weights: Answers [N]; weights None if the file has none.
    """

    row: int
    title: str
    parameters: dict[str, float]
    numbers: dict[str, float]
    lengths: NDArray[np.int64]
    finished: NDArray[np.bool_]
    weights: FloatArray | None


def read_rows(path: str | Path, rows: Sequence[int] | NDArray[np.int64]) -> list[FitRow]:
    """The rows of these numbers, in this order."""
    file = pq.ParquetFile(path)
    names = file.schema_arrow.names
    first_number = min(names.index(name) for name in _PARAMETERS if name in names)
    keys = [name for name in names[:first_number] if name not in CARRIED or name == "prompt"]
    wanted = [
        name
        for name in (
            *_PARAMETERS,
            "log_likelihood",
            "ks_p",
            "ks_p_boot",
            "output_tokens",
            "finished",
            "weights",
        )
        if name in names
    ]
    numbers = np.asarray(rows, dtype=np.int64)
    found: dict[int, FitRow] = {}
    start = 0
    for group in range(file.num_row_groups):
        end = start + file.metadata.row_group(group).num_rows
        here = np.unique(numbers[(numbers >= start) & (numbers < end)])
        if len(here):
            table = file.read_row_group(group, columns=[*keys, *wanted]).take(pa.array(here - start))
            for row, values in zip(here.tolist(), table.to_pylist(), strict=True):
                found[row] = _fit_row(row, values, keys)
        start = end
    return [found[number] for number in numbers.tolist()]


def _fit_row(row: int, values: dict[str, Any], keys: list[str]) -> FitRow:
    title = values.get("prompt") or ", ".join(f"{key}={values[key]!r}" for key in keys)
    weights = values.get("weights")

    def numbers(names: Iterable[str]) -> dict[str, float]:
        return {name: math.nan if values[name] is None else values[name] for name in names if name in values}

    return FitRow(
        row,
        " ".join(str(title).split()),
        numbers(_PARAMETERS),
        numbers(("log_likelihood", "ks_p", "ks_p_boot")),
        np.array(values["output_tokens"], dtype=np.int64),
        np.array(values["finished"], dtype=bool),
        None if weights is None else np.array(weights, dtype=np.float64),
    )


@dataclass(frozen=True, slots=True)
class Fitting:
    """How a file's fits were made: family, and whether cut answers and whole numbers were seen as such."""

    family: Family
    right_censored: bool
    integers: bool

    def again(self, row: FitRow, family: Family) -> Estimates:
        """Fits a family to a row's answers in the same way."""
        finished = row.finished if self.right_censored else np.ones_like(row.finished)
        sample = Sample.of(row.lengths, finished, np.array([0, len(row.lengths)]), row.weights)
        return estimate(sample, family, integers=self.integers)


def fitting_of(rows: Sequence[FitRow]) -> Fitting:
    """How the rows were fitted: of all ways, the one that gives their log-likelihoods again.

    A fits file does not say; where two ways give the same, they are the same for these rows.
    """
    families = _families_of(rows)
    ways = [Fitting(*way) for way in product(families, (True, False), (False, True))]
    return min(ways, key=lambda way: sum(_difference(way, row) for row in rows))


def _families_of(rows: Sequence[FitRow]) -> list[Family]:
    names = set(rows[0].parameters)
    if "mu" in names:
        nu = {row.parameters["nu"] for row in rows}
        free = family_of("log-t", None)
        if len(nu) > 1:
            return [free]
        only = nu.pop()
        return [family_of("log-normal") if math.isinf(only) else family_of("log-t", only), free]
    return [family_of(name) for name in (("gamma", "weibull") if "shape" in names else ("exponential",))]


def _difference(way: Fitting, row: FitRow) -> float:
    value = float(way.again(row, way.family).log_likelihood[0])
    difference = abs(value - row.numbers.get("log_likelihood", math.nan))
    return 0.0 if math.isnan(difference) else difference


def compared_in(names: Sequence[str], nu: float | None) -> dict[str, Family]:
    """The families that a file with these columns is compared with."""
    return {
        label: family for label, family in compared_families(nu).items() if f"{label}_log_likelihood" in names
    }


def distribution_of(family: Family, parameters: dict[str, Any]) -> LengthDistribution:
    """The length distribution(s) with these parameters."""
    if "mu" in parameters:
        return LogT(parameters["mu"], parameters["sigma"], parameters["nu"])
    if family.label == "gamma":
        return Gamma(parameters["shape"], parameters["scale"])
    if family.label == "weibull":
        return Weibull(parameters["shape"], parameters["scale"])
    return Exponential(parameters["scale"])


def spread_rows(scan: FitsScan, count: int) -> list[int]:
    """Row numbers of up to `count` usable fits, from the shortest to the longest typical length."""
    rows, typical = scan.rows[scan.usable], scan.typical[scan.usable]
    order = rows[np.lexsort((rows, typical))]
    if len(order) <= count:
        return [int(row) for row in order]
    ranks = np.linspace(0.05, 0.95, count) * (len(order) - 1)
    return [int(order[int(rank)]) for rank in ranks]
