"""Run by vLLM's Python: batch formers in vLLM's real scheduler and KV cache, with a model that only counts; prints JSON.

python -m tests.scheduler_core.adapters.former_script '{"model": ..., "cases": [{"batching": ..., "policy": ..., ...}]}'

Requests of random prompts, some of which share their beginning, arrive while others run; some are aborted. `depth` steps are
under way at the same time: 2 as with asynchronous scheduling on GPUs, 1 without. With `images`, the size of the encoder cache in
embeddings, and of the encoder's batch, most prompts have images.
"""

import json
import os
import random
import sys
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}  # no model runs

from benchmarks.vllm.real_scheduler import outputs_of, real_scheduler


def run(model: str, case: dict[str, Any]) -> dict[str, Any]:
    """One case; what happened to its requests."""
    from vllm import SamplingParams
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.utils.hashing import sha256
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request, RequestStatus

    chance = random.Random(case.get("seed", 0))
    names = ("batching", "batching_parameters", "predictor")
    settings: dict[str, Any] = {name: case[name] for name in names if name in case}
    scheduler = real_scheduler(
        case.get("policy", "fcfs"), model, case.get("blocks", 60), settings, max_model_len=512,
        max_num_seqs=case.get("seqs", 8), max_num_batched_tokens=case.get("tokens", 512),
        enable_prefix_caching=True, async_scheduling=True,
    )  # fmt: skip
    if images := case.get("images"):
        scheduler.max_num_encoder_input_tokens = images
        scheduler.encoder_cache_manager = EncoderCacheManager(images)
    originals = [
        spoil(scheduler, hook, error, case.get("after", 20)) for hook, error in case.get("raise", {}).items()
    ]
    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)
    lengths: dict[str, int] = {}
    counts: Counter[str] = Counter()
    requests: dict[str, Any] = {}
    under_way: deque[tuple[Any, Any]] = deque()
    seen: Counter[str] = Counter()
    num = case.get("num", 60)
    to_abort = {f"r{number}": chance.randrange(5, 60) for number in range(0, num, 9)}

    def add(number: int) -> None:
        shared = [9] * chance.choice((0, 0, 64, 128))
        prompt = [*shared, *(number + 20 for _ in range(chance.randrange(2, 140)))]
        features = []
        for _ in range(chance.randrange(5) if images else 0):
            content = chance.randrange(12)
            position = PlaceholderRange(offset=len(prompt), length=8 + 8 * (content % 3))
            features.append(MultiModalFeatureSpec(None, "image", f"image{content}", position))
            prompt += [5] * position.length + [6] * chance.randrange(30)
        name, lengths[name] = f"r{number}", chance.randrange(1, 60)
        sampling = SamplingParams(max_tokens=lengths[name], temperature=0.0)
        sampling.extra_args = {"tailcast_tbt_slo_s": chance.choice((0.001, 0.5)), "tailcast_tier": number % 5}
        sampling.update_from_generation_config({}, 1)
        requests[name] = Request(name, prompt, sampling, None, mm_features=features, block_hasher=hasher)
        scheduler.add_request(requests[name])

    step = idle = next_request = 0
    while scheduler.requests or under_way or next_request < num:
        step += 1
        for _ in range(2 if step % 2 and next_request < num else 0):
            add(next_request)
            next_request += 1
        for name in [name for name, due in to_abort.items() if due == step and name in requests]:
            if name in scheduler.requests:
                scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
                seen["aborted"] += 1
            lengths.pop(name)
        plan = scheduler.schedule()
        scheduled = plan.num_scheduled_tokens
        batches = getattr(scheduler, "_tailcast_batches", None)
        if batches is not None and not scheduler._tailcast_failed:
            seen["paused"] += len(scheduler.running) - sum(
                each.request_id in scheduled for each in scheduler.running
            )
            limits = scheduler._tailcast_chunks
            seen["above limit"] += sum(scheduled.get(name, 0) > limit for name, limit in limits.items())
            seen["unplanned prompts"] += sum(
                tokens > 1 and name not in limits and requests[name].num_output_tokens == 0
                for name, tokens in scheduled.items()
            )
            seen["unexecuted"] += len(batches.unexecuted)
        check_images(scheduler, plan, requests, seen)
        assert len(scheduled) <= case.get("seqs", 8), "more requests than the model runner takes"
        idle = 0 if scheduled or under_way else idle + 1
        assert idle < 50, f"nothing runs: {len(scheduler.requests)} requests in step {step}"
        if scheduled:
            under_way.append((plan, outputs_of(scheduler, plan)))
        if len(under_way) == case.get("depth", 1) or (under_way and not scheduled):
            plan, outputs = under_way.popleft()
            for each in scheduler.update_from_output(plan, outputs).values():
                for output in each.outputs:
                    counts[output.request_id] += len(output.new_token_ids)
    seen["steps"] = step
    seen["preemptions"] = sum(request.num_preemptions for request in requests.values())
    for mend in originals:
        mend()
    blocks = scheduler.kv_cache_manager.block_pool
    order = scheduler._tailcast_order
    return {
        "wrong": {name: [counts[name], length] for name, length in lengths.items() if counts[name] != length},
        "left": [
            len(scheduler.requests),
            len(scheduler.waiting),
            len(scheduler.running),
            0 if scheduler._tailcast_failed else len(order.states),
        ],
        "held_images": sum(map(len, scheduler.encoder_cache_manager.cached.values())),
        "used_blocks": blocks.num_gpu_blocks - 1 - blocks.get_num_free_blocks(),
        "failed": scheduler._tailcast_failed,
        "failures": failures(),
        "queue": type(scheduler.waiting).__name__,
        "ours": dict(seen),
    }


