"""What a batch former is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from scheduler_core.plan import PrefillChunk
from scheduler_core.pool import Pool
from scheduler_core.request import RequestState


@dataclass(slots=True)
class Batch:
    """The requests of one step.

    Attributes:
        prefills: Requests and the chunk of each to process.
        decodes: Requests that generate one token.
        num_context_tokens: Tokens of all of them already in the cache.
        admitted: Requests that left the waiting queue.
        preempted: Requests that lost their cache.
    """

    prefills: list[tuple[RequestState, PrefillChunk]]
    decodes: list[RequestState]
    num_context_tokens: int
    admitted: list[str]
    preempted: list[str]


class BatchFormer(ABC):
    """Chooses the next step's work, admitting and preempting through the pool. Keeps no requests itself."""

    __slots__ = ()

    @abstractmethod
    def form(self, pool: Pool, max_num_batched_tokens: int, now: float) -> Batch:
        """The next step; empty if nothing can be done.

        Args:
            pool: Live requests; `admit` and `preempt` are the only changes to make.
            max_num_batched_tokens: Most tokens (prefill and decode) in the step.
            now: Time in seconds.
        """

    @abstractmethod
    def steady_steps(self, pool: Pool, batch: Batch, limit: int) -> int:
        """How many times, from 1 to `limit`, the batch just formed would be formed again if nothing arrives or stops.

        Exact or too small, never too large.
        """
