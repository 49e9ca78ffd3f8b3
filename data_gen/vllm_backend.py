"""Sampling with a vLLM engine in this process: no server, all of the GPU for sampling."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from data_gen.backend import SampledOutput, SampleFailure, SamplingSettings, Work, WorkResult, sample_seed
from data_gen.local_models import model_name, resolve_model, tokenize_within
from data_gen.prompts import Prompt
from scheduler_core.errors import InputError, MissingExtraError


@dataclass(frozen=True, kw_only=True)
class VllmOptions:
    """A vLLM engine in this process."""

    dtype: str = "auto"
    """Precision of the weights, as vLLM names it: auto, float32, bfloat16, float16."""
    tensor_parallel_size: int = 1
    """GPUs that share the model."""
    gpu_memory_utilization: float = 0.9
    """Fraction of the GPU's memory for weights and KV cache."""
    max_model_len: int | None = None
    """Longest prompt and output together; unset: the model's own limit."""
    max_num_seqs: int = 256
    """Outputs that decode together; as many again wait in the engine."""
    enforce_eager: bool = False
    """Do not compile or capture graphs: starts faster, runs slower."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vllm.LLM, e.g. {"quantization": "fp8"}."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise InputError(name, getattr(self, name), "integers > 0")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InputError(
                "gpu_memory_utilization", self.gpu_memory_utilization, "a number above 0, at most 1"
            )


@dataclass(slots=True)
class _PendingRequest:
    """One request in the engine."""

    prompt: Prompt
    sample_index: int
    prompt_tokens: int


class VllmBackend:
    """Samples from `vllm.LLM`.

    Every sample is a request of its own with its own seed, because only then does it depend on (settings, prompt id,
    sample index) alone: a resumed run requests the missing ones of a prompt and gets what it would have got. vLLM makes
    n requests out of n=N too, and its prefix cache lets them share the prompt.

    Args:
        model: Local folder, `.gguf` file, hub name or `package:NAME/PATH`.
        served_model: Name recorded with the samples; default is the last part of `model`.
        options: How the engine is started.
    """

    name = "vllm"
    seeded = True

    def __init__(self, model: str, *, served_model: str = "", options: VllmOptions | None = None) -> None:
        self._source = model
        self._options = options or VllmOptions()
        self._llm: Any = None
        self.served_model = served_model or model_name(model)

    @property
    def version(self) -> str:
        """Version of vLLM.

        Raises:
            MissingExtraError: vLLM is not installed.
        """
        return str(_vllm().__version__)

    def load(self) -> Any:
        """The engine, started once.

        Raises:
            InputError: The model cannot be loaded.
            MissingExtraError: vLLM is not installed.
        """
        if self._llm is None:
            options = self._options
            arguments = {
                "model": resolve_model(self._source),
                "dtype": options.dtype,
                "tensor_parallel_size": options.tensor_parallel_size,
                "gpu_memory_utilization": options.gpu_memory_utilization,
                "max_num_seqs": options.max_num_seqs,
                "enforce_eager": options.enforce_eager,
                # The timings of an output come with the engine's own statistics.
                "disable_log_stats": False,
                **({} if options.max_model_len is None else {"max_model_len": options.max_model_len}),
                **options.engine_args,
            }
            vllm = _vllm()
            try:
                self._llm = vllm.LLM(**arguments)
            except (OSError, ValueError) as error:
                reason = " ".join(str(error).split())[:200]
                raise InputError("model", self._source, f"a model that vLLM can load ({reason})") from error
        return self._llm

    def sample(self, work: Iterable[Work], settings: SamplingSettings) -> Iterator[WorkResult]:
        """See `Backend.sample`; one result for each output. Closing the iterator aborts what the engine has."""
        llm = self.load()
        engine, tokenizer = llm.llm_engine, llm.get_tokenizer()
        limit = int(engine.model_config.max_model_len)
        look_ahead = 2 * self._options.max_num_seqs
        pending: dict[str, _PendingRequest] = {}
        waiting = iter(work)
        number = 0
        more = True
        try:
            while more or pending:
                while more and len(pending) < look_ahead:
                    item = next(waiting, None)
                    if item is None:
                        more = False
                        break
                    ids, failure = tokenize_within(tokenizer, item, settings, limit)
                    if failure is not None:
                        yield failure
                        continue
                    for index in item.indices:
                        number += 1
                        pending[str(number)] = _PendingRequest(item.prompt, index, len(ids))
                        engine.add_request(
                            str(number), {"prompt_token_ids": ids}, _parameters(settings, item.prompt, index)
                        )
                if pending:
                    for output in engine.step():
                        if output.finished and output.request_id in pending:
                            yield _result(pending.pop(output.request_id), output)
        finally:
            if pending:
                engine.abort_request(list(pending))

    def close(self) -> None:
        """Stops the engine and frees its memory."""
        if self._llm is not None:
            core = getattr(self._llm.llm_engine, "engine_core", None)
            if core is not None and hasattr(core, "shutdown"):
                core.shutdown()
            self._llm = None


def _vllm() -> Any:
    try:
        import vllm
    except ImportError as error:
        raise MissingExtraError("vllm", "vllm") from error
    return vllm


def _parameters(settings: SamplingSettings, prompt: Prompt, sample_index: int) -> Any:
    return _vllm().SamplingParams(
        n=1,
        temperature=settings.temperature,
        top_p=settings.top_p,
        max_tokens=settings.max_tokens,
        seed=sample_seed(settings.seed, prompt.prompt_id, sample_index),
    )


def _result(pending: _PendingRequest, output: Any) -> WorkResult:
    completion = output.outputs[0]
    reason = completion.finish_reason
    if reason not in ("stop", "length"):
        failure = SampleFailure(pending.sample_index, f"the engine ended it with {reason!r}", "aborted")
        return WorkResult(pending.prompt, pending.prompt_tokens, (), (failure,))
    queue_s, ttft_s, total_s = _timings(output.metrics)
    sampled = SampledOutput(
        pending.sample_index,
        len(completion.token_ids),
        reason,
        completion.text,
        queue_s=queue_s,
        ttft_s=ttft_s,
        total_s=total_s,
    )
    return WorkResult(pending.prompt, pending.prompt_tokens, (sampled,))


def _timings(metrics: Any) -> tuple[float | None, float | None, float | None]:
    """Queue, first token, last token, in seconds since the engine got the request; vLLM's clock is monotonic."""
    stamps = [
        getattr(metrics, name, None)
        for name in ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
    ]
    start, *rest = stamps
    if not start:
        return None, None, None
    queue_s, ttft_s, total_s = (stamp - start if stamp else None for stamp in rest)
    return queue_s, ttft_s, total_s
