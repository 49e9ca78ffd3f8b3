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
    entering = sorted(
        {
            name
            for node in halved
            for name in node.input
            if name and name not in internal and not graph.is_constant(name)
        }
    )
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
    ahead = _reached(graph, ["input_ids"], lambda node: node.op_type == "Gather" and _is_table(graph, node))
    nodes, stack, visited = [], [last_states], set()
    while stack:
        node = graph.producer(stack.pop())
        if node is not None and id(node) not in visited:
            visited.add(id(node))
            stack += node.input
            if id(node) in ahead:
                nodes.append(node)
    return nodes


def _is_table(graph: GraphView, node: NodeProto) -> bool:
    value = graph.constant_shape(node.input[0])
    return value is not None and len(value) == 2


def _reached(graph: GraphView, names: Sequence[str], starts: Any) -> set[int]:
    """Nodes behind those nodes that read one of the tensors (by way of others) and that `starts` accepts."""
    stack, behind, visited = list(names), set(), set()
    while stack:
        name = stack.pop()
        for node in graph.consumers(name):
            after = name in behind or starts(node)
            if node.op_type == "Shape" or (id(node), after) in visited:
                continue
            visited.add((id(node), after))
            for output in node.output:
                if after:
                    behind.add(output)
                stack.append(output)
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
                is_single = value.dtype == np.float32
                halves[name] = graph.add_constant(f"{name}_half", _half(value)) if is_single else name
            elif types[name] == np.float32:
                lowest = graph.add_constant("lowest", np.float32(LOWEST))  # type: ignore[arg-type]
                halves[name] = graph.add("Cast", [graph.add("Max", [name, lowest])], to=TensorProto.FLOAT16)
            else:
                halves[name] = name
        node.input[position] = halves[name]
    if node.op_type == "Cast":
        for entry in node.attribute:
            if entry.name == "to" and entry.i == TensorProto.FLOAT:
                entry.i = TensorProto.FLOAT16


def _half(value: Any) -> Any:
    return np.maximum(np.minimum(value, -LOWEST), LOWEST).astype(np.float16)


def last_of(model: onnx.ModelProto, names: Sequence[str]) -> str:
    """The last of some tensors in the order of the graph."""
    position = {name: number for number, node in enumerate(model.graph.node) for name in node.output}
    return max(names, key=lambda name: position.get(name, -1))
