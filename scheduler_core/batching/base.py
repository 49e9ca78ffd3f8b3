"""What a batch former is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from scheduler_core.batching.batch import Batch
from scheduler_core.errors import InputError
from scheduler_core.limits import Limits
from scheduler_core.policies.base import Policy
from scheduler_core.pool import Pool
from scheduler_core.request import Request, RequestState


class BatchFormer(ABC):
    """Chooses the next step's work, admitting and evicting through the batch. Belongs to one scheduler.

    A batch former is a keyword-only slots dataclass whose fields are the parameters of its paper. It keeps no requests
    itself.

    Attributes:
        evicts_by_key: It evicts by the policy's eviction key, whether the policy is preemptive or not.
        takes_preemptive: A policy may be preemptive.
        decodes_all: In a step in which anybody decodes all running requests do that have processed their prompts.
    """

    __slots__ = ()

    evicts_by_key: ClassVar[bool] = False
    takes_preemptive: ClassVar[bool] = True
    decodes_all: ClassVar[bool] = False

    @abstractmethod
    def form(self, pool: Pool, max_num_batched_tokens: int, now: float) -> Batch:
        """The next step; empty only if there is nobody.

        Args:
            pool: Live requests; changed through the batch alone.
            max_num_batched_tokens: Most tokens (prefill and decode) in the step.
            now: Time in seconds.
        """

    @abstractmethod
    def steady_steps(self, pool: Pool, batch: Batch, limit: int) -> int:
        """How many times, from 1 to `limit`, the batch just formed would be formed again if nothing arrives or stops.

        Exact or too small, never too large. Asked only about batches of decodes alone, for which nobody was admitted
        or evicted.
        """

    def steady_chunks(self, batch: Batch, limit: int) -> int:
        """How many times, from 1 to `limit`, the next steps would process a chunk of the same prompt and size, and no other,
        none of them the last, as long as the same requests decode.

        Exact or too small, never too large. Asked only about batches with chunks for which nobody was evicted.
        """
        return 1

    def check(self, limits: Limits) -> None:  # noqa: B027
        """Raises InputError if the parameters do not go together with these limits; here they always do."""

    def check_policy(self, policy: Policy) -> None:
        """Raises InputError if the policy makes no sense with this former."""
        if policy.preemptive and not self.takes_preemptive:
            raise InputError(
                f"policy under {type(self).__name__}",
                type(policy).__name__,
                "policies that are not preemptive: this batch former keeps a request running until it is done",
            )

    def max_running(self, limits: Limits) -> int:
        """Most requests that hold memory at the same time."""
        return limits.max_num_seqs

    def refusal(self, request: Request, limits: Limits) -> InputError | None:
        """Why a request could never be served, beyond the size of the cache; None if it could."""
        return None

    @property
    def group(self) -> Callable[[RequestState], int] | None:
        """Waiting requests of a smaller group go first, whatever their keys; None: no groups."""
        return None

    def on_step(self, step_s: float) -> None:  # noqa: B027
        """A step has ended after `step_s` seconds."""


def whole_prompts_refusal(request: Request, most_tokens: int, limits: Limits) -> InputError | None:
    """For formers that process up to `most_tokens` of the request in one step."""
    if most_tokens <= limits.max_num_batched_tokens:
        return None
    return InputError(
        f"tokens of request {request.request_id} to process in one step",
        most_tokens,
        f"at most max_num_batched_tokens = {limits.max_num_batched_tokens}: this batch former splits no prompts",
    )
