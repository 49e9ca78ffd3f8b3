"""Batches of a training run: tokens of prompts, their rows, and urgency labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from predictors.modules.config import PredictorConfig
from predictors.modules.encoder import tokenize
from predictors.modules.predictor import PromptPredictor
from training.fitting.rows import Rows
from training.network.batches import BatchPlan, EpochPlans, padded_widths

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


#: Text -> (level, weight): level 0 is the most urgent; the weight in the loss is above 0.
UrgencyLabels = dict[str, tuple[int, float]]


class SampleLengths(NamedTuple):
    """Output lengths of R rows, padded to K samples each.

    Attributes:
        tokens: Lengths, float32 [R, K]; the truncated length for censored samples, 1 for padding.
        finished: Whether the sample is complete; False: the length is a lower bound, bool [R, K].
        present: False for padding, bool [R, K]; each row has at least one sample.
        max_tokens: Length at which samples of the row are truncated, float32 [R]; infinite if unknown.
    """

    tokens: Tensor
    finished: Tensor
    present: Tensor
    max_tokens: Tensor

    def mean(self, values: Tensor) -> Tensor:
        """Mean of values [R, K] over the samples of each row, [R]."""
        total = torch.where(self.present, values, torch.zeros_like(values)).sum(dim=-1)
        return total / self.present.sum(dim=-1)


class TrainingBatch(NamedTuple):
    """One training step: P prompts, each encoded once, and R rows.

    Attributes:
        inputs: Token ids and mask [P, S], or features [P, F].
        row_prompt: Position of each row's prompt in this batch [R].
        served_model: Number of the served model, 0 if unknown [R].
        temperature: Sampling temperature, NaN if unknown [R].
        samples: Output lengths of the rows.
        fits: z-scores of the fitted mu, of log(1 + sigma), and of log(1 + sigma) as target of sigma_within; NaN without
            a fit [R, 3].
        weight: Weights of the rows in the loss, with mean 1 over the split [R].
        level: Urgency level [P].
        level_weight: Weights of the urgency labels, with mean 1 over the labels; 0 for prompts without a label [P].
        prompt, row: Positions in the split [P], [R].
    """

    inputs: tuple[Tensor, ...]
    row_prompt: Tensor
    served_model: Tensor
    temperature: Tensor
    samples: SampleLengths
    fits: Tensor
    weight: Tensor
    level: Tensor
    level_weight: Tensor
    prompt: Tensor
    row: Tensor


def pad(
    token_ids: Sequence[NDArray[Any]], pad_token_id: int, max_length: int | None = None
) -> tuple[Tensor, Tensor]:
    """Token ids and mask, int64 [B, S], right-padded to the longest prompt of the batch; with `max_length`, to one of a
    few widths (`padded_widths`)."""
    width = max(len(ids) for ids in token_ids)
    if max_length is not None:
        width = int(padded_widths(np.array(width), max_length))
    input_ids = np.full((len(token_ids), width), pad_token_id, dtype=np.int64)
    mask = np.zeros((len(token_ids), width), dtype=np.int64)
    for row, ids in enumerate(token_ids):
        input_ids[row, : len(ids)] = ids
        mask[row, : len(ids)] = 1
    return torch.from_numpy(input_ids), torch.from_numpy(mask)


@dataclass(frozen=True, slots=True, eq=False)
class SplitData:
    """One split: P prompts with their tokens, N rows, and urgency labels for some of the prompts.

    Prompts with rows come first, in the order of the rows, followed by texts that only have a label.

    Attributes:
        rows: Rows and their samples.
        texts, token_ids: Text and token ids of each prompt [P].
        row_offsets: Rows of prompt p are row_offsets[p] to row_offsets[p + 1] [P + 1].
        level, level_weight: Urgency level and its weight; 0 for prompts without a label [P].
    """

    rows: Rows
    texts: list[str]
    token_ids: list[NDArray[np.int32]]
    row_offsets: NDArray[np.int64]
    level: NDArray[np.int64]
    level_weight: NDArray[np.float64]

    @classmethod
    def of(
        cls, rows: Rows, labels: UrgencyLabels, tokenizer: PreTrainedTokenizerBase, config: PredictorConfig
    ) -> SplitData:
        """Joins rows and labels by text, and tokenizes each text once according to `config`."""
        number = {text: at for at, text in enumerate(rows.prompts)}
        prompt = [number.setdefault(text, len(number)) for text in labels]
        texts = list(number)
        level = np.zeros(len(texts), dtype=np.int64)
        weight = np.zeros(len(texts))
        if labels:
            level[prompt], weight[prompt] = zip(*labels.values(), strict=True)
        return cls(
            rows=rows,
            texts=texts,
            token_ids=tokenize(
                tokenizer,
                texts,
                max_length=config.max_length,
                truncation_side=config.truncation_side,
                amounts=config.amounts,
            ),
            row_offsets=np.searchsorted(rows.prompt, np.arange(len(texts) + 1)).astype(np.int64),
            level=level,
            level_weight=weight,
        )

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """Number of tokens of each prompt [P]."""
        return np.array([len(ids) for ids in self.token_ids], dtype=np.int64)

    def name(self, prompt: int) -> str:
        """The prompt's id, or the beginning of its text if it has none."""
        if prompt < len(self.rows.prompt_ids):
            return self.rows.prompt_ids[prompt]
        text = " ".join(self.texts[prompt].split())
        return text if len(text) <= 40 else text[:39] + "…"


