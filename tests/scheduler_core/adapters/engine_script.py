"""Run by vLLM's Python: one real engine, stepped by hand; prints what happened as one line of JSON.

python -m tests.scheduler_core.adapters.engine_script '{"model": ..., "tailcast": {...} or null, ...}'
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def main() -> None:
    from vllm import EngineArgs, LLMEngine

    task = json.loads(sys.argv[1])
    arguments: dict[str, Any] = {
        "model": task["model"],
        "dtype": "float32",
        "enforce_eager": True,
        "max_num_seqs": task["max_num_seqs"],
        "max_model_len": 96,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "gpu_memory_utilization": 0.3,
    }
    if task.get("blocks"):
        arguments |= {"num_gpu_blocks_override": task["blocks"], "block_size": 32}
    if task.get("tailcast"):
        arguments["scheduler_cls"] = "scheduler_core.adapters.vllm.TailcastScheduler"
        arguments["additional_config"] = {"tailcast": task["tailcast"]}
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    sys.stdout.write("RESULT " + json.dumps(serve(engine, task)) + "\n")
    sys.stdout.flush()
    os._exit(0)


def serve(engine: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Serves requests of given lengths until all are done; aborts some of them in random steps."""
    from vllm import SamplingParams

    scheduler = engine.engine_core.engine_core.scheduler
    chance = random.Random(task.get("seed", 0))
    admitted: list[str] = []
    finished: dict[str, list[int]] = {}
    order: list[str] = []
    kept = True
    preempted: dict[str, int] = {}
    scores: dict[str, Any] = {}
    names = {}
    to_abort = {name: chance.randrange(1, 60) for name in task.get("abort", [])}

    def add(number: int, length: int) -> None:
        parameters = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0)
        ids = [5 + length] * (3 + number % 5)
        engine.add_request(f"r{number}", {"prompt_token_ids": ids}, parameters)

    lengths = task["lengths"]
    for number, length in enumerate(lengths[: task["at_once"]]):
        add(number, length)
    wait_for_predictions(scheduler, task)
    later = list(enumerate(lengths))[task["at_once"] :]
    step = 0
    while engine.has_unfinished_requests() or later:
        step += 1
        if later and step % 3 == 0:
            add(*later.pop(0))
        for name, when in list(to_abort.items()):
            if step >= when:
                del to_abort[name]
                engine.abort_request([name])
        for output in engine.step():
            name = output.request_id
            if output.finished and output.outputs[0].finish_reason != "abort":
                finished[name] = list(output.outputs[0].token_ids)
                order.append(name)
        for internal, request in scheduler.requests.items():
            name = internal.split("-")[0]
            names[internal] = name
            if request.num_computed_tokens and name not in admitted:
                admitted.append(name)
            preempted[name] = request.num_preemptions
        if task.get("tailcast"):
            kept &= scores_are_kept(scheduler, scores)
        assert step < 20000, "never ends"
    left = {
        "requests": len(scheduler.requests),
        "waiting": len(scheduler.waiting),
        "running": len(scheduler.running),
    }
    if task.get("tailcast"):
        left["states"] = len(scheduler._tailcast_order.states)
    return {
        "admitted": admitted, "order": order, "finished": finished, "left": left, "scores_kept": kept,
        "preemptions": sum(preempted.values()), "scheduler": [kind.__name__ for kind in type(scheduler).__mro__[:3]],
        "steps": step, "metrics": metrics(), "async": bool(scheduler.scheduler_config.async_scheduling),
    }  # fmt: skip


def scores_are_kept(scheduler: Any, seen: dict[str, Any]) -> bool:
    """Whether every live request still has the prediction it once had, also those that lost their place."""
    kept = True
    for request_id, state in scheduler._tailcast_order.states.items():
        if request_id in seen:
            kept &= state.prediction == seen[request_id]
        elif state.prediction is not None:
            seen[request_id] = state.prediction
    return kept


def wait_for_predictions(scheduler: Any, task: dict[str, Any]) -> None:
    """The first requests shall be known before the first step, so that the order is that of the policy alone."""
    thread = getattr(scheduler, "_tailcast_thread", None)
    end = time.monotonic() + 30
    while thread is not None and task.get("wait") and len(thread._events) < task["at_once"]:
        assert time.monotonic() < end, "no predictions"
        time.sleep(0.01)


def metrics() -> dict[str, float]:
    from prometheus_client import REGISTRY

    return {
        f"{sample.name}{sorted(sample.labels.values())}": sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name.startswith("tailcast_") and sample.name.endswith("_total")
    }


if __name__ == "__main__":
    main()
