"""Devices of one replica with the served model: data sheets of GPUs, parallelism, data types, and memory for the KV cache."""

import math
from dataclasses import dataclass
from functools import cached_property

from scheduler_core.errors import InputError, unknown_name
from scheduler_core.ranges import FINITE, POSITIVE, check_choice, check_ranges
from scheduler_core.simulator.step_time.model_size import WEIGHT_BITS, ModelSize, model_size

#: Devices of a node, which are linked by `Gpu.link_bytes_per_s`; between nodes: 400 Gb/s per device.
NODE_DEVICES, NODE_LINK_BYTES_PER_S = 8, 50e9
#: Memory that the driver, the collectives and captured graphs take on each device: about what vLLM's logs show.
CONTEXT_BYTES = 1.0e9
KV_BYTES = {"bf16": 2, "fp8": 1}
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    """Data sheet of a GPU.

    Attributes:
        architecture: Generation of the device, by which the achieved fraction of the operations differs.
        flops: Dense 16-bit tensor-core operations per second.
        fp8_flops: The same in 8 bit; those of 16 bit if the device has no such units.
        bytes_per_s: Bandwidth of its memory.
        memory_bytes: Memory that programs see, somewhat other than the name says.
        link_bytes_per_s: Bandwidth to the other devices of the node, in one direction.
    """

    architecture: str
    flops: float
    fp8_flops: float
    bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float
    source: str


_HALF = "half of the figures with sparsity"
GPUS: dict[str, Gpu] = {
    "a100-40gb": Gpu("ampere", 312e12, 312e12, 1555e9, 39.4 * GIB, 300e9, "A100 Tensor Core GPU, 40GB SXM; NVLink 3"),
    "a100-80gb": Gpu("ampere", 312e12, 312e12, 2039e9, 79.1 * GIB, 300e9, "A100 Tensor Core GPU, 80GB SXM; NVLink 3"),
    "h100-80gb": Gpu("hopper", 989.4e12, 1979e12, 3350e9, 79.1 * GIB, 450e9, f"H100 SXM5, {_HALF}; NVLink 4"),
    "h200-141gb": Gpu("hopper", 989.4e12, 1979e12, 4800e9, 139.8 * GIB, 450e9, f"H200 SXM, {_HALF}; NVLink 4"),
    "b200-180gb": Gpu("blackwell", 2250e12, 4500e12, 8000e9, 178.3 * GIB, 900e9, f"HGX B200, {_HALF}; NVLink 5"),
    "l40s-48gb": Gpu("ada", 362e12, 733e12, 864e9, 44.4 * GIB, 32e9, f"L40S, {_HALF}; PCIe 4.0 x16"),
    "mi300x-192gb": Gpu("cdna3", 1307.4e12, 2614.9e12, 5300e9, 191.5 * GIB, 448e9, "Instinct MI300X; 7 Infinity Fabric links"),
    "a6000-48gb": Gpu("ampere", 154.8e12, 154.8e12, 768e9, 47.5 * GIB, 32e9, f"RTX A6000, {_HALF}; PCIe 4.0 x16"),
    "rtx6000ada-48gb": Gpu("ada", 364.2e12, 728.5e12, 960e9, 47.5 * GIB, 32e9, f"RTX 6000 Ada, {_HALF}; PCIe 4.0 x16"),
    "a5000-24gb": Gpu("ampere", 111.1e12, 111.1e12, 768e9, 23.7 * GIB, 32e9, f"RTX A5000, {_HALF}; PCIe 4.0 x16"),
}  # fmt: skip


