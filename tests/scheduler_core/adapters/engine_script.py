"""Run by vLLM's Python: vLLM's real scheduler, with our order or its own; prints what happened as one line of JSON.

python -m tests.scheduler_core.adapters.engine_script '{"model": ..., "tailcast": {...} or null, "lengths": [...], ...}'

With "pipelined" there is no model, but one that only counts: vLLM executes nothing asynchronously on CPUs (docs/vllm.md says
why), but its scheduler can be driven so. Each step is planned before the one before it has its tokens, as on GPUs.
"""

import json
import os
import random
import sys
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
#: Token of the test's model that ends an output.
EOS = 1
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "enable_prefix_caching": False}


def main() -> None:
    task = json.loads(sys.argv[1])
    options = (
        OPTIONS | {"model": task["model"], "max_num_seqs": task["max_num_seqs"]} | task.get("options", {})
    )
    if task["tailcast"]:
        options["additional_config"] = {"tailcast": task["tailcast"]}
    result = (pipelined if task.get("pipelined") else stepped)(options, task)
    sys.stdout.write("RESULT " + json.dumps(result) + "\n")
    sys.stdout.flush()
    os._exit(0)


def stepped(options: dict[str, Any], task: dict[str, Any]) -> dict[str, Any]:
    """A whole engine, step by step; aborts some of its requests in random steps."""
    from vllm import EngineArgs, LLMEngine, SamplingParams

    options |= {"enforce_eager": True, "disable_log_stats": True, "gpu_memory_utilization": 0.3}
    if task.get("blocks"):
        options |= {"num_gpu_blocks_override": task["blocks"], "block_size": 32}
    if task["tailcast"]:
        options["scheduler_cls"] = "scheduler_core.adapters.vllm.TailcastScheduler"
    engine = LLMEngine.from_engine_args(EngineArgs(**options))
    scheduler = engine.engine_core.engine_core.scheduler
    chance = random.Random(0)
    to_abort = {name: chance.randrange(1, 60) for name in task.get("abort", [])}
    finished: dict[str, list[int]] = {}
    preemptions: dict[str, int] = {}
    scores: dict[str, Any] = {}
    levels: dict[str, tuple[int, bool]] = {}
    kept = True

    def add(number: int, length: int) -> None:
        if "chats" in task:
            chat = [{"role": "user", "content": task["chats"][number]}]
            prompt = {"prompt_token_ids": ids_of_chat(task["model"], chat)}
            engine.add_request(f"r{number}", prompt, SamplingParams(max_tokens=length, temperature=0.0))
            return
        # Without EOS; ignore_eos would tell the scheduler the length.
        # vLLM has no bias of logits with speculative tokens.
        endless: dict[str, Any] = (
            {"ignore_eos": True} if task.get("speculates") else {"logit_bias": {EOS: -100.0}}
        )
        sampling = SamplingParams(max_tokens=length, temperature=0.0, **endless)
        word = 5 + task.get("predicted", task["lengths"])[number]
        engine.add_request(f"r{number}", {"prompt_token_ids": [word] * (3 + number % 5)}, sampling)

    for step in arrivals(task, scheduler, add, lambda: engine.has_unfinished_requests()):
        for name, due in list(to_abort.items()):
            if step >= due:
                del to_abort[name]
                engine.abort_request([name])
        for output in engine.step():
            if output.finished and output.outputs[0].finish_reason != "abort":
                finished[output.request_id] = list(output.outputs[0].token_ids)
        preemptions |= {name: request.num_preemptions for name, request in scheduler.requests.items()}
        kept &= scores_are_kept(scheduler, scores)
        levels |= predicted_levels(scheduler)
    kinds = [
        kind.__name__
        for kind in type(scheduler).__mro__
        if kind.__name__.endswith(("Scheduler", "Scheduling"))
    ][:3]
    result = {"finished": finished, "preemptions": sum(preemptions.values()), "scores_kept": kept}
    return result | {"left": left(scheduler), "scheduler": kinds, "metrics": metrics(), "levels": levels}


