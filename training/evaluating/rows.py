"""What predictors are compared on: prompts with served model and temperature, their answers, and fits to those."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_gen.splits import split_of
from scheduler_core.errors import InputError
from training.evaluating.scoring import Answers
from training.fitting.fits import NOT_FITTED, FittedGroups

log = logging.getLogger(__name__)

FloatArray = NDArray[np.float64]
#: CASTILLO cut its answers at so many new tokens, which its files do not say.
CASTILLO_CAP = 15_000
_CASTILLO_COLUMNS = frozenset(
    [
        "dataset",
        "model",
        "prompt_id",
        "prompt",
        "prompt_tokens",
        "output_tokens",
        "temperature",
        "top_p",
        "top_k",
        "category",
    ]
)


@dataclass(frozen=True, slots=True)
class EvaluationRows:
    """G rows, each a prompt answered by one served model at one temperature.

    Attributes:
        fits: The answers and a log-t fit to those of each row.
        prompts: [G].
        served_models: Name of the model that answered, None where the data do not say [G].
        temperatures: Sampling temperature, None where the data do not say [G].
        answers: All answers, flat.
        compared: Rows with a fit to compare parameters with [C].
    """

    fits: FittedGroups
    prompts: Sequence[str]
    served_models: Sequence[str | None]
    temperatures: Sequence[float | None]
    answers: Answers
    compared: NDArray[np.intp]

    def __len__(self) -> int:
        return len(self.fits)

    @classmethod
    def of(cls, fits: FittedGroups) -> EvaluationRows:
        """Rows out of fitted groups.

        Raises:
            InputError: The data have no prompts.
        """
        groups = fits.groups
        return cls(
            fits=fits,
            prompts=prompts_of(fits),
            served_models=[None if name is None else str(name) for name in _column(fits, "model")],
            temperatures=[_known(value) for value in _column(fits, "temperature")],
            answers=Answers(
                owner=np.repeat(np.arange(len(fits)), groups.counts),
                lengths=groups.flat_lengths.astype(np.float64),
                finished=groups.flat_finished,
                caps=caps_of(fits),
            ),
            compared=np.flatnonzero(~fits.has_flag(*NOT_FITTED)),
        )

    def mean_lengths(self) -> FloatArray:
        """Mean served length of each row in tokens [G]; a cut answer counts with the length it was cut at."""
        sums = np.bincount(self.answers.owner, weights=self.answers.lengths, minlength=len(self))
        return np.asarray(sums / self.fits.groups.counts)

    def first_lengths(self) -> FloatArray:
        """Length of each row's first answer in tokens [G]: what one request would see."""
        return self.answers.lengths[self.fits.groups.offsets[:-1]]

    def kinds(self, column: str) -> list[str] | None:
        """Values [G] of a column as text; None if the data have no such column."""
        values = self.fits.groups.column(column)
        return None if values is None else [str(value) for value in values]


def _column(fits: FittedGroups, name: str) -> list[Any]:
    return fits.groups.column(name) or [None] * len(fits)


def _known(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def prompts_of(fits: FittedGroups) -> list[str]:
    """Prompt of each group.

    Raises:
        InputError: The data have no prompts.
    """
    prompts = fits.groups.column("prompt")
    if prompts is None:
        raise InputError(f"{fits.groups.path.name}, columns", fits.groups.rows.column_names, "also prompt")
    if None in prompts:
        raise InputError(
            f"{fits.groups.path.name}, group {fits.groups.name(prompts.index(None))}, column prompt",
            None,
            "text",
        )
    return [str(prompt) for prompt in prompts]


def caps_of(fits: FittedGroups) -> FloatArray:
    """Cap on the answers of each group in tokens: the smallest cut, else as declared, else none (infinite)."""
    groups = fits.groups
    caps = np.array([math.inf if cap is None else float(cap) for cap in groups.max_tokens])
    cut = ~groups.flat_finished
    smallest = np.full(len(fits), math.inf)
    owner = np.repeat(np.arange(len(fits)), groups.counts)
    np.minimum.at(smallest, owner[cut], groups.flat_lengths[cut])
    return np.where(np.isfinite(smallest), smallest, caps)


def known_cap(path: str | Path) -> int | None:
    """The cap of a published set whose file does not tell it, recognised by its columns; None for any other file."""
    import pyarrow.parquet as pq

    try:
        names = set(pq.read_schema(path).names)
    except (OSError, ValueError):
        return None
    if names >= _CASTILLO_COLUMNS and not names & {"finished", "finish_reason", "max_tokens"}:
        log.info("%s has CASTILLO's columns: answers of %d tokens or more count as cut", path, CASTILLO_CAP)
        return CASTILLO_CAP
    return None


def of_split(fits: FittedGroups, seed: int, fractions: Sequence[float], split: str) -> NDArray[np.intp]:
    """Groups whose prompt id falls into a split as training made it.

    Raises:
        InputError: The data have no prompt_id, or no group is in the split.
    """
    ids = fits.groups.column("prompt_id")
    if ids is None:
        raise InputError(f"{fits.groups.path.name}, columns", fits.groups.rows.column_names, "also prompt_id")
    shares = (float(fractions[0]), float(fractions[1]), float(fractions[2]))
    chosen = np.flatnonzero([split_of(str(name), seed, shares) == split for name in ids])
    if len(chosen) == 0:
        raise InputError("split", split, f"a split with prompts; none of {len(fits)} groups is in it")
    return chosen
