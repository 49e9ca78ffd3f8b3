"""Values inside a graph: run it on a few inputs and look."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from scheduler_core.errors import MissingExtraError, TailcastError

Feed = Mapping[str, NDArray[Any]]
#: A graph with its weights inside one message may not be larger than this.
_LARGEST = 2_000_000_000


def session(model: onnx.ModelProto, *, optimise: bool = True, threads: int = 1) -> Any:
    """An ONNX Runtime session on the CPU.

    Raises:
        MissingExtraError: onnxruntime is not installed.
        TailcastError: The graph is refused or too large.
    """
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise MissingExtraError("onnxruntime", "export") from error
    if model.ByteSize() > _LARGEST:
        raise TailcastError(
            "variants of models beyond 2 GB cannot be made: the graph must fit into one message"
        )
    options: Any = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimise else level.ORT_DISABLE_ALL
    try:
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        raise TailcastError(f"ONNX Runtime refuses the rewritten graph: {error}") from error


def random_feed(
    model: onnx.ModelProto, batch: int, seq: int, rng: np.random.Generator, vocabulary: int
) -> dict[str, NDArray[Any]]:
    """Inputs for a graph of token ids: random tokens, rows padded on the right from the second on, zeros for the rest.

    Inputs with a default are left out.

    Args:
        model: Its inputs have the axes batch and seq in this order, as the manifest says.
        batch, seq: Shape.
        rng: Draws tokens and lengths.
        vocabulary: Number of token ids.
    """
    feed: dict[str, NDArray[Any]] = {}
    lengths = np.array([seq, *rng.integers(1, seq + 1, size=batch - 1)])
    defaults = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        if value.name in defaults:
            continue
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
    """Values of tensors inside a graph, nothing optimised away.

    Args:
        model: The graph; it is not changed.
        names: Tensors; inputs and constants of the graph are given too.
        feed: Inputs.
    """
    wanted = list(dict.fromkeys(names))
    made = {name for node in model.graph.node for name in node.output}
    inside = [name for name in wanted if name in made]
    found = {name: feed[name] for name in wanted if name in feed}
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    found |= {name: onnx.numpy_helper.to_array(constants[name]) for name in wanted if name in constants}
    if inside:
        graph = part(model, inside)
        inputs = {value.name for value in graph.graph.input}
        values = session(graph, optimise=False).run(
            inside, {name: value for name, value in feed.items() if name in inputs}
        )
        found |= dict(zip(inside, values, strict=True))
    return found


def part(model: onnx.ModelProto, outputs: Iterable[str]) -> onnx.ModelProto:
    """The part of a graph that some of its tensors need, with those as outputs of unstated shape."""
    wanted = list(dict.fromkeys(outputs))
    makers = {name: node for node in model.graph.node for name in node.output}
    needed: set[str] = set()
    stack = list(wanted)
    while stack:
        name = stack.pop()
        if name in needed:
            continue
        needed.add(name)
        if name in makers:
            stack += list(makers[name].input)
    graph = onnx.GraphProto(name=model.graph.name)
    graph.node.extend(node for node in model.graph.node if needed.intersection(node.output))
    graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in needed)
    graph.input.extend(value for value in model.graph.input if value.name in needed)
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
    return helper.make_model(
        graph,
        opset_imports=list(model.opset_import),
        ir_version=model.ir_version,
        functions=list(model.functions),
    )
