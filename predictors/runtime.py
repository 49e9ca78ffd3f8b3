"""Runtime of an artifact: tokenizer and ONNX Runtime session; predictions as arrays and rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from predictors.artifact import Artifact, open_artifact
from predictors.heads import Predicted, record_of
from predictors.manifest import MANIFEST, MODEL, TOKENIZER, TensorSpec, checked_temperature
from predictors.tiny import WEIGHTS, TinySession
from predictors.tokenizer import PromptTokenizer
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.prediction.predictions import Prediction

if TYPE_CHECKING:
    import onnxruntime as ort

ProviderChoice = Literal["auto", "cpu", "cuda"]
CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"

# Inputs to verify a model with before it serves. They include a prompt of `max_length` tokens, but at most
# LONGEST_PROBE, which takes seconds, to detect position embeddings that are too short.
PROBES = ("Name three rivers.", "Write a long essay about the sea, and then some more about rivers.")
PROBE_BATCH = 16
LONGEST_PROBE = 2048


class ArtifactRuntime:
    """Runs one artifact; `provider` is ONNX Runtime's execution provider. `run` is thread-safe."""

    def __init__(
        self, artifact: Artifact, tokenizer: PromptTokenizer, session: ort.InferenceSession | TinySession
    ) -> None:
        self.artifact = artifact
        self.tokenizer = tokenizer
        self.provider: str = session.get_providers()[0]
        self._session = session
        # The manifest recomputes them at every access.
        self._inputs = [tensor.name for tensor in artifact.manifest.inputs]
        self._outputs = artifact.manifest.outputs

    def run(
        self,
        prompts: Sequence[NDArray[Any]],
        served_models: Sequence[str | None] | None = None,
        temperatures: Sequence[float | None] | None = None,
        *,
        seq: int | None = None,
    ) -> Predicted:
        """Predicts one batch of B prompts, each with at least one token id, int64 [tokens].

        Names of served models (see `Manifest.served_model_number`) and temperatures >= 0 are [B]; None:
        unknown. `seq` is the length to pad to (default: the longest prompt), without effect on predictions.

        Raises:
            InputError: The artifact does not support a served model, a temperature is below 0, or a prompt
                has more than `seq` tokens.
            TailcastError: The session failed, or its outputs do not have B rows.
        """
        feed = self.feed(prompts, served_models, temperatures, seq=seq)
        try:
            outputs = self._session.run([tensor.name for tensor in self._outputs], feed)
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            shape = next(iter(feed.values())).shape
            reason = " ".join(str(error).split())
            raise TailcastError(f"the ONNX session failed on shape {shape}: {reason}") from error
        arrays = {}
        for tensor, values in zip(self._outputs, outputs, strict=True):
            expected = (len(prompts), *tensor.shape[1:])
            if values.shape != expected:
                text = f"the model returned {tensor.name} of shape {values.shape}, not {expected}"
                raise TailcastError(text)
            arrays[tensor.name] = values.astype(np.float64)
        return Predicted.of(arrays, nu=self.artifact.manifest.nu)

    def predict(
        self,
        prompts: Sequence[str],
        served_models: Sequence[str | None] | None = None,
        temperatures: Sequence[float | None] | None = None,
        *,
        batch_size: int = 4,
        track: Callable[[Sequence[int]], Iterable[int]] = lambda batches: batches,
    ) -> Predicted:
        """Predicts N texts in batches of similar length (small ones are fastest on a CPU), and returns the
        predictions in the order of `prompts`; served_models and temperatures [N] are as in `run`. `track` wraps
        the batches, e.g. in a progress bar."""
        if batch_size < 1:
            raise InputError("batch_size", batch_size, "an integer >= 1")
        for name, values in (("served_models", served_models), ("temperatures", temperatures)):
            if values is not None and len(values) != len(prompts):
                raise InputError(name, f"{len(values)} entries", f"{len(prompts)}, one per prompt")
        tokenized = self.tokenizer(prompts)
        by_length = sorted(range(len(prompts)), key=lambda index: len(tokenized[index].ids))
        if not prompts:
            empty = {tensor.name: np.zeros((0, *map(int, tensor.shape[1:]))) for tensor in self._outputs}
            return Predicted.of(empty, nu=self.artifact.manifest.nu)
        parts = []
        for start in track(range(0, len(prompts), batch_size)):
            rows = by_length[start : start + batch_size]
            batch = self.run(
                [tokenized[row].ids for row in rows],
                None if served_models is None else [served_models[row] for row in rows],
                None if temperatures is None else [temperatures[row] for row in rows],
            )
            parts.append(batch.arrays())
        order = np.argsort(by_length)
        return Predicted(**{name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]})

    def prediction(self, row: Mapping[str, Any]) -> Prediction:
        """The prediction of one prompt from its numbers (see `Predicted.rows`); TailcastError if one is out of range."""
        try:
            return record_of(row, self.artifact.manifest)
        except InputError as error:
            numbers = ", ".join(f"{name} = {value}" for name, value in row.items())
            raise TailcastError(f"the model returned {numbers}: {error}") from error

    def warm_up(self) -> None:
        """Warms up and verifies the model: small batches, one prompt of max_length (up to 2048) tokens with
        the highest token id, and texts for every served model, with and without a temperature. TailcastError
        if the model fails, or returns values out of range."""
        manifest = self.artifact.manifest
        names: list[str | None] = list(manifest.served_models)
        if manifest.conditioning is None:
            names = names[:1] or [None]  # not an input of the graph
        elif manifest.conditioning.unknown_models:
            names.append(None)
        for batch, tokens in ((1, 16), (4, 32), (1, LONGEST_PROBE)):
            prompt = np.zeros(min(tokens, manifest.max_length), dtype=np.int64)
            prompt[-1] = self.tokenizer.vocabulary_size - 1
            self._check(self.run([prompt] * batch, names[:1] * batch))
        rows = [
            (probe.ids, name, temperature)
            for probe, temperature in zip(self.tokenizer(PROBES), (None, 1.0), strict=True)
            for name in names
            if len(probe.ids) > 0
        ]
        for start in range(0, len(rows), PROBE_BATCH):
            self._check(self.run(*zip(*rows[start : start + PROBE_BATCH], strict=True)))

    def _check(self, predicted: Predicted) -> None:
        for row in predicted.rows():
            self.prediction(row)

    def feed(
        self,
        prompts: Sequence[NDArray[Any]],
        served_models: Sequence[str | None] | None = None,
        temperatures: Sequence[float | None] | None = None,
        *,
        seq: int | None = None,
    ) -> dict[str, NDArray[Any]]:
        """Inputs of the graph by name, [B, S] or [B]; arguments and errors as in `run`."""
        manifest = self.artifact.manifest
        longest = max(len(ids) for ids in prompts)
        shape = (len(prompts), longest if seq is None else seq)
        if shape[1] < longest:
            raise InputError("seq", seq, f"at least the {longest} tokens of the longest prompt")
        input_ids = np.full(shape, manifest.pad_token_id, dtype=np.int64)
        attention_mask = np.zeros(shape, dtype=np.int64)
        for row, ids in enumerate(prompts):
            input_ids[row, : len(ids)] = ids
            attention_mask[row, : len(ids)] = 1
        unknown = [None] * len(prompts)
        numbers = [manifest.served_model_number(name) for name in served_models or unknown]
        values = [checked_temperature(value) for value in temperatures or unknown]
        feed: dict[str, NDArray[Any]] = {"input_ids": input_ids, "attention_mask": attention_mask}
        feed["served_model"] = np.array(numbers, dtype=np.int64)
        feed["temperature"] = np.array(values, dtype=np.float32)
        return {name: feed[name] for name in self._inputs}