def find_gpu(name: str) -> Gpu:
    """The device of `GPUS` by its name, in which capitals do not matter, or by the part before the memory if only one has it;
    `InputError` if there is none."""
    lower = name.lower()
    matches = [key for key in GPUS if lower in (key, key.partition("-")[0])]
    if len(matches) != 1:
        raise unknown_name("gpu", name, matches or [*GPUS])
    return GPUS[matches[0]]


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A served model on the devices of one replica. `InputError` if a value is invalid, or it does not fit."""

    model: str = "llama-3-8b"
    """Served model: a name in `MODELS`, or the path of a Hugging Face config.json."""
    gpu: str = "a100-80gb"
    """Device, see `GPUS`."""
    tensor_parallel: int = 1
    """Number of devices that share every layer."""
    pipeline_parallel: int = 1
    """Number of groups of such devices with a part of the layers each."""
    expert_parallel: bool = False
    """Each device of a group has whole experts, instead of a part of every expert."""
    weights: str | None = None
    """Data type of the weights: bf16, fp8, int4. Unset: that of the model's config."""
    kv_cache: str = "bf16"
    """Data type of keys and values: bf16, fp8."""
    memory_utilization: float = 0.9
    """Fraction of the device memory for weights, activations and KV cache."""
    link_bytes_per_s: float | None = None
    """Bandwidth between the devices of a group, in one direction. Unset: that of the data sheet, or 400 Gb/s per device for
    groups of more than 8, which are in several nodes."""

    def __post_init__(self) -> None:
        check_ranges(self, tensor_parallel=(1, 2**16), memory_utilization=(POSITIVE, 1))
        check_ranges(self, pipeline_parallel=(1, self.size.num_layers))
        if self.weights is not None:
            check_choice("weights", self.weights, WEIGHT_BITS)
        check_choice("kv_cache", self.kv_cache, KV_BYTES)
        check_ranges(self, link_bytes_per_s=(POSITIVE, FINITE))
        sizes = self.size.tensor_parallel_sizes
        if self.tensor_parallel not in sizes:
            allowed = ", ".join(map(str, sizes)) + f", by the attention heads of {self.model}"
            raise InputError("tensor_parallel", self.tensor_parallel, allowed)
        if self.expert_parallel and not self.size.expert_parameters:
            raise InputError("expert_parallel", True, f"false, as {self.model} has no experts")
        self.num_kv_blocks()

    @cached_property
    def size(self) -> ModelSize:
        return model_size(self.model)

    @cached_property
    def device(self) -> Gpu:
        return find_gpu(self.gpu)

    @property
    def num_devices(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def weight_types(self) -> tuple[str, str]:
        """Data types of the weights in the layers, and of those of their experts."""
        return (self.weights or self.size.weights, self.weights or self.size.expert_weights)

    @property
    def weight_bytes(self) -> float:
        """Memory for all weights together."""
        size = self.size
        dense, expert = (WEIGHT_BITS[name] / 8 for name in self.weight_types)
        embeddings = size.num_parameters - size.layer_parameters
        return dense * size.dense_parameters + expert * size.expert_parameters + 2.0 * embeddings

    @property
    def _link_bytes_per_s(self) -> float:
        """Bandwidth of the slowest link between the devices that share a layer."""
        if self.link_bytes_per_s is not None:
            return self.link_bytes_per_s
        return self.device.link_bytes_per_s if self.tensor_parallel <= NODE_DEVICES else NODE_LINK_BYTES_PER_S

    def num_kv_blocks(
        self, block_tokens: int = 16, max_num_seqs: int = 128, max_num_batched_tokens: int = 2048
    ) -> int:
        """Number of blocks of the KV cache that fit beside weights and activations; `InputError`, with what would fit, if
        none does. In layers with a window, each of `max_num_seqs` requests holds no more tokens than that."""
        usable = self._usable_bytes(max_num_seqs, max_num_batched_tokens)
        free = usable - self.weight_bytes / self.num_devices
        all_bytes, windows_bytes = self._kv_token_bytes()
        tokens = free / all_bytes
        if windows_bytes and all_bytes > windows_bytes:
            held = max_num_seqs * self._window_bytes()
            tokens = max(tokens, (free - held) / (all_bytes - windows_bytes))
        blocks = int(tokens // block_tokens)
        if blocks <= 0:
            raise self._too_large(usable, block_tokens * all_bytes)
        return blocks

    def _kv_token_bytes(self) -> tuple[float, float]:
        """Bytes of a token in the KV cache of a device: of all layers, and of those with a window."""
        values = [0.0, 0.0]
        for layer, num in self.size.layers:
            held = num * layer.kv_values / min(self.tensor_parallel, layer.kv_heads)
            values[0] += held
            values[1] += held if layer.window else 0.0
        scale = KV_BYTES[self.kv_cache] / self.pipeline_parallel
        return values[0] * scale, values[1] * scale

    def _window_bytes(self) -> float:
        """Bytes of full windows of a request on a device."""
        scale = KV_BYTES[self.kv_cache] / self.pipeline_parallel
        return scale * sum(
            num * layer.kv_values * (layer.window or 0) / min(self.tensor_parallel, layer.kv_heads)
            for layer, num in self.size.layers
        )

    def _usable_bytes(self, max_num_seqs: int, max_num_batched_tokens: int) -> float:
        """Memory of a device for weights and KV cache: activations are four hidden vectors per token and the widest
        feed-forward layer, and the logits of every request in 32 bit."""
        size = self.size
        widest = max(
            (layer.feed_forward + layer.experts_per_token * layer.expert) / size.hidden
            for layer, _ in size.layers
        )
        activations = max_num_batched_tokens * 2 * (4 * size.hidden + widest / self.tensor_parallel)
        logits = max_num_seqs * 4 * size.vocabulary
        usable = self.device.memory_bytes * self.memory_utilization
        return usable - CONTEXT_BYTES - activations - logits

    def _too_large(self, usable: float, block: float) -> InputError:
        """The refusal of a model that does not fit, with devices and data types with which it would."""
        weights = self.weight_bytes
        per_device = max(usable - block, 1.0)
        need = math.ceil(weights / self.pipeline_parallel / per_device) if usable > block else 2**16
        fitting = [num for num in self.size.tensor_parallel_sizes if num >= need]
        kind = {"bf16": "16-bit", "fp8": "8-bit", "int4": "4-bit"}[self.weight_types[1]]
        allowed = f"at least {fitting[0]}" if fitting else "no number of these devices"
        allowed += (
            f": the {kind} weights of {self.model} take {weights / 1e9:.0f} GB, and one {self.gpu} has "
            f"{max(usable, 0.0) / 1e9:.0f} GB for weights and KV cache"
        )
        bits = WEIGHT_BITS[self.weight_types[1]]
        smaller = [
            name
            for name in ("fp8", "int4")
            if WEIGHT_BITS[name] < bits and weights * WEIGHT_BITS[name] / bits < per_device * self.num_devices
        ]
        others = [
            name
            for name, gpu in GPUS.items()
            if weights / self.num_devices + block
            < usable + (gpu.memory_bytes - self.device.memory_bytes) * self.memory_utilization
        ]
        if smaller:
            allowed += f"; or weights {smaller[0]}"
        if others:
            allowed += f"; or gpu {others[0]}"
        return InputError("tensor_parallel", self.tensor_parallel, allowed)
