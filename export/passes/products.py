"""Products of computed states with stored weights: where nearly all time of an encoder goes, and what is quantised."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto

from export.passes.probe import Feed, part, session
from export.passes.view import GraphView

Array = NDArray[np.float32]
#: Smaller products cost next to nothing.
SMALLEST_WEIGHT = 64 * 64


@dataclass(frozen=True, slots=True)
class Product:
    """`source @ weight + bias`.

    Attributes:
        node: The MatMul.
        source: States [B, S, K].
        weight: Name of the stored weight [K, N].
        add: The Add of a stored bias [N], if there is one.
        bias: Name of that bias.
    """

    node: NodeProto
    source: str
    weight: str
    add: NodeProto | None
    bias: str

    @property
    def output(self) -> str:
        """Where the result is [B, S, N]."""
        return str((self.node if self.add is None else self.add).output[0])


def find_products(graph: GraphView, tokens_of: Callable[[str], bool]) -> list[Product]:
    """Products worth quantising.

    Args:
        graph: The graph.
        tokens_of: Whether a tensor has one row per token: the small products behind the pooling stay exact.
    """
    found = []
    for node in graph.nodes:
        if node.op_type != "MatMul":
            continue
        shape = graph.constant_shape(node.input[1])
        if shape is None or len(shape) != 2 or shape[0] * shape[1] < SMALLEST_WEIGHT:
            continue
        if tokens_of(node.input[0]):
            add, bias = _bias(graph, node, shape[1])
            found.append(Product(node, node.input[0], node.input[1], add, bias))
    return found


def _bias(graph: GraphView, node: NodeProto, width: int) -> tuple[NodeProto | None, str]:
    readers = graph.consumers(node.output[0])
    if len(readers) != 1 or readers[0].op_type != "Add" or node.output[0] in graph.outputs:
        return None, ""
    [other] = [name for name in readers[0].input if name != node.output[0]] or [""]
    return (readers[0], other) if graph.constant_shape(other) == (width,) else (None, "")


def token_states(model: onnx.ModelProto, feed: Feed) -> Callable[[str], bool]:
    """Tells of a tensor whether it has the shape [B, S, K], by running the graph on `feed`."""
    graph = GraphView(model)
    sources = {
        node.input[0]
        for node in graph.nodes
        if node.op_type == "MatMul" and len(graph.constant_shape(node.input[1]) or ()) == 2
    }
    made = [name for name in sources if graph.producer(name) is not None]
    batch, seq = feed["input_ids"].shape
    if not made:
        return lambda name: False
    runner = session(part(model, made))
    needed = {value.name for value in runner.get_inputs()}
    values = runner.run(made, {name: value for name, value in feed.items() if name in needed})
    right = {
        name
        for name, value in zip(made, values, strict=True)
        if value.ndim == 3 and value.shape[:2] == (batch, seq)
    }
    return lambda name: name in right


@dataclass(frozen=True, slots=True)
class Range:
    """What a tensor [.., K] held over the calibration prompts, for each of the K channels."""

    low: Array
    high: Array


def measure_ranges(
    model: onnx.ModelProto, names: Sequence[str], feeds: Iterable[Feed]
) -> Mapping[str, Range]:
    """Smallest and largest value of each channel of some tensors.

    Args:
        model: The graph.
        names: Tensors [B, S, K].
        feeds: Inputs without padding.
    """
    wanted = list(dict.fromkeys(names))
    runner: Any = session(part(model, wanted))
    needed = {value.name for value in runner.get_inputs()}
    found: dict[str, Range] = {}
    for feed in feeds:
        values = runner.run(wanted, {name: value for name, value in feed.items() if name in needed})
        for name, value in zip(wanted, values, strict=True):
            rows = value.reshape(-1, value.shape[-1])
            low, high = rows.min(axis=0), rows.max(axis=0)
            if name in found:
                low, high = np.minimum(low, found[name].low), np.maximum(high, found[name].high)
            found[name] = Range(low, high)
    return found
