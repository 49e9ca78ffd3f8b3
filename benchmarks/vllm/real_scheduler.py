"""vLLM's real scheduler and KV cache, or ours in them, without a model; imported only by vLLM's Python."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from vllm import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.vllm.model import NAME, packaged_model
from scheduler_core.adapters.vllm import scheduler_class

#: vLLM's own scheduler, among names of policies.
VLLM = "vllm"
BLOCK_TOKENS = 16
#: The token of every output.
TOKEN = 7


def real_scheduler(
    policy: str | None, model: Path, num_blocks: int, settings: Mapping[str, Any], **engine: Any
) -> Any:
    """A scheduler with its KV cache.

    Args:
        policy: Policy of our scheduler; None: vLLM's own scheduler.
        model: Folder of a model, for its configuration.
        num_blocks: Size of the KV cache in blocks of `BLOCK_TOKENS`.
        settings: Other settings of our scheduler.
        **engine: Arguments of vLLM's engine.
    """
    ours = {} if policy is None else {"tailcast": {"policy": policy, **settings}}
    config = EngineArgs(
        model=str(model), dtype="float32", block_size=BLOCK_TOKENS, additional_config=ours, **engine
    ).create_engine_config()
    config.scheduler_config.async_scheduling = True
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=32, dtype=torch.float32)
    kind: Any = AsyncScheduler if policy is None else scheduler_class()
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
    )


def outputs_of(scheduler: Any, plan: Any) -> ModelRunnerOutput:
    """What a model would return for a step: one token for each request whose prompt is processed."""
    names = list(plan.num_scheduled_tokens)
    tokens = [[] if scheduler.requests[name].is_prefill_chunk else [TOKEN] for name in names]
    rows = {name: row for row, name in enumerate(names)}
    return ModelRunnerOutput(req_ids=names, req_id_to_index=rows, sampled_token_ids=tokens)


def in_own_process(run: Callable[..., Any], policy: str, *arguments: Any) -> Any:
    """`run(policy or None, model, *arguments)` in a process of its own, as an engine has, without garbage collection."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_run, (run, policy, *arguments))


@contextmanager
def own_process(run: Callable[..., Any], policy: str, *arguments: Any) -> Iterator[Connection]:
    """As `in_own_process`, but runs on: the last argument of `run` and the result are the ends of a connection. It should end when
    it receives None."""
    context = get_context("spawn")
    ours, its = context.Pipe()
    process = context.Process(target=_run, args=(run, policy, *arguments, its))
    process.start()
    its.close()
    try:
        yield ours
    finally:
        ours.send(None)
        process.join()


def _run(run: Callable[..., Any], policy: str, *arguments: Any) -> Any:
    model = packaged_model(Path(sys.executable).parents[1] / "models" / NAME)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        gc.disable()
        return run(None if policy == VLLM else policy, model, *arguments)
