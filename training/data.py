"""Batches of a training run: tokens of prompts, and all rows that share them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from predictors.modules import Normalization, PredictorConfig, read_lexical, read_tokens
from training.batches import EpochPlans, Plan
from training.labels import Labels
from training.objectives.answers import Answers
from training.rows import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Batch(NamedTuple):
    """One training step: P prompts, each read once, and R rows.

    Attributes:
        inputs: What the prompts are read from: token ids and mask [P, S] and, where they are read, lexical features
            [P, L]; or features [P, F].
        row_prompt: Position of each row's prompt in this batch [R].
        served_model: 0 where it is unknown [R].
        temperature: NaN where it is unknown [R].
        answers: Of the rows.
        fits: z-scores of fitted mu, of log(1 + sigma), and of the same as target of sigma_within; NaN where there is no
            fit [R, 3].
        weight: Of the rows in the loss, 1 on average over the split [R].
        level: Urgency level [P].
        level_weight: The same of the labels; 0 where a prompt has none [P].
        prompt, row: Positions in the split [P], [R].
    """

    inputs: tuple[Tensor, ...]
    row_prompt: Tensor
    served_model: Tensor
    temperature: Tensor
    answers: Answers
    fits: Tensor
    weight: Tensor
    level: Tensor
    level_weight: Tensor
    prompt: Tensor
    row: Tensor


def pad(token_ids: Sequence[NDArray[Any]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and mask, int64 [B, S], padded on the right to the longest of the batch."""
    longest = max(len(ids) for ids in token_ids)
    input_ids = np.full((len(token_ids), longest), pad_token_id, dtype=np.int64)
    mask = np.zeros((len(token_ids), longest), dtype=np.int64)
    for row, ids in enumerate(token_ids):
        input_ids[row, : len(ids)] = ids
        mask[row, : len(ids)] = 1
    return torch.from_numpy(input_ids), torch.from_numpy(mask)


@dataclass(frozen=True, slots=True, eq=False)
class SplitData:
    """One split: P prompts with their tokens, N rows, and a label for some of the prompts.

    Prompts with rows come first, in the order of the rows; texts that have a label alone follow.

    Attributes:
        rows: Rows and their answers.
        texts: Of all prompts [P].
        token_ids: Of all prompts [P].
        lexical: Lexical features of all prompts [P, L]; None where they are not read.
        row_offsets: Rows of prompt p are row_offsets[p] to row_offsets[p + 1] [P + 1].
        level: Urgency level [P].
        level_weight: 0 where a prompt has no label [P].
    """

    rows: Rows
    texts: list[str]
    token_ids: list[NDArray[np.int32]]
    lexical: NDArray[np.float32] | None
    row_offsets: NDArray[np.int64]
    level: NDArray[np.int64]
    level_weight: NDArray[np.float64]

    @classmethod
    def of(
        cls, rows: Rows, labels: Labels, tokenizer: PreTrainedTokenizerBase, config: PredictorConfig
    ) -> SplitData:
        """Joins rows and labels by text and reads each text once, as the predictor's configuration says."""
        number = {text: at for at, text in enumerate(rows.prompts)}
        where = [number.setdefault(text, len(number)) for text in labels.texts]
        texts = list(number)
        level = np.zeros(len(texts), dtype=np.int64)
        weight = np.zeros(len(texts))
        level[where], weight[where] = labels.level, labels.weight
        return cls(
            rows=rows,
            texts=texts,
            token_ids=read_tokens(
                tokenizer, texts, max_length=config.max_length, truncation_side=config.truncation_side
            ),
            lexical=read_lexical(config.lexical, texts),
            row_offsets=np.searchsorted(rows.prompt, np.arange(len(texts) + 1)).astype(np.int64),
            level=level,
            level_weight=weight,
        )

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """Tokens of each prompt [P]."""
        return np.array([len(ids) for ids in self.token_ids], dtype=np.int64)

    def name(self, prompt: int) -> str:
        """The prompt's id, or the beginning of a text that has none."""
        if prompt < len(self.rows.prompt_ids):
            return self.rows.prompt_ids[prompt]
        text = " ".join(self.texts[prompt].split())
        return text if len(text) <= 40 else text[:39] + "…"


