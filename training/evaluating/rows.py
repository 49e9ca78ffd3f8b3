"""Rows of an evaluation: prompt, served model and temperature, with outputs and fits to the outputs."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_gen.splits import overlap, split_of
from scheduler_core.errors import InputError
from training.evaluating.scores import OutputLengths
from training.fitting.fits import NOT_FITTED, FittedGroups
from training.fitting.rows import shortest_limits, texts

log = logging.getLogger(__name__)

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class EvaluationRows:
    """G rows, each a prompt with the outputs of one served model at one temperature."""

    fits: FittedGroups  # outputs and a log-t fit of each row
    prompts: Sequence[str]  # [G]
    served_models: Sequence[str | None]  # None if unnamed [G]
    temperatures: Sequence[float | None]  # sampling temperature, None if unknown [G]
    outputs: OutputLengths  # outputs of all rows, flat
    compared: NDArray[np.intp]  # indices of the rows with a usable fit [C]

    def __len__(self) -> int:
        return len(self.fits)

    @classmethod
    def of(cls, fits: FittedGroups) -> EvaluationRows:
        """Rows of fitted groups, whose data must have prompts."""
        groups = fits.groups
        return cls(
            fits=fits,
            prompts=texts(groups, "prompt").to_pylist(),
            served_models=[None if name is None else str(name) for name in _column(fits, "model")],
            temperatures=[
                None if value is None or not math.isfinite(value) else float(value)
                for value in _column(fits, "temperature")
            ],
            outputs=OutputLengths(
                owner=np.repeat(np.arange(len(fits)), groups.counts),
                lengths=groups.flat_lengths.astype(np.float64),
                finished=groups.flat_finished,
                max_tokens=shortest_limits(groups, groups.flat_finished),
            ),
            compared=np.flatnonzero(~fits.has_flag(*NOT_FITTED)),
        )

    def mean_lengths(self) -> FloatArray:
        """Mean served length of each row in tokens [G]; truncated outputs count with their truncated length."""
        sums = np.bincount(self.outputs.owner, weights=self.outputs.lengths, minlength=len(self))
        return np.asarray(sums / self.fits.groups.counts)

    def first_lengths(self) -> FloatArray:
        """Length of each row's first output in tokens [G], as observed for a single request."""
        return self.outputs.lengths[self.fits.groups.offsets[:-1]]


def _column(fits: FittedGroups, name: str) -> list[Any]:
    return fits.groups.column(name) or [None] * len(fits)


def of_split(fits: FittedGroups, data: Mapping[str, Any], split: str) -> FittedGroups:
    """Selects the groups of a split of the predictor's training `data`, by prompt id; "all" selects every group. InputError
    if the training data were not split, the groups have no prompt_id, or the split is empty."""
    if split == "all":
        return fits
    parts = data.get("split")
    if not isinstance(parts, Mapping) or not {"seed", "fractions"} <= set(parts):
        raise InputError("split", split, "all: the predictor does not record a split of its data")
    ids = fits.groups.column("prompt_id")
    if ids is None:
        raise InputError(f"{fits.groups.path.name}, columns", fits.groups.rows.column_names, "also prompt_id")
    seed, (train, validation, test) = int(parts["seed"]), map(float, parts["fractions"])
    of_group = [split_of(str(name), seed, (train, validation, test)) for name in ids]
    chosen = np.flatnonzero(np.array(of_group) == split)
    if len(chosen) == 0:
        raise InputError("split", split, f"a split with prompts; none of {len(fits)} groups is in it")
    return fits.take(chosen)


def warn_of_training_prompts(data: Mapping[str, Any], prompts: Sequence[str], split: str) -> None:
    """Warns if some prompts were used for training, estimated from hashes in the predictor's `data`, unless `split` is train."""
    fraction = overlap(prompts, data.get("smallest_hashes") or ())
    if fraction == 0 or split == "train":
        return
    advice = "--split test selects held-out prompts" if data.get("split") else "use other prompts"
    log.warning(
        "about %.0f %% of the prompts are in the training data, so the figures are too optimistic; %s",
        100 * fraction,
        advice,
    )
