"""What a batch former is, and what formers have in common."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable
from typing import ClassVar

from scheduler_core.batching.batch import Batch
from scheduler_core.errors import InputError
from scheduler_core.kv_cache import Limits
from scheduler_core.policies.base import Policy
from scheduler_core.pool import Pool
from scheduler_core.request import Request, RequestState


class BatchFormer(ABC):
    """Chooses the next step's work, admitting and evicting through the batch. Belongs to one scheduler.

    A batch former is a keyword-only slots dataclass whose fields are the parameters of its paper; values outside their
    range raise InputError. It keeps no requests itself.

    Attributes:
        evicts_by_key: It evicts by the policy's eviction key, whether the policy is preemptive or not.
        allows_preemptive: A policy may be preemptive.
        migratable: A running request can come and go between two steps: no batch belongs together, and admission reserves
            no memory beyond what is to be processed.
        lockstep: In a step in which any request decodes all running requests do that have processed their prompts, and it
            does not read their states. Under a policy that does not either they are advanced in lockstep.
    """

    __slots__ = ()

    evicts_by_key: ClassVar[bool] = False
    allows_preemptive: ClassVar[bool] = True
    lockstep: ClassVar[bool] = False
    migratable: ClassVar[bool] = False

    @abstractmethod
    def form(self, pool: Pool, max_num_batched_tokens: int, now: float) -> Batch:
        """The next step, of at most so many tokens (prefill and decode); empty only if there are no requests.

        The pool is changed through the batch alone.
        """

    @abstractmethod
    def steady_steps(self, pool: Pool, batch: Batch, limit: int) -> int:
        """How many times, from 1 to `limit`, the batch just formed would be formed again if nothing arrives or stops.

        Exact or too small, never too large. Called only for batches of decodes alone, without admissions or evictions.
        """

    def steady_chunks(self, batch: Batch, limit: int) -> int:
        """How many times, from 1 to `limit`, the next steps would process a chunk of the same prompt and size, and no other,
        none of them the last, as long as the same requests decode.

        Exact or too small, never too large. Called only for batches with chunks and without evictions.
        """
        return 1

    def check(self, limits: Limits) -> None:  # noqa: B027
        """Raises InputError if the parameters do not go together with these limits; here they always do."""

    def check_policy(self, policy: Policy) -> None:
        """Raises InputError if the policy does not go together with this former."""
        if policy.preemptive and not self.allows_preemptive:
            allowed = (
                "policies that are not preemptive: this batch former keeps a request running until it is done"
            )
            raise InputError(f"policy under {type(self).__name__}", type(policy).__name__, allowed)

    def max_running(self, limits: Limits) -> int:
        """Maximum number of requests that hold memory at the same time."""
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


def whole_prompts_refusal(request: Request, num_tokens: int, limits: Limits) -> InputError | None:
    """The refusal of formers that process `num_tokens` of the request in one step; None if they fit."""
    if num_tokens <= limits.max_num_batched_tokens:
        return None
    name = f"tokens of request {request.request_id} to process in one step"
    most = f"at most max_num_batched_tokens = {limits.max_num_batched_tokens}"
    return InputError(name, num_tokens, f"{most}: this batch former splits no prompts")


def steady_decodes(pool: Pool, batch: Batch, limit: int, spare_blocks: int = 0) -> int:
    """`steady_steps` of formers that decode all running requests and admit the first waiting one whenever it fits.

    A head that did not fit now fits even less when the running requests grow, so only memory can end the run, unless
    the policy may by then have another head.
    """
    if len(pool.waiting) and pool.policy.key_changes == "with_time" and pool.num_running < pool.max_running:
        return 1
    return steps_that_fit(pool, batch, limit, spare_blocks)


def steps_that_fit(pool: Pool, batch: Batch, limit: int, spare_blocks: int = 0) -> int:
    """The most steps, from 1 to `limit`, that the decodes can take before less than `spare_blocks` are free."""
    if _fits(pool, batch, limit, spare_blocks):
        return limit
    # The first number from 2 on that does not fit is one too many.
    too_many = range(2, limit)
    return 1 + bisect_left(too_many, True, key=lambda steps: not _fits(pool, batch, steps, spare_blocks))


def _fits(pool: Pool, batch: Batch, num_steps: int, spare_blocks: int) -> bool:
    if pool.lockstep is not None:
        blocks = pool.lockstep.blocks_until(pool.lockstep.num_steps + num_steps)
        return blocks + spare_blocks <= pool.kv.num_free_blocks
    size = pool.kv.block_tokens
    short = [state.num_computed_tokens + num_steps - state.kv_tokens for state in batch.decodes]
    blocks = sum([-(-tokens // size) for tokens in short if tokens > 0])
    return blocks + spare_blocks <= pool.kv.num_free_blocks
