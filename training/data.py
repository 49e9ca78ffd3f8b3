"""Prompts and targets of one training run: splits, tokens, batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from data_gen.splits import Split, split_of
from predictors.modules import Normalization
from scheduler_core.errors import InputError
from training.config import TrainConfig
from training.evaluation import prompts_of
from training.fitting.fits import FittedGroups

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class Batch(NamedTuple):
    """One training step.

    Attributes:
        inputs: What the network is called with: token ids and mask [B, S], or features [B, F].
        mu, sigma: Targets, z-scores [B].
        position: Position of each prompt in its split [B].
    """

    inputs: tuple[Tensor, ...]
    mu: Tensor
    sigma: Tensor
    position: Tensor


@dataclass(frozen=True, slots=True)
class SplitFits:
    """Fitted groups by split.

    Attributes:
        targets: Split -> groups whose fits are compared with predictions in the loss.
        test: All groups of the test split, those without a usable fit too.
        num_excluded: Split -> groups left out because of a flag.
    """

    targets: dict[Split, FittedGroups]
    test: FittedGroups
    num_excluded: dict[Split, int]


def splits_of(fits: FittedGroups, seed: int, fractions: Sequence[float]) -> NDArray[np.str_]:
    """Split of each group [G], by its prompt id alone.

    Raises:
        InputError: The groups have no prompt_id.
    """
    ids = fits.groups.column("prompt_id")
    if ids is None:
        raise InputError(f"{fits.groups.path.name}, columns", fits.groups.rows.column_names, "also prompt_id")
    shares = (float(fractions[0]), float(fractions[1]), float(fractions[2]))
    return np.array([split_of(str(prompt_id), seed, shares) for prompt_id in ids], dtype=np.str_)


def split_fits(fits: FittedGroups, config: TrainConfig) -> SplitFits:
    """Splits the groups and leaves out targets that cannot be learnt from.

    Raises:
        InputError: There are no prompts, or too few of them are left for training or validation.
    """
    prompts_of(fits)
    split = splits_of(fits, config.split_seed, config.fractions)
    usable = ~fits.has_flag(*config.exclude_flags)
    targets = {name: fits.take(np.flatnonzero((split == name) & usable)) for name in SPLITS}
    for name, least in (("train", 2), ("validation", 1)):
        if len(targets[name]) < least:  # type: ignore[index]
            raise InputError(
                f"{fits.groups.path.name}, prompts with a usable fit in the {name} split",
                len(targets[name]),  # type: ignore[index]
                f"at least {least}; {len(fits)} groups in all, another split_seed or fractions may help",
            )
    return SplitFits(
        targets=targets,
        test=fits.take(np.flatnonzero(split == "test")),
        num_excluded={name: int(((split == name) & ~usable).sum()) for name in SPLITS},
    )


def tokenize(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], max_length: int
) -> list[NDArray[np.int64]]:
    """Token ids of each prompt, special tokens included, at most `max_length` of them."""
    if not prompts:
        return []
    encoded = tokenizer(
        list(prompts), truncation=True, max_length=max_length, padding=False, return_attention_mask=False
    )
    return [np.asarray(ids, dtype=np.int64) for ids in encoded["input_ids"]]


def pad(token_ids: Sequence[NDArray[np.int64]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and mask, int64 [B, S], padded on the right to the longest of the batch."""
    longest = max(len(ids) for ids in token_ids)
    input_ids = np.full((len(token_ids), longest), pad_token_id, dtype=np.int64)
    mask = np.zeros((len(token_ids), longest), dtype=np.int64)
    for row, ids in enumerate(token_ids):
        input_ids[row, : len(ids)] = ids
        mask[row, : len(ids)] = 1
    return torch.from_numpy(input_ids), torch.from_numpy(mask)


class Examples:
    """Inputs and targets of one split; `batch(indices)` makes a `Batch`.

    Args:
        fits: Groups that are targets [N].
        normalization: Of the training split.
        token_ids: Tokens of each prompt [N], for stage 1.
        pad_token_id: Token id of padding.
        features: Pooled features [N, F], for stage 2; they take the place of the tokens.
    """

    def __init__(
        self,
        fits: FittedGroups,
        normalization: Normalization,
        *,
        token_ids: Sequence[NDArray[np.int64]] = (),
        pad_token_id: int = 0,
        features: Tensor | None = None,
    ) -> None:
        mu, sigma = normalization.normalize(fits.mu, fits.sigma)
        self.prompt_ids = [str(prompt_id) for prompt_id in fits.groups.column("prompt_id") or []]
        self.mu = torch.from_numpy(mu).float()
        self.sigma = torch.from_numpy(sigma).float()
        self._token_ids = token_ids
        self._pad_token_id = pad_token_id
        self._features = features

    def __len__(self) -> int:
        return len(self.mu)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The examples at these positions as one batch."""
        position = torch.as_tensor(indices, dtype=torch.int64)
        if self._features is not None:
            inputs: tuple[Tensor, ...] = (self._features[position],)
        else:
            inputs = pad([self._token_ids[number] for number in indices], self._pad_token_id)
        return Batch(inputs, self.mu[position], self.sigma[position], position)


class EpochSampler(Sampler[int]):
    """Draws N of N positions with replacement, by weight; the draw follows from seed and epoch alone.

    Args:
        weights: How often each position is drawn, relative to the others [N].
        seed: Base of the draw; the trainer sets the epoch.
    """

    def __init__(self, weights: NDArray[np.float64], seed: int) -> None:
        self._p = weights / weights.sum()
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the trainer before each epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng([self._seed, self._epoch])
        return iter(rng.choice(len(self._p), size=len(self._p), p=self._p).tolist())

    def __len__(self) -> int:
        return len(self._p)


def sampling_weights(fits: FittedGroups, rules: Sequence[tuple[float, float, float]]) -> NDArray[np.float64]:
    """Weight of each group [G]: 1, or that of the last rule (mu, sigma, weight) with a smaller mu or sigma."""
    weights = np.ones(len(fits))
    for mu_above, sigma_above, weight in rules:
        weights[(fits.mu > mu_above) | (fits.sigma > sigma_above)] = weight
    return weights


def loader(examples: Examples, batch_size: int, sampler: Sampler[int] | None = None) -> DataLoader[Any]:
    """Batches of the examples, in the sampler's order or as they stand."""
    positions: Any = range(len(examples))
    return DataLoader(positions, batch_size=batch_size, sampler=sampler, collate_fn=examples.batch)


def length_ordered_batches(token_ids: Sequence[NDArray[np.int64]], batch_size: int) -> Iterator[list[int]]:
    """Positions in batches of similar length, so that little is padding."""
    order = sorted(range(len(token_ids)), key=lambda number: len(token_ids[number]))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]
