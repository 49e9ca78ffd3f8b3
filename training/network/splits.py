"""Training data by split: rows with output lengths, and urgency labels."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_gen.splits import SPLITS, split_of
from data_gen.urgency.labels import read_labels
from scheduler_core.errors import InputError
from scheduler_core.shell.table_files import read_parquet
from training.fitting.fits import NOT_FITTED, FitOptions, filtered, fit_groups, read_fits_or_fit
from training.fitting.rows import FloatArray, Rows, join, rows_of
from training.fitting.samples import GroupedLengths, group_table, with_conversations
from training.network.config import TrainConfig
from training.network.data import UrgencyLabels

log = logging.getLogger(__name__)


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
        validation, num_excluded_too = _read_validation(config)
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


def _read_validation(config: TrainConfig) -> tuple[Rows, int]:
    """As `_read_all`; each file has the same total weight, so that its number of rows does not decide which epoch is best."""
    parts = [_read(path, 1.0, config, "validation") for path in config.files["validation"]]
    return join([part.weighted(1 / len(part)) for part, _ in parts]), sum(count for _, count in parts)


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
        FitOptions(nu=config.length.nu, keys=keys, max_tokens=config.max_tokens),
        field=field,
        where=where,
        form=config.form,
    )
    if fits.nu != config.length.nu:
        raise InputError(f"{Path(path).name}, column nu", fits.nu, f"{config.length.nu:g}, as in length.nu")
    usable = np.flatnonzero(~fits.has_flag(*NOT_FITTED))
    num_excluded = len(fits) - len(usable)
    if len(usable) == 0:
        raise InputError(f"{Path(path).name}, rows with a usable fit", 0, "at least one")
    fits = fits.take(usable)
    rows = rows_of(fits.groups, fits.mu, fits.sigma, weight=weight)
    return rows, num_excluded


def _rows(table: pa.Table, path: str, keys: tuple[str, ...], weight: float, config: TrainConfig) -> Rows:
    """Rows of a table, without fitted parameters; without the key `model`, the served model is unknown."""
    if config.conversations:
        table = with_conversations(table, Path(path), config.form)
    is_fits = {"mu", "sigma", "nu"} <= set(table.column_names)
    groups = group_table(
        table, Path(path), keys=keys, max_tokens=None if is_fits else config.max_tokens, min_samples=1
    )
    groups = groups.take(np.flatnonzero(groups.counts))
    sigma = _sigma_within(groups, config)
    return rows_of(groups, None, sigma, weight=weight)


def _sigma_within(groups: GroupedLengths, config: TrainConfig) -> FloatArray | None:
    """Fitted sigma of each group as target of sigma_within; NaN for groups with too few samples."""
    if config.length is None or not config.length.within:
        return None
    fits = fit_groups(groups, FitOptions(nu=config.length.nu, keys=groups.keys))
    return np.where(fits.has_flag(*NOT_FITTED), np.nan, fits.sigma)


def _keys(table: pa.Table, config: TrainConfig) -> tuple[str, ...]:
    keys = config.keys
    conditions_on_temperature = config.conditioning is not None and config.conditioning.temperature
    if conditions_on_temperature and "temperature" not in keys and "temperature" in table.column_names:
        column = table.column("temperature")
        if column.null_count == 0 and (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
            keys = (*keys, "temperature")
    return keys


def read_split_labels(config: TrainConfig) -> tuple[UrgencyLabels, UrgencyLabels]:
    """Labels of the training and of the validation split; both empty without an urgency head."""
    if config.urgency is None:
        return {}, {}
    labels: dict[str, UrgencyLabels] = {"urgency_data": {}, "urgency_validation": {}}
    for field, joined in labels.items():
        for path in config.files[field]:
            texts = read_labels(path, field, levels=config.urgency.levels)
            # The first label of a text takes precedence.
            joined |= {text.text: (text.level, text.weight) for text in reversed(texts)} | joined
    train, validation = labels.values()
    if config.files["urgency_validation"]:
        train = {text: label for text, label in train.items() if text not in validation}
    else:
        split = {text: split_of(text, config.split_seed, config.fractions) for text in train}
        train, validation = (
            {text: label for text, label in train.items() if split[text] == name}
            for name in ("train", "validation")
        )
    for name, part in (("train", train), ("validation", validation)):
        if not part:
            allowed = "at least one; other fractions or split_seed may help"
            raise InputError(f"labelled texts in the {name} split", 0, allowed)
    return train, validation
