"""Rows of answers as what trees learn from: a matrix of inputs, and targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from predictors.lexical import LexicalFeatures
from scheduler_core.errors import InputError
from scheduler_core.files import existing_file
from training.evaluating.predictors import distinct
from training.evaluating.rows import EvaluationRows, known_cap, of_split, prompts_of
from training.fitting.fits import FittedGroups
from training.fitting.fits_file import read_fits_or_fit
from training.fitting.options import FitOptions
from training.fitting.reading.table import GroupedLengths
from training.lexical.config import TrainLexicalConfig

FloatArray = NDArray[np.float64]
#: What stands for an unknown temperature.
UNKNOWN_TEMPERATURE = -1.0
#: Columns behind the lexical features.
CONDITIONS = ("model_mu", "model_sigma", "temperature")
_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class LexicalTable:
    """G rows for trees.

    Attributes:
        rows: Prompts, served models, answers and fits.
        features: Lexical features float32 [G, F].
        prompt: Number of each row's prompt; equal texts have equal numbers [G].
        mu: Fitted location, or ln of the middle answer where there are too few for a fit [G].
        log_sigma: ln of the fitted scale, NaN where there is no fit [G].
    """

    rows: EvaluationRows
    features: NDArray[np.float32]
    prompt: NDArray[np.intp]
    mu: FloatArray
    log_sigma: FloatArray

    def __len__(self) -> int:
        return len(self.mu)

    @classmethod
    def of(cls, rows: EvaluationRows, max_chars: int) -> LexicalTable:
        """Extracts the features of each different prompt once."""
        first, prompt = distinct(rows.prompts)
        features = LexicalFeatures().extract([rows.prompts[row] for row in first], max_chars)
        log_sigma = np.full(len(rows), np.nan)
        log_sigma[rows.compared] = np.log(rows.fits.sigma[rows.compared])
        return cls(rows, features[prompt], prompt, rows.fits.mu, log_sigma)

    def take(self, at: NDArray[np.intp]) -> LexicalTable:
        """Some of the rows."""
        return LexicalTable(
            EvaluationRows.of(self.rows.fits.take(at)),
            self.features[at],
            self.prompt[at],
            self.mu[at],
            self.log_sigma[at],
        )

    def inputs(self, effects: ModelEffects) -> NDArray[np.float32]:
        """The matrix that trees see, float32 [G, F + 3]."""
        numbers = effects.numbers(self.rows.served_models)
        return np.concatenate(
            [self.features, effects.table[numbers], _temperatures(self.rows.temperatures)], axis=1
        ).astype(np.float32)


@dataclass(frozen=True, slots=True)
class ModelEffects:
    """How much longer and how much more scattered each served model answers than the mean one, prompt for prompt.

    Attributes:
        names: Served models [M].
        table: Effect on mu and on ln sigma, float32 [M + 1, 2]; row 0, an unknown model, is the mean one: zeros.
    """

    names: tuple[str, ...]
    table: NDArray[np.float32]

    @classmethod
    def of(cls, table: LexicalTable) -> ModelEffects:
        """Additive effects of prompt and model, by alternating means."""
        served = table.rows.served_models
        names = tuple(sorted({name for name in served if name is not None}))
        of_name = {name: number for number, name in enumerate(names, start=1)}
        model = np.array([of_name.get(name or "", 0) for name in served], dtype=np.intp)
        effects = np.zeros((len(names) + 1, 2))
        for column, target in enumerate((table.mu, table.log_sigma)):
            known = np.isfinite(target) & (model > 0)
            effects[:, column] = _effects(target[known], table.prompt[known], model[known], len(names))
        return cls(names, effects.astype(np.float32))

    def numbers(self, served_models: Sequence[str | None]) -> NDArray[np.intp]:
        """Row of the table for each name; 0 for an unknown one."""
        of_name = {name: number for number, name in enumerate(self.names, start=1)}
        return np.array([of_name.get(name or "", 0) for name in served_models], dtype=np.intp)


def _effects(
    target: FloatArray, prompt: NDArray[np.intp], model: NDArray[np.intp], num_models: int
) -> FloatArray:
    effect = np.zeros(num_models + 1)
    if len(target) == 0:
        return effect
    _, numbers = np.unique(prompt, return_inverse=True)
    for _ in range(_ROUNDS):
        of_prompt = _means(target - effect[model], numbers, int(numbers.max()) + 1)
        effect = _means(target - of_prompt[numbers], model, num_models + 1)
        effect[1:] -= effect[1:].mean()
        effect[0] = 0.0
    return effect


def _means(values: FloatArray, of: NDArray[np.intp], count: int) -> FloatArray:
    sums = np.bincount(of, weights=values, minlength=count)
    return np.asarray(sums / np.maximum(np.bincount(of, minlength=count), 1))


def _temperatures(values: Sequence[float | None]) -> NDArray[np.float64]:
    return np.array([[UNKNOWN_TEMPERATURE if value is None else value] for value in values])


def read_table(paths: Sequence[str], config: TrainLexicalConfig, field: str) -> LexicalTable:
    """Reads and fits files, and joins them.

    Raises:
        InputError: A file cannot be used.
    """
    fits = [_read(path, config, field) for path in paths]
    return LexicalTable.of(EvaluationRows.of(_joined(fits)), config.max_chars)


def _read(path: str, config: TrainLexicalConfig, field: str) -> FittedGroups:
    existing_file(path, field)
    cap = config.max_tokens or known_cap(path)
    options = FitOptions(nu=config.nu, keys=config.keys, max_tokens=cap)
    fits = read_fits_or_fit(path, options, field=field, min_samples=1)
    if fits.nu != config.nu:
        raise InputError(f"{Path(path).name}, column nu", fits.nu, f"{config.nu:g}, as the option nu says")
    prompts_of(fits)
    return fits


def _joined(parts: Sequence[FittedGroups]) -> FittedGroups:
    """All groups of several files."""
    if len(parts) == 1:
        return parts[0]
    groups = [part.groups for part in parts]
    counts = np.concatenate([group.counts for group in groups])
    names = ("mu", "sigma", "nu")

    def flat(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(part, name) for part in parts])

    return FittedGroups(
        groups=GroupedLengths(
            path=groups[0].path,
            keys=groups[0].keys,
            rows=pa.concat_tables([group.rows for group in groups], promote_options="permissive"),
            flat_lengths=np.concatenate([group.flat_lengths for group in groups]),
            flat_finished=np.concatenate([group.flat_finished for group in groups]),
            offsets=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)]),
            max_tokens=[cap for group in groups for cap in group.max_tokens],
        ),
        parameters={name: np.concatenate([part.parameters[name] for part in parts]) for name in names},
        log_likelihood=flat("log_likelihood"),
        ks_stat=flat("ks_stat"),
        ks_p=flat("ks_p"),
        ad_stat=flat("ad_stat"),
        converged=flat("converged"),
        flag_bits=flat("flag_bits"),
    )


def split_by_prompt(table: LexicalTable, share: float, seed: int) -> tuple[LexicalTable, LexicalTable]:
    """Training and validation rows; all rows of a prompt id on the same side, by its hash.

    Raises:
        InputError: One side is empty, or the data have no prompt_id.
    """
    fractions = split_fractions(share)
    sides = [of_split(table.rows.fits, seed, fractions, side) for side in ("train", "validation")]
    return table.take(sides[0]), table.take(sides[1])


def split_fractions(share: float) -> tuple[float, float, float]:
    """Shares of training, validation and test prompts."""
    return (1 - share, share, 0.0)