def open_runtime(
    path: str | Path,
    *,
    provider: ProviderChoice = "auto",
    threads_per_run: int = 1,
    public_key: str | Path | None = None,
) -> ArtifactRuntime:
    """Verifies and loads an artifact (see `open_artifact`); InputError if it is invalid or the provider is
    not available. The provider "auto" is CUDA if that works, otherwise the CPU; "cuda" fails if CUDA does not
    work. A model call on the CPU uses `threads_per_run` threads."""
    artifact = open_artifact(path, public_key=public_key)
    manifest = artifact.manifest
    tokenizer = PromptTokenizer(
        artifact.path / TOKENIZER,
        max_length=manifest.max_length,
        truncation_side=manifest.truncation_side,
        amounts=manifest.amounts,
    )
    if manifest.pad_token_id >= tokenizer.vocabulary_size:
        allowed = f"0 to {tokenizer.vocabulary_size - 1}, the token ids of {TOKENIZER}"
        raise InputError("artifact manifest, pad_token_id", manifest.pad_token_id, allowed)
    return ArtifactRuntime(artifact, tokenizer, _open_session(artifact, provider, threads_per_run))


def _open_session(
    artifact: Artifact, provider: ProviderChoice, threads: int
) -> ort.InferenceSession | TinySession:
    if threads < 1:
        raise InputError("threads_per_run", threads, "an integer >= 1")
    if WEIGHTS in artifact.manifest.files:
        if provider == "cuda":
            raise InputError("provider", provider, "cpu or auto: a tiny predictor has no graph")
        return TinySession(artifact.path / WEIGHTS)
    import onnxruntime as ort

    # Available providers are those that were compiled in; creating a session shows whether they work.
    has_cuda = CUDA in ort.get_available_providers()
    if provider == "cuda" and not has_cuda:
        raise InputError("provider", provider, "cpu or auto: this onnxruntime was built without CUDA")
    providers = [CUDA, CPU] if has_cuda and provider != "cpu" else [CPU]
    if CUDA in providers and hasattr(ort, "preload_dlls"):
        ort.preload_dlls()
    options: Any = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Spinning threads would use CPU time that tokenization and gRPC need.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    path = str(artifact.path / MODEL)
    try:
        session = ort.InferenceSession(path, options, providers=providers)
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        allowed = f"a valid ONNX model ({' '.join(str(error).split())})"
        raise InputError(f"artifact file {MODEL}", path, allowed) from error
    if provider == "cuda" and session.get_providers()[0] != CUDA:
        raise InputError("provider", provider, f"cpu or auto: the session got only {session.get_providers()}")
    manifest = artifact.manifest
    _check_tensors("inputs", session.get_inputs(), manifest.inputs)
    _check_tensors("outputs", session.get_outputs(), manifest.outputs)
    return session


def _check_tensors(kind: str, nodes: Sequence[ort.NodeArg], specs: Sequence[TensorSpec]) -> None:
    """Raises InputError unless names, types and shapes of the graph's tensors match the manifest."""
    by_name = {node.name: node for node in nodes}
    if by_name.keys() != {spec.name for spec in specs}:
        expected = f"exactly {sorted(spec.name for spec in specs)}, as in {MANIFEST}"
        raise InputError(f"artifact file {MODEL}, {kind}", sorted(by_name), expected)
    for spec in specs:
        node = by_name[spec.name]
        type_name = f"tensor({'float' if spec.dtype == 'float32' else spec.dtype})"
        shape = node.shape or spec.shape  # empty if the graph does not declare it
        fits = len(shape) == len(spec.shape) and all(
            not isinstance(actual, int) or actual == size
            for actual, size in zip(shape, spec.shape, strict=True)
        )
        if node.type != type_name or not fits:
            field, allowed = f"artifact file {MODEL}, {kind}, {spec.name}", f"{type_name} {list(spec.shape)}"
            raise InputError(field, f"{node.type} {node.shape}", f"{allowed}, as in {MANIFEST}")
