"""Rows (prompt, served model, temperature) with their sampled lengths: reading, joining, splitting by prompt."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data_gen.splits import SPLITS, split_of
from scheduler_core.errors import InputError
from scheduler_core.shell.table_files import convertible, read_parquet
from training.fitting.fits import NOT_FITTED, FitOptions, filtered, fit_groups, read_fits_or_fit
from training.fitting.samples import GroupedLengths, group_table, with_conversations
from training.network.config import TrainConfig

log = logging.getLogger(__name__)

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
SCHEMA = pa.schema(
    [
        ("prompt", pa.large_string()),
        ("prompt_id", pa.large_string()),
        ("model", pa.dictionary(pa.int32(), pa.large_string())),
        *((name, pa.float64()) for name in ("temperature", "weight", "max_tokens", "mu", "sigma")),
        ("lengths", pa.large_list(pa.int32())),
        ("finished", pa.large_list(pa.bool_())),
    ]
)


class Rows:
    """N rows of P distinct prompts, with S samples in total; rows of the same prompt are adjacent.

    Built from a table of `SCHEMA` with at least one sample in each row; rows with equal text share a prompt. temperature
    [N] is NaN if unknown; weight [N] is the weight in the loss; max_tokens [N] is the length at which samples of the row
    are truncated, infinite if unknown; mu and sigma [N] are fitted parameters, NaN if not fitted.
    """

    def __init__(self, table: pa.Table) -> None:
        prompts = table["prompt"].combine_chunks().dictionary_encode()
        codes = np.asarray(prompts.indices)
        order = np.argsort(codes, kind="stable")
        self.table = table = table.take(order)  # sorted by prompt in order of first appearance
        self.prompts: list[str] = prompts.dictionary.to_pylist()  # texts, all different [P]
        self.prompt: IntArray = codes[order].astype(np.int64)  # number of each row's prompt, ascending [N]
        first = np.searchsorted(self.prompt, np.arange(len(self.prompts)))
        self.prompt_ids: list[str] = table["prompt_id"].take(first).to_pylist()
        models = table["model"].combine_chunks()
        self.models: tuple[str, ...] = tuple(models.dictionary.to_pylist())  # names of served models [M]
        # Index of each row's served model in `models` + 1; 0 if unnamed [N].
        self.model: IntArray = np.asarray(models.indices.fill_null(-1)).astype(np.int64) + 1
        self.temperature, self.weight, self.max_tokens, self.mu, self.sigma = (
            table[name].to_numpy() for name in ("temperature", "weight", "max_tokens", "mu", "sigma")
        )
        lengths = table["lengths"].combine_chunks()
        # Samples of row r are lengths[offsets[r]:offsets[r + 1]]; the truncated length for censored samples.
        self.counts: IntArray = np.asarray(lengths.value_lengths()).astype(np.int64)
        self.offsets: IntArray = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self.counts)])
        self.lengths: NDArray[np.int32] = np.asarray(lengths.flatten())
        self.finished: NDArray[np.bool_] = np.asarray(table["finished"].combine_chunks().flatten())

    def __len__(self) -> int:
        return len(self.prompt)

    def row_means(self, values: NDArray[Any]) -> FloatArray:
        """Mean of values [S] over the samples of each row [N]."""
        return np.asarray(np.add.reduceat(values.astype(np.float64), self.offsets[:-1]) / self.counts)

    def take(self, rows: IntArray) -> Rows:
        """The rows at these positions; prompts without rows are dropped, but `models` is unchanged."""
        return Rows(self.table.take(rows))

    def where(self, mask: NDArray[np.bool_]) -> Rows:
        """The rows of the prompts for which the mask is true [P]."""
        return self.take(np.flatnonzero(mask[self.prompt]))


def join(parts: Sequence[Rows]) -> Rows:
    """Concatenates the rows of several files; rows with equal text share a prompt."""
    return Rows(pa.concat_tables([part.table for part in parts]).unify_dictionaries())


@dataclass(frozen=True, slots=True)
class SplitRows:
    """Rows by split."""

    # train, validation: rows for training, and for selection of the best epoch.
    train: Rows
    validation: Rows
    num_test_prompts: int = 0  # prompts reserved for testing
    num_excluded: int = 0  # rows excluded because they have no usable fit
    num_shared: int = 0  # training prompts excluded because validation or test have the same text


def read_split_rows(config: TrainConfig) -> SplitRows:
    """Reads all files with output lengths and splits them."""
    weights = config.data_weights or (1.0,) * len(config.files["data"])
    rows, num_excluded = _read_all(list(zip(config.files["data"], weights, strict=True)), config, "data")
    if config.files["validation"]:
        files = [(path, 1.0) for path in config.files["validation"]]
        validation, num_excluded_too = _read_all(files, config, "validation")
        num_excluded += num_excluded_too
        train, held_out, num_test = rows, set(validation.prompts), 0
    else:
        names = [split_of(prompt_id, config.split_seed, config.fractions) for prompt_id in rows.prompt_ids]
        split = np.array(names, dtype=np.str_)
        train, validation, test = (rows.where(split == name) for name in SPLITS)
        held_out, num_test = {*validation.prompts, *test.prompts}, len(test.prompts)
    is_shared = np.array([text in held_out for text in train.prompts], dtype=bool)
    if is_shared.any():
        log.info("%d training prompts left out: validation or test have the same text", int(is_shared.sum()))
        train = train.where(~is_shared)
    for name, part, minimum in (("train", train, 2), ("validation", validation, 1)):
        if len(part.prompts) < minimum:
            raise InputError(
                f"prompts with usable samples in the {name} split",
                len(part.prompts),
                f"at least {minimum}; {len(rows.prompts)} prompts in total, another split_seed or fractions may help",
            )
    return SplitRows(train, validation, num_test, num_excluded, int(is_shared.sum()))


def _read_all(files: Sequence[tuple[str, float]], config: TrainConfig, field: str) -> tuple[Rows, int]:
    """Rows of all files (path, weight), and the number of rows excluded because they have no usable fit."""
    parts = [_read(path, weight, config, field) for path, weight in files]
    return join([part for part, _ in parts]), sum(count for _, count in parts)


def _read(path: str, weight: float, config: TrainConfig, field: str) -> tuple[Rows, int]:
    where = {} if config.served_model is None else {"model": config.served_model}
    table = filtered(read_parquet(path, field), Path(path), where)
    keys = _keys(table, config)
    if not config.needs_fits:
        if "model" not in keys or "model" not in table.column_names:
            return _rows(table, path, keys, weight, config), 0
        unknown = table.column("model").is_null()
        others = tuple(key for key in keys if key != "model")
        parts = {keys: table.filter(pc.invert(unknown)), others: table.filter(unknown).drop_columns("model")}
        return join([_rows(part, path, own, weight, config) for own, part in parts.items() if len(part)]), 0
    assert config.length is not None
    fits = read_fits_or_fit(
        path,
        FitOptions(nu=config.length.nu, censoring=config.censoring, keys=keys, max_tokens=config.max_tokens),
        field=field,
        where=where,
        conversations=config.conversations,
    )
    if fits.nu != config.length.nu:
        raise InputError(f"{Path(path).name}, column nu", fits.nu, f"{config.length.nu:g}, as in length.nu")
    usable = np.flatnonzero(~fits.has_flag(*NOT_FITTED))
    num_excluded = len(fits) - len(usable)
    if len(usable) == 0:
        raise InputError(f"{Path(path).name}, rows with a usable fit", 0, "at least one")
    fits = fits.take(usable)
    rows = rows_of(fits.groups, fits.mu, fits.sigma, weight=weight, censoring=config.censoring)
    return rows, num_excluded


def _rows(table: pa.Table, path: str, keys: tuple[str, ...], weight: float, config: TrainConfig) -> Rows:
    """Rows of a table, without fitted parameters; without the key `model`, the served model is unknown."""
    if config.conversations:
        table = with_conversations(table, Path(path))
    is_fits = {"mu", "sigma", "nu"} <= set(table.column_names)
    groups = group_table(
        table, Path(path), keys=keys, max_tokens=None if is_fits else config.max_tokens, min_samples=1
    )
    groups = groups.take(np.flatnonzero(groups.counts))
    sigma = _sigma_within(groups, config)
    return rows_of(groups, None, sigma, weight=weight, censoring=config.censoring)


def _sigma_within(groups: GroupedLengths, config: TrainConfig) -> FloatArray | None:
    """Fitted sigma of each group as target of sigma_within; NaN for groups with too few samples."""
    if config.length is None or not config.length.within:
        return None
    fits = fit_groups(groups, FitOptions(nu=config.length.nu, censoring=config.censoring, keys=groups.keys))
    return np.where(fits.has_flag(*NOT_FITTED), np.nan, fits.sigma)


def _keys(table: pa.Table, config: TrainConfig) -> tuple[str, ...]:
    keys = config.keys
    conditions_on_temperature = config.conditioning is not None and config.conditioning.temperature
    if conditions_on_temperature and "temperature" not in keys and "temperature" in table.column_names:
        column = table.column("temperature")
        if column.null_count == 0 and (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
            keys = (*keys, "temperature")
    return keys


def rows_of(
    groups: GroupedLengths,
    mu: FloatArray | None = None,
    sigma: FloatArray | None = None,
    *,
    weight: float = 1.0,
    censoring: str = "right",
) -> Rows:
    """Converts G groups with at least one sample each, and their fitted parameters [G] (NaN if not fitted), to rows.

    InputError, with the name of the group, if a prompt or a name is missing, or a temperature is not allowed.
    """
    missing = np.full(len(groups), np.nan)
    finished = groups.flat_finished | (censoring == "none")
    columns = {
        "prompt": texts(groups, "prompt"),
        "prompt_id": texts(groups, "prompt_id"),
        "model": pa.nulls(len(groups), pa.large_string()),
        "temperature": _temperature(groups),
        "weight": np.full(len(groups), float(weight)),
        "max_tokens": shortest_limits(groups, finished),
        "mu": missing if mu is None else mu,
        "sigma": missing if sigma is None else sigma,
        "lengths": pa.LargeListArray.from_arrays(groups.offsets, groups.flat_lengths.astype(np.int32)),
        "finished": pa.LargeListArray.from_arrays(groups.offsets, finished),
    }
    if "model" in groups.rows.column_names:
        columns["model"] = texts(groups, "model")
    return Rows(pa.table(columns).cast(SCHEMA))


def texts(groups: GroupedLengths, name: str) -> pa.Array:
    """Values of a column as text; InputError if there is no such column, or a value is missing."""
    if name not in groups.rows.column_names:
        raise InputError(f"{groups.path.name}, columns", groups.rows.column_names, f"also {name}")
    values = groups.rows.column(name).combine_chunks()
    if values.null_count:
        row = groups.name(values.is_null().index(True).as_py())
        raise InputError(f"{groups.path.name}, group {row}, column {name}", None, "text")
    with convertible(groups.path.name):
        return values.cast(pa.large_string())


def _temperature(groups: GroupedLengths) -> FloatArray:
    if "temperature" not in groups.rows.column_names:
        return np.full(len(groups), np.nan)
    column, where = groups.rows.column("temperature"), f"{groups.path.name}, column temperature"
    kind = column.type
    if not (pa.types.is_null(kind) or pa.types.is_floating(kind) or pa.types.is_integer(kind)):
        raise InputError(where, str(kind), "numbers")
    values: FloatArray = column.cast(pa.float64()).fill_null(np.nan).to_numpy()
    wrong = np.flatnonzero((values < 0) | np.isinf(values))
    if len(wrong):
        row, value = groups.name(wrong[0]), float(values[wrong[0]])
        raise InputError(f"{where}, group {row}", value, "finite numbers >= 0, or null")
    return values


def shortest_limits(groups: GroupedLengths, finished: NDArray[np.bool_]) -> FloatArray:
    """Limit of each group's lengths in tokens [G]: the shortest censored length, else max_tokens, else infinite."""
    declared = np.array([np.inf if limit is None else limit for limit in groups.max_tokens], dtype=np.float64)
    censored = np.where(finished, np.inf, groups.flat_lengths.astype(np.float64))
    shortest = np.minimum.reduceat(censored, groups.offsets[:-1])
    return np.asarray(np.where(np.isfinite(shortest), shortest, declared), dtype=np.float64)
