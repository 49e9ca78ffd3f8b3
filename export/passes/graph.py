"""Graphs to rewrite: producers and consumers of tensors, changes, and values inside of a graph that is run."""

from __future__ import annotations

import graphlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
                raise TailcastError(f"a {node.op_type} has a graph inside: no pass can read it")
        self.outputs = [value.name for value in model.graph.output]
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._names = {name for node in self.nodes for name in (*node.input, *node.output)} | set(
            self._constants
        )
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
        return list(self._consumers[name])

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
        """The model as changed: sorted, without unused nodes and constants, without stored shapes (they may be stale)."""
        needed = _needed(self._producers, self.outputs)
        graph = self.model.graph
        nodes = [node for node in self.nodes if needed.intersection(node.output)]
        numbers = {name: number for number, node in enumerate(nodes) for name in node.output if name}
        sources = {
            n: {numbers[name] for name in node.input if name in numbers} for n, node in enumerate(nodes)
        }
        ordered = [nodes[number] for number in graphlib.TopologicalSorter(sources).static_order()]
        constants = [tensor for name, tensor in self._constants.items() if name in needed]
        copied = [NodeProto.FromString(node.SerializeToString()) for node in ordered]
        del graph.node[:], graph.value_info[:]
        graph.node.extend(copied)
        for position in reversed(range(len(graph.initializer))):
            if graph.initializer[position].name not in needed:
                del graph.initializer[position]
        present = {tensor.name for tensor in graph.initializer}
        graph.initializer.extend(tensor for tensor in constants if tensor.name not in present)
        domains = {entry.domain for entry in self.model.opset_import}
        if MICROSOFT not in domains and any(node.domain == MICROSOFT for node in copied):
            self.model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
        return self.model


def _needed(producers: Mapping[str, NodeProto], outputs: Iterable[str]) -> set[str]:
    """The tensors that some tensors are made from, themselves included."""
    needed: set[str] = set()
    stack = list(outputs)
    while stack:
        name = stack.pop()
        if name not in needed:
            needed.add(name)
            stack += producers[name].input if name in producers else []
    return needed


def attribute(node: NodeProto, name: str, default: Any = None) -> Any:
    """Value of a node's attribute; `default` where it has none of that name."""
    for entry in node.attribute:
        if entry.name == name:
            return helper.get_attribute_value(entry)
    return default


Feed = Mapping[str, NDArray[Any]]
#: A graph with its weights inside one message may not be larger than this.
_LARGEST = 2_000_000_000


def session(model: onnx.ModelProto, *, optimize: bool = True) -> Any:
    """An ONNX Runtime session on the CPU with one thread.

    Raises:
        TailcastError: The graph is refused or too large.
    """
    import onnxruntime as ort

    if model.ByteSize() > _LARGEST:
        raise TailcastError("the graph is beyond 2 GB: variants must fit into one message")
    options: Any = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    try:
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        raise TailcastError(f"ONNX Runtime refuses the rewritten graph: {error}") from error


def random_feed(
    model: onnx.ModelProto, batch: int, seq: int, rng: np.random.Generator, vocabulary: int
) -> dict[str, NDArray[Any]]:
    """Inputs for a graph of token ids: random tokens, rows padded on the right from the second on, zeros for the rest.

    Args:
        model: Its inputs have the axes batch and seq in this order, as the manifest says.
        batch, seq: Shape.
        rng: Draws tokens and lengths.
        vocabulary: Number of token ids.
    """
    feed: dict[str, NDArray[Any]] = {}
    lengths = np.array([seq, *rng.integers(1, seq + 1, size=batch - 1)])
    for value in model.graph.input:
        dims = [batch, seq][: len(value.type.tensor_type.shape.dim)]
        dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if value.name == "input_ids":
            feed[value.name] = rng.integers(0, vocabulary, size=dims).astype(dtype)
        elif value.name == "attention_mask":
            feed[value.name] = (np.arange(seq) < lengths[:, None]).astype(dtype)
        else:
            feed[value.name] = np.zeros(dims, dtype=dtype)
    return feed


def probe(model: onnx.ModelProto, names: Iterable[str], feed: Feed) -> dict[str, NDArray[Any]]:
    """Values of tensors inside a graph, nothing optimized away.

    Args:
        model: The graph; it is not changed.
        names: Tensors, also inputs and constants of the graph.
        feed: Inputs.
    """
    names = list(dict.fromkeys(names))
    computed = {name for node in model.graph.node for name in node.output}
    inside = [name for name in names if name in computed]
    tensors = {name: feed[name] for name in names if name in feed}
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    tensors |= {name: onnx.numpy_helper.to_array(constants[name]) for name in names if name in constants}
    if inside:
        graph = part(model, inside)
        inputs = {value.name for value in graph.graph.input}
        values = session(graph, optimize=False).run(
            inside, {name: value for name, value in feed.items() if name in inputs}
        )
        tensors |= dict(zip(inside, values, strict=True))
    return tensors


def part(model: onnx.ModelProto, outputs: Iterable[str]) -> onnx.ModelProto:
    """The part of a graph that some of its tensors need, with those as outputs of unstated shape."""
    outputs = list(dict.fromkeys(outputs))
    needed = _needed({name: node for node in model.graph.node for name in node.output}, outputs)
    graph = onnx.GraphProto(name=model.graph.name)
    graph.node.extend(node for node in model.graph.node if needed.intersection(node.output))
    graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in needed)
    graph.input.extend(value for value in model.graph.input if value.name in needed)
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    return helper.make_model(
        graph,
        opset_imports=list(model.opset_import),
        ir_version=model.ir_version,
        functions=list(model.functions),
    )
