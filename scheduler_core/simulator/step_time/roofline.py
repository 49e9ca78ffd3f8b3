"""Step times from data sheets: the maximum of compute time and memory time (roofline model)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_core.errors import InputError
from scheduler_core.ranges import FINITE, POSITIVE, check_choice, check_ranges
from scheduler_core.simulator.step_time.base import DecodeRun, PolynomialRun, StepWork, total_of

#: Tokens of a block of the KV cache in `RooflineStepTime.num_kv_blocks`.
KV_BLOCK_TOKENS = 16
#: With several devices: seconds of each of two collectives per layer beside its transfer, and bandwidth in one direction.
COLLECTIVE_S, LINK_BYTES_PER_S = 2e-5, 300e9
#: Bandwidth to host memory: PCIe 4.0 x16.
HOST_BYTES_PER_S = 25e9


@dataclass(frozen=True, slots=True)
class Gpu:
    """Data sheet of an NVIDIA GPU; `flops` are dense 16-bit tensor-core operations per second."""

    flops: float
    bytes_per_s: float
    memory_bytes: float
    source: str


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Size of a decoder-only transformer with gated feed-forward layers, such as Llama, Mistral and Qwen. `source` is
    the model whose config.json has these numbers; with `tied`, input and output embeddings are the same matrix."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head: int
    intermediate: int
    vocabulary: int
    source: str
    tied: bool = False

    @property
    def layer_parameters(self) -> int:
        """Number of weights in the matrices of all layers, without norms and biases, which are negligible."""
        attention = self.hidden * self.head * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def num_parameters(self) -> int:
        """Number of weights of all matrices, including embeddings."""
        return self.layer_parameters + self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def attention_flops(self) -> float:
        """Operations for the attention of one token to another, in all layers."""
        return 4.0 * self.num_layers * self.num_heads * self.head

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values per token in 16 bit."""
        return 4 * self.num_layers * self.num_kv_heads * self.head


GPUS: dict[str, Gpu] = {
    "a100-40gb": Gpu(312e12, 1555e9, 40e9, "A100 Tensor Core GPU, 40GB PCIe and SXM"),
    "a100-80gb": Gpu(312e12, 2039e9, 80e9, "A100 Tensor Core GPU, 80GB SXM"),
    "h100-80gb": Gpu(989.4e12, 3350e9, 80e9, "H100 SXM5; half of the 1,979 TFLOPS with sparsity"),
    "h200-141gb": Gpu(989.4e12, 4800e9, 141e9, "H200 SXM; half of the 1,979 TFLOPS with sparsity"),
    "a6000-48gb": Gpu(154.8e12, 768e9, 48e9, "RTX A6000; half of the 309.7 TFLOPS with sparsity"),
    "rtx6000ada-48gb": Gpu(364.2e12, 960e9, 48e9, "RTX 6000 Ada; a quarter of 1,457 in FP8 with sparsity"),
    "a5000-24gb": Gpu(111.1e12, 768e9, 24e9, "RTX A5000; half of the 222.2 TFLOPS with sparsity"),
}
MODELS: dict[str, ModelSize] = {
    "codellama-34b": ModelSize(48, 8192, 64, 8, 128, 22016, 32000, "codellama/CodeLlama-34b-hf"),
    "llama-2-7b": ModelSize(32, 4096, 32, 32, 128, 11008, 32000, "meta-llama/Llama-2-7b-hf"),
    "llama-2-13b": ModelSize(40, 5120, 40, 40, 128, 13824, 32000, "meta-llama/Llama-2-13b-hf"),
    "llama-2-70b": ModelSize(80, 8192, 64, 8, 128, 28672, 32000, "meta-llama/Llama-2-70b-hf"),
    "llama-3-8b": ModelSize(32, 4096, 32, 8, 128, 14336, 128256, "meta-llama/Meta-Llama-3-8B"),
    "llama-3-70b": ModelSize(80, 8192, 64, 8, 128, 28672, 128256, "meta-llama/Meta-Llama-3-70B"),
    "llama-3.2-1b": ModelSize(16, 2048, 32, 8, 64, 8192, 128256, "meta-llama/Llama-3.2-1B", tied=True),
    "llama-3.2-3b": ModelSize(28, 3072, 24, 8, 128, 8192, 128256, "meta-llama/Llama-3.2-3B", tied=True),
    "mistral-7b": ModelSize(32, 4096, 32, 8, 128, 14336, 32000, "mistralai/Mistral-7B-v0.1"),
    "qwen1.5-4b": ModelSize(40, 2560, 20, 20, 128, 6912, 151936, "Qwen/Qwen1.5-4B"),
    "qwen1.5-7b": ModelSize(32, 4096, 32, 32, 128, 11008, 151936, "Qwen/Qwen1.5-7B"),
    "qwen2.5-0.5b": ModelSize(24, 896, 14, 2, 64, 4864, 151936, "Qwen/Qwen2.5-0.5B", tied=True),
    "qwen2.5-1.5b": ModelSize(28, 1536, 12, 2, 128, 8960, 151936, "Qwen/Qwen2.5-1.5B", tied=True),
    "qwen2.5-7b": ModelSize(28, 3584, 28, 4, 128, 18944, 152064, "Qwen/Qwen2.5-7B"),
    "qwen2.5-14b": ModelSize(48, 5120, 40, 8, 128, 13824, 152064, "Qwen/Qwen2.5-14B"),
    "qwen2.5-32b": ModelSize(64, 5120, 40, 8, 128, 27648, 152064, "Qwen/Qwen2.5-32B"),
    "qwen2.5-72b": ModelSize(80, 8192, 64, 8, 128, 29568, 152064, "Qwen/Qwen2.5-72B"),
}


