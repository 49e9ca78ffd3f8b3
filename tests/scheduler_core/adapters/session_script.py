"""Run by vLLM's Python: vLLM's real scheduler and KV cache under sessions, with checks in every step.

python -m tests.scheduler_core.adapters.session_script '{"model": ..., "policy": ... or null, "aborts": 0.0, "load": {...}}'

Prints what happened as one line of JSON. The queue of free blocks is checked in every step, and hits of waiting requests are
compared with vLLM's own search.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.agents.vllm_scheduler import Load, Sessions


def main() -> None:
    task = json.loads(sys.argv[1])
    sessions = CheckedSessions(task["policy"], Path(task["model"]), Load(**task["load"]))
    sessions.aborts = task["aborts"]
    sessions.run()
    scheduler = sessions.scheduler
    left = {name: len(getattr(scheduler, name)) for name in ("requests", "waiting", "running")}
    result = {
        "turns": sessions.turns, "hits": sessions.hit_tokens / sessions.prompt_tokens, "held": sessions.num_held,
        "left": left, "num_wrong": sessions.num_wrong, "names": len(sessions.names), "longest_s": max(sessions.ttft_s),
    }  # fmt: skip
    sys.stdout.write("RESULT " + json.dumps(result) + "\n")
    sys.stdout.flush()
    os._exit(0)


class CheckedSessions(Sessions):
    """`aborts`: probability of an abort in a step."""

    aborts = 0.0

    def __init__(self, policy: str | None, model: Path, load: Load) -> None:
        super().__init__(policy, model, load)
        self.names: set[str] = set()
        #: Looks at the hits of a waiting request that differ from vLLM's.
        self.num_wrong = 0

    def step(self) -> None:
        if self.rng.random() < self.aborts:
            self.abort(str(self.rng.choice(list(self.live))))
        order = getattr(self.scheduler, "_tailcast_order", None)
        if order is not None:
            self.names |= {state.request.session for state in order.states.values()}
        self.check()
        if self.live:
            super().step()
        self.check()
        assert self.num_steps < 100_000, "never ends"

    def check(self) -> None:
        manager = self.scheduler.kv_cache_manager
        pool = manager.block_pool
        free = pool.free_block_queue.get_all_free_blocks()
        assert len(free) == pool.free_block_queue.num_free_blocks == len({block.block_id for block in free})
        assert all(block.ref_cnt == 0 and not block.is_null for block in free)
        assert len(free) + sum(block.ref_cnt > 0 for block in pool.blocks) == len(pool.blocks) - 1
        block: Any = pool.free_block_queue.fake_free_list_tail
        for expected in reversed(free):
            block = block.prev_free_block
            assert block is expected, "the two directions of the queue differ"
        order = getattr(self.scheduler, "_tailcast_order", None)
        if order is not None and order.policy.reads("cached"):
            for state in order.waiting:
                order.engine.look_up([state])
                _, num_tokens, _ = manager.get_computed_blocks(self.scheduler.requests[state.request_id])
                self.num_wrong += state.cached_tokens != num_tokens


if __name__ == "__main__":
    main()
