"""A graph that can be asked who makes and who reads a tensor, and changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, helper, numpy_helper

from scheduler_core.errors import TailcastError

MICROSOFT = "com.microsoft"


class GraphView:
    """The main graph of a model, for rewriting.

    Args:
        model: The model; it is changed by `finish` alone. Its nodes have no graphs inside.

    Raises:
        TailcastError: A node holds a graph of its own (a loop or a branch).
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.nodes: list[NodeProto] = list(model.graph.node)
        for node in self.nodes:
            if any(attribute.type == onnx.AttributeProto.GRAPH for attribute in node.attribute):
                raise TailcastError(
                    f"the graph has a {node.op_type} with a graph inside: no pass can read it"
                )
        self.inputs = [value.name for value in model.graph.input]
        self.outputs = [value.name for value in model.graph.output]
        # What is an input too is only a default.
        self._constants = {
            tensor.name: tensor for tensor in model.graph.initializer if tensor.name not in self.inputs
        }
        self._names = {name for node in self.nodes for name in (*node.input, *node.output)}
        self._names |= set(self._constants) | set(self.inputs) | set(self.outputs)
        self._index()

    def _index(self) -> None:
        self._producers = {name: node for node in self.nodes for name in node.output if name}
        self._consumers: dict[str, list[NodeProto]] = defaultdict(list)
        for node in self.nodes:
            for name in dict.fromkeys(node.input):
                if name:
                    self._consumers[name].append(node)

    def producer(self, name: str) -> NodeProto | None:
        """The node that makes a tensor; None for inputs and constants."""
        return self._producers.get(name)

    def consumers(self, name: str) -> list[NodeProto]:
        """The nodes that read a tensor."""
        return list(self._consumers.get(name, ()))

    def is_constant(self, name: str) -> bool:
        """Whether a tensor is stored in the model."""
        return name in self._constants

    def constant(self, name: str) -> NDArray[Any] | None:
        """Value of a tensor that is stored in the model; None for any other."""
        tensor = self._constants.get(name)
        return None if tensor is None else numpy_helper.to_array(tensor)

    def constant_shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor that is stored in the model, without reading it; None for any other."""
        tensor = self._constants.get(name)
        return None if tensor is None else tuple(tensor.dims)

    def add_constant(self, hint: str, value: NDArray[Any]) -> str:
        """Stores a tensor in the model; returns its name."""
        name = self._fresh(hint)
        self._constants[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name

    def add(self, op_type: str, inputs: Sequence[str], *, domain: str = "", **attributes: Any) -> str:
        """Adds a node with one output; returns the name of the output. An empty input name leaves that input out."""
        hint = next((name for name in inputs if name), op_type)
        output = self._fresh(f"{hint.split('/')[-1].split('.')[-1]}_{op_type}")
        node = helper.make_node(op_type, list(inputs), [output], name=output, domain=domain, **attributes)
        self.nodes.append(node)
        self._producers[output] = node
        for name in dict.fromkeys(inputs):
            if name:
                self._consumers[name].append(node)
        return output

    def replace_uses(self, old: str, new: str, *, among: Iterable[NodeProto] | None = None) -> None:
        """Lets the readers of `old` (or some of them) read `new`; a graph output keeps its name.

        Raises:
            TailcastError: `old` is an output of the graph.
        """
        if old in self.outputs:
            raise TailcastError(f"{old} is an output of the graph and cannot be replaced")
        chosen = self.consumers(old) if among is None else list(among)
        for node in chosen:
            for position, name in enumerate(node.input):
                if name == old:
                    node.input[position] = new
        self._index()

    def _fresh(self, hint: str) -> str:
        name, number = hint, 0
        while name in self._names:
            number += 1
            name = f"{hint}_{number}"
        self._names.add(name)
        return name

    def finish(self) -> onnx.ModelProto:
        """The model as changed: in order, without what nobody reads, without stored shapes (they may be stale)."""
        needed: set[str] = set(self.outputs)
        stack = [node for name in self.outputs if (node := self.producer(name)) is not None]
        kept: dict[int, NodeProto] = {}
        while stack:
            node = stack.pop()
            if id(node) in kept:
                continue
            kept[id(node)] = node
            needed.update(node.input)
            stack += [maker for name in node.input if (maker := self.producer(name)) is not None]
        graph = self.model.graph
        ordered = self._ordered([node for node in self.nodes if id(node) in kept])
        constants = [tensor for name, tensor in self._constants.items() if name in needed]
        copied = [NodeProto.FromString(node.SerializeToString()) for node in ordered]
        del graph.node[:], graph.value_info[:]
        graph.node.extend(copied)
        needed.update(self.inputs)
        stale = [tensor.name for tensor in graph.initializer if tensor.name not in needed]
        for name in stale:
            position = next(at for at, tensor in enumerate(graph.initializer) if tensor.name == name)
            del graph.initializer[position]
        present = {tensor.name for tensor in graph.initializer}
        graph.initializer.extend(tensor for tensor in constants if tensor.name not in present)
        if any(node.domain == MICROSOFT for node in copied):
            domains = {entry.domain for entry in self.model.opset_import}
            if MICROSOFT not in domains:
                self.model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
        return self.model

    def _ordered(self, nodes: Sequence[NodeProto]) -> list[NodeProto]:
        makers = {name: number for number, node in enumerate(nodes) for name in node.output if name}
        missing = [{makers[name] for name in node.input if name in makers} for node in nodes]
        readers: dict[int, list[int]] = defaultdict(list)
        for number, needs in enumerate(missing):
            for need in needs:
                readers[need].append(number)
        ready = [number for number, needs in enumerate(missing) if not needs]
        found: list[NodeProto] = []
        at = 0
        while at < len(ready):
            number = ready[at]
            at += 1
            found.append(nodes[number])
            for reader in readers[number]:
                missing[reader].discard(number)
                if not missing[reader]:
                    ready.append(reader)
        if len(found) != len(nodes):
            raise TailcastError("the rewritten graph has a cycle")
        return found


def attribute(node: NodeProto, name: str, default: Any = None) -> Any:
    """Value of a node's attribute; `default` where it has none of that name."""
    for entry in node.attribute:
        if entry.name == name:
            return helper.get_attribute_value(entry)
    return default
