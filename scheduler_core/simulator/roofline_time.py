"""Step times from data sheets: work over what the device can do, computing or reading, whichever takes longer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_core.errors import InputError
from scheduler_core.simulator.data_sheets import GPUS, MODELS, Gpu, ModelSize
from scheduler_core.simulator.decode_run import DecodeRun, PolynomialRun
from scheduler_core.simulator.step_time import StepWork, total_of


@dataclass(frozen=True, kw_only=True)
class RooflineStepTime:
    """t = overhead_s + max(F_w / f, B_w / b) + max(F_a / f, B_a / b) for a chunk each, and once for all decodes + copies.

    Linear layers: F_w = 2 W tokens, plus 2 V per sampled token; B_w = 2 (W + V), the weights, read once per step.
    Attention of c tokens after k: F_a = 4 L H c (k + (c + 1) / 2), B_a = the keys and values of k + c tokens.

    | symbol | meaning | unit |
    | --- | --- | --- |
    | W, V | weights of the layers; of the output embedding | - |
    | L, H | layers; query heads times their size | - |
    | f, b | efficiency times operations and bytes per second of all devices of the replica | 1/s |

    Source: Williams et al. 2009 (roofline); the operations are those of any decoder-only transformer. The efficiencies
    are what such kernels typically reach, no measurement of yours: within 20 % of Vidur's profile of Llama-3-8B on an A100
    from 1 to 128 decodes and from 256 to 4,096 prompt tokens (tests). For numbers to rely on, calibrate.

    Raises:
        InputError: Model or GPU are unknown, or a value is outside its range.
    """

    model: str = "llama-3-8b"
    """Size of the served model, see `data_sheets.MODELS`."""
    gpu: str = "a100-80gb"
    """Device, see `data_sheets.GPUS`."""
    tensor_parallel: int = 1
    """Devices that share every layer."""
    compute_efficiency: float = 0.6
    """Share of the peak operations that is reached, in (0, 1]."""
    memory_efficiency: float = 0.75
    """Share of the peak bandwidth that is reached, in (0, 1]."""
    overhead_s: float = 1e-3
    """Seconds every step takes beside: launches, sampling, the host."""
    collective_s: float = 2e-5
    """Seconds each of two collectives per layer takes beside its transfer, with several devices."""
    link_bytes_per_s: float = 300e9
    """Bandwidth between the devices of a replica, in one direction."""
    host_bytes_per_s: float = 25e9
    """Bandwidth to the host's memory; 25e9 is PCIe 4.0 x16."""

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise InputError("model", self.model, ", ".join(MODELS))
        if self.gpu not in GPUS:
            raise InputError("gpu", self.gpu, ", ".join(GPUS))
        if self.tensor_parallel <= 0:
            raise InputError("tensor_parallel", self.tensor_parallel, "integers > 0")
        for name in ("compute_efficiency", "memory_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise InputError(name, getattr(self, name), "numbers in (0, 1]")
        for name in ("overhead_s", "collective_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(name, getattr(self, name), "seconds >= 0")
        for name in ("link_bytes_per_s", "host_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise InputError(name, getattr(self, name), "numbers > 0")

    @property
    def size(self) -> ModelSize:
        """The model's data sheet."""
        return MODELS[self.model]

    @property
    def device(self) -> Gpu:
        """The GPU's data sheet."""
        return GPUS[self.gpu]

    @property
    def _flops(self) -> float:
        return self.device.flops * self.compute_efficiency * self.tensor_parallel

    @property
    def _bytes_per_s(self) -> float:
        return self.device.bytes_per_s * self.memory_efficiency * self.tensor_parallel

    def num_kv_blocks(self, kv_block_tokens: int = 16, memory_share: float = 0.9) -> int:
        """Blocks of the KV cache that the devices have room for beside the weights.

        Raises:
            InputError: The weights do not fit.
        """
        room = self.device.memory_bytes * self.tensor_parallel * memory_share - 2 * self.size.num_parameters
        blocks = int(room // (self.size.kv_bytes_per_token * kv_block_tokens))
        if blocks <= 0:
            raise InputError(
                "tensor_parallel", self.tensor_parallel, f"enough {self.gpu} for the weights of {self.model}"
            )
        return blocks

    def step_s(self, work: StepWork) -> float:
        """See `StepTime`."""
        sampled = len(work.contexts) + sum([chunk.is_last for chunk in work.prefills])
        seconds = self._linear(work.num_tokens, sampled) + self._decodes(
            len(work.contexts), total_of(work.contexts)
        )
        for chunk in work.prefills:
            seconds += self._chunk(chunk.start_token, chunk.num_tokens)
        return seconds + work.num_swapped_tokens * self.size.kv_bytes_per_token / self.host_bytes_per_s

    def run(self, contexts: Sequence[int], start_s: float) -> DecodeRun:
        """The attention of decodes is linear in the sum of their contexts, which grows by one per request and step."""
        num = len(contexts)
        first_s = self._linear(num, num) + self._decodes(num, total_of(contexts))
        return PolynomialRun(start_s, first_s, self._decodes(num, num) - self._decodes(num, 0))

    def _linear(self, num_tokens: int, num_sampled: int) -> float:
        size, devices = self.size, self.tensor_parallel
        output = size.vocabulary * size.hidden
        computing = 2.0 * (size.layer_parameters * num_tokens + output * num_sampled) / self._flops
        reading = 2.0 * (size.layer_parameters + (output if num_sampled else 0)) / self._bytes_per_s
        seconds = self.overhead_s + max(computing, reading)
        if devices > 1:
            sent = 2 * size.hidden * num_tokens * 2 * (devices - 1) / devices
            seconds += 2 * size.num_layers * (self.collective_s + sent / self.link_bytes_per_s)
        return seconds

    def _decodes(self, num: int, context: int) -> float:
        """Attention of decodes, each of which also reads what it has just written."""
        tokens = context + num
        per_token = 4.0 * self.size.num_layers * self.size.num_heads * self.size.head
        reading = self.size.kv_bytes_per_token / self._bytes_per_s
        return tokens * max(per_token / self._flops, reading)

    def _chunk(self, start: int, num: int) -> float:
        per_token = 4.0 * self.size.num_layers * self.size.num_heads * self.size.head
        computing = per_token * num * (start + (num + 1) / 2) / self._flops
        return max(computing, (start + num) * self.size.kv_bytes_per_token / self._bytes_per_s)
