"""Half precision for the encoder; masks, positions, pooling, heads and outputs stay in single precision.

What decides is not the type of a node but what flows through it: the path from the word embeddings to the last hidden
states is halved, and everything beside it (DeBERTa's buckets, which need exact logarithms; masks) only as it enters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto

from export.passes.graph import Feed, GraphView, probe
from scheduler_core.errors import TailcastError

#: Stands for minus infinity where half precision must hold it and be added to.
LOWEST = -6e4


def to_half(model: onnx.ModelProto, last_states: str, feed: Feed) -> int:
    """Puts the encoder into half precision, in place; inputs and outputs keep their types.

    Args:
        model: A simplified graph.
        last_states: The encoder's last hidden states.
        feed: Inputs, to see the types of tensors.

    Returns:
        Number of nodes in half precision.

    Raises:
        TailcastError: No word embeddings lead to `last_states`.
    """
    graph = GraphView(model)
    halved = _between(graph, last_states)
    if not halved:
        raise TailcastError("no word embeddings lead to the hidden states")
    inside = {id(node) for node in halved}
    internal = {name for node in halved for name in node.output}
    inputs = {name for node in halved for name in node.input if name and name not in internal}
    entering = sorted(name for name in inputs if not graph.is_constant(name))
    leaving = sorted(
        name for name in internal if any(id(reader) not in inside for reader in graph.consumers(name))
    )
    types = {name: value.dtype for name, value in probe(model, [*entering, *leaving], feed).items()}
    halves: dict[str, str] = {}
    for node in halved:
        _halve_node(graph, node, internal, types, halves)
    for name in leaving:
        if types[name] == np.float32:
            outside = [reader for reader in graph.consumers(name) if id(reader) not in inside]
            single = graph.add("Cast", [name], to=TensorProto.FLOAT)
            graph.replace_uses(name, single, among=outside)
    graph.finish()
    return len(halved)


def _between(graph: GraphView, last_states: str) -> Sequence[NodeProto]:
    """Nodes on a path from the word embeddings to the last hidden states."""
    ahead = _behind_embeddings(graph)
    nodes, stack, visited = [], [last_states], set()
    while stack:
        node = graph.producer(stack.pop())
        if node is not None and id(node) not in visited:
            visited.add(id(node))
            stack += node.input
            if id(node) in ahead:
                nodes.append(node)
    return nodes


def _behind_embeddings(graph: GraphView) -> set[int]:
    """The lookup of the token ids in the word embeddings, and all nodes that read its result, by way of others too."""
    stack, behind, visited = ["input_ids"], set(), set()
    while stack:
        name = stack.pop()
        for node in graph.consumers(name):
            is_lookup = node.op_type == "Gather" and len(graph.constant_shape(node.input[0]) or ()) == 2
            after = name in behind or is_lookup
            if node.op_type == "Shape" or (id(node), after) in visited:
                continue
            visited.add((id(node), after))
            stack += node.output
            if after:
                behind.update(node.output)
    return {number for number, after in visited if after}


def _halve_node(
    graph: GraphView, node: NodeProto, internal: set[str], types: dict[str, Any], halves: dict[str, str]
) -> None:
    for position, name in enumerate(node.input):
        if not name or name in internal:
            continue
        if name not in halves:
            value = graph.constant(name)
            if value is not None:
                half = np.clip(value, LOWEST, -LOWEST).astype(np.float16)
                halves[name] = graph.add_constant(f"{name}_half", half) if value.dtype == np.float32 else name
            elif types[name] == np.float32:
                lowest = graph.add_constant("lowest", np.float32(LOWEST))  # type: ignore[arg-type]
                halves[name] = graph.add("Cast", [graph.add("Max", [name, lowest])], to=TensorProto.FLOAT16)
            else:
                halves[name] = name
        node.input[position] = halves[name]
    for entry in node.attribute:
        if node.op_type == "Cast" and (entry.name, entry.i) == ("to", TensorProto.FLOAT):
            entry.i = TensorProto.FLOAT16
