"""Products of an encoder in 8-bit integers whose results depend neither on batch mates nor on the processor.

`find_products` finds products of computed states with stored weights, where nearly all time of an encoder goes.
`measure_ranges` measures their inputs on calibration prompts. `smooth` moves outlying channels of activations into the
weights, exactly, so that eight bits per tensor suffice. `quantize` then replaces the products.

Activations: one scale and zero point per tensor. A scale taken from each batch (ONNX Runtime's dynamic quantization)
lets one prompt change the rounding of all others; scales per row cost as much time as they save. Weights: one scale per
output channel.

Smoothing: one scale for a whole tensor is what the fast integer product needs; a few channels far from zero leave few
steps for the others. Channel k of the states is shifted by c_k and divided by s_k, and the weights take it back:
x W + b = ((x - c) / s) (s W) + (b + c W). Where x comes from a layer normalization, a second one with other gains gives
(x - c) / s; where it is the context of attention, the value projection does, because attention weights sum to 1.

Processors without VNNI multiply unsigned by signed bytes in pairs and saturate the sum of a pair at 32,767 (16 bits).
Weights of 7 bits avoid that at the price of half of the precision. Here the scale of a channel is such that no pair can
saturate with any activation: positive weights of neighbors sum to at most 128, and so do negative ones. That costs about
a third of a bit, and all processors give the same integers.

Sources: Xiao et al., SmoothQuant, ICML 2023, equation 4, with the shift of Wei et al., Outlier Suppression+, EMNLP 2023;
Intel 64 manual, VPMADDUBSW; ONNX Runtime, "Quantize ONNX models", when and why reduce_range.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto

from export.passes.graph import MICROSOFT, Feed, GraphView, attribute, part, probe, session

Array = NDArray[np.float32]
#: Smaller products cost next to nothing.
SMALLEST_WEIGHT = 64 * 64


@dataclass(frozen=True, slots=True)
class Product:
    """`source @ weight + bias`.

    Attributes:
        node: The MatMul.
        source: States [B, S, K] that were measured; rewrites can put others in their place.
        add: The Add of a stored bias [N], if there is one.
    """

    node: NodeProto
    source: str
    add: NodeProto | None

    @property
    def weight(self) -> str:
        """Name of the stored weight [K, N]."""
        return str(self.node.input[1])

    @property
    def bias(self) -> str:
        """Name of the stored bias; empty if there is none."""
        names = [] if self.add is None else self.add.input
        return next((str(name) for name in names if name != self.node.output[0]), "")

    @property
    def output(self) -> str:
        """Where the result is [B, S, N]."""
        return str((self.node if self.add is None else self.add).output[0])


def find_products(graph: GraphView, feed: Feed) -> list[Product]:
    """Products worth quantizing, in the order of the graph: those with one row per token, as a run on `feed` shows.

    The small products behind the pooling stay exact.
    """
    products = [Product(node, node.input[0], None) for node in graph.nodes if node.op_type == "MatMul"]
    shapes = {product.output: graph.constant_shape(product.weight) or () for product in products}
    large = [
        p for p in products if len(shapes[p.output]) == 2 and math.prod(shapes[p.output]) >= SMALLEST_WEIGHT
    ]
    states = probe(graph.model, [product.source for product in large], feed)
    rows = feed["input_ids"].shape
    large = [p for p in large if states[p.source].ndim == 3 and states[p.source].shape[:2] == rows]
    return [_with_bias(graph, product, shapes[product.output][1:]) for product in large]


def _with_bias(graph: GraphView, product: Product, shape: tuple[int, ...]) -> Product:
    readers = graph.consumers(product.output)
    if len(readers) == 1 and readers[0].op_type == "Add" and product.output not in graph.outputs:
        biased = Product(product.node, product.source, readers[0])
        return biased if graph.constant_shape(biased.bias) == shape else product
    return product


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
    names = list(dict.fromkeys(names))
    runner = session(part(model, names))
    needed = {value.name for value in runner.get_inputs()}
    ranges: dict[str, Range] = {}
    for feed in feeds:
        values = runner.run(names, {name: value for name, value in feed.items() if name in needed})
        for name, value in zip(names, values, strict=True):
            rows = value.reshape(-1, value.shape[-1])
            low, high = rows.min(axis=0), rows.max(axis=0)
            if name in ranges:
                low, high = np.minimum(low, ranges[name].low), np.maximum(high, ranges[name].high)
            ranges[name] = Range(low, high)
    return ranges


#: How much of a channel's spread goes into the weights.
STRENGTH = 0.5
#: Channels narrower than this do not vary.
_NARROW = 1e-5


def smooth(graph: GraphView, products: Sequence[Product], ranges: Mapping[str, Range]) -> int:
    """Rewrites a graph in place, with the same numbers; returns how many tensors were smoothed.

    Args:
        graph: The graph.
        products: Its products.
        ranges: Of the products' sources.
    """
    groups: dict[str, list[Product]] = defaultdict(list)
    for product in products:
        groups[product.source].append(product)
    by_output = {product.output: product for product in products}
    done = 0
    for source, group in groups.items():
        node = graph.producer(source)
        if node is None or any(product.add is None for product in group):
            continue
        shift, scale = _shift_and_scale(ranges[source], [_stored(graph, product.weight) for product in group])
        values = by_output.get(node.input[2]) if node.op_type == "MultiHeadAttention" else None
        if (
            node.op_type == "LayerNormalization"
            and len(node.input) == 3
            and all(map(graph.is_constant, node.input[1:]))
        ):
            smoothed = graph.add(
                "LayerNormalization",
                [
                    node.input[0],
                    graph.add_constant("smooth_gain", _stored(graph, node.input[1]) / scale),
                    graph.add_constant("smooth_offset", (_stored(graph, node.input[2]) - shift) / scale),
                ],
                axis=attribute(node, "axis", -1),
                epsilon=attribute(node, "epsilon", 1e-5),
            )
            for product in group:
                graph.replace_uses(source, smoothed, among=[product.node])
        elif (
            values is not None
            and values.add is not None
            and len(graph.consumers(source)) == len(group)
            and len(graph.consumers(values.output)) == 1
        ):
            weight, bias = _stored(graph, values.weight), _stored(graph, values.bias)
            _replace(graph, values, weight / scale, (bias - shift) / scale)
        else:
            continue
        for product in group:
            weight, bias = _stored(graph, product.weight), _stored(graph, product.bias)
            _replace(graph, product, weight * scale[:, None], bias + shift @ weight)
        done += 1
    graph.finish()
    return done


def _stored(graph: GraphView, name: str) -> Array:
    value = graph.constant(name)
    assert value is not None
    return value


def _shift_and_scale(range_: Range, weights: Sequence[Array]) -> tuple[Array, Array]:
    shift = (range_.low + range_.high) / 2
    half_width = np.maximum((range_.high - range_.low) / 2, _NARROW)
    height = np.maximum(np.max([np.abs(weight).max(axis=1) for weight in weights], axis=0), _NARROW)
    scale = half_width**STRENGTH / height ** (1 - STRENGTH)
    # The whole tensor keeps its size; only the channels change relative to each other.
    scale = scale / np.exp(np.log(scale).mean())
    return shift.astype(np.float32), scale.astype(np.float32)


def _replace(graph: GraphView, product: Product, weight: Array, bias: Array) -> None:
    assert product.add is not None
    graph.replace_uses(product.bias, graph.add_constant("smooth_bias", bias), among=[product.add])
    graph.replace_uses(product.weight, graph.add_constant("smooth_weight", weight), among=[product.node])


#: Largest sum of two neighboring weights of the same sign: 255 x 128 fits into 16 bits with a sign.
LARGEST_PAIR = 128
#: Calibration prompts do not show everything: so much beyond their range is still represented.
MARGIN = 1.05


def quantize(graph: GraphView, products: Sequence[Product], ranges: Mapping[str, Range]) -> int:
    """Puts products into 8-bit integers, in place; returns how many.

    Args:
        graph: The graph.
        products: Its products.
        ranges: Of the products' sources.
    """
    quantized: dict[str, tuple[str, str, str]] = {}
    for product in products:
        if product.source not in quantized:
            scale, zero = activation_scale(ranges[product.source])
            names = (graph.add_constant("act_scale", scale), graph.add_constant("act_zero", zero))
            integers = graph.add("QuantizeLinear", [product.source, *names])
            quantized[product.source] = (integers, *names)
        integers, act_scale, act_zero = quantized[product.source]
        rounded, scales = quantize_weight(_stored(graph, product.weight))
        result = graph.add(
            "MatMulIntegerToFloat",
            [
                integers,
                graph.add_constant("weight_int8", rounded),
                act_scale,
                graph.add_constant("weight_scale", scales),
                act_zero,
                "",
                product.bias,
            ],
            domain=MICROSOFT,
        )
        graph.replace_uses(product.output, result)
    graph.finish()
    return len(products)


def activation_scale(range_: Range) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Scale and zero point of unsigned bytes for a tensor; 0 is always represented exactly."""
    low, high = min(float(range_.low.min()), 0.0) * MARGIN, max(float(range_.high.max()), 0.0) * MARGIN
    scale = max(high - low, 1e-8) / 255
    return np.float32(scale), np.array(np.clip(round(-low / scale), 0, 255), dtype=np.uint8)  # type: ignore[return-value]


