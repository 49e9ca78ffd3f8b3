"""Rows (prompt, served model, temperature) with their sampled lengths: reading, joining, splitting by prompt."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from training.fitting.fits import FitOptions, fit_groups, read_fits_or_fit
from training.fitting.samples import GroupedLengths, group_table, with_conversations

log = logging.getLogger(__name__)

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
_PER_ROW = ("model", "temperature", "weight", "max_tokens", "mu", "sigma")


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """N rows of P different prompts, with S samples in all; rows of the same prompt are adjacent.

    Attributes:
        prompts: Texts, all different [P].
        prompt_ids: Id of each prompt at its first appearance [P].
        prompt: Number of each row's prompt, ascending [N].
        models: Names of served models [M].
        model: Number of each row's served model + 1; 0 where it has none [N].
        temperature: NaN where unknown [N].
        weight: In the loss [N].
        offsets: Samples of row r are lengths[offsets[r]:offsets[r + 1]], at least one [N + 1].
        lengths: Tokens; of a censored sample the length it was truncated to [S].
        finished: False: censored [S].
        max_tokens: Length at which the row's samples are truncated, infinite where unknown [N].
        mu, sigma: Fitted parameters; NaN where nothing was fitted [N].
    """

    prompts: list[str]
    prompt_ids: list[str]
    prompt: IntArray
    models: tuple[str, ...]
    model: IntArray
    temperature: FloatArray
    weight: FloatArray
    offsets: IntArray
    lengths: NDArray[np.int32]
    finished: NDArray[np.bool_]
    max_tokens: FloatArray
    mu: FloatArray
    sigma: FloatArray

    def __len__(self) -> int:
        return len(self.prompt)

    @classmethod
    def none(cls) -> Rows:
        """No rows."""
        ints = np.empty(0, dtype=np.int64)
        columns: dict[str, Any] = {name: ints if name == "model" else np.empty(0) for name in _PER_ROW}
        return cls(
            prompts=[],
            prompt_ids=[],
            prompt=ints,
            models=(),
            offsets=np.zeros(1, dtype=np.int64),
            lengths=np.empty(0, dtype=np.int32),
            finished=np.empty(0, dtype=bool),
            **columns,
        )

    @property
    def counts(self) -> IntArray:
        """Number of samples of each row [N]."""
        return np.diff(self.offsets)

    def row_means(self, values: NDArray[Any]) -> FloatArray:
        """Mean of values [S] over each row's samples [N]."""
        return np.asarray(np.add.reduceat(values.astype(np.float64), self.offsets[:-1]) / self.counts)

    def take(self, rows: IntArray) -> Rows:
        """The rows at these positions; prompts without a row are dropped."""
        is_used = np.zeros(len(self.prompts), dtype=bool)
        is_used[self.prompt[rows]] = True
        used = np.flatnonzero(is_used).tolist()
        number = np.cumsum(is_used) - 1
        order = rows[np.argsort(number[self.prompt[rows]], kind="stable")]
        counts = self.counts[order]
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        samples = np.repeat(self.offsets[order] - offsets[:-1], counts) + np.arange(offsets[-1])
        return replace(
            self,
            prompts=[self.prompts[at] for at in used],
            prompt_ids=[self.prompt_ids[at] for at in used],
            prompt=number[self.prompt[order]],
            offsets=offsets,
            lengths=self.lengths[samples],
            finished=self.finished[samples],
            **{name: getattr(self, name)[order] for name in _PER_ROW},
        )

    def where(self, mask: NDArray[np.bool_]) -> Rows:
        """The rows of the prompts for which the mask is true [P]."""
        return self.take(np.flatnonzero(mask[self.prompt]) if len(self) else self.prompt)


