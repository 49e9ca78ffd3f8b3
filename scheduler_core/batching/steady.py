"""How long a batch of decodes stays the same."""

from __future__ import annotations

from scheduler_core.batching.batch import Batch
from scheduler_core.pool import Pool


def steady_decodes(pool: Pool, batch: Batch, limit: int) -> int:
    """For formers that decode all running requests and admit the first waiting one whenever it fits.

    A head that did not fit now fits even less when the running requests grow, so only memory can end the run, unless
    the policy may by then put another head in its place.
    """
    if len(pool.waiting) and pool.policy.key_changes == "with_time" and len(pool.running) < pool.max_running:
        return 1
    return steps_that_fit(pool, batch, limit)


def steps_that_fit(pool: Pool, batch: Batch, limit: int) -> int:
    """The most steps, from 1 to `limit`, that the decodes can take before their memory runs out."""
    if _fits(pool, batch, limit):
        return limit
    low, high = 1, limit
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(pool, batch, middle):
            low = middle
        else:
            high = middle
    return low


def _fits(pool: Pool, batch: Batch, num_steps: int) -> bool:
    kv = pool.kv
    need = 0
    for state in batch.decodes:
        tokens = state.num_computed_tokens + num_steps
        if tokens > state.kv_tokens:
            need += kv.blocks_for(tokens - state.kv_tokens)
    return need <= kv.num_free_blocks
