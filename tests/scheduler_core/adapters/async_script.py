"""Run by vLLM's Python: vLLM's real scheduler, asynchronous, with our order, and a model that only counts.

vLLM executes nothing asynchronously on CPUs (docs/vllm.md says why), but its scheduler does not mind: each step is planned
here before the one before it has its tokens, as vLLM's engine does on GPUs. Prints what happened as one line of JSON.

python -m tests.scheduler_core.adapters.async_script '{"model": ..., "tailcast": {...} or null, "lengths": [...], ...}'
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from typing import Any


def main() -> None:
    import torch
    from vllm import EngineArgs, SamplingParams
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    task = json.loads(sys.argv[1])
    arguments = EngineArgs(
        model=task["model"], dtype="float32", max_num_seqs=task["max_num_seqs"], max_model_len=96,
        enable_prefix_caching=False, block_size=32, async_scheduling=True,
        additional_config={"tailcast": task["tailcast"]} if task["tailcast"] else {},
    )  # fmt: skip
    config = arguments.create_engine_config()
    engine_says = bool(config.scheduler_config.async_scheduling)
    config.scheduler_config.async_scheduling = True
    config.cache_config.num_gpu_blocks = task["blocks"]
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
    cache = KVCacheConfig(task["blocks"], [], [KVCacheGroupSpec(["layer"], spec)])
    kind: Any = AsyncScheduler
    if task["tailcast"]:
        from scheduler_core.adapters.vllm import scheduler_class

        kind = scheduler_class()
    scheduler = kind(
        vllm_config=config, kv_cache_config=cache, structured_output_manager=StructuredOutputManager(config), block_size=32
    )  # fmt: skip
    requests = []
    for number, length in enumerate(task["lengths"]):
        sampling = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0)
        sampling.update_from_generation_config({}, 1)
        requests.append(Request(f"r{number}", [5 + length] * (3 + number % 5), sampling, None))
    found = serve(scheduler, requests, task)
    sys.stdout.write("RESULT " + json.dumps(found | {"engine_says": engine_says}) + "\n")
    sys.stdout.flush()
    os._exit(0)


def serve(scheduler: Any, requests: list[Any], task: dict[str, Any]) -> dict[str, Any]:
    """Serves requests, the later ones as steps go by; two steps are always under way."""
    from tests.scheduler_core.adapters.engine_script import scores_are_kept, wait_for_predictions

    finished: dict[str, int] = {}
    counts: dict[str, int] = {}
    scores: dict[str, Any] = {}
    under_way: deque[tuple[Any, list[str], dict[str, bool]]] = deque()
    num_pipelined = steps = preemptions = 0
    kept = True
    for request in requests[: task["at_once"]]:
        scheduler.add_request(request)
    wait_for_predictions(scheduler, task | {"wait": True})
    later = requests[task["at_once"] :]
    while scheduler.requests or later or under_way:
        steps += 1
        assert steps < 20000, "never ends"
        if later and steps % 3 == 0:
            scheduler.add_request(later.pop(0))
        plan = scheduler.schedule()
        names = list(plan.num_scheduled_tokens)
        if names:
            samples = {name: not scheduler.requests[name].is_prefill_chunk for name in names}
            num_pipelined += bool(under_way)
            under_way.append((plan, names, samples))
        if len(under_way) == 2 or (under_way and not names):
            for output in deliver(scheduler, *under_way.popleft()):
                counts[output.request_id] = counts.get(output.request_id, 0) + len(output.new_token_ids)
                if output.finish_reason is not None:
                    finished[output.request_id] = counts[output.request_id]
        if task["tailcast"]:
            kept &= scores_are_kept(scheduler, scores)
    preemptions = sum(request.num_preemptions for request in requests)
    left = {"waiting": len(scheduler.waiting), "running": len(scheduler.running)}
    if task["tailcast"]:
        left["states"] = len(scheduler._tailcast_order.states)
    return {
        "finished": finished, "order": list(finished), "preemptions": preemptions, "left": left, "scores_kept": kept,
        "pipelined": num_pipelined, "steps": steps,
    }  # fmt: skip


def deliver(scheduler: Any, plan: Any, names: list[str], samples: dict[str, bool]) -> list[Any]:
    """The tokens of a step reach the scheduler; what it tells the clients."""
    from vllm.v1.outputs import ModelRunnerOutput

    result = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: row for row, name in enumerate(names)},
        sampled_token_ids=[[7] if samples[name] else [] for name in names],
    )
    told = scheduler.update_from_output(plan, result)
    return [output for outputs in told.values() for output in outputs.outputs]


if __name__ == "__main__":
    main()
