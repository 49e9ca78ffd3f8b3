"""Data sheets: what GPUs can do, and how large models are. Numbers as published, with their source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU.

    Attributes:
        flops: Dense matrix operations in 16 bit with tensor cores, without sparsity, per second.
        bytes_per_s: Memory bandwidth.
        memory_bytes: Memory.
        source: Where the numbers are from.
    """

    flops: float
    bytes_per_s: float
    memory_bytes: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A decoder-only transformer with gated feed-forward layers, as Llama, Mistral and Qwen are.

    Attributes:
        num_layers: Layers.
        hidden: Width.
        num_heads: Query heads.
        num_kv_heads: Heads of keys and values.
        head: Size of a head.
        intermediate: Width of the feed-forward layers.
        vocabulary: Tokens it knows.
        tied: Input and output embeddings are one matrix.
        source: Where the numbers are from.
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head: int
    intermediate: int
    vocabulary: int
    tied: bool = False
    source: str = ""

    @property
    def layer_parameters(self) -> int:
        """Weights of the matrices of all layers; norms and biases, which are few, are left out."""
        attention = self.hidden * self.head * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def num_parameters(self) -> int:
        """Weights of all matrices, embeddings among them."""
        return self.layer_parameters + self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of a token in 16 bit."""
        return 4 * self.num_layers * self.num_kv_heads * self.head


_TERA, _GIGA = 1e12, 1e9

GPUS: dict[str, Gpu] = {
    "a100-40gb": Gpu(
        flops=312 * _TERA, bytes_per_s=1555 * _GIGA, memory_bytes=40 * _GIGA,
        source="NVIDIA A100 Tensor Core GPU data sheet, 40GB PCIe and SXM",
    ),
    "a100-80gb": Gpu(
        flops=312 * _TERA, bytes_per_s=2039 * _GIGA, memory_bytes=80 * _GIGA,
        source="NVIDIA A100 Tensor Core GPU data sheet, 80GB SXM",
    ),
    "h100-80gb": Gpu(
        flops=989.4 * _TERA, bytes_per_s=3350 * _GIGA, memory_bytes=80 * _GIGA,
        source="NVIDIA H100 Tensor Core GPU data sheet, SXM5; half of the 1,979 TFLOPS with sparsity",
    ),
    "h200-141gb": Gpu(
        flops=989.4 * _TERA, bytes_per_s=4800 * _GIGA, memory_bytes=141 * _GIGA,
        source="NVIDIA H200 Tensor Core GPU data sheet, SXM; half of the 1,979 TFLOPS with sparsity",
    ),
    "a6000-48gb": Gpu(
        flops=154.8 * _TERA, bytes_per_s=768 * _GIGA, memory_bytes=48 * _GIGA,
        source="NVIDIA RTX A6000 data sheet; half of the 309.7 TFLOPS with sparsity",
    ),
    "rtx6000ada-48gb": Gpu(
        flops=364.2 * _TERA, bytes_per_s=960 * _GIGA, memory_bytes=48 * _GIGA,
        source="NVIDIA RTX 6000 Ada Generation data sheet; a quarter of the 1,457 TFLOPS in FP8 with sparsity",
    ),
    "a5000-24gb": Gpu(
        flops=111.1 * _TERA, bytes_per_s=768 * _GIGA, memory_bytes=24 * _GIGA,
        source="NVIDIA RTX A5000 data sheet; half of the 222.2 TFLOPS with sparsity",
    ),
}  # fmt: skip


def _size(
    layers: int,
    hidden: int,
    heads: tuple[int, int, int],
    wide: int,
    words: int,
    source: str,
    tied: bool = False,
) -> ModelSize:
    return ModelSize(
        num_layers=layers,
        hidden=hidden,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head=heads[2],
        intermediate=wide,
        vocabulary=words,
        tied=tied,
        source=f"config.json of {source}",
    )


MODELS: dict[str, ModelSize] = {
    "llama-2-7b": _size(32, 4096, (32, 32, 128), 11008, 32000, "meta-llama/Llama-2-7b-hf"),
    "llama-2-13b": _size(40, 5120, (40, 40, 128), 13824, 32000, "meta-llama/Llama-2-13b-hf"),
    "llama-2-70b": _size(80, 8192, (64, 8, 128), 28672, 32000, "meta-llama/Llama-2-70b-hf"),
    "llama-3-8b": _size(32, 4096, (32, 8, 128), 14336, 128256, "meta-llama/Meta-Llama-3-8B"),
    "llama-3-70b": _size(80, 8192, (64, 8, 128), 28672, 128256, "meta-llama/Meta-Llama-3-70B"),
    "llama-3.2-1b": _size(16, 2048, (32, 8, 64), 8192, 128256, "meta-llama/Llama-3.2-1B", tied=True),
    "llama-3.2-3b": _size(28, 3072, (24, 8, 128), 8192, 128256, "meta-llama/Llama-3.2-3B", tied=True),
    "mistral-7b": _size(32, 4096, (32, 8, 128), 14336, 32000, "mistralai/Mistral-7B-v0.1"),
    "qwen1.5-4b": _size(40, 2560, (20, 20, 128), 6912, 151936, "Qwen/Qwen1.5-4B"),
    "qwen1.5-7b": _size(32, 4096, (32, 32, 128), 11008, 151936, "Qwen/Qwen1.5-7B"),
    "qwen2.5-0.5b": _size(24, 896, (14, 2, 64), 4864, 151936, "Qwen/Qwen2.5-0.5B", tied=True),
    "qwen2.5-1.5b": _size(28, 1536, (12, 2, 128), 8960, 151936, "Qwen/Qwen2.5-1.5B", tied=True),
    "qwen2.5-7b": _size(28, 3584, (28, 4, 128), 18944, 152064, "Qwen/Qwen2.5-7B"),
    "qwen2.5-14b": _size(48, 5120, (40, 8, 128), 13824, 152064, "Qwen/Qwen2.5-14B"),
    "qwen2.5-32b": _size(64, 5120, (40, 8, 128), 27648, 152064, "Qwen/Qwen2.5-32B"),
    "qwen2.5-72b": _size(80, 8192, (64, 8, 128), 29568, 152064, "Qwen/Qwen2.5-72B"),
}
