"""Half precision for the encoder; masks, positions, pooling, heads and outputs stay in single precision.

Nodes are selected by data flow, not by type: those on a path from the word embeddings to the last hidden states are
converted. Other tensors (masks; DeBERTa's buckets, which need exact logarithms) are cast where they enter these nodes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from export.passes.graph import (
    Array,
    Feed,
    add,
    add_constant,
    finish,
    probe,
    replace_uses,
    stored,
    stored_shape,
)
from scheduler_core.errors import TailcastError

#: Replaces minus infinity in half precision; leaves some range for later additions.
LOWEST = -6e4


def to_half(model: ir.Model, last_states: ir.Value, feed: Feed) -> int:
    """Converts the encoder of a simplified graph to half precision, in place; returns the number of converted
    nodes. Inputs and outputs of the graph keep their types. `last_states` are the encoder's last hidden
    states; TailcastError if they do not depend on word embeddings. A run with the inputs `feed` determines
    the types of tensors."""
    graph = model.graph
    halved = _between(graph, last_states)
    if not halved:
        raise TailcastError("the last hidden states do not depend on word embeddings")
    inside = set(halved)
    internal = dict.fromkeys(value for node in halved for value in node.outputs)
    inputs = dict.fromkeys(value for node in halved for value in node.inputs if value is not None)
    entering = [value for value in inputs if value not in internal]
    leaving = [value for value in internal if not inside.issuperset(value.consumers())]
    values = probe(model, [*entering, *leaving], feed)
    halves = {value: _halved(graph, value, values) for value in entering}
    for node in halved:
        for position, value in enumerate(node.inputs):
            if value is not None:
                node.replace_input_with(position, halves.get(value, value))
        if node.op_type == "Cast" and node.attributes["to"].as_int() == ir.DataType.FLOAT:
            node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT16)
    for value in leaving:
        if values[value].dtype == np.float32:
            outside = [reader for reader in value.consumers() if reader not in inside]
            replace_uses(value, add(graph, "Cast", value, to=ir.DataType.FLOAT), outside)
    finish(model)
    return len(halved)


def _between(graph: ir.Graph, last_states: ir.Value) -> list[ir.Node]:
    """Nodes on a path from the word embeddings to the last hidden states."""
    downstream = _downstream_of_embeddings(graph)
    stack: list[ir.Value | None] = [last_states]
    visited: dict[ir.Node, None] = {}  # in the order of the search
    while stack:
        value = stack.pop()
        node = None if value is None else value.producer()
        if node is not None and node not in visited:
            visited[node] = None
            stack += node.inputs
    return [node for node in visited if node in downstream]


def _downstream_of_embeddings(graph: ir.Graph) -> set[ir.Node]:
    """The lookup of the token ids in the word embeddings, and all nodes that depend on its result."""
    stack = [(value, False) for value in graph.inputs if value.name == "input_ids"]
    visited: set[tuple[ir.Node, bool]] = set()
    while stack:
        value, is_downstream = stack.pop()
        for node in value.consumers():
            is_lookup = node.op_type == "Gather" and len(stored_shape(node.inputs[0])) == 2
            after = is_downstream or is_lookup
            if node.op_type != "Shape" and (node, after) not in visited:
                visited.add((node, after))
                stack += [(output, after) for output in node.outputs]
    return {node for node, after in visited if after}


def _halved(graph: ir.Graph, value: ir.Value, values: Mapping[ir.Value, Array]) -> ir.Value:
    """A tensor that enters the encoder, cast to half precision if it has single precision."""
    if values[value].dtype != np.float32:
        return value
    constant = stored(value)
    if constant is not None:
        half = np.clip(constant, LOWEST, -LOWEST).astype(np.float16)
        return add_constant(graph, f"{value.name}_half", half)
    lowest = add_constant(graph, "lowest", np.float32(LOWEST))
    return add(graph, "Cast", add(graph, "Max", value, lowest), to=ir.DataType.FLOAT16)
