"""Helper functions to rewrite graphs with onnx_ir, and to compute the values of tensors inside a graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import ArrayLike, NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

from scheduler_core.errors import TailcastError

MICROSOFT = "com.microsoft"
Array = NDArray[Any]
Feed = Mapping[str, Array]
#: Maximum size in bytes of a graph with its weights in one protobuf message.
_LARGEST = 2_000_000_000


def stored(value: ir.Value | None) -> Array | None:
    """Value of a tensor that is stored in the model; None for other tensors."""
    tensor = None if value is None else value.const_value
    return None if tensor is None else tensor.numpy()


def stored_shape(value: ir.Value | None) -> tuple[int, ...]:
    """Shape of a tensor that is stored in the model, without loading it; empty for other tensors."""
    tensor = None if value is None else value.const_value
    return () if tensor is None else tuple(tensor.shape.numpy())


def add_constant(graph: ir.Graph, hint: str, values: ArrayLike) -> ir.Value:
    """Stores a tensor in the model."""
    value = ir.val(f"{hint}_{len(graph.initializers)}", const_value=ir.tensor(np.asarray(values)))
    graph.register_initializer(value)
    return value


def add(
    graph: ir.Graph, op_type: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any
) -> ir.Value:
    """Adds a node and returns its only output; an input of None is omitted."""
    node = ir.node(op_type, inputs, attributes, domain=domain)
    graph.append(node)
    return node.outputs[0]


def replace_uses(old: ir.Value, new: ir.Value, among: Iterable[ir.Node] | None = None) -> None:
    """Replaces `old` by `new` in all nodes that use it, or only in the nodes `among`."""
    chosen = old.consumers() if among is None else list(among)
    for node, position in tuple(old.uses()):
        if node in chosen:
            node.replace_input_with(position, new)


def shift_output(model: ir.Model, name: str, shift: float) -> None:
    """Adds a constant to an output of the graph in place; nodes that read it keep the value without the constant."""
    graph = model.graph
    [position] = [at for at, value in enumerate(graph.outputs) if value.name == name]
    old = graph.outputs[position]
    assert old.dtype is not None
    new = add(graph, "Add", old, add_constant(graph, "shift", np.array(shift, dtype=old.dtype.numpy())))
    old.name, new.name = f"{name}_before_shift", name
    new.shape, new.type = old.shape, old.type
    graph.outputs[position] = new
    finish(model)


def finish(model: ir.Model) -> None:
    """Sorts the nodes, and removes unused nodes and constants."""
    model.graph.opset_imports.setdefault(MICROSOFT, 1)
    model.graph.sort()
    ir.passes.Sequential(RemoveUnusedNodesPass(), RemoveUnusedOpsetsPass())(model)


def save(model: ir.Model, path: Path) -> None:
    """Writes a graph with the lowest IR version that has its operator sets, so that older runtimes load it too."""
    sets = [onnx.helper.make_opsetid(*each) for each in model.opset_imports.items()]
    model.ir_version = onnx.helper.find_min_ir_version_for(sets, ignore_unknown=True)
    ir.save(model, path)


def session(model: ir.Model, *, optimize: bool = True) -> Any:
    """An ONNX Runtime session on the CPU with one thread; TailcastError for an invalid or too large graph."""
    import onnxruntime as ort

    message = ir.to_proto(model)
    if message.ByteSize() > _LARGEST:
        raise TailcastError("the graph is larger than 2 GB; variants must fit into one protobuf message")
    options: Any = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    try:
        return ort.InferenceSession(message.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        raise TailcastError(f"ONNX Runtime rejects the rewritten graph: {error}") from error


def random_feed(
    model: ir.Model, batch: int, seq: int, rng: np.random.Generator, vocabulary: int
) -> dict[str, Array]:
    """Inputs [batch, seq] or [batch] for a graph: random tokens, padded on the right in all rows but the
    first; all other inputs are zero."""
    feed: dict[str, Array] = {}
    lengths = np.array([seq, *rng.integers(1, seq + 1, size=batch - 1)])
    for value in model.graph.inputs:
        assert value.name and value.shape is not None and value.dtype is not None  # noqa: PT018
        dims, dtype = (batch, seq)[: len(value.shape)], value.dtype.numpy()
        if value.name == "input_ids":
            feed[value.name] = rng.integers(0, vocabulary, size=dims).astype(dtype)
        elif value.name == "attention_mask":
            feed[value.name] = (np.arange(seq) < lengths[:, None]).astype(dtype)
        else:
            feed[value.name] = np.zeros(dims, dtype=dtype)
    return feed


def probe(model: ir.Model, values: Iterable[ir.Value], feed: Feed) -> dict[ir.Value, Array]:
    """Values of any tensors of a graph, including inputs and constants, run without graph optimizations."""
    values = list(dict.fromkeys(values))
    tensors = {value: array for value in values if (array := stored(value)) is not None}
    tensors |= {value: feed[str(value.name)] for value in values if value.is_graph_input()}
    computed = [value for value in values if value not in tensors]
    if computed:
        outputs = session(part(model, computed), optimize=False).run(None, dict(feed))
        tensors |= dict(zip(computed, outputs, strict=True))
    return tensors


def part(model: ir.Model, outputs: Iterable[ir.Value]) -> ir.Model:
    """The part of a graph that computes `outputs`, with all inputs of the graph."""
    graph = ir.convenience.extract(model.graph, model.graph.inputs, list(outputs))
    return ir.Model(graph, ir_version=model.ir_version)
