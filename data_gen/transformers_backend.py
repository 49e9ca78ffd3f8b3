"""Sampling in this process with transformers, from a local folder, a GGUF file, a packaged model or a hub model."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_gen.backend import SampledOutput, SampleFailure, SamplingSettings, Work, WorkResult, uniforms
from data_gen.prompts import Prompt
from scheduler_core.errors import InputError
from scheduler_core.ranges import INTEGERS, check_ranges
from scheduler_core.shell.files import PACKAGE_SCHEME, inside_package
from scheduler_core.shell.threads import check_threads


@dataclass(frozen=True, kw_only=True)
class TransformersOptions:
    """A model that runs in this process with transformers."""

    max_rows: int = 256
    """Maximum number of outputs in the decoding batch."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the weights."""
    device: str = "auto"
    """Torch device; auto: a GPU if available."""
    threads: int | None = None
    """Torch threads; unset: torch's default."""

    def __post_init__(self) -> None:
        check_ranges(self, max_rows=(1, INTEGERS))
        check_threads("threads", self.threads)


@dataclass(slots=True)
class _Row:
    """An unfinished output; `started` is the `time.perf_counter` value at which its prompt joined the batch."""

    prompt: Prompt
    prompt_tokens: int
    sample_index: int
    uniforms: np.ndarray
    started: float
    tokens: list[int] = field(default_factory=list)
    ttft_s: float | None = None


class TransformersBackend:
    """Continuous-batch sampling of a causal language model in this process.

    `model` is a local folder, `.gguf` file, hub name or `package:NAME/PATH`; `served_model` is the name stored with the
    samples, by default the last part of `model`.
    """

    name = "transformers"
    seeded = True

    def __init__(
        self, model: str, *, served_model: str = "", options: TransformersOptions | None = None
    ) -> None:
        self._source = model
        self._options = options or TransformersOptions()
        self._loaded: tuple[Any, Any] | None = None
        self.served_model = served_model or Path(model.rstrip("/")).name.removesuffix(".gguf")

    @property
    def version(self) -> str:
        """Versions of transformers and torch."""
        from importlib.metadata import version

        return f"{version('transformers')}+torch-{version('torch')}"

    def load(self) -> tuple[Any, Any]:
        """Loads the model in eval mode, and its tokenizer, on the first call; InputError if they cannot be loaded."""
        if self._loaded is not None:
            return self._loaded
        import torch
        import transformers

        from data_gen.decoding import ATTENTION

        if self._options.threads is not None:
            torch.set_num_threads(self._options.threads)
        path = self._source
        if path.startswith(PACKAGE_SCHEME):
            path = str(inside_package(path, "model"))
        gguf: dict[str, Any] = {}
        if path.endswith(".gguf"):
            gguf = {"gguf_file": Path(path).name}
            path = str(Path(path).parent)
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        device = self._options.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            # Loading a GGUF file shows progress bars that cannot be disabled by logging settings.
            with contextlib.redirect_stderr(io.StringIO()):
                tokenizer = transformers.AutoTokenizer.from_pretrained(path, **gguf)
                if gguf:
                    gguf["quantization_config"] = transformers.GgufConfig(
                        gguf_file=gguf["gguf_file"], dequantize=True
                    )
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    path, dtype=getattr(torch, self._options.dtype), attn_implementation=ATTENTION, **gguf
                )
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            allowed = f"a local model folder, a .gguf file, or a reachable hub model ({reason})"
            raise InputError("model", self._source, allowed) from error
        self._loaded = model.eval().to(device), tokenizer  # type: ignore[no-untyped-call]
        return self._loaded

    def sample(self, work: Iterable[Work], settings: SamplingSettings) -> Generator[WorkResult, None, None]:
        """See `Backend.sample`; one result for each output.

        The batch has at most `max_rows` outputs, or all missing samples of a single prompt if these are more.
        """
        model, tokenizer = self.load()
        sampler = _Sampler(model, tokenizer, settings)
        waiting = iter(work)
        upcoming = next(waiting, None)
        while upcoming is not None or sampler.rows:
            while upcoming is not None and (
                not sampler.rows or len(sampler.rows) + len(upcoming.indices) <= self._options.max_rows
            ):
                failure = sampler.start(upcoming)
                if failure is not None:
                    yield failure
                upcoming = next(waiting, None)
            if sampler.rows:
                yield from sampler.step()

    def close(self) -> None:
        """Releases the model."""
        self._loaded = None


