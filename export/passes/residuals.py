"""Sums in front of a layer normalisation kept apart from it.

ONNX Runtime puts `LayerNormalization(Add(x, y))` into one operator, SkipLayerNormalization, when it loads a graph. On a CPU that
operator is slower than the two it stands for (ONNX Runtime 1.31). It looks for Add, not for Sum.
"""

from __future__ import annotations

import onnx

from export.passes.view import GraphView


def keep_residuals_apart(model: onnx.ModelProto) -> int:
    """Turns the Add of two computed tensors in front of each layer normalisation into a Sum; returns how many."""
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