def check_images(scheduler: Any, plan: Any, requests: dict[str, Any], seen: Counter[str]) -> None:
    """Every image is in the encoder cache in the step that reads it, and none is computed for later steps."""
    cached = plan.scheduled_cached_reqs
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    starts |= {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
    for name, num_tokens in plan.num_scheduled_tokens.items():
        computed = plan.scheduled_encoder_inputs.get(name, ())
        for number, feature in enumerate(requests[name].mm_features):
            first, length = feature.mm_position.offset, feature.mm_position.length
            is_read = first < starts[name] + num_tokens and first + length > starts[name]
            holders = scheduler.encoder_cache_manager.cached.get(feature.identifier, ())
            assert not is_read or name in holders, f"{name} reads {feature.identifier}, which is not there"
            seen["images"] += number in computed
            seen["early images"] += number in computed and not is_read
    seen["blocked"] += bool(getattr(scheduler, "_tailcast_blocked", ()))


def spoil(scheduler: Any, hook: str, error: str, after: int) -> Callable[[], None]:
    """Lets a hook raise from its call number `after` on; returns a function that mends it."""
    *path, name = hook.split(".")
    owner = scheduler
    for part in path:
        owner = getattr(owner, part)
    kind = type(owner)
    original = getattr(kind, name)
    num_calls = 0

    def raises(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls > after:
            raise RuntimeError(error)
        return original(*args, **kwargs)

    setattr(kind, name, raises)
    return lambda: setattr(kind, name, original)


def failures() -> dict[str, float]:
    """Counted failures by part."""
    from prometheus_client import REGISTRY

    samples = (sample for family in REGISTRY.collect() for sample in family.samples)
    return {each.labels["part"]: each.value for each in samples if each.name == "tailcast_failures_total"}


def main() -> None:
    task = json.loads(sys.argv[1])
    for case in task["cases"]:
        try:
            result = run(task["model"], case)
        except Exception as problem:  # the test shows it
            import traceback

            result = {
                "problem": f"{type(problem).__name__}: {problem}",
                "trace": traceback.format_exc()[-1500:],
            }
        sys.stdout.write("RESULT " + json.dumps(result) + "\n")
        sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
