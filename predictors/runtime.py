"""An artifact ready to predict: tokenizer and ONNX Runtime session, nothing of the network.

runtime = open_runtime("artifact")
predicted = runtime.predict(["Name three rivers.", "Write an essay on tides."])
print(predicted.mu, predicted.sigma)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from predictors.artifact import MANIFEST, MODEL, TOKENIZER, Artifact, LexicalInput, open_artifact
from predictors.lexical_reader import LexicalReader
from predictors.manifest import LEXICAL_INPUT, Manifest, TensorSpec, checked_temperature
from predictors.predicted import Predicted, check_range
from predictors.tokenizer import PromptTokenizer
from scheduler_core.errors import InputError, MissingExtraError, TailcastError

if TYPE_CHECKING:
    import onnxruntime as ort

logger = logging.getLogger(__name__)

ProviderChoice = Literal["auto", "cpu", "cuda"]
CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"

# What a model is verified with before it serves. A prompt of as many tokens as it reads is one of them, up to a length
# that takes seconds: position embeddings that end earlier than `max_length` have at most about so many rows.
PROBES = ("Name three rivers.", "Write a long essay about the sea, and then some more about rivers.")
PROBE_BATCH = 16
LONGEST_PROBE = 2048


class ArtifactRuntime:
    """Runs one artifact. `run` may be called from several threads at a time.

    Attributes:
        artifact: What is run.
        tokenizer: Text to what the model reads: token ids, or features where the artifact is lexical.
        provider: ONNX Runtime's execution provider in use, which can differ from the one asked for by "auto".
    """

    def __init__(
        self,
        artifact: Artifact,
        tokenizer: PromptTokenizer | LexicalReader,
        session: ort.InferenceSession,
    ) -> None:
        self.artifact = artifact
        self.tokenizer = tokenizer
        self.provider: str = session.get_providers()[0]
        self._session = session

    def run(
        self,
        prompts: Sequence[NDArray[Any]],
        served_models: Sequence[str | None] | None = None,
        temperatures: Sequence[float | None] | None = None,
        *,
        lexical: Sequence[NDArray[np.float32] | None] | None = None,
        seq: int | None = None,
    ) -> Predicted:
        """Predicts one batch.

        Args:
            prompts: Token ids of B prompts, each int64 [tokens], at least one token; of a lexical artifact features,
                each float32 [F].
            served_models: Names of the LLMs that will answer [B]; None: not told. What the artifact makes of names
                it does not know: `Manifest.served_model_number`.
            temperatures: Sampling temperatures [B], at least 0; None: not told. An artifact that is not conditioned
                does not look at them.
            lexical: Lexical features [B], each float32 [F], of an encoder that takes them too; None: unknown.
            seq: Pad to so many columns instead of to the longest prompt; changes no number.

        Returns:
            Predictions for B prompts.

        Raises:
            InputError: The artifact has not learnt a served model's lengths, a temperature is below 0, or a prompt has
                more tokens than `seq`.
            TailcastError: The session failed or gave something else than B rows.
        """
        manifest = self.artifact.manifest
        if manifest.kind == "lexical":
            feed: dict[str, NDArray[Any]] = {"features": np.stack(prompts).astype(np.float32, copy=False)}
        else:
            feed = self._tokens(prompts, seq)
            if manifest.lexical is not None:
                feed[LEXICAL_INPUT] = _lexical(manifest.lexical, lexical or [None] * len(prompts))
        feed |= _conditions(manifest, len(prompts), served_models, temperatures)
        names = [tensor.name for tensor in manifest.outputs]
        try:
            found = self._session.run(names, feed)
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            shape = next(iter(feed.values())).shape
            reason = " ".join(str(error).split())
            raise TailcastError(f"the ONNX session failed on shape {shape}: {reason}") from error
        for tensor, values in zip(manifest.outputs, found, strict=True):
            wanted = (len(prompts), *tensor.shape[1:])
            if values.shape != wanted:
                raise TailcastError(f"the model gave {tensor.name} with shape {values.shape}, not {wanted}")
        arrays = {name: values.astype(np.float64) for name, values in zip(names, found, strict=True)}
        return Predicted.of(arrays, nu=manifest.nu)

    def predict(
        self,
        prompts: Sequence[str],
        served_models: Sequence[str | None] | None = None,
        temperatures: Sequence[float | None] | None = None,
        *,
        batch_size: int = 4,
    ) -> Predicted:
        """Predicts any number of prompts, in batches of similar length.

        Args:
            prompts: N texts.
            served_models, temperatures: As in `run`, [N].
            batch_size: Prompts per model call; on a CPU small batches are the fastest.

        Returns:
            Predictions in the order of the prompts.
        """
        if batch_size < 1:
            raise InputError("batch_size", batch_size, "an integer >= 1")
        for name, values in (("served_models", served_models), ("temperatures", temperatures)):
            if values is not None and len(values) != len(prompts):
                raise InputError(name, f"{len(values)} entries", f"{len(prompts)}, one for each prompt")
        read = self.tokenizer(prompts)
        by_length = sorted(range(len(read)), key=lambda index: len(read[index].values))
        batches = [by_length[start : start + batch_size] for start in range(0, len(read), batch_size)]
        if not batches:
            return self._nothing()
        parts = [
            self.run(
                [read[row].values for row in rows],
                None if served_models is None else [served_models[row] for row in rows],
                None if temperatures is None else [temperatures[row] for row in rows],
                lexical=[read[row].lexical for row in rows],
            )
            for rows in batches
        ]
        return Predicted.gathered(parts, batches)

    def warm_up(self, shapes: Sequence[tuple[int, int]] = ((1, 16), (4, 32))) -> None:
        """Runs all that a request can ask for, so that the first one pays no start-up cost and none finds a broken model.

        Batches of the given (batch, tokens), one prompt as long as the model reads (up to 2048 tokens) with the highest
        token id in it, and texts for every served model, with and without a temperature.

        Raises:
            TailcastError: The model fails, or gives numbers that no scheduler can use.
        """
        manifest = self.artifact.manifest
        names: list[str | None] = list(manifest.served_models)
        if manifest.conditioning is None:
            names = names[:1] or [None]  # the graph does not see them
        elif manifest.conditioning.unknown_models:
            names.append(None)
        for batch, tokens in (*shapes, (1, LONGEST_PROBE)):
            if manifest.kind == "encoder":
                prompt: NDArray[Any] = np.zeros(min(tokens, manifest.max_length or 1), dtype=np.int64)
                prompt[-1] = (self.tokenizer.vocabulary_size or 1) - 1
            else:
                assert manifest.lexical is not None
                prompt = np.zeros(len(manifest.lexical.feature_names), dtype=np.float32)
            _check(self.run([prompt] * batch, names[:1] * batch))
        probes = [read for read in self.tokenizer(PROBES) if len(read.values) > 0]
        asks = [
            (read, name, temperature)
            for read, temperature in zip(probes, (None, 1.0), strict=False)
            for name in names
        ]
        for start in range(0, len(asks), PROBE_BATCH):
            reads, served, temperatures = zip(*asks[start : start + PROBE_BATCH], strict=True)
            lexical = [read.lexical for read in reads]
            _check(self.run([read.values for read in reads], served, temperatures, lexical=lexical))

    def _tokens(self, prompts: Sequence[NDArray[Any]], seq: int | None) -> dict[str, NDArray[Any]]:
        longest = max(len(ids) for ids in prompts)
        if seq is not None and seq < longest:
            raise InputError("seq", seq, f"at least the {longest} tokens of the longest prompt")
        longest = longest if seq is None else seq
        pad = self.artifact.manifest.pad_token_id
        assert pad is not None
        input_ids = np.full((len(prompts), longest), pad, dtype=np.int64)
        attention_mask = np.zeros((len(prompts), longest), dtype=np.int64)
        for row, ids in enumerate(prompts):
            input_ids[row, : len(ids)] = ids
            attention_mask[row, : len(ids)] = 1
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def _nothing(self) -> Predicted:
        manifest = self.artifact.manifest
        arrays = {
            tensor.name: np.zeros((0, *(size for size in tensor.shape[1:] if isinstance(size, int))))
            for tensor in manifest.outputs
        }
        return Predicted.of(arrays, nu=manifest.nu)


def _check(predicted: Predicted) -> None:
    for row in predicted.rows():
        check_range(row)


def _lexical(lexical: LexicalInput, features: Sequence[NDArray[np.float32] | None]) -> NDArray[np.float32]:
    unknown = np.full(len(lexical.feature_names), np.nan, dtype=np.float32)
    return np.stack([unknown if row is None else row for row in features]).astype(np.float32, copy=False)


def _conditions(
    manifest: Manifest,
    num_prompts: int,
    served_models: Sequence[str | None] | None,
    temperatures: Sequence[float | None] | None,
) -> dict[str, NDArray[Any]]:
    names = served_models if served_models is not None else [None] * num_prompts
    numbers = [manifest.served_model_number(name) for name in names]
    told = temperatures if temperatures is not None else [None] * num_prompts
    checked = [checked_temperature(value) for value in told]
    if manifest.conditioning is None:
        return {}
    found: dict[str, NDArray[Any]] = {"served_model": np.array(numbers, dtype=np.int64)}
    if manifest.conditioning.temperature:
        found["temperature"] = np.array(checked, dtype=np.float32)
    return found


def open_runtime(
    path: str | Path,
    *,
    provider: ProviderChoice = "auto",
    threads_per_run: int = 1,
    public_key: str | Path | None = None,
) -> ArtifactRuntime:
    """Verifies the artifact at `path` and loads it.

    Args:
        path: Artifact folder.
        provider: "auto" takes CUDA where it works, else the CPU; "cuda" fails where it does not work.
        threads_per_run: Threads of one model call on the CPU.
        public_key: As in `open_artifact`: who must have signed it.

    Raises:
        InputError: The artifact is refused, or the provider cannot be had.
    """
    artifact = open_artifact(path, public_key=public_key)
    return ArtifactRuntime(
        artifact, _open_tokenizer(artifact), _open_session(artifact, provider, threads_per_run)
    )


def _open_tokenizer(artifact: Artifact) -> PromptTokenizer | LexicalReader:
    manifest = artifact.manifest
    lexical = None if manifest.lexical is None else LexicalReader(manifest.lexical)
    if manifest.kind == "lexical":
        assert lexical is not None
        return lexical
    assert manifest.max_length is not None and manifest.truncation_side is not None  # noqa: PT018
    tokenizer = PromptTokenizer(
        artifact.tokenizer_path,
        max_length=manifest.max_length,
        truncation_side=manifest.truncation_side,
        lexical=lexical,
    )
    pad, size = manifest.pad_token_id, tokenizer.vocabulary_size
    assert pad is not None and size is not None  # noqa: PT018
    if pad >= size:
        allowed = f"0 to {size - 1}, the token ids of {TOKENIZER}"
        raise InputError("artifact manifest, pad_token_id", pad, allowed)
    return tokenizer


def _open_session(artifact: Artifact, provider: ProviderChoice, threads: int) -> ort.InferenceSession:
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise MissingExtraError("onnxruntime", "serve") from error
    if threads < 1:
        raise InputError("threads_per_run", threads, "an integer >= 1")
    _warn_of_two_packages()
    # The list of available providers names what was compiled in; only the session knows what really works.
    has_cuda = CUDA in ort.get_available_providers()
    if provider == "cuda" and not has_cuda:
        raise InputError("provider", provider, "cpu or auto: this onnxruntime was built without CUDA")
    wanted = [CUDA, CPU] if has_cuda and provider != "cpu" else [CPU]
    if CUDA in wanted and hasattr(ort, "preload_dlls"):
        ort.preload_dlls()
    options: Any = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Threads that spin while they wait burn the cores that tokenisation and gRPC need.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    try:
        session = ort.InferenceSession(str(artifact.model_path), options, providers=wanted)
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        reason = " ".join(str(error).split())
        raise InputError(
            f"artifact file {MODEL}", str(artifact.model_path), f"a valid ONNX model ({reason})"
        ) from error
    if provider == "cuda" and session.get_providers()[0] != CUDA:
        raise InputError("provider", provider, f"cpu or auto: the session got only {session.get_providers()}")
    manifest = artifact.manifest
    inputs = {
        optional: [each for each in manifest.inputs if each.optional is optional]
        for optional in (False, True)
    }
    _check_tensors("inputs", session.get_inputs(), inputs[False])
    _check_tensors("optional inputs", session.get_overridable_initializers(), inputs[True])
    _check_tensors("outputs", session.get_outputs(), manifest.outputs)
    return session


def _warn_of_two_packages() -> None:
    """onnxruntime and onnxruntime-gpu write into the same folder: with both, chance decides which one runs."""
    try:
        for name in ("onnxruntime", "onnxruntime-gpu"):
            metadata.version(name)
    except metadata.PackageNotFoundError:
        return
    logger.warning("onnxruntime and onnxruntime-gpu are both installed and overwrite each other; keep one")


def _check_tensors(kind: str, nodes: Sequence[ort.NodeArg], specs: Sequence[TensorSpec]) -> None:
    """Names, types and shapes of the graph's tensors are the manifest's; a free axis is free in both."""
    by_name = {node.name: node for node in nodes}
    if by_name.keys() != {spec.name for spec in specs}:
        expected = f"exactly {sorted(spec.name for spec in specs)}, as in {MANIFEST}"
        raise InputError(f"artifact file {MODEL}, {kind}", sorted(by_name), expected)
    for spec in specs:
        node = by_name[spec.name]
        type_name = f"tensor({'float' if spec.dtype == 'float32' else spec.dtype})"
        fits = not node.shape or (  # no shape: the graph does not tell
            len(node.shape) == len(spec.shape)
            and all(
                not isinstance(actual, int) or actual == size
                for actual, size in zip(node.shape, spec.shape, strict=True)
            )
        )
        if node.type != type_name or not fits:
            raise InputError(
                f"artifact file {MODEL}, {kind}, {spec.name}",
                f"{node.type} {node.shape}",
                f"{type_name} {list(spec.shape)}, as in {MANIFEST}",
            )