class Examples(Dataset[Batch]):
    """Makes the batches of a split; an item is the batch of a plan.

    Args:
        data: The split.
        normalization: Of the training split.
        model_numbers: Number that the predictor gives each of `data.rows.models`, with 0 in front for none [M + 1].
        pad_token_id: Token id of padding.
        features: Pooled features [P, F], for stage 2; they take the place of the tokens.
    """

    def __init__(
        self,
        data: SplitData,
        normalization: Normalization,
        model_numbers: NDArray[np.int64],
        *,
        pad_token_id: int = 0,
        features: Tensor | None = None,
    ) -> None:
        rows = data.rows
        self.data = data
        self.features = features
        self._pad_token_id = pad_token_id
        self._served_model = model_numbers[rows.model]
        targets = (*normalization.normalize(rows.mu, rows.sigma), normalization.normalize_within(rows.sigma))
        self._fits = np.stack(targets, axis=1)
        self._weight = _with_mean_1(rows.weight)
        self._level_weight = _with_mean_1(data.level_weight)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, plan: Plan) -> Batch:
        data, rows = self.data, self.data.rows
        prompts, at = plan.prompts, plan.rows
        if self.features is not None:
            inputs: tuple[Tensor, ...] = (self.features[torch.from_numpy(prompts)],)
        else:
            inputs = pad([data.token_ids[number] for number in prompts.tolist()], self._pad_token_id)
            if data.lexical is not None:
                inputs = (*inputs, torch.from_numpy(data.lexical[prompts]))
        return Batch(
            inputs=inputs,
            row_prompt=torch.from_numpy(plan.row_prompt),
            served_model=torch.from_numpy(self._served_model[at]),
            temperature=_floats(rows.temperature[at]),
            answers=padded_answers(rows, at),
            fits=_floats(self._fits[at]),
            weight=_floats(self._weight[at]),
            level=torch.from_numpy(data.level[prompts]),
            level_weight=_floats(self._level_weight[prompts]),
            prompt=torch.from_numpy(prompts),
            row=torch.from_numpy(at),
        )


def padded_answers(rows: Rows, at: NDArray[np.int64]) -> Answers:
    """Answers of the rows at these positions [R, K], K the most answers of one of them."""
    starts, counts = rows.offsets[at], rows.counts[at]
    most = int(counts.max()) if len(at) else 0
    places = np.arange(most)
    present = places < counts[:, None]
    flat = np.where(present, starts[:, None] + places, 0)
    if len(rows.lengths) == 0:
        flat = np.empty((len(at), most), dtype=np.int64)
    lengths = np.where(present, rows.lengths[flat], 1)
    finished = np.where(present, rows.finished[flat], True)
    return Answers(
        _floats(lengths), torch.from_numpy(finished), torch.from_numpy(present), _floats(rows.cap[at])
    )


def loader(examples: Examples, plans: EpochPlans) -> DataLoader[Any]:
    """A batch for each plan of the epoch."""
    return DataLoader(examples, batch_size=None, sampler=plans, collate_fn=_same)


def _same(batch: Any) -> Any:
    return batch


def _with_mean_1(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """The weights over the mean of those that are not 0."""
    return weights / weights[weights > 0].mean() if (weights > 0).any() else weights


def _floats(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))


def length_ordered_batches(token_ids: Sequence[NDArray[Any]], batch_size: int) -> Iterator[list[int]]:
    """Positions in batches of similar length, so that little is padding."""
    order = sorted(range(len(token_ids)), key=lambda number: len(token_ids[number]))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]