def join(parts: Sequence[Rows]) -> Rows:
    """All rows of several files; the same text is the same prompt."""
    if len(parts) == 1:
        return parts[0]
    prompts: dict[str, tuple[int, str]] = {}
    models: dict[str, int] = {}
    prompt, model = [], []
    for part in parts:
        pairs = zip(part.prompts, part.prompt_ids, strict=True)
        numbers = [prompts.setdefault(text, (len(prompts), prompt_id))[0] for text, prompt_id in pairs]
        prompt.append(np.array(numbers, dtype=np.int64)[part.prompt])
        table = np.array([0, *(models.setdefault(name, len(models)) + 1 for name in part.models)])
        model.append(table[part.model])

    def concatenate(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(part, name) for part in parts])

    counts = concatenate("counts")
    arrays = {name: concatenate(name) for name in ("lengths", "finished", *_PER_ROW) if name != "model"}
    rows = Rows(
        prompts=list(prompts),
        prompt_ids=[prompt_id for _, prompt_id in prompts.values()],
        prompt=np.concatenate(prompt),
        models=tuple(models),
        model=np.concatenate(model),
        offsets=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)]),
        **arrays,
    )
    return rows.take(np.arange(len(rows)))


@dataclass(frozen=True, slots=True)
class SplitRows:
    """Rows by split.

    Attributes:
        train, validation: For training, and for the choice of the best epoch.
        num_test_prompts: Prompts left out for a test.
        num_excluded: Rows left out because of a flag of their fit.
        num_shared: Training prompts left out because validation or test have the same text.
    """

    train: Rows
    validation: Rows
    num_test_prompts: int = 0
    num_excluded: int = 0
    num_shared: int = 0


def read_split_rows(config: TrainConfig) -> SplitRows:
    """Reads all files with output lengths and splits them.

    Raises:
        InputError: A file cannot be read, lacks a column, or a split is empty.
    """
    weights = config.data_weights or (1.0,) * len(config.files["data"])
    rows, num_excluded = _read_all(list(zip(config.files["data"], weights, strict=True)), config, "data")
    if config.files["validation"]:
        files = [(path, 1.0) for path in config.files["validation"]]
        validation, num_excluded_too = _read_all(files, config, "validation")
        num_excluded += num_excluded_too
        train, held_out, num_test = rows, set(validation.prompts), 0
        if config.validation_split != "all":
            validation = validation.where(_split(validation, config) == config.validation_split)
    else:
        split = _split(rows, config)
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
                f"at least {minimum}; {len(rows.prompts)} prompts in all, another split_seed or fractions may help",
            )
    return SplitRows(train, validation, num_test, num_excluded, int(is_shared.sum()))


def _split(rows: Rows, config: TrainConfig) -> NDArray[np.str_]:
    names = [split_of(prompt_id, config.split_seed, config.fractions) for prompt_id in rows.prompt_ids]
    return np.array(names, dtype=np.str_)


def _read_all(files: Sequence[tuple[str, float]], config: TrainConfig, field: str) -> tuple[Rows, int]:
    """Rows of all files (path, weight), and how many were left out because of a flag."""
    parts = [_read(path, weight, config, field) for path, weight in files]
    return join([part for part, _ in parts]), sum(count for _, count in parts)


def _read(path: str, weight: float, config: TrainConfig, field: str) -> tuple[Rows, int]:
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


def _sigma_within(groups: GroupedLengths, config: TrainConfig) -> FloatArray | None:
    """Fitted sigma of each group as target of sigma_within; NaN where samples are too few."""
    if config.length is None or not config.length.within:
        return None
    fits = fit_groups(groups, FitOptions(nu=config.length.nu, censoring=config.censoring, keys=groups.keys))
    return np.where(fits.has_flag(*config.exclude_flags), np.nan, fits.sigma)


def _filtered(table: pa.Table, path: Path, served_model: str | None) -> pa.Table:
    if served_model is None:
        return table
    if "model" not in table.column_names:
        raise InputError(f"{path.name}, columns", table.column_names, "also model")
    matches = table.filter(pc.equal(table.column("model"), served_model))
    if matches.num_rows == 0:
        names = ", ".join(sorted(map(str, pc.unique(table.column("model")).to_pylist()))[:20])
        raise InputError(f"{path.name}, column model", served_model, f"one of {names}")
    return matches


