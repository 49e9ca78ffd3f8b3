"""Which waiting requests go into the next batch.

On a CPU, padding is what batching costs and the matrix products gain almost nothing from it: a batch of 32 in order of
arrival pads to about 3.5 times the real tokens of a usual prompt mix. So the oldest request is joined only by
neighbours of nearly its own length, and nothing waits for company. On a GPU larger batches pay, and a short wait does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scheduler_core.errors import InputError

Order = Literal["length", "arrival"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingSettings:
    """How requests are grouped and how many batches run at a time. Defaults: `cpu` and `gpu`.

    Attributes:
        max_batch: Most requests in a batch.
        max_wait_s: How long the oldest request waits for a full batch while a worker is free; 0 = not at all.
        flush_when_idle: Nothing waits while no batch is running; a wait then only fills the second worker's batch.
        order: "length" joins the oldest request with its nearest neighbours in length, "arrival" takes the oldest.
        max_padding: Largest ratio of padded to real tokens of a batch of more than one; read with order "length".
        max_padded_tokens: Largest batch x longest of a batch of more than one.
        max_queue: Most requests waiting; one more is refused.
        num_workers: Batches that run at the same time.
        num_ahead: Batches handed over beyond these: a worker that ends one goes on with the next without waiting for
            the event loop.
    """

    max_batch: int
    max_wait_s: float
    flush_when_idle: bool = False
    order: Order = "length"
    max_padding: float = math.inf
    max_padded_tokens: int = 16_384
    max_queue: int = 512
    num_workers: int = 1
    num_ahead: int = 0

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_padded_tokens", "max_queue", "num_workers"):
            value = getattr(self, name)
            if value < 1:
                raise InputError(name, value, "an integer >= 1")
        if self.num_ahead < 0:
            raise InputError("num_ahead", self.num_ahead, "an integer >= 0")
        if not (0 <= self.max_wait_s < math.inf):
            raise InputError("max_wait_s", self.max_wait_s, "a finite number of seconds >= 0")
        if not self.max_padding >= 1:
            raise InputError("max_padding", self.max_padding, "a number >= 1 (padded / real tokens)")
        if self.order not in ("length", "arrival"):
            raise InputError("order", self.order, "length or arrival")

    @classmethod
    def cpu(cls, num_workers: int) -> BatchingSettings:
        """No wait, at most 4 requests of nearly the same length, single-threaded workers: one per core.

        From 256 tokens on a batch costs as much for each prompt as one prompt alone; it only takes memory, and lets all
        wait for all.
        """
        return cls(
            max_batch=4,
            max_wait_s=0.0,
            max_padding=1.1,
            max_padded_tokens=256,
            num_workers=num_workers,
            num_ahead=1,
        )

    @classmethod
    def gpu(cls) -> BatchingSettings:
        """At once when nothing runs; beside a running batch up to 32 requests, or what has come 3 ms after the oldest.

        The second worker prepares the next batch while the device works on the first.
        """
        return cls(max_batch=32, max_wait_s=0.003, flush_when_idle=True, num_workers=2)

    @property
    def max_running(self) -> int:
        """Batches handed over and not yet ended."""
        return self.num_workers + self.num_ahead

    def starts_at_once(self, num_running: int) -> bool:
        """Whether a request that finds the queue empty is handed over in the same moment, alone."""
        if num_running >= self.max_running:
            return False
        return self.max_wait_s == 0 or self.max_batch == 1 or (self.flush_when_idle and num_running == 0)


def nearest_in_length(lengths: Sequence[int], start: int, settings: BatchingSettings) -> range:
    """Positions of the batch around one request.

    Args:
        lengths: Lengths of the waiting requests, ascending, each >= 1.
        start: Position of the request that must be in the batch.
        settings: Limits on size and padding.

    Returns:
        A contiguous range of positions holding `start`: grown by the neighbour nearer in length (the longer one when
        equally near) as long as the limits hold.
    """
    low, high = start, start + 1
    real, longest = lengths[start], lengths[start]
    while high - low < settings.max_batch:
        sides = []
        if high < len(lengths):
            sides.append((lengths[high] - lengths[start], 0, high))
        if low > 0:
            sides.append((lengths[start] - lengths[low - 1], 1, low - 1))
        for _, side, position in sorted(sides):
            new_longest = max(longest, lengths[position])
            new_real = real + lengths[position]
            padded = (high - low + 1) * new_longest
            if padded <= settings.max_padding * new_real and padded <= settings.max_padded_tokens:
                low, high = (low, high + 1) if side == 0 else (low - 1, high)
                real, longest = new_real, new_longest
                break
        else:
            break
    return range(low, high)


def oldest_first(lengths: Sequence[int], settings: BatchingSettings) -> int:
    """How many of the requests, in order of arrival with the given lengths, make the next batch: at least one."""
    longest = 0
    for count, length in enumerate(lengths[: settings.max_batch]):
        longest = max(longest, length)
        if count > 0 and (count + 1) * longest > settings.max_padded_tokens:
            return count
    return min(len(lengths), settings.max_batch)
