"""What is learnt from: prompts, and rows (prompt, served model, temperature) with their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """N rows of P different prompts, with S answers in all; rows of the same prompt stand together.

    Attributes:
        prompts: Texts, all different [P].
        prompt_ids: Id of each prompt where it appeared first [P].
        prompt: Number of each row's prompt, ascending [N].
        models: Names of served models [M].
        model: Number of each row's served model + 1; 0 where it has none [N].
        temperature: NaN where unknown [N].
        weight: In the loss [N].
        offsets: Answers of row r are lengths[offsets[r]:offsets[r + 1]], at least one [N + 1].
        lengths: Tokens; of a cut answer the length it was cut at [S].
        finished: Whether the answer ended by itself [S].
        cap: Length at which the row's answers are cut, infinite where unknown [N].
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
    cap: FloatArray
    mu: FloatArray
    sigma: FloatArray

    def __len__(self) -> int:
        return len(self.prompt)

    @classmethod
    def none(cls) -> Rows:
        """No rows."""
        floats, ints = np.empty(0), np.empty(0, dtype=np.int64)
        return cls(
            prompts=[],
            prompt_ids=[],
            prompt=ints,
            models=(),
            model=ints,
            temperature=floats,
            weight=floats,
            offsets=np.zeros(1, dtype=np.int64),
            lengths=np.empty(0, dtype=np.int32),
            finished=np.empty(0, dtype=bool),
            cap=floats,
            mu=floats,
            sigma=floats,
        )

    @property
    def counts(self) -> IntArray:
        """Number of answers of each row [N]."""
        return np.diff(self.offsets)

    def row_means(self, values: NDArray[Any]) -> FloatArray:
        """Mean of values [S] over each row's answers [N]."""
        return np.asarray(np.add.reduceat(values.astype(np.float64), self.offsets[:-1]) / self.counts)

    def take(self, rows: IntArray) -> Rows:
        """The rows at these positions; prompts without a row are left out."""
        kept = np.zeros(len(self.prompts), dtype=bool)
        kept[self.prompt[rows]] = True
        number = np.cumsum(kept) - 1
        order = rows[np.argsort(number[self.prompt[rows]], kind="stable")]
        offsets, flat = _slices(self.offsets, order)
        return replace(
            self,
            prompts=[self.prompts[at] for at in np.flatnonzero(kept).tolist()],
            prompt_ids=[self.prompt_ids[at] for at in np.flatnonzero(kept).tolist()],
            prompt=number[self.prompt[order]],
            offsets=offsets,
            lengths=self.lengths[flat],
            finished=self.finished[flat],
            **{name: getattr(self, name)[order] for name in _PER_ROW},
        )

    def where(self, is_kept: NDArray[np.bool_]) -> Rows:
        """The rows of the prompts for which this is true [P]."""
        return self.take(np.flatnonzero(is_kept[self.prompt]) if len(self) else self.prompt)


_PER_ROW = ("model", "temperature", "weight", "cap", "mu", "sigma")


def _slices(offsets: IntArray, rows: IntArray) -> tuple[IntArray, IntArray]:
    """Offsets of the chosen rows, and the positions of their answers."""
    counts = np.diff(offsets)[rows]
    chosen = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
    return chosen, np.repeat(offsets[rows] - chosen[:-1], counts) + np.arange(chosen[-1])


def join(parts: Sequence[Rows]) -> Rows:
    """All rows of several files; the same text is the same prompt."""
    if len(parts) == 1:
        return parts[0]
    prompts: dict[str, int] = {}
    ids: list[str] = []
    models: dict[str, int] = {}
    prompt, model = [], []
    for part in parts:
        numbers = np.empty(len(part.prompts), dtype=np.int64)
        for at, (text, prompt_id) in enumerate(zip(part.prompts, part.prompt_ids, strict=True)):
            numbers[at] = prompts.setdefault(text, len(prompts))
            if numbers[at] == len(ids):
                ids.append(prompt_id)
        table = np.array([0, *(models.setdefault(name, len(models)) + 1 for name in part.models)])
        prompt.append(numbers[part.prompt])
        model.append(table[part.model])
    together = np.concatenate(prompt)
    counts = np.concatenate([part.counts for part in parts])
    whole = Rows(
        prompts=list(prompts),
        prompt_ids=ids,
        prompt=together,
        models=tuple(models),
        offsets=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)]),
        lengths=np.concatenate([part.lengths for part in parts]),
        finished=np.concatenate([part.finished for part in parts]),
        model=np.concatenate(model),
        **{
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in _PER_ROW
            if name != "model"
        },
    )
    return whole.take(np.arange(len(whole)))