def _keys(table: pa.Table, config: TrainConfig) -> tuple[str, ...]:
    keys = config.keys
    conditions_on_temperature = config.conditioning is not None and config.conditioning.temperature
    if conditions_on_temperature and "temperature" not in keys and "temperature" in table.column_names:
        column = table.column("temperature")
        if column.null_count == 0 and (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
            keys = (*keys, "temperature")
    return keys


def _groups(table: pa.Table, path: Path, keys: tuple[str, ...], config: TrainConfig) -> GroupedLengths:
    is_fits = {"mu", "sigma", "nu"} <= set(table.column_names)
    groups = group_table(
        table, path, keys=keys, max_tokens=None if is_fits else config.max_tokens, min_samples=1
    )
    has_samples = np.flatnonzero(groups.counts)
    return groups if len(has_samples) == len(groups) else groups.take(has_samples)


def _rows(
    groups: GroupedLengths,
    weight: float,
    config: TrainConfig,
    mu: FloatArray | None = None,
    sigma: FloatArray | None = None,
) -> Rows:
    count = len(groups)
    missing = np.full(count, np.nan)
    prompts, prompt = _encoded(groups, "prompt")
    models: list[str] = []
    model = np.zeros(count, dtype=np.int64)
    if "model" in groups.rows.column_names:
        models, number = _encoded(groups, "model")
        model = number + 1
    ids = groups.column("prompt_id") or []
    _, first = np.unique(prompt, return_index=True)
    finished = groups.flat_finished
    if config.censoring == "none":
        finished = np.ones_like(finished)
    rows = Rows(
        prompts=prompts,
        prompt_ids=[str(ids[at]) for at in first.tolist()],
        prompt=prompt,
        models=tuple(models),
        model=model,
        temperature=_temperature(groups),
        weight=np.full(count, float(weight)),
        offsets=groups.offsets.astype(np.int64),
        lengths=groups.flat_lengths.astype(np.int32),
        finished=finished,
        max_tokens=_max_tokens(groups, finished),
        mu=missing if mu is None else mu,
        sigma=missing if sigma is None else sigma,
    )
    return rows.take(np.arange(count))


def _encoded(groups: GroupedLengths, name: str) -> tuple[list[str], IntArray]:
    """The different values of a text column in order of first appearance, and the number of each row's value."""
    values = groups.column(name)
    if values is None:
        raise InputError(f"{groups.path.name}, columns", groups.rows.column_names, f"also {name}")
    if None in values:
        row = groups.name(values.index(None))
        raise InputError(f"{groups.path.name}, group {row}, column {name}", None, "text")
    numbers: dict[str, int] = {}
    number = [numbers.setdefault(str(value), len(numbers)) for value in values]
    return list(numbers), np.array(number, dtype=np.int64)


def _temperature(groups: GroupedLengths) -> FloatArray:
    if "temperature" not in groups.rows.column_names:
        return np.full(len(groups), np.nan)
    column = groups.rows.column("temperature")
    if pa.types.is_null(column.type):
        return np.full(len(groups), np.nan)
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        raise InputError(f"{groups.path.name}, column temperature", str(column.type), "numbers")
    filled = pc.fill_null(column.cast(pa.float64()), float("nan"))
    values: FloatArray = np.asarray(filled.to_numpy(), dtype=np.float64)
    if (values < 0).any() or np.isinf(values).any():
        row = int(np.argmax((values < 0) | np.isinf(values)))
        raise InputError(
            f"{groups.path.name}, group {groups.name(row)}, column temperature",
            float(values[row]),
            "finite numbers >= 0, or null",
        )
    return values


def _max_tokens(groups: GroupedLengths, finished: NDArray[np.bool_]) -> FloatArray:
    """The shortest censored length of each row, else its declared max_tokens, else infinity."""
    declared = np.array([np.inf if limit is None else limit for limit in groups.max_tokens], dtype=np.float64)
    censored = np.where(finished, np.inf, groups.flat_lengths.astype(np.float64))
    shortest = np.minimum.reduceat(censored, groups.offsets[:-1])
    return np.asarray(np.where(np.isfinite(shortest), shortest, declared), dtype=np.float64)
