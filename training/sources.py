"""Reading the files of a run into rows, and splitting them by prompt."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data_gen.splits import SPLITS, split_of
from data_gen.tables import read_parquet
from scheduler_core.errors import InputError
from training.config import TrainConfig
from training.fitting.fits import fit_groups
from training.fitting.fits_file import read_fits_or_fit
from training.fitting.options import FitOptions
from training.fitting.reading.conversations import with_conversations
from training.fitting.reading.table import GroupedLengths, group_table
from training.rows import Rows, join

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SplitRows:
    """Rows by split.

    Attributes:
        train, validation: What is learnt from, and what decides which epoch is best.
        num_test_prompts: Prompts kept out for a test.
        num_excluded: Rows left out because of a flag of their fit.
        num_shared: Training prompts left out because validation or test have the same text.
    """

    train: Rows
    validation: Rows
    num_test_prompts: int = 0
    num_excluded: int = 0
    num_shared: int = 0


def read_split_rows(config: TrainConfig) -> SplitRows:
    """Reads all files with answer lengths and splits them.

    Raises:
        InputError: A file cannot be read, lacks a column, or a split is empty.
    """
    weights = config.data_weights or (1.0,) * len(config.data_files)
    parts = [
        _read(path, weight, config, "data") for path, weight in zip(config.data_files, weights, strict=True)
    ]
    rows = join([part for part, _ in parts])
    num_excluded = sum(count for _, count in parts)
    if config.validation_files:
        others = [_read(path, 1.0, config, "validation") for path in config.validation_files]
        whole = join([part for part, _ in others])
        num_excluded += sum(count for _, count in others)
        train = rows
        validation = whole
        if config.validation_split != "all":
            validation = whole.where(_split(whole, config) == config.validation_split)
        held_out = set(whole.prompts)
        num_test = 0
    else:
        split = _split(rows, config)
        train, validation, test = (rows.where(split == name) for name in SPLITS)
        held_out = set(validation.prompts) | set(test.prompts)
        num_test = len(test.prompts)
    is_own = np.array([text not in held_out for text in train.prompts], dtype=bool)
    if not is_own.all():
        log.info("%d training prompts left out: validation or test have the same text", int((~is_own).sum()))
        train = train.where(is_own)
    for name, part, least in (("train", train, 2), ("validation", validation, 1)):
        if len(part.prompts) < least:
            raise InputError(
                f"prompts with usable answers in the {name} split",
                len(part.prompts),
                f"at least {least}; {len(rows.prompts)} prompts in all, another split_seed or fractions may help",
            )
    return SplitRows(train, validation, num_test, num_excluded, int((~is_own).sum()))


def _split(rows: Rows, config: TrainConfig) -> NDArray[np.str_]:
    shares = config.fractions
    return np.array(
        [split_of(prompt_id, config.split_seed, shares) for prompt_id in rows.prompt_ids], dtype=np.str_
    )


def _read(path: str, weight: float, config: TrainConfig, field: str) -> tuple[Rows, int]:
    """Rows of one file, and how many were left out because of a flag."""
    table = _filtered(read_parquet(path, field), Path(path), config.served_model)
    keys = _keys(table, config)
    if not config.needs_fits:
        if config.conversations:
            table = with_conversations(table, Path(path))
        groups = _groups(table, Path(path), keys, config)
        return _rows(groups, weight, config, sigma=_sigma_within(groups, config)), 0
    assert config.length is not None
    fits = read_fits_or_fit(
        path,
        FitOptions(nu=config.length.nu, censoring=config.censoring, keys=keys, max_tokens=config.max_tokens),
        field=field,
        where={} if config.served_model is None else {"model": config.served_model},
        conversations=config.conversations,
    )
    if fits.nu != config.length.nu:
        raise InputError(f"{Path(path).name}, column nu", fits.nu, f"{config.length.nu:g}, as length.nu is")
    usable = np.flatnonzero(~fits.has_flag(*config.exclude_flags))
    num_excluded = len(fits) - len(usable)
    if len(usable) == 0:
        raise InputError(f"{Path(path).name}, rows with a usable fit", 0, "at least one")
    fits = fits.take(usable)
    return _rows(fits.groups, weight, config, fits.mu, fits.sigma), num_excluded


def _sigma_within(groups: GroupedLengths, config: TrainConfig) -> NDArray[np.float64] | None:
    """Fitted sigma of each group as target of sigma_within; NaN where answers are too few."""
    if config.length is None or not config.length.within:
        return None
    fits = fit_groups(groups, FitOptions(nu=config.length.nu, censoring=config.censoring, keys=groups.keys))
    return np.where(fits.has_flag(*config.exclude_flags), np.nan, fits.sigma)


def _filtered(table: pa.Table, path: Path, served_model: str | None) -> pa.Table:
    if served_model is None:
        return table
    if "model" not in table.column_names:
        raise InputError(f"{path.name}, columns", table.column_names, "also model")
    found = table.filter(pc.equal(table.column("model"), served_model))
    if found.num_rows == 0:
        known = ", ".join(sorted(map(str, pc.unique(table.column("model")).to_pylist()))[:20])
        raise InputError(f"{path.name}, column model", served_model, f"one of {known}")
    return found


def _keys(table: pa.Table, config: TrainConfig) -> tuple[str, ...]:
    keys = config.keys
    sees_temperature = config.conditioning is not None and config.conditioning.temperature
    if sees_temperature and "temperature" not in keys and "temperature" in table.column_names:
        column = table.column("temperature")
        if column.null_count == 0 and (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
            keys = (*keys, "temperature")
    return keys


def _groups(table: pa.Table, path: Path, keys: tuple[str, ...], config: TrainConfig) -> GroupedLengths:
    is_fits = {"mu", "sigma", "nu"} <= set(table.column_names)
    groups = group_table(
        table, path, keys=keys, max_tokens=None if is_fits else config.max_tokens, min_samples=1
    )
    answered = np.flatnonzero(groups.counts)
    return groups if len(answered) == len(groups) else groups.take(answered)


def _rows(
    groups: GroupedLengths,
    weight: float,
    config: TrainConfig,
    mu: NDArray[np.float64] | None = None,
    sigma: NDArray[np.float64] | None = None,
) -> Rows:
    count = len(groups)
    nothing = np.full(count, np.nan)
    prompts, prompt = _encoded(groups, "prompt")
    models, model = _encoded(groups, "model") if "model" in groups.rows.column_names else ([], nothing)
    ids = groups.column("prompt_id") or []
    first = np.empty(len(prompts), dtype=np.int64)
    first[prompt[::-1].astype(np.int64)] = np.arange(count - 1, -1, -1)
    finished = groups.flat_finished
    if config.censoring == "none":
        finished = np.ones_like(finished)
    rows = Rows(
        prompts=prompts,
        prompt_ids=[str(ids[at]) for at in first.tolist()],
        prompt=prompt.astype(np.int64),
        models=tuple(models),
        model=np.zeros(count, dtype=np.int64) if not models else model.astype(np.int64) + 1,
        temperature=_temperature(groups),
        weight=np.full(count, float(weight)),
        offsets=groups.offsets.astype(np.int64),
        lengths=groups.flat_lengths.astype(np.int32),
        finished=finished,
        cap=_caps(groups, finished),
        mu=nothing if mu is None else mu,
        sigma=nothing if sigma is None else sigma,
    )
    return rows.take(np.arange(count))


def _encoded(groups: GroupedLengths, name: str) -> tuple[list[str], NDArray[Any]]:
    """The different values of a text column in order of first appearance, and the number of each row's."""
    rows, path = groups.rows, groups.path
    if name not in rows.column_names:
        raise InputError(f"{path.name}, columns", rows.column_names, f"also {name}")
    column = rows.column(name).combine_chunks()
    if column.null_count:
        row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise InputError(f"{path.name}, group {groups.name(row)}, column {name}", None, "text")
    encoded = column.dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.unify_dictionaries().combine_chunks()
    return [str(text) for text in encoded.dictionary.to_pylist()], encoded.indices.to_numpy(
        zero_copy_only=False
    )


