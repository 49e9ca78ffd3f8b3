"""One ONNX file from text to predictions: tokenizer, predictor and, on request, the capped length."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import compose, helper

from export.graph import MAX_INLINE_BYTES
from export.text.tokenizer_graph import EXTENSIONS, IR_VERSION, OPSET, tokenizer_graph
from predictors.artifact import Artifact
from scheduler_core.errors import InputError


def text_graph(artifact: Artifact, *, capped: bool = False) -> onnx.ModelProto:
    """The graph: text [batch] and the artifact's conditions in, its outputs out.

    Running it takes onnxruntime-extensions for the tokenizer's operators. It says what it is made of in its metadata.

    Args:
        artifact: An encoder with a WordPiece tokenizer.
        capped: Also take max_tokens [batch] and give the outputs of the artifact's length.onnx.

    Raises:
        InputError: The tokenizer cannot be done in a graph, or the artifact has no length.onnx, or is too large for one
            file, or of an opset that does not fit.
    """
    manifest = artifact.manifest
    size = sum(
        (artifact.path / name).stat().st_size for name in manifest.files if name.startswith("model.onnx")
    )
    if size > MAX_INLINE_BYTES:
        raise InputError(
            "artifact file model.onnx", f"{size} bytes", f"at most {MAX_INLINE_BYTES} for one file"
        )
    if capped and manifest.capped is None:
        raise InputError("capped", capped, f"false: artifact {manifest.artifact_id} has no length.onnx")
    model = onnx.load(artifact.model_path)
    parts = [_prefixed(tokenizer_graph(artifact), "tokenizer/"), model]
    if capped:
        parts.append(_prefixed(onnx.load(artifact.capped_model_path), "length/"))
    wanted = {tensor.name for tensor in manifest.outputs}
    if capped and manifest.capped is not None:
        wanted |= {tensor.name for tensor in manifest.capped.outputs}
    chained = _chained(parts, wanted)
    for name in ("artifact_id", "artifact_version", "license"):
        value = getattr(manifest, name)
        if value is not None:
            chained.metadata_props.add(key=f"tailcast.{name}", value=str(value))
    onnx.checker.check_model(chained)
    return chained


def extensions_library() -> Path:
    """The library of operators that onnxruntime-extensions brings.

    Raises:
        MissingExtraError: It is not installed.
    """
    from scheduler_core.errors import MissingExtraError

    try:
        from onnxruntime_extensions import get_library_path
    except ImportError as error:
        raise MissingExtraError("onnxruntime-extensions", "export") from error
    return Path(get_library_path())


def _prefixed(model: onnx.ModelProto, prefix: str) -> onnx.ModelProto:
    return compose.add_prefix(model, prefix, rename_inputs=False, rename_outputs=False)


def _chained(parts: list[onnx.ModelProto], outputs: set[str]) -> onnx.ModelProto:
    """The graphs one after another: an input that an earlier graph gives comes from there."""
    opsets: dict[str, int] = {}
    inputs: dict[str, onnx.ValueInfoProto] = {}
    given: dict[str, onnx.ValueInfoProto] = {}
    for part in parts:
        for entry in part.opset_import:
            domain = entry.domain
            if opsets.setdefault(domain, entry.version) != entry.version:
                where = f"artifact file, opset {domain or 'ai.onnx'}"
                raise InputError(where, entry.version, f"{opsets[domain]}, for one file with the tokenizer")
        for value in part.graph.input:
            if value.name not in given:
                inputs.setdefault(value.name, value)
        given |= {value.name: value for value in part.graph.output}
    graph = helper.make_graph(
        [node for part in parts for node in part.graph.node],
        "text",
        list(inputs.values()),
        [value for name, value in given.items() if name in outputs],
        initializer=[tensor for part in parts for tensor in part.graph.initializer],
        value_info=[value for part in parts for value in part.graph.value_info],
    )
    assert opsets[EXTENSIONS] == 1
    assert opsets[""] == OPSET
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid(domain, version) for domain, version in opsets.items()],
        functions=[function for part in parts for function in part.functions],
        ir_version=max(IR_VERSION, *(part.ir_version for part in parts)),
        producer_name="tailcast",
    )
