"""Interface of batch formers, and functions that several of them share."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable
from typing import ClassVar

from scheduler_core.batching.batch import Batch
from scheduler_core.engine.kv_cache import Limits
from scheduler_core.engine.pool import Pool
from scheduler_core.errors import InputError
from scheduler_core.policies.base import Policy
from scheduler_core.request import Request, RequestState


class BatchFormer(ABC):
    """Selects the requests of the next step; admits and evicts through the batch. Belongs to one scheduler.

    A batch former is a keyword-only slots dataclass whose fields are the parameters of its paper; values
    outside their range raise InputError. It does not store requests.

    Attributes:
        evicts_by_key: Evicts by the policy's eviction key under every policy (see `Policy.evicts_by_key`).
        allows_preemptive: Supports preemptive policies.
        migratable: Running requests may be added or removed between two steps: a batch has no fixed members,
            and admission reserves no memory beyond the tokens to process.
        lockstep: A step with decodes includes all running requests that have completed their prefill, and the former
            does not read their states. They are advanced in lockstep if the policy does not read the states either.
    """

    __slots__ = ()

    evicts_by_key: ClassVar[bool] = False
    allows_preemptive: ClassVar[bool] = True
    lockstep: ClassVar[bool] = False
    migratable: ClassVar[bool] = False

    @abstractmethod
    def form(self, pool: Pool, max_num_batched_tokens: int, now: float) -> Batch:
        """Forms the next step, with prefill and decode tokens up to the limit; empty only without requests.

        Must change the pool only through the batch.
        """

    @abstractmethod
    def steady_steps(self, pool: Pool, batch: Batch, limit: int) -> int:
        """Number of steps, from 1 to `limit`, with the same batch as the last one, if no request arrives or stops.

        Exact or too small, never too large. Called only for batches without prefills, admissions and evictions.
        """

    def steady_chunks(self, batch: Batch, limit: int) -> int:
        """Number of steps, from 1 to `limit`, with one chunk of the same prompt and size, not its last chunk,
        while the same requests decode.

        Exact or too small, never too large. Called only for batches with chunks and without evictions.
        """
        return 1

    def check(self, limits: Limits) -> None:  # noqa: B027
        """Raises InputError if the parameters are not compatible with the limits; by default they always are."""

    def check_policy(self, policy: Policy) -> None:
        """Raises InputError if the policy is not compatible with this former."""
        if policy.preemptive and not self.allows_preemptive:
            allowed = (
                "policies that are not preemptive: this batch former runs each request until it is finished"
            )
            raise InputError(f"policy under {type(self).__name__}", type(policy).__name__, allowed)

    def max_running(self, limits: Limits) -> int:
        """Maximum number of requests that hold memory at the same time."""
        return limits.max_num_seqs

    def refusal(self, request: Request, limits: Limits) -> InputError | None:
        """The error if a request could never be served (apart from the cache size); None if it could."""
        return None

    @property
    def reads_step_times(self) -> bool:
        """Whether it uses the measured times of steps (`Pool.step_times`)."""
        return False

    @property
    def group(self) -> Callable[[RequestState], int] | None:
        """Group of a waiting request; smaller groups come first, regardless of the keys. None: no groups."""
        return None

    def on_step(self, step_s: float) -> None:  # noqa: B027
        """Called at the end of a step that took `step_s` seconds."""


def whole_prompts_refusal(request: Request, num_tokens: int, limits: Limits) -> InputError | None:
    """The error of formers that process `num_tokens` tokens of the request in one step; None if they fit."""
    if num_tokens <= limits.max_num_batched_tokens:
        return None
    name = f"tokens of request {request.request_id} to process in one step"
    allowed = f"at most max_num_batched_tokens = {limits.max_num_batched_tokens}"
    return InputError(name, num_tokens, f"{allowed}: this batch former does not split prompts")


def steady_decodes(pool: Pool, batch: Batch, limit: int, spare_blocks: int = 0) -> int:
    """`steady_steps` of formers that decode all running requests and admit the first waiting one whenever it fits.

    If the first waiting request does not fit now, it does not fit after the growth of the running ones either.
    So only memory limits the number of steps, unless the order of the waiting requests may change with time.
    """
    if len(pool.waiting) and pool.policy.key_changes == "with_time" and pool.num_running < pool.max_running:
        return 1
    return steps_that_fit(pool, batch, limit, spare_blocks)


def steps_that_fit(pool: Pool, batch: Batch, limit: int, spare_blocks: int = 0) -> int:
    """Maximum number of steps, from 1 to `limit`, before fewer than `spare_blocks` blocks are free."""
    if _fits(pool, batch, limit, spare_blocks):
        return limit
    # One less than the first number of steps, from 2 on, that does not fit.
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
