"""Sampling with a vLLM engine in this process, without a server."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from data_gen.backend import SampledOutput, SampleFailure, SamplingSettings, Work, WorkResult, sample_seed
from data_gen.local_models import model_name, resolve_model, tokenize_within
from data_gen.prompts import Prompt
from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.ranges import INTEGERS, POSITIVE, check_ranges


@dataclass(frozen=True, kw_only=True)
class VllmOptions:
    """A vLLM engine in this process."""

    dtype: str = "auto"
    """Precision of the weights, as in vLLM: auto, float32, bfloat16, float16."""
    tensor_parallel_size: int = 1
    """Number of GPUs for tensor parallelism."""
    gpu_memory_utilization: float = 0.9
    """Fraction of the GPU's memory for weights and KV cache."""
    max_model_len: int | None = None
    """Maximum number of tokens of prompt and output together; unset: the limit of the model."""
    max_num_seqs: int = 256
    """Maximum number of outputs in the decoding batch; the same number of requests is queued in the engine."""
    enforce_eager: bool = False
    """Disable compilation and CUDA graphs: faster start, slower decoding."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Additional arguments of vllm.LLM, e.g. {"quantization": "fp8"}."""

    def __post_init__(self) -> None:
        check_ranges(self, tensor_parallel_size=(1, INTEGERS), max_num_seqs=(1, INTEGERS))
        check_ranges(self, gpu_memory_utilization=(POSITIVE, 1.0))


class VllmBackend:
    """Samples from `vllm.LLM`.

    Every sample is a separate request with its own seed, so that it depends only on (settings, prompt id, sample index) and
    a resumed run gets the same samples. This is not slower than n=N, which vLLM also splits into N requests: its prefix
    cache shares the prompt between them.

    `model` is a local folder, `.gguf` file, hub name or `package:NAME/PATH`; `served_model` is the name stored with the
    samples, by default the last part of `model`."""

    name = "vllm"
    seeded = True

    def __init__(self, model: str, *, served_model: str = "", options: VllmOptions | None = None) -> None:
        self._source = model
        self._options = options or VllmOptions()
        self._llm: Any = None
        self.served_model = served_model or model_name(model)

    @property
    def version(self) -> str:
        """Version of vLLM; MissingExtraError if it is not installed."""
        return str(_vllm().__version__)

    def load(self) -> Any:
        """Starts the engine on the first call; InputError if it cannot load the model, MissingExtraError without vLLM."""
        if self._llm is None:
            options = {name: value for name, value in asdict(self._options).items() if value is not None}
            engine_args = options.pop("engine_args")
            # The timings of an output are part of the engine's statistics.
            common = {"model": resolve_model(self._source), "disable_log_stats": False}
            arguments = common | options | engine_args
            vllm = _vllm()
            try:
                self._llm = vllm.LLM(**arguments)
            except (OSError, ValueError) as error:
                reason = " ".join(str(error).split())[:200]
                raise InputError("model", self._source, f"a model that vLLM can load ({reason})") from error
        return self._llm

    def sample(self, work: Iterable[Work], settings: SamplingSettings) -> Generator[WorkResult, None, None]:
        """See `Backend.sample`; one result for each output. Closing the iterator aborts all unfinished requests."""
        llm = self.load()
        engine, tokenizer = llm.llm_engine, llm.get_tokenizer()
        limit = int(engine.model_config.max_model_len)
        look_ahead = 2 * self._options.max_num_seqs
        names = ("temperature", "top_p", "max_tokens")
        common = {name: getattr(settings, name) for name in names}
        pending: dict[str, tuple[Prompt, int, int]] = {}  # prompt, sample index, tokens of the prompt
        waiting = iter(work)
        item = next(waiting, None)
        number = 0
        try:
            while item is not None or pending:
                while item is not None and len(pending) < look_ahead:
                    ids, failure = tokenize_within(tokenizer, item, settings, limit)
                    if failure is not None:
                        yield failure
                    else:
                        for index in item.indices:
                            number += 1
                            pending[str(number)] = (item.prompt, index, len(ids))
                            seed = sample_seed(settings.seed, item.prompt.prompt_id, index)
                            parameters = _vllm().SamplingParams(n=1, seed=seed, **common)
                            engine.add_request(str(number), {"prompt_token_ids": ids}, parameters)
                    item = next(waiting, None)
                if pending:
                    for output in engine.step():
                        if output.finished and output.request_id in pending:
                            yield _result(*pending.pop(output.request_id), output)
        finally:
            if pending:
                engine.abort_request(list(pending))

    def close(self) -> None:
        """Stops the engine and frees its memory."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None


def _vllm() -> Any:
    try:
        import vllm
    except ImportError as error:
        raise MissingExtraError("vllm", "vllm") from error
    return vllm


def _result(prompt: Prompt, index: int, prompt_tokens: int, output: Any) -> WorkResult:
    completion = output.outputs[0]
    reason = completion.finish_reason
    if reason not in ("stop", "length"):
        failure = SampleFailure(index, f"the engine finished with reason {reason!r}", "aborted")
        return WorkResult(prompt, prompt_tokens, (), (failure,))
    # Seconds since the engine received the request; vLLM uses a monotonic clock.
    names = {"queue_s": "scheduled_ts", "ttft_s": "first_token_ts", "total_s": "last_token_ts"}
    start = getattr(output.metrics, "queued_ts", None)
    stamps = {name: getattr(output.metrics, stamp, None) for name, stamp in names.items()}
    timings = {name: stamp - start for name, stamp in stamps.items() if start and stamp}
    sampled = SampledOutput(index, len(completion.token_ids), reason, completion.text, **timings)
    return WorkResult(prompt, prompt_tokens, (sampled,))