@dataclass(frozen=True, kw_only=True)
class RooflineStepTime:
    """t = overhead_s + max(F_w / f, B_w / b) + attention + copies; attention is the sum of max(F_a / f, B_a / b) over the
    chunks, plus one such term for all decodes.

    Linear layers: F_w = 2 W tokens, plus 2 V per sampled token; B_w = 2 (W + V), the weights, read once per step.
    Attention of c tokens after k: F_a = 4 L H c (k + (c + 1) / 2), B_a = bytes of the keys and values of k + c tokens.

    | symbol | meaning | unit |
    | --- | --- | --- |
    | W, V | weights of the layers; of the output embedding | - |
    | L, H | layers; query heads times their size | - |
    | f, b | efficiency times operations and bytes per second of all devices of the replica | 1/s |

    Source: Williams et al. 2009 (roofline); the operations are those of any decoder-only transformer. With the default
    efficiencies, step times are within 20 % of Vidur's profile of Llama-3-8B on an A100 for 1 to 128 decodes
    and 256 to 4,096 prompt tokens (tests). For precise results use `simulate calibrate`.
    """

    model: str = "llama-3-8b"
    """Served model, see `MODELS`."""
    gpu: str = "a100-80gb"
    """Device, see `GPUS`."""
    tensor_parallel: int = 1
    """Number of devices that share every layer."""
    compute_efficiency: float = 0.6
    """Achieved fraction of the peak operations, in (0, 1]."""
    memory_efficiency: float = 0.75
    """Achieved fraction of the peak bandwidth, in (0, 1]."""
    overhead_s: float = 1e-3
    """Additional seconds per step: kernel launches, sampling, host."""

    def __post_init__(self) -> None:
        check_choice("model", self.model, MODELS)
        check_choice("gpu", self.gpu, GPUS)
        check_ranges(self, tensor_parallel=(1, 2**31), overhead_s=(0, FINITE))
        check_ranges(self, compute_efficiency=(POSITIVE, 1), memory_efficiency=(POSITIVE, 1))
        self.num_kv_blocks()

    @property
    def size(self) -> ModelSize:
        return MODELS[self.model]

    @property
    def _flops(self) -> float:
        return GPUS[self.gpu].flops * self.compute_efficiency * self.tensor_parallel

    @property
    def _bytes_per_s(self) -> float:
        return GPUS[self.gpu].bytes_per_s * self.memory_efficiency * self.tensor_parallel

    def num_kv_blocks(self) -> int:
        """Number of blocks of `KV_BLOCK_TOKENS` that fit into 90 % of the memory with the weights; InputError if none."""
        usable, weights = GPUS[self.gpu].memory_bytes * 0.9, 2 * self.size.num_parameters
        block = self.size.kv_bytes_per_token * KV_BLOCK_TOKENS
        blocks = int((usable * self.tensor_parallel - weights) // block)
        if blocks <= 0:
            allowed = (
                f"at least {math.ceil((weights + block) / usable)}: the 16-bit weights of {self.model} take "
                f"{weights / 1e9:.0f} GB, and one {self.gpu} has {usable / 1e9:.0f} GB for weights and KV cache"
            )
            raise InputError("tensor_parallel", self.tensor_parallel, allowed)
        return blocks

    def step_s(self, work: StepWork) -> float:
        sampled = len(work.contexts) + sum([chunk.is_last for chunk in work.prefills])
        seconds = self._linear(work.num_tokens, sampled)
        seconds += self._decodes(len(work.contexts), total_of(work.contexts))
        for chunk in work.prefills:
            seconds += self._chunk(chunk.start_token, chunk.num_tokens)
        return seconds + work.num_swapped_tokens * self.size.kv_bytes_per_token / HOST_BYTES_PER_S

    def run(self, contexts: Sequence[int], start_s: float) -> DecodeRun:
        """The attention of decodes is linear in the sum of their contexts, which grows by one per request and step."""
        num = len(contexts)
        first_s = self._linear(num, num) + self._decodes(num, total_of(contexts))
        return PolynomialRun(start_s, first_s, self._decodes(num, num) - self._decodes(num, 0))

    def least_s(self, num_steps: float, prefill_tokens: float, decodes: float) -> float:
        """Without the output embedding for the first tokens of requests, and without reading it."""
        size, num_tokens = self.size, prefill_tokens + decodes
        operations = size.layer_parameters * num_tokens + size.vocabulary * size.hidden * decodes
        weights = size.layer_parameters * num_steps
        seconds = 2.0 * max(operations / self._flops, weights / self._bytes_per_s)
        return self.overhead_s * num_steps + seconds + self._collectives(num_steps, num_tokens)

    def least_attention_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """The prompt in one chunk, and all decodes."""
        decodes = output_tokens - 1
        contexts = decodes * prompt_tokens + decodes * (decodes - 1) // 2
        return self._chunk(0, prompt_tokens) + self._decodes(decodes, contexts)

    def _linear(self, num_tokens: int, num_sampled: int) -> float:
        size = self.size
        output = size.vocabulary * size.hidden
        computing = 2.0 * (size.layer_parameters * num_tokens + output * num_sampled) / self._flops
        reading = 2.0 * (size.layer_parameters + (output if num_sampled else 0)) / self._bytes_per_s
        return self.overhead_s + max(computing, reading) + self._collectives(1, num_tokens)

    def _collectives(self, num_steps: float, num_tokens: float) -> float:
        """Time of the collectives of several devices in these steps with `num_tokens` tokens in total."""
        size, devices = self.size, self.tensor_parallel
        if devices == 1:
            return 0.0
        sent = 2 * size.hidden * num_tokens * 2 * (devices - 1) / devices
        return 2 * size.num_layers * (COLLECTIVE_S * num_steps + sent / LINK_BYTES_PER_S)

    def _decodes(self, num: int, context: int) -> float:
        """Attention time of decodes, each of which also reads the keys and values of its new token."""
        reading = self.size.kv_bytes_per_token / self._bytes_per_s
        return (context + num) * max(self.size.attention_flops / self._flops, reading)

    def _chunk(self, start: int, num: int) -> float:
        computing = self.size.attention_flops * num * (start + (num + 1) / 2) / self._flops
        return max(computing, (start + num) * self.size.kv_bytes_per_token / self._bytes_per_s)
