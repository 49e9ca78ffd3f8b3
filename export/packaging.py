"""Artifact folder -> what another serving stack loads: one ONNX file, a Triton repository, KServe's layout."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from export.parity import PROBES
from export.triton.model_config import Device
from export.triton.repository import RepositoryOptions, Runtime, write_repository
from predictors.artifact import Artifact, open_artifact
from predictors.tokenizer import PromptTokenizer
from scheduler_core.errors import InputError, MissingExtraError, TailcastError
from scheduler_core.files import atomic_directory, atomic_file, folder_target, writable_target

logger = logging.getLogger(__name__)

Target = Literal["text", "triton", "kserve"]
TARGETS: tuple[Target, ...] = ("text", "triton", "kserve")

# Texts that tell tokenizers apart, beside those that the export is checked with.
NASTY = (
    "",
    " \t\n ",
    "naïve CAFÉ a\u0301\u0323b İstanbul ẞ ΣΑΣ ﬁ ½",
    "한국어 텍스트 北京市 ไทย हिन्दी العربية",
    "[CLS] [SEP] [PAD] [MASK] <s> </s> <|endoftext|>",
    "\u200bzero\u200dwidth\ufeff\u00ad\u2028lines\u2029 \u00a0\u3000",
    "\x00nul \x01control\x1f\x7f",
    "👩‍👩‍👧🇩🇪 𝒳 \U00020000 \U000e0041 \ue000 \ufffd",
    "x" * 99 + " " + "y" * 101,
    "x," * 3000,
    "北京" * 3000,
    "z" * 20000 + " end",
)


@dataclass(frozen=True, kw_only=True)
class PackageConfig:
    """Turns an artifact into what another serving stack loads.

    TARGET is text (one ONNX file, text in, predictions out), triton (a model repository) or kserve (that repository with
    the resource that serves it).
    """

    INPUTS = ("artifact", "public_key")
    OUTPUTS = ("out",)

    target: str
    """text, triton or kserve."""
    artifact: str
    """Artifact folder, as export-onnx writes it."""
    out: str
    """File (text) or folder to write; a file is replaced, a folder must be new or empty."""
    overwrite: bool = False
    """Replace an earlier folder of the same target at `out`, if it holds nothing else; anything else there is never replaced."""
    public_key: str | None = None
    """Public key of minisign, file or base64 line: the artifact must be signed with it."""
    capped: bool = False
    """Also take max_tokens, and give expectation, CVaR and quantiles of min(X, max_tokens)."""
    name: str = "tailcast"
    """Name of the model that takes text; the names of its parts begin with it."""
    runtime: Runtime = "onnxruntime"
    """Of triton and kserve. onnxruntime: Triton's onnxruntime backend, tokenizer by onnxruntime-extensions (WordPiece
    only); python: its Python backend with the packages onnxruntime and tokenizers, any tokenizer."""
    max_batch_size: int = 64
    """Most prompts of a batch that the server makes."""
    max_queue_delay_us: int = 1000
    """How long a request waits for others to share a batch, microseconds."""
    instances: int = 1
    """Copies of each model that run at the same time."""
    device: Device = "cpu"
    """Where the predictor runs; the tokenizer runs on the CPU."""
    threads: int = 1
    """Threads of one call of the predictor on the CPU."""
    seq_multiple: int = 32
    """Columns are rounded up to a multiple of it, so that more requests have the shape to share a batch."""
    extensions_library: str = "libortextensions.so"
    """The library of onnxruntime-extensions as the server finds it."""
    storage_uri: str | None = None
    """Of kserve: where the folder models will lie, as in pvc://claim/models."""

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise InputError("TARGET", self.target, ", ".join(TARGETS))
        for name in ("artifact", "out"):
            if not getattr(self, name):
                raise InputError(name, getattr(self, name), "a path")
        if (self.storage_uri is None) == (self.target == "kserve"):
            raise InputError("storage_uri", self.storage_uri, "set for kserve, and for nothing else")

    @property
    def repository(self) -> RepositoryOptions:
        """The options of a repository among them."""
        return RepositoryOptions(
            name=self.name,
            runtime=self.runtime,
            capped=self.capped,
            max_batch_size=self.max_batch_size,
            max_queue_delay_us=self.max_queue_delay_us,
            instances=self.instances,
            device=self.device,
            threads=self.threads,
            seq_multiple=self.seq_multiple,
            extensions_library=self.extensions_library,
        )


def package(config: PackageConfig) -> None:
    """Writes what `config` says, after checking that its tokenizer gives the artifact's token ids.

    Raises:
        InputError: The artifact is refused, or cannot be packaged so.
        TailcastError: The tokenizer in the graph gives other token ids.
    """
    if config.target == "text":
        out = writable_target(config.out, "out")
    else:
        out = folder_target(config.out, config.target, overwrite=config.overwrite)
    artifact = open_artifact(config.artifact, public_key=config.public_key)
    if artifact.manifest.kind != "encoder":
        raise InputError("artifact manifest, kind", artifact.manifest.kind, "encoder, which reads token ids")
    if config.target == "text" or config.runtime == "onnxruntime":
        check_tokenizer_graph(artifact)
    options = config.repository
    if config.target == "text":
        from export.text.text_graph import text_graph

        content = text_graph(artifact, capped=config.capped).SerializeToString()
        with atomic_file(out) as temporary:
            temporary.write_bytes(content)
    else:
        from export.triton.kserve import write_kserve

        with atomic_directory(out, config.target, overwrite=config.overwrite) as folder:
            if config.target == "triton":
                write_repository(artifact, options, folder)
            else:
                write_kserve(artifact, options, config.storage_uri or "", folder)
    logger.info("%s of artifact %s in %s", config.target, artifact.manifest.artifact_id, out)


def check_tokenizer_graph(artifact: Artifact) -> None:
    """Raises TailcastError unless the tokenizer as a graph gives the ids of `tokenizers`, for text of every kind."""
    from export.text.text_graph import extensions_library
    from export.text.tokenizer_graph import TEXT, tokenizer_graph

    try:
        import onnxruntime as ort
    except ImportError as error:
        raise MissingExtraError("onnxruntime", "export") from error
    manifest = artifact.manifest
    assert manifest.max_length is not None and manifest.truncation_side is not None  # noqa: PT018
    graph = tokenizer_graph(artifact)
    options: Any = ort.SessionOptions()
    options.register_custom_ops_library(str(extensions_library()))
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
    tokenizer = PromptTokenizer(
        artifact.tokenizer_path, max_length=manifest.max_length, truncation_side=manifest.truncation_side
    )
    texts = [*PROBES, *NASTY]
    names = ("input_ids", "attention_mask")
    found = dict(zip(names, session.run(list(names), {TEXT: np.array(texts, dtype=object)}), strict=True))
    for row, text in enumerate(texts):
        [wanted] = tokenizer([text])
        _check_row(found, row, wanted.ids, text)


def _check_row(found: Mapping[str, NDArray[Any]], row: int, wanted: NDArray[np.int64], text: str) -> None:
    used = found["attention_mask"][row] == 1
    got = found["input_ids"][row][used]
    if got.tolist() != wanted.tolist() or not used[: len(wanted)].all():
        raise TailcastError(
            f"the tokenizer as a graph differs on {text[:40]!r}: {got[:8].tolist()}... and {wanted[:8].tolist()}..."
        )