class _Sampler:
    """Outputs in flight and their decoding batch."""

    def __init__(self, model: Any, tokenizer: Any, settings: SamplingSettings) -> None:
        from data_gen.decoding import DecodingBatch

        self._tokenizer = tokenizer
        self._settings = settings
        self._batch = DecodingBatch(model)
        self._context = int(model.config.max_position_embeddings)
        eos = model.generation_config.eos_token_id
        tokens = eos if isinstance(eos, list) else [eos]
        self._eos = {int(token) for token in [*tokens, tokenizer.eos_token_id] if token is not None}
        self.rows: list[_Row] = []

    def start(self, work: Work) -> WorkResult | None:
        """Adds the missing samples of a prompt to the batch; returns failures if the prompt is too long or invalid."""
        started = time.perf_counter()
        ids, failure = self._tokenize(work)
        if failure is not None:
            return failure
        self._batch.join(ids, len(work.indices))
        for index in work.indices:
            drawn = uniforms(self._settings.seed, work.prompt.prompt_id, index, self._settings.max_tokens)
            self.rows.append(_Row(work.prompt, len(ids), index, drawn, started))
        return None

    def _tokenize(self, work: Work) -> tuple[list[int], WorkResult | None]:
        """Token ids of a prompt, and failures if the chat template rejects it or its outputs exceed the context.

        Without a chat template, the messages are joined by blank lines.
        """
        import jinja2

        tokenizer, max_tokens = self._tokenizer, self._settings.max_tokens
        messages = [{"role": message.role, "content": message.text} for message in work.prompt.chat]
        if tokenizer.chat_template is None:
            ids = list(tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"])
        else:
            try:
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            except jinja2.TemplateError as error:  # e.g. it does not support system messages
                return [], _failed(work, None, "template", str(error))
            ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(ids) + max_tokens <= self._context:
            return ids, None
        reason = f"{len(ids)} prompt + {max_tokens} output tokens exceed the context of {self._context}"
        return ids, _failed(work, len(ids), "too_long", reason)

    def step(self) -> Iterator[WorkResult]:
        """Decodes one token for every row; yields the finished outputs."""
        import torch

        tokens = self._choose()
        now = time.perf_counter()
        remaining: list[int] = []
        finished: list[WorkResult] = []
        for position, (row, token) in enumerate(zip(self.rows, tokens.tolist(), strict=True)):
            row.tokens.append(token)
            if row.ttft_s is None:
                row.ttft_s = now - row.started
            stopped = token in self._eos
            if not stopped and len(row.tokens) < self._settings.max_tokens:
                remaining.append(position)
                continue
            text = self._tokenizer.decode(row.tokens, skip_special_tokens=True)
            output = SampledOutput(
                row.sample_index,
                len(row.tokens),
                "stop" if stopped else "length",
                text,
                ttft_s=row.ttft_s,
                total_s=now - row.started,
            )
            finished.append(WorkResult(row.prompt, row.prompt_tokens, (output,)))
        if len(remaining) < len(self.rows):
            rows = torch.tensor(remaining, dtype=torch.long)
            self._batch.keep(rows)
            tokens = tokens[rows]
            self.rows = [self.rows[position] for position in remaining]
        yield from finished
        if remaining:
            self._batch.advance(tokens)

    def _choose(self) -> Any:
        """Samples one token per row by the inverse CDF, with the uniform random numbers of each row."""
        import torch

        settings = self._settings
        logits = self._batch.logits.float()
        if settings.temperature == 0:
            return logits.argmax(-1).cpu()
        weights = (logits / settings.temperature).softmax(-1)
        if settings.top_p < 1:
            ordered, order = weights.sort(-1, descending=True)
            ordered[ordered.cumsum(-1) - ordered >= settings.top_p] = 0
            weights = torch.zeros_like(weights).scatter_(-1, order, ordered)
        cumulative = weights.cumsum(-1)
        drawn = torch.tensor([row.uniforms[len(row.tokens)] for row in self.rows], dtype=cumulative.dtype)
        target = drawn.to(cumulative.device)[:, None] * cumulative[:, -1:]
        # If rounding puts the target at the end of the CDF, the last token with nonzero probability is used.
        last = cumulative.shape[1] - 1 - (weights.flip(-1) > 0).int().argmax(-1)
        return torch.minimum(torch.searchsorted(cumulative, target, right=True)[:, 0], last).cpu()


def _failed(work: Work, prompt_tokens: int | None, kind: str, reason: str) -> WorkResult:
    failures = tuple(SampleFailure(index, reason, kind) for index in work.indices)
    return WorkResult(work.prompt, prompt_tokens, (), failures)