def _temperature(groups: GroupedLengths) -> NDArray[np.float64]:
    if "temperature" not in groups.rows.column_names:
        return np.full(len(groups), np.nan)
    column = groups.rows.column("temperature")
    if pa.types.is_null(column.type):
        return np.full(len(groups), np.nan)
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        raise InputError(f"{groups.path.name}, column temperature", str(column.type), "numbers")
    filled = pc.fill_null(column.cast(pa.float64()), float("nan"))
    values: NDArray[np.float64] = np.asarray(filled.to_numpy(), dtype=np.float64)
    if (values < 0).any() or np.isinf(values).any():
        row = int(np.argmax((values < 0) | np.isinf(values)))
        raise InputError(
            f"{groups.path.name}, group {groups.name(row)}, column temperature",
            float(values[row]),
            "a finite number, not negative, or nothing",
        )
    return values


def _caps(groups: GroupedLengths, finished: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The smallest cut of each row, else its declared cap, else infinity."""
    declared = np.array([np.inf if cap is None else cap for cap in groups.max_tokens], dtype=np.float64)
    cut = np.where(finished, np.inf, groups.flat_lengths.astype(np.float64))
    smallest = np.minimum.reduceat(cut, groups.offsets[:-1])
    return np.asarray(np.where(np.isfinite(smallest), smallest, declared), dtype=np.float64)