class Examples(Dataset[TrainingBatch]):
    """Dataset of a split, indexed by batch plan.

    Normalization and served-model numbers are those of `model`. `features` [P, F] replace the tokens in stage 2.
    """

    def __init__(
        self, data: SplitData, model: PromptPredictor, pad_token_id: int = 0, features: Tensor | None = None
    ) -> None:
        rows, normalization, conditioning = data.rows, model.normalization, model.config.conditioning
        numbers = [0 if conditioning is None else conditioning.number_of(name) for name in rows.models]
        self.data = data
        self.features = features
        self._pad_token_id = pad_token_id
        self._max_length = model.config.max_length
        self._served_model = np.array([0, *numbers], dtype=np.int64)[rows.model]
        targets = normalization.normalize(rows.mu, rows.sigma)
        self._fits = np.stack(targets, axis=1)
        self._weight = _with_mean_1(rows.weight)
        self._level_weight = _with_mean_1(data.level_weight)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, plan: BatchPlan) -> TrainingBatch:
        data, rows = self.data, self.data.rows
        prompts, index = plan.prompts, plan.rows
        if self.features is not None:
            inputs: tuple[Tensor, ...] = (self.features[torch.from_numpy(prompts)],)
        else:
            token_ids = [data.token_ids[number] for number in prompts.tolist()]
            inputs = pad(token_ids, self._pad_token_id, self._max_length)
        return TrainingBatch(
            inputs=inputs,
            row_prompt=torch.from_numpy(plan.row_prompt),
            served_model=torch.from_numpy(self._served_model[index]),
            temperature=_floats(rows.temperature[index]),
            samples=padded_samples(rows, index),
            fits=_floats(self._fits[index]),
            weight=_floats(self._weight[index]),
            level=torch.from_numpy(data.level[prompts]),
            level_weight=_floats(self._level_weight[prompts]),
            prompt=torch.from_numpy(prompts),
            row=torch.from_numpy(index),
        )


def padded_samples(rows: Rows, index: NDArray[np.int64]) -> SampleLengths:
    """Samples of the rows at these positions [R, K], where K is the largest number of samples per row."""
    starts, counts = rows.offsets[index], rows.counts[index]
    columns = np.arange(int(counts.max()) if len(index) else 0)
    present = columns < counts[:, None]
    flat = np.where(present, starts[:, None] + columns, 0)
    tokens = np.where(present, rows.lengths[flat], 1) if present.size else np.ones(present.shape)
    finished = np.where(present, rows.finished[flat], True) if present.size else present
    return SampleLengths(
        _floats(tokens),
        torch.from_numpy(finished),
        torch.from_numpy(present),
        _floats(rows.max_tokens[index]),
    )


def prompt_weights(split: SplitData, rules: Sequence[tuple[float, float, float]]) -> NDArray[np.float64]:
    """Relative sampling frequency of each prompt [P]: the largest weight of its rows, at least 1. The weight of a row is
    that of the last rule (mu, sigma, weight) whose mu or sigma its fit exceeds."""
    rows = split.rows
    of_row = np.ones(len(rows.mu))
    for mu_above, sigma_above, weight in rules:
        of_row[(rows.mu > mu_above) | (rows.sigma > sigma_above)] = weight
    weights = np.ones(len(split))
    np.maximum.at(weights, rows.prompt, of_row)
    return weights


def loader(examples: Examples, plans: EpochPlans) -> DataLoader[Any]:
    """DataLoader that yields one batch for each plan of the epoch."""
    return DataLoader(examples, batch_size=None, sampler=plans, collate_fn=_unchanged)


def _unchanged(batch: Any) -> Any:
    return batch


def _with_mean_1(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """The weights divided by the mean of the positive ones."""
    return weights / weights[weights > 0].mean() if (weights > 0).any() else weights


def _floats(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))


def length_ordered_batches(token_ids: Sequence[NDArray[Any]], batch_size: int) -> Iterator[list[int]]:
    """Positions of prompts in batches of similar length, to reduce padding."""
    order = sorted(range(len(token_ids)), key=lambda number: len(token_ids[number]))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]
