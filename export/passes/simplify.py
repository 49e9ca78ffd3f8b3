"""Exact simplifications by ONNX Runtime, done once and stored, and one that it must not do."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import onnx

from export.graph import drop_unused_domains
from export.passes.graph import GraphView
from scheduler_core.errors import TailcastError


def simplified(path: str | Path) -> onnx.ModelProto:
    """The graph of a file with its constants folded and its duplicates removed (ONNX Runtime's basic level).

    That turns `MatMul(x, Transpose(weight))` into a product with a stored weight, which the other passes can see, and
    leaves only standard operators.

    Raises:
        TailcastError: ONNX Runtime refuses the file.
    """
    import onnxruntime as ort

    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "basic.onnx"
        options: Any = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(target)
        options.log_severity_level = 3
        try:
            ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            raise TailcastError(f"ONNX Runtime cannot simplify {path}: {error}") from error
        model = onnx.load(target)
    # Shapes found before the simplification can contradict it, and the quantizer believes them.
    del model.graph.value_info[:]
    # It also names every operator set it knows of.
    drop_unused_domains(model)
    return model


def keep_residuals_apart(model: onnx.ModelProto) -> int:
    """Turns the Add of two computed tensors in front of each layer normalization into a Sum; returns how many."""
    graph = GraphView(model)
    done = 0
    for node in list(graph.nodes):
        if node.op_type != "LayerNormalization":
            continue
        added = graph.producer(node.input[0])
        if added is None or added.op_type != "Add" or any(graph.is_constant(name) for name in added.input):
            continue
        added.op_type = "Sum"
        done += 1
    if done:
        graph.finish()
    return done
