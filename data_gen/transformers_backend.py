"""Sampling on this machine with transformers: a local folder, a GGUF file, a packaged model or a hub model."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_gen.backend import Answer, PromptResult, SamplingSettings
from data_gen.prompts import Prompt
from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.files import PACKAGE_SCHEME, inside_package


def resolve_model(model: str) -> str:
    """Path or hub name of a model; `package:NAME/PATH` is a file or folder inside an installed package.

    Raises:
        InputError: If the package is not installed or has no such file.
    """
    return str(inside_package(model, "model")) if model.startswith(PACKAGE_SCHEME) else model


def uniforms(seed: int, prompt_id: str, sample_index: int, count: int) -> np.ndarray:
    """The uniform numbers in [0, 1) that draw one answer, token by token; shape [count], float64.

    They depend on nothing but the arguments, so an answer does not depend on which batch it was made in.
    """
    digest = hashlib.sha256(f"{seed}\x00{prompt_id}\x00{sample_index}".encode()).digest()
    key = np.frombuffer(digest[:16], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(count)


@dataclass(slots=True)
class _Progress:
    """Answers of one prompt while they grow."""

    prompt: Prompt
    prompt_tokens: int
    answers: dict[int, Answer] = field(default_factory=dict)


@dataclass(slots=True)
class _Row:
    """One growing answer."""

    owner: _Progress
    sample_index: int
    uniforms: np.ndarray
    tokens: list[int] = field(default_factory=list)


class TransformersBackend:
    """Continuous-batch sampling of a causal language model in this process.

    Args:
        model: Local folder, `.gguf` file, hub name or `package:NAME/PATH`.
        served_model: Name recorded with the samples; default is the last part of `model`.
        max_rows: How many answers decode together.
        dtype: Torch dtype name of the weights.
        device: "auto" takes a GPU when there is one.
    """

    name = "transformers"

    def __init__(
        self,
        model: str,
        *,
        served_model: str = "",
        max_rows: int = 256,
        dtype: str = "float32",
        device: str = "auto",
    ) -> None:
        if max_rows < 1:
            raise InputError("max_rows", max_rows, "a whole number of at least 1")
        if dtype not in ("float32", "bfloat16", "float16"):
            raise InputError("dtype", dtype, "float32, bfloat16 or float16")
        self._source = model
        self._max_rows = max_rows
        self._dtype = dtype
        self._device = device
        self._loaded: tuple[Any, Any] | None = None
        self.served_model = served_model or Path(model.rstrip("/")).name.removesuffix(".gguf")

    @property
    def version(self) -> str:
        """Versions of transformers and torch."""
        from importlib.metadata import version

        return f"{version('transformers')}+torch-{version('torch')}"

    def load(self) -> tuple[Any, Any]:
        """The model, in evaluation mode on its device, and its tokenizer; loaded once.

        Raises:
            InputError: If `model` names nothing that can be loaded.
            MissingExtraError: If torch or transformers is not installed.
        """
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    def _load(self) -> tuple[Any, Any]:
        try:
            import torch
            import transformers
        except ImportError as error:
            raise MissingExtraError(error.name or "transformers", "gen") from error
        from data_gen.decoding import ATTENTION

        path = resolve_model(self._source)
        where: dict[str, Any] = {}
        if path.endswith(".gguf"):
            where = {"gguf_file": Path(path).name}
            path = str(Path(path).parent)
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        device = ("cuda" if torch.cuda.is_available() else "cpu") if self._device == "auto" else self._device
        try:
            # Reading GGUF draws its own progress bars, which no logging setting turns off.
            with contextlib.redirect_stderr(io.StringIO()):
                tokenizer = transformers.AutoTokenizer.from_pretrained(path, **where)
                if where:
                    where["quantization_config"] = transformers.GgufConfig(
                        gguf_file=where["gguf_file"], dequantize=True
                    )
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    path, dtype=getattr(torch, self._dtype), attn_implementation=ATTENTION, **where
                )
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                "model",
                self._source,
                f"a local model folder, a .gguf file, or a reachable hub model ({reason})",
            ) from error
        return model.eval().to(device), tokenizer  # type: ignore[no-untyped-call]

    def sample(self, prompts: Iterable[Prompt], settings: SamplingSettings) -> Iterator[PromptResult]:
        """See `Backend.sample`; at most `max_rows` answers decode at a time (one prompt's repeats at the least)."""
        model, tokenizer = self.load()
        sampler = _Sampler(model, tokenizer, settings)
        room = max(self._max_rows, settings.num_samples)
        waiting = iter(prompts)
        upcoming = next(waiting, None)
        while upcoming is not None or sampler.rows:
            while upcoming is not None and len(sampler.rows) + settings.num_samples <= room:
                refused = sampler.start(upcoming)
                if refused is not None:
                    yield refused
                upcoming = next(waiting, None)
            if sampler.rows:
                yield from sampler.step()


class _Sampler:
    """The answers in flight and the batch that decodes them."""

    def __init__(self, model: Any, tokenizer: Any, settings: SamplingSettings) -> None:
        from data_gen.decoding import DecodingBatch

        self._tokenizer = tokenizer
        self._settings = settings
        self._batch = DecodingBatch(model)
        self._context = int(model.config.max_position_embeddings)
        end = model.generation_config.eos_token_id
        ends = end if isinstance(end, list) else [end]
        self._ends = {int(token) for token in [*ends, tokenizer.eos_token_id] if token is not None}
        self.rows: list[_Row] = []

    def start(self, prompt: Prompt) -> PromptResult | None:
        """Lets all answers of a prompt join the batch; a prompt that cannot fit the context is refused."""
        ids = self._prompt_ids(prompt.text)
        if len(ids) + self._settings.max_tokens > self._context:
            reason = f"{len(ids)} prompt + {self._settings.max_tokens} answer tokens exceed the context of {self._context}"
            return PromptResult(prompt, len(ids), (), reason)
        self._batch.join(ids, self._settings.num_samples)
        owner = _Progress(prompt, len(ids))
        for index in range(self._settings.num_samples):
            drawn = uniforms(self._settings.seed, prompt.prompt_id, index, self._settings.max_tokens)
            self.rows.append(_Row(owner, index, drawn))
        return None

    def _prompt_ids(self, text: str) -> list[int]:
        if self._tokenizer.chat_template is None:
            return list(self._tokenizer(text)["input_ids"])
        rendered = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        return list(self._tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def step(self) -> Iterator[PromptResult]:
        """One token for every row; yields the prompts whose last answer finished."""
        import torch

        tokens = self._choose()
        kept: list[int] = []
        for position, (row, token) in enumerate(zip(self.rows, tokens.tolist(), strict=True)):
            row.tokens.append(token)
            stopped = token in self._ends
            if not stopped and len(row.tokens) < self._settings.max_tokens:
                kept.append(position)
                continue
            text = self._tokenizer.decode(row.tokens, skip_special_tokens=True)
            reason = "stop" if stopped else "length"
            row.owner.answers[row.sample_index] = Answer(row.sample_index, len(row.tokens), reason, text)
            if len(row.owner.answers) == self._settings.num_samples:
                answers = tuple(row.owner.answers[index] for index in sorted(row.owner.answers))
                yield PromptResult(row.owner.prompt, row.owner.prompt_tokens, answers)
        if len(kept) < len(self.rows):
            rows = torch.tensor(kept, dtype=torch.long)
            self._batch.keep(rows)
            tokens = tokens[rows]
            self.rows = [self.rows[position] for position in kept]
        if kept:
            self._batch.advance(tokens)

    def _choose(self) -> Any:
        """Inverse-CDF sampling of one token per row, from each row's own stream of uniforms."""
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
        # Rounding may put the target on the very end of the distribution; the last token with weight takes it.
        last = cumulative.shape[1] - 1 - (weights.flip(-1) > 0).int().argmax(-1)
        return torch.minimum(torch.searchsorted(cumulative, target, right=True)[:, 0], last).cpu()
