"""Batch plans: prompts grouped by length under a token budget, in an order determined by seed and epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import distributed as dist
from torch.utils.data import Sampler

IntArray = NDArray[np.int64]

# Prompts are sorted by length within pools of this many batches, so that batches still differ between epochs.
POOL_BATCHES = 64
# Batches are padded to a multiple of this many tokens, because kernels cache memory for each input shape.
WIDTH_STEP = 16


def padded_widths(num_tokens: IntArray, max_length: int) -> IntArray:
    """Padded width of a batch for the number of tokens of its longest prompt; at most `max_length`."""
    return np.minimum(-(-num_tokens // WIDTH_STEP) * WIDTH_STEP, max_length)


class BatchPlan(NamedTuple):
    """Positions of a batch in its split: prompts [P], rows [R], and the position of each row's prompt among the prompts [R]."""

    prompts: IntArray
    rows: IntArray
    row_prompt: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """Options of batching.

    Attributes:
        batch_size: Maximum number of prompts.
        batch_tokens: Maximum number of tokens with padding; None: no limit. A longer prompt forms its own batch.
        by_length: Group prompts of similar length.
        shuffled: Use a different order in each epoch; otherwise shortest first, or the given order.
        rows_per_prompt: Maximum number of rows per prompt; None: all.
    """

    batch_size: int
    batch_tokens: int | None = None
    by_length: bool = True
    shuffled: bool = True
    rows_per_prompt: int | None = None


def batch_ends(num_tokens: IntArray, batching: Batching) -> list[int]:
    """End index of each batch when prompts are taken in the given order."""
    if batching.batch_tokens is None:
        size = batching.batch_size
        return [*range(size, len(num_tokens), size), len(num_tokens)] if len(num_tokens) else []
    ends: list[int] = []
    start = longest = 0
    for at, count in enumerate(num_tokens.tolist()):
        widest = max(longest, count)
        if at > start and (
            at - start >= batching.batch_size or widest * (at - start + 1) > batching.batch_tokens
        ):
            ends.append(at)
            start, widest = at, count
        longest = widest
    return [*ends, len(num_tokens)] if len(num_tokens) else []


class EpochPlans(Sampler[BatchPlan]):
    """Batch plans of an epoch, determined by seed and epoch; every epoch has the same number of batches.

    Args:
        num_tokens: Number of tokens of each prompt [P].
        row_offsets: Rows of prompt p are row_offsets[p] to row_offsets[p + 1] [P + 1].
        batching, seed: Batching options and random seed.
        num_epochs: Number of epochs that must have the same number of batches.
        weights: Sampling weights [P] with which P prompts are drawn with replacement; None: each prompt once.
        distributed: Split the batches evenly over the processes of a distributed run.
    """

    def __init__(
        self,
        num_tokens: IntArray,
        row_offsets: IntArray,
        batching: Batching,
        *,
        seed: int = 0,
        num_epochs: int = 1,
        weights: NDArray[np.float64] | None = None,
        distributed: bool = False,
    ) -> None:
        self._num_tokens = num_tokens
        self._row_offsets = row_offsets
        self._batching = batching
        self._seed = seed
        self._p = None if weights is None else weights / weights.sum()
        self._epoch = 0
        self._distributed = distributed
        # With a token budget the number of batches varies by epoch, but the trainer reads it only once.
        varies = batching.shuffled and batching.batch_tokens is not None
        self._num_batches = max(len(self._batches(epoch)) for epoch in range(num_epochs if varies else 1))

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch; the trainer calls this before each one."""
        self._epoch = epoch

    def __len__(self) -> int:
        return -(-self._num_batches // self._rank()[1])

    def _rank(self) -> tuple[int, int]:
        """Rank of this process and number of processes; (0, 1) before the process group is initialized."""
        if self._distributed and dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1

    def __iter__(self) -> Iterator[BatchPlan]:
        batches = self._batches(self._epoch)
        # The largest batches are halved until the epoch has as many as the others.
        while len(batches) < self._num_batches:
            largest = max(range(len(batches)), key=lambda number: len(batches[number]))
            prompts = batches.pop(largest)
            if len(prompts) == 1:
                batches += [prompts] * (self._num_batches - len(batches))
                break
            batches += [prompts[: len(prompts) // 2], prompts[len(prompts) // 2 :]]
        rng = np.random.default_rng([self._seed, self._epoch, 1])
        if self._batching.shuffled:
            batches = [batches[number] for number in rng.permutation(len(batches)).tolist()]
        # Batches are repeated until all processes have the same number; otherwise collective operations would hang.
        rank, num_ranks = self._rank()
        missing = len(self) * num_ranks - len(batches)
        batches += [batches[number % len(batches)] for number in range(missing)]
        for number, prompts in enumerate(batches):
            plan = self._plan(prompts, rng)
            if number % num_ranks == rank:
                yield plan

    def _batches(self, epoch: int) -> list[IntArray]:
        rng = np.random.default_rng([self._seed, epoch])
        count = len(self._num_tokens)
        order = np.arange(count)
        if self._p is not None:
            order = rng.choice(count, size=count, p=self._p)
        elif self._batching.shuffled:
            order = rng.permutation(count)
        if self._batching.by_length:
            pool = POOL_BATCHES * self._batching.batch_size if self._batching.shuffled else max(count, 1)
            order = np.concatenate(
                [order[:0], *(self._sorted(order[start : start + pool]) for start in range(0, count, pool))]
            )
        ends = batch_ends(self._num_tokens[order], self._batching)
        return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def _sorted(self, prompts: IntArray) -> IntArray:
        return prompts[np.argsort(self._num_tokens[prompts], kind="stable")]

    def _plan(self, prompts: IntArray, rng: np.random.Generator) -> BatchPlan:
        limit = self._batching.rows_per_prompt
        rows = []
        for prompt in prompts.tolist():
            start, end = self._row_offsets[prompt], self._row_offsets[prompt + 1]
            if limit is None or end - start <= limit:
                rows.append(np.arange(start, end))
            else:
                rows.append(start + np.sort(rng.choice(end - start, size=limit, replace=False)))
        row_prompt = np.repeat(np.arange(len(prompts)), [len(part) for part in rows])
        return BatchPlan(prompts, np.concatenate([np.empty(0, dtype=np.int64), *rows]), row_prompt)
