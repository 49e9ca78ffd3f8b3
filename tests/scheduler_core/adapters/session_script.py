"""Run by vLLM's Python: vLLM's real AsyncScheduler and KV cache under sessions in a closed loop, without a model.

python -m tests.scheduler_core.adapters.session_script '{"model": ..., "policy": ... or null, "sessions": ..., ...}'

A step takes 10 ms and 1 ms per token. Prints as one line of JSON what happened; every step checks the queue of free blocks, and the hits
of waiting requests against vLLM's own search.
"""

import json
import os
import random
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
EOS = 1
BLOCK_TOKENS = 16


def main() -> None:
    task = json.loads(sys.argv[1])
    result = Sessions(task).run()
    sys.stdout.write("RESULT " + json.dumps(result) + "\n")
    sys.stdout.flush()
    os._exit(0)


class Sessions:
    """Sessions whose contexts grow by `growth` tokens a turn and return `pause` seconds after a turn's end.

    `named`: how the scheduler learns of the session: "hint", "session_id", or not at all.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        import torch
        from vllm import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        options = {
            "model": task["model"],
            "dtype": "float32",
            "max_model_len": 4096,
            "max_num_batched_tokens": 512,
        }
        if task["policy"] is not None:
            options["additional_config"] = {
                "tailcast": {"policy": task["policy"], "online_calibration": False}
            }
        config = EngineArgs(
            **options,
            max_num_seqs=8,
            block_size=BLOCK_TOKENS,
            enable_prefix_caching=True,
            hf_overrides={"max_position_embeddings": 4096},
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = task["blocks"]
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=32, dtype=torch.float32)
        cache = KVCacheConfig(task["blocks"], [], [KVCacheGroupSpec(["layer"], spec)])
        kind: Any = AsyncScheduler
        if task["policy"] is not None:
            from scheduler_core.adapters.vllm import scheduler_class

            kind = scheduler_class()
        manager = StructuredOutputManager(config)
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=manager,
            block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.task = task
        self.step = 0
        self.now = 0.0
        if task["policy"] is not None:
            self.scheduler._tailcast_clock = self.clock
            self.scheduler.waiting._clock = self.clock
        self.chance = random.Random(task.get("seed", 0))
        self.system = [self.chance.randrange(5, 50) for _ in range(task.get("system", 0))]
        self.contexts = [
            self.system + [self.chance.randrange(5, 50) for _ in range(task["first"])]
            for _ in range(task["sessions"])
        ]
        self.due = dict.fromkeys(range(task["sessions"]), 0.0)
        self.turns = dict.fromkeys(range(task["sessions"]), 0)
        self.live: dict[str, int] = {}
        self.waits: dict[str, float] = {}
        self.queries = self.hits = 0
        self.idle_steps = 0
        self.held_steps = 0
        self.names: set[str] = set()

    def clock(self) -> float:
        return self.now

    def add(self, session: int) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        hints = {"tailcast_session": f"s{session}"} if self.task.get("named", "hint") == "hint" else None
        sampling = SamplingParams(max_tokens=self.task["output"], temperature=0.0, extra_args=hints)
        sampling.update_from_generation_config({}, EOS)
        name = f"s{session}t{self.turns[session]}"
        options = {"session_id": f"s{session}"} if self.task.get("named") == "session_id" else {}
        request = Request(
            name, list(self.contexts[session]), sampling, None, block_hasher=self.hasher, **options
        )
        self.live[name] = session
        self.waits[name] = self.now
        self.scheduler.add_request(request)
        if self.task["policy"] is not None:
            self.names.add(self.scheduler._tailcast_order.states[name].request.session)

    def run(self) -> dict[str, Any]:
        from vllm.v1.outputs import ModelRunnerOutput

        longest = 0.0
        done = 0
        while done < self.task["sessions"]:
            self.step += 1
            assert self.step < 100_000, "never ends"
            for session, due in list(self.due.items()):
                if due <= self.now:
                    del self.due[session]
                    self.add(session)
            if self.live and self.chance.random() < self.task.get("aborts", 0.0):
                self.abort(self.chance.choice(list(self.live)))
            self.check()
            plan = self.scheduler.schedule()
            self.check()
            names = list(plan.num_scheduled_tokens)
            for data in plan.scheduled_new_reqs:
                self.queries += self.scheduler.requests[data.req_id].num_prompt_tokens
                self.hits += data.num_computed_tokens
                longest = max(longest, self.now - self.waits[data.req_id])
            self.idle_steps += not names and bool(self.scheduler.requests)
            waits = len(self.scheduler.waiting)
            self.held_steps += waits > 0 and not self.scheduler.waiting and bool(self.scheduler.running)
            self.now += 0.01 + 0.001 * plan.total_num_scheduled_tokens
            rows = {name: row for row, name in enumerate(names)}
            tokens = [[] if self.scheduler.requests[name].is_prefill_chunk else [7] for name in names]
            output = ModelRunnerOutput(req_ids=names, req_id_to_index=rows, sampled_token_ids=tokens)
            for outputs in self.scheduler.update_from_output(plan, output).values():
                for one in outputs.outputs:
                    if one.finish_reason is not None:
                        done += self.end(one.request_id)
        left = {name: len(getattr(self.scheduler, name)) for name in ("requests", "waiting", "running")}
        return {
            "seconds": self.now, "hits": self.hits / self.queries, "idle": self.idle_steps, "held": self.held_steps, "left": left,
            "longest_wait": longest, "names": len(self.names),
        }  # fmt: skip

    def end(self, name: str) -> bool:
        """A turn has ended; whether it was the last one of its session."""
        session = self.live.pop(name)
        self.turns[session] += 1
        growth = self.task["growth"]
        self.contexts[session] += [7] * self.task["output"] + [
            self.chance.randrange(5, 50) for _ in range(growth)
        ]
        if self.turns[session] == self.task["turns"]:
            return True
        self.due[session] = self.now + self.task["pause"]
        return False

    def abort(self, name: str) -> None:
        """A client goes away and comes back with the same turn."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        session = self.live.pop(name)
        self.turns[session] += 1  # another request id
        self.turns[session] = min(self.turns[session], self.task["turns"] - 1)
        self.due[session] = self.now + self.task["pause"]

    def check(self) -> None:
        manager = self.scheduler.kv_cache_manager
        pool = manager.block_pool
        free = pool.free_block_queue.get_all_free_blocks()
        assert len(free) == pool.free_block_queue.num_free_blocks == len({block.block_id for block in free})
        assert all(block.ref_cnt == 0 and not block.is_null for block in free)
        assert len(free) + sum(block.ref_cnt > 0 for block in pool.blocks) == len(pool.blocks) - 1
        backwards = free[::-1]
        block = pool.free_block_queue.fake_free_list_tail.prev_free_block
        for expected in backwards:
            assert block is expected
            block = block.prev_free_block
        order = getattr(self.scheduler, "_tailcast_order", None)
        if order is not None and self.scheduler._tailcast_cache is not None and order.policy.reads("cached"):
            for state in order.waiting:
                self.scheduler._tailcast_cache.look_up([state])
                request = self.scheduler.requests[state.request_id]
                _, num_tokens, _ = manager.get_computed_blocks(request)
                assert state.cached_tokens == num_tokens, (state.cached_tokens, num_tokens)


if __name__ == "__main__":
    main()