def quantize_weight(weight: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Integers [K, N] and a scale per output channel [N], such that weight is about integers * scale."""
    largest = np.abs(weight).max(axis=0)
    scale = np.maximum(np.maximum(largest / 127, _largest_pairs(weight) / LARGEST_PAIR), 1e-12)
    rounded = np.rint(weight / scale)
    # Rounding can lift a pair by one; a slightly larger scale takes that back.
    for _ in range(8):
        over = _largest_pairs(rounded) > LARGEST_PAIR
        if not over.any():
            break
        scale = np.where(over, scale * (1 + 1 / LARGEST_PAIR), scale)
        rounded = np.rint(weight / scale)
    return rounded.astype(np.int8), scale.astype(np.float32)


def _largest_pairs(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """Largest sum of the same sign of two neighbors (0 and 1, 2 and 3, ...) in each column."""
    if len(weight) % 2:
        weight = np.concatenate([weight, np.zeros((1, weight.shape[1]), dtype=weight.dtype)])
    pairs = weight.reshape(-1, 2, weight.shape[1])
    positive = np.maximum(pairs, 0).sum(axis=1).max(axis=0)
    negative = np.maximum(-pairs, 0).sum(axis=1).max(axis=0)
    return np.asarray(np.maximum(positive, negative))


def quantize_tables(graph: GraphView, *, least_rows: int = 1000) -> int:
    """Stores embedding tables in bytes with a scale per row, in place; returns how many.

    A row is turned back into floats when it is looked up: that makes the file smaller and no prediction slower, at a rounding
    error far below that of the products.

    Args:
        graph: The graph.
        least_rows: Smaller tables stay as they are.
    """
    done = 0
    for node in list(graph.nodes):
        shape = graph.constant_shape(node.input[0]) if node.op_type == "Gather" else None
        if shape is None or len(shape) != 2 or shape[0] < least_rows or attribute(node, "axis", 0) != 0:
            continue
        table = graph.constant(node.input[0])
        if table is None or table.dtype != np.float32:
            continue
        scale = np.maximum(np.abs(table).max(axis=1, keepdims=True) / 127, 1e-12).astype(np.float32)
        rounded = np.rint(table / scale).astype(np.int8)
        rows = graph.add("Gather", [graph.add_constant("table_int8", rounded), node.input[1]])
        scales = graph.add("Gather", [graph.add_constant("table_scale", scale), node.input[1]])
        floats = graph.add("Mul", [graph.add("Cast", [rows], to=TensorProto.FLOAT), scales])
        graph.replace_uses(node.output[0], floats)
        done += 1
    graph.finish()
    return done
