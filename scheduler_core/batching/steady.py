"""How long a batch of decodes stays the same."""

from __future__ import annotations

from scheduler_core.batching.batch import Batch
from scheduler_core.pool import Pool


def steady_decodes(pool: Pool, batch: Batch, limit: int, spare_blocks: int = 0) -> int:
    """For formers that decode all running requests and admit the first waiting one whenever it fits.

    A head that did not fit now fits even less when the running requests grow, so only memory can end the run, unless
    the policy may by then put another head in its place.
    """
    if len(pool.waiting) and pool.policy.key_changes == "with_time" and pool.num_running < pool.max_running:
        return 1
    return steps_that_fit(pool, batch, limit, spare_blocks)


def steps_that_fit(pool: Pool, batch: Batch, limit: int, spare_blocks: int = 0) -> int:
    """The most steps, from 1 to `limit`, that the decodes can take before less than `spare_blocks` are free."""
    if _fits(pool, batch, limit, spare_blocks):
        return limit
    low, high = 1, limit
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(pool, batch, middle, spare_blocks):
            low = middle
        else:
            high = middle
    return low


def _fits(pool: Pool, batch: Batch, num_steps: int, spare_blocks: int) -> bool:
    if pool.cohort is not None:
        blocks = pool.cohort.blocks_until(pool.cohort.num_steps + num_steps)
        return blocks + spare_blocks <= pool.kv.num_free_blocks
    size = pool.kv.block_tokens
    short = [state.num_computed_tokens + num_steps - state.kv_tokens for state in batch.decodes]
    return (
        sum([-(-tokens // size) for tokens in short if tokens > 0]) + spare_blocks <= pool.kv.num_free_blocks
    )