def ids_of_chat(model: str, chat: list[dict[str, str]]) -> list[int]:
    """Token ids of a chat by the template of the model."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def predicted_levels(scheduler: Any) -> dict[str, tuple[int, bool]]:
    """Predicted urgency level of each live request that has one, and whether it also has a length."""
    order = getattr(scheduler, "_tailcast_order", None)
    states = {} if order is None else order.states
    return {  # vLLM adds a suffix to the id
        name.partition("-")[0]: (state.urgency.level, state.prediction is not None)
        for name, state in states.items()
        if state.urgency is not None
    }


def pipelined(options: dict[str, Any], task: dict[str, Any]) -> dict[str, Any]:
    """The scheduler alone; two steps are always under way."""
    import torch
    from vllm import EngineArgs, SamplingParams
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    config = EngineArgs(**options, block_size=32, async_scheduling=True).create_engine_config()
    engine_says = bool(config.scheduler_config.async_scheduling)
    config.scheduler_config.async_scheduling = True
    config.cache_config.num_gpu_blocks = task["blocks"]
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
    cache = KVCacheConfig(task["blocks"], [], [KVCacheGroupSpec(["layer"], spec)])
    kind: Any = AsyncScheduler
    if task["tailcast"]:
        from scheduler_core.adapters.vllm import scheduler_class

        kind = scheduler_class()
    manager = StructuredOutputManager(config)
    parts = {"vllm_config": config, "kv_cache_config": cache, "structured_output_manager": manager}
    scheduler = kind(**parts, block_size=32)
    requests: list[Any] = []
    counts: dict[str, int] = {}
    finished: dict[str, int] = {}
    scores: dict[str, Any] = {}
    under_way: deque[tuple[Any, list[str], dict[str, bool]]] = deque()
    num_pipelined, num_steps, kept = 0, 0, True

    def add(number: int, length: int) -> None:
        sampling = SamplingParams(max_tokens=length, temperature=0.0)
        sampling.update_from_generation_config({}, EOS)
        requests.append(Request(f"r{number}", [5 + length] * (3 + number % 5), sampling, None))
        scheduler.add_request(requests[-1])

    for _ in arrivals(task | {"wait": True}, scheduler, add, lambda: scheduler.requests or under_way):
        num_steps += 1
        plan = scheduler.schedule()
        names = list(plan.num_scheduled_tokens)
        if names:
            samples = {name: not scheduler.requests[name].is_prefill_chunk for name in names}
            num_pipelined += bool(under_way)
            under_way.append((plan, names, samples))
        if len(under_way) == 2 or (under_way and not names):
            for output in deliver(scheduler, *under_way.popleft()):
                name = output.request_id
                counts[name] = counts.get(name, 0) + len(output.new_token_ids)
                if output.finish_reason is not None:
                    finished[name] = counts[name]
        kept &= scores_are_kept(scheduler, scores)
    preemptions = sum(request.num_preemptions for request in requests)
    result = {"finished": finished, "preemptions": preemptions, "scores_kept": kept, "left": left(scheduler)}
    return result | {"pipelined": num_pipelined, "steps": num_steps, "engine_says": engine_says}


class CountedEvents(deque[Any]):
    """Predictions that sets an event when there are so many."""

    def __init__(self, is_full: threading.Event, num: int) -> None:
        super().__init__()
        self._is_full, self._num = is_full, num

    def append(self, event: Any) -> None:
        super().append(event)
        if len(self) >= self._num:
            self._is_full.set()


def arrivals(task: dict[str, Any], scheduler: Any, add: Any, is_busy: Any) -> Iterator[int]:
    """Numbers of steps until all requests are done; the first ones are there at once, others come as steps go by."""
    later = list(enumerate(task["lengths"]))
    thread = getattr(scheduler, "_tailcast_thread", None)
    is_predicted = threading.Event()
    if thread is not None:
        thread._events = CountedEvents(is_predicted, task["at_once"])
    for _ in range(task["at_once"]):
        add(*later.pop(0))
    # The first requests are predicted before the first step, so that the order is that of the policy alone.
    if thread is not None and task.get("wait"):
        assert is_predicted.wait(120), "no predictions"
    step = 0
    while is_busy() or later:
        step += 1
        assert step < 20000, "never ends"
        if later and step % 3 == 0:
            add(*later.pop(0))
        yield step


def deliver(scheduler: Any, plan: Any, names: list[str], samples: dict[str, bool]) -> list[Any]:
    """The tokens of a step reach the scheduler; what clients get."""
    from vllm.v1.outputs import ModelRunnerOutput

    rows = {name: row for row, name in enumerate(names)}
    tokens = [[7] if samples[name] else [] for name in names]
    result = ModelRunnerOutput(req_ids=names, req_id_to_index=rows, sampled_token_ids=tokens)
    return [one for outputs in scheduler.update_from_output(plan, result).values() for one in outputs.outputs]


def scores_are_kept(scheduler: Any, scores: dict[str, Any]) -> bool:
    """Whether every live request still has the prediction it once had, also those that lost their place."""
    kept = True
    order = getattr(scheduler, "_tailcast_order", None)
    for request_id, state in () if order is None else order.states.items():
        if request_id in scores:
            kept &= state.prediction == scores[request_id]
        elif state.prediction is not None:
            scores[request_id] = state.prediction
    return kept


def left(scheduler: Any) -> dict[str, int]:
    """What should be empty at the end."""
    order = getattr(scheduler, "_tailcast_order", None)
    parts = {"requests": scheduler.requests, "waiting": scheduler.waiting, "running": scheduler.running}
    return {name: len(part) for name, part in parts.items()} | {"states": len(order.states) if order else 0}


def metrics() -> dict[str, float]:
    from prometheus_client import REGISTRY

    samples = (sample for family in REGISTRY.collect() for sample in family.samples)
    return {
        f"{sample.name}{sorted(sample.labels.values())}": sample.value
        for sample in samples
        if sample.name.startswith("tailcast_") and sample.name.endswith("_total")
    }


if __name__ == "__main__":
    main()
