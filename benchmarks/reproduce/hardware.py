"""Step times of models on GPUs from their data sheets: a memory-bound base, compute per token, cache reads per token."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_core.simulator.step_time import LinearStepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU's data sheet.

    Attributes:
        bytes_per_s: Memory bandwidth.
        flops: Dense fp16 operations per second.
    """

    bytes_per_s: float
    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model's data sheet.

    Attributes:
        parameters: Number of parameters.
        kv_bytes: Bytes of keys and values per token, fp16.
    """

    parameters: float
    kv_bytes: float


A100_80 = Gpu(bytes_per_s=2.039e12, flops=312e12)
A6000 = Gpu(bytes_per_s=0.768e12, flops=154.8e12)
H100 = Gpu(bytes_per_s=3.35e12, flops=989e12)
LLAMA_2_7B = Model(parameters=6.74e9, kv_bytes=32 * 2 * 4096 * 2)
LLAMA_3_8B = Model(parameters=8.03e9, kv_bytes=32 * 2 * 1024 * 2)
CODELLAMA_34B = Model(parameters=33.7e9, kv_bytes=48 * 2 * 1024 * 2)

#: Shares of the data sheet's bandwidth and operations that kernels reach, as commonly measured.
MEMORY_EFFICIENCY = 0.8
COMPUTE_EFFICIENCY = 0.6


def step_time(model: Model, gpu: Gpu) -> LinearStepTime:
    """Weights once per step, 2 operations per parameter and token, the cache of every context token read once.

    A sum, where a roofline takes the larger one: at most twice too slow, and continuous.
    """
    bandwidth = gpu.bytes_per_s * MEMORY_EFFICIENCY
    per_token = 2 * model.parameters / (gpu.flops * COMPUTE_EFFICIENCY)
    return LinearStepTime(
        base_s=2 * model.parameters / bandwidth,
        per_prefill_token_s=per_token,
        per_decode_s=per_token,
        per_context_token_s=model.kv_bytes / bandwidth,
    )
