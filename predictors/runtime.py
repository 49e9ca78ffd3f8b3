"""An artifact ready to predict: tokenizer and ONNX Runtime session, nothing of the network.

runtime = open_runtime("artifact")
mu, sigma = runtime.predict(["Name three rivers.", "Write an essay on tides."])
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from predictors.artifact import MODEL, Artifact, open_artifact
from predictors.tokenizer import PromptTokenizer
from scheduler_core.errors import InputError, MissingExtraError, TailcastError

if TYPE_CHECKING:
    import onnxruntime as ort

logger = logging.getLogger(__name__)

ProviderChoice = Literal["auto", "cpu", "cuda"]
CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"


class ArtifactRuntime:
    """Runs one artifact. `run` may be called from several threads at a time.

    Attributes:
        artifact: What is run.
        tokenizer: Text to token ids.
        provider: ONNX Runtime's execution provider in use, which can differ from the one asked for by "auto".
    """

    def __init__(self, artifact: Artifact, tokenizer: PromptTokenizer, session: ort.InferenceSession) -> None:
        self.artifact = artifact
        self.tokenizer = tokenizer
        self.provider: str = session.get_providers()[0]
        self._session = session

    def run(self, prompts: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Predicts one batch.

        Args:
            prompts: Token ids of B prompts, each [tokens], at least one token.

        Returns:
            mu [B] and sigma [B] in log tokens.

        Raises:
            TailcastError: The session failed or gave something else than B numbers for each.
        """
        longest = max(len(ids) for ids in prompts)
        input_ids = np.full((len(prompts), longest), self.artifact.manifest.pad_token_id, dtype=np.int64)
        attention_mask = np.zeros((len(prompts), longest), dtype=np.int64)
        for row, ids in enumerate(prompts):
            input_ids[row, : len(ids)] = ids
            attention_mask[row, : len(ids)] = 1
        try:
            mu, sigma = self._session.run(
                ["mu", "sigma"], {"input_ids": input_ids, "attention_mask": attention_mask}
            )
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            raise TailcastError(f"the ONNX session failed on shape {input_ids.shape}: {error}") from error
        if mu.shape != (len(prompts),) or sigma.shape != (len(prompts),):
            raise TailcastError(f"the model gave shapes {mu.shape}, {sigma.shape} for {len(prompts)} prompts")
        return mu.astype(np.float64), sigma.astype(np.float64)

    def predict(
        self, prompts: Sequence[str], *, batch_size: int = 4
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Predicts any number of prompts, in batches of similar length.

        Args:
            prompts: N texts.
            batch_size: Prompts per model call; on a CPU small batches are the fastest.

        Returns:
            mu [N] and sigma [N] in log tokens, in the order of the prompts.
        """
        if batch_size < 1:
            raise InputError("batch_size", batch_size, "an integer >= 1")
        tokens = [prompt.ids for prompt in self.tokenizer(prompts)]
        mu, sigma = np.empty(len(tokens)), np.empty(len(tokens))
        by_length = sorted(range(len(tokens)), key=lambda index: len(tokens[index]))
        for start in range(0, len(tokens), batch_size):
            rows = by_length[start : start + batch_size]
            mu[rows], sigma[rows] = self.run([tokens[row] for row in rows])
        return mu, sigma

    def warm_up(self, shapes: Sequence[tuple[int, int]] = ((1, 16), (4, 32))) -> None:
        """Runs dummy batches of the given (batch, tokens), so that the first request pays no start-up cost."""
        for batch, tokens in shapes:
            self.run([np.zeros(min(tokens, self.tokenizer.max_length), dtype=np.int64)] * batch)


def open_runtime(
    path: str | Path, *, provider: ProviderChoice = "auto", threads_per_run: int = 1
) -> ArtifactRuntime:
    """Verifies the artifact at `path` and loads it.

    Args:
        path: Artifact folder.
        provider: "auto" takes CUDA where it works, else the CPU; "cuda" fails where it does not work.
        threads_per_run: Threads of one model call on the CPU.

    Raises:
        InputError: The artifact is refused, or the provider cannot be had.
    """
    artifact = open_artifact(path)
    tokenizer = PromptTokenizer(
        artifact.tokenizer_path,
        max_length=artifact.manifest.max_length,
        truncation_side=artifact.manifest.truncation_side,
    )
    return ArtifactRuntime(artifact, tokenizer, _open_session(artifact, provider, threads_per_run))


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
        raise InputError(
            f"artifact file {MODEL}", str(artifact.model_path), f"a valid ONNX model ({error})"
        ) from error
    if provider == "cuda" and session.get_providers()[0] != CUDA:
        raise InputError("provider", provider, f"cpu or auto: the session got only {session.get_providers()}")
    _check_tensors(
        "inputs", {tensor.name for tensor in session.get_inputs()}, {"input_ids", "attention_mask"}
    )
    found = {tensor.name for tensor in session.get_outputs()}
    _check_tensors("outputs", found & {"mu", "sigma"}, {"mu", "sigma"})
    return session


def _warn_of_two_packages() -> None:
    """onnxruntime and onnxruntime-gpu write into the same folder: with both, chance decides which one runs."""
    try:
        for name in ("onnxruntime", "onnxruntime-gpu"):
            metadata.version(name)
    except metadata.PackageNotFoundError:
        return
    logger.warning("onnxruntime and onnxruntime-gpu are both installed and overwrite each other; keep one")


def _check_tensors(kind: str, found: set[str], expected: set[str]) -> None:
    if found != expected:
        raise InputError(f"artifact file {MODEL}, {kind}", sorted(found), f"exactly {sorted(expected)}")
