"""Quantization of an encoder to int8, with results that do not depend on batch mates or the processor.

`find_products` finds matrix products of states with stored weights, which take nearly all the time of an
encoder. `measure_ranges` measures their inputs on calibration prompts. `smooth` moves the scale of outlier
channels into the weights, so that eight bits per tensor suffice. `quantize` replaces the products.

Activations: one scale and zero point per tensor. With a scale per batch (ONNX Runtime's dynamic quantization)
one prompt changes the rounding of all others. Scales per row cost as much time as they save. Weights: one
scale per output channel.

Smoothing: the fast integer product needs one scale for the whole tensor. A few channels far from zero then
leave few steps for the others. Channel k of the states is shifted by c_k and divided by s_k, and the weights
compensate for it: x W + b = ((x - c) / s) (s W) + (b + c W). If x is the output of a layer normalization, a
second one with other gains computes (x - c) / s. If x is the context of attention, the value projection does,
as attention weights sum to 1.

Processors without VNNI multiply unsigned by signed bytes in pairs and saturate the sum of a pair at 32,767
(16 bits). Weights of 7 bits avoid that but halve the precision. Here the scale of a channel is chosen so that
no pair can saturate with any activation: two neighboring weights of the same sign sum to at most 128 in
magnitude. That costs about a third of a bit, and all processors compute the same integers.

Sources: Xiao et al., SmoothQuant, ICML 2023, equation 4, with the shift of Wei et al., Outlier Suppression+, EMNLP 2023;
Intel 64 manual, VPMADDUBSW; ONNX Runtime, "Quantize ONNX models", when and why reduce_range.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from export.passes.graph import (
    MICROSOFT,
    Feed,
    add,
    add_constant,
    finish,
    part,
    probe,
    replace_uses,
    session,
    stored,
    stored_shape,
)

Array = NDArray[np.float32]
#: Minimum number of weights of a product to quantize; smaller products take little time.
SMALLEST_WEIGHT = 64 * 64


@dataclass(frozen=True, slots=True)
class Product:
    """`source @ weight + bias`."""

    node: ir.Node  # the MatMul
    source: ir.Value  # measured states [B, S, K]; rewrites can replace the input of the MatMul
    add: ir.Node | None = None  # the Add of a stored bias [N]

    @property
    def weight(self) -> ir.Value:
        """The stored weight [K, N]."""
        weight = self.node.inputs[1]
        assert weight is not None
        return weight

    @property
    def bias(self) -> ir.Value | None:
        """The stored bias [N], if any."""
        values = [] if self.add is None else self.add.inputs
        return next((value for value in values if value is not self.node.outputs[0]), None)

    @property
    def output(self) -> ir.Value:
        """The result [B, S, N]."""
        return (self.node if self.add is None else self.add).outputs[0]


def find_products(model: ir.Model, feed: Feed) -> list[Product]:
    """Products to quantize, in the order of the graph: those with one row per token, determined by a run on
    `feed`. The small products after the pooling stay exact."""
    products = [
        Product(node, source)
        for node in model.graph
        if node.op_type == "MatMul" and (source := node.inputs[0]) is not None and _is_large(node.inputs[1])
    ]
    states = probe(model, [product.source for product in products], feed)
    rows = feed["input_ids"].shape
    return [
        _with_bias(product)
        for product in products
        if states[product.source].ndim == 3 and states[product.source].shape[:2] == rows
    ]


def _is_large(weight: ir.Value | None) -> bool:
    shape = stored_shape(weight)
    return len(shape) == 2 and math.prod(shape) >= SMALLEST_WEIGHT


def _with_bias(product: Product) -> Product:
    readers = product.output.consumers()
    if len(readers) == 1 and readers[0].op_type == "Add" and not product.output.is_graph_output():
        biased = Product(product.node, product.source, readers[0])
        return biased if stored_shape(biased.bias) == stored_shape(product.weight)[1:] else product
    return product


@dataclass(frozen=True, slots=True)
class Range:
    """Minimum and maximum of each channel [K] of a tensor [.., K] over the calibration prompts."""

    low: Array
    high: Array


def measure_ranges(
    model: ir.Model, values: Iterable[ir.Value], feeds: Iterable[Feed]
) -> Mapping[ir.Value, Range]:
    """Range of each channel of the tensors `values` [B, S, K] over inputs without padding."""
    values = list(dict.fromkeys(values))
    runner = session(part(model, values))
    ranges: dict[ir.Value, Range] = {}
    for feed in feeds:
        for value, array in zip(values, runner.run(None, dict(feed)), strict=True):
            rows = array.reshape(-1, array.shape[-1])
            low, high = rows.min(axis=0), rows.max(axis=0)
            if value in ranges:
                low, high = np.minimum(low, ranges[value].low), np.maximum(high, ranges[value].high)
            ranges[value] = Range(low, high)
    return ranges


#: Fraction of a channel's scale that moves into the weights, the alpha of SmoothQuant.
STRENGTH = 0.5
#: Minimum half-width of a channel; narrower channels count as constant.
_NARROW = 1e-5


def smooth(model: ir.Model, products: Sequence[Product], ranges: Mapping[ir.Value, Range]) -> int:
    """Smooths a graph in place, without changing its outputs; returns the number of smoothed tensors."""
    graph = model.graph
    groups: dict[ir.Value, list[Product]] = defaultdict(list)
    for product in products:
        groups[product.source].append(product)
    by_output = {product.output: product for product in products}
    num_smoothed = 0
    for source, group in groups.items():
        node = source.producer()
        if node is None or any(product.add is None for product in group):
            continue
        shift, scale = _shift_and_scale(ranges[source], [_array(product.weight) for product in group])
        if node.op_type == "LayerNormalization":
            constants = [array for value in node.inputs[1:] if (array := stored(value)) is not None]
            if len(constants) < 2:
                continue
            gain = add_constant(graph, "smooth_gain", constants[0] / scale)
            offset = add_constant(graph, "smooth_offset", (constants[1] - shift) / scale)
            attributes = {name: attribute.value for name, attribute in node.attributes.items()}
            smoothed = add(graph, "LayerNormalization", node.inputs[0], gain, offset, **attributes)
            for product in group:
                replace_uses(source, smoothed, [product.node])
        elif node.op_type == "MultiHeadAttention" and len(source.consumers()) == len(group):
            values = by_output.get(node.inputs[2])  # type: ignore[arg-type]
            if values is None or values.add is None or len(values.output.consumers()) > 1:
                continue
            _replace(graph, values, _array(values.weight) / scale, (_array(values.bias) - shift) / scale)
        else:
            continue
        for product in group:
            weight, bias = _array(product.weight), _array(product.bias)
            _replace(graph, product, weight * scale[:, None], bias + shift @ weight)
        num_smoothed += 1
    finish(model)
    return num_smoothed


def _array(value: ir.Value | None) -> Array:
    array = stored(value)
    assert array is not None
    return array


def _shift_and_scale(range_: Range, weights: Sequence[Array]) -> tuple[Array, Array]:
    shift = (range_.low + range_.high) / 2
    half_width = np.maximum((range_.high - range_.low) / 2, _NARROW)
    height = np.maximum(np.max([np.abs(weight).max(axis=1) for weight in weights], axis=0), _NARROW)
    scale = half_width**STRENGTH / height ** (1 - STRENGTH)
    # The geometric mean of the scales is 1: channels change only relative to each other.
    scale = scale / np.exp(np.log(scale).mean())
    return shift.astype(np.float32), scale.astype(np.float32)


def _replace(graph: ir.Graph, product: Product, weight: Array, bias: Array) -> None:
    assert product.add is not None and product.bias is not None  # noqa: PT018
    replace_uses(product.bias, add_constant(graph, "smooth_bias", bias), [product.add])
    replace_uses(product.weight, add_constant(graph, "smooth_weight", weight), [product.node])


#: Largest sum of two neighboring weights of the same sign: 255 x 128 fits into 16 bits with a sign.
LARGEST_PAIR = 128
#: Factor on the calibration range, because other prompts can exceed it.
MARGIN = 1.05


def quantize(model: ir.Model, products: Sequence[Product], ranges: Mapping[ir.Value, Range]) -> int:
    """Quantizes products to int8 in place, with the ranges of their sources; returns their number."""
    graph = model.graph
    quantized: dict[ir.Value, tuple[ir.Value, ir.Value, ir.Value]] = {}
    for product in products:
        if product.source not in quantized:
            scale, zero = activation_scale(ranges[product.source])
            constants = add_constant(graph, "act_scale", scale), add_constant(graph, "act_zero", zero)
            integers = add(graph, "QuantizeLinear", product.source, *constants)
            quantized[product.source] = (integers, *constants)
        integers, act_scale, act_zero = quantized[product.source]
        rounded, scales = quantize_weight(_array(product.weight))
        weight = add_constant(graph, "weight_int8", rounded)
        weight_scale = add_constant(graph, "weight_scale", scales)
        operands = (integers, weight, act_scale, weight_scale, act_zero, None, product.bias)
        result = add(graph, "MatMulIntegerToFloat", *operands, domain=MICROSOFT)
        replace_uses(product.output, result)
    finish(model)
    return len(products)


def activation_scale(range_: Range) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Scale and zero point of a tensor in uint8; 0 is always represented exactly."""
    low, high = min(float(range_.low.min()), 0.0) * MARGIN, max(float(range_.high.max()), 0.0) * MARGIN
    scale = max(high - low, 1e-8) / 255
    return np.float32(scale), np.array(np.clip(round(-low / scale), 0, 255), dtype=np.uint8)  # type: ignore[return-value]


def quantize_weight(weight: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Integers [K, N] and a scale per output channel [N]; weight is approximately integers * scale."""
    largest = np.abs(weight).max(axis=0)
    scale = np.maximum(np.maximum(largest / 127, _largest_pairs(weight) / LARGEST_PAIR), 1e-12)
    rounded = np.rint(weight / scale)
    # Rounding can raise the sum of a pair by one; a slightly larger scale corrects that.
    for _ in range(8):
        over = _largest_pairs(rounded) > LARGEST_PAIR
        if not over.any():
            break
        scale = np.where(over, scale * (1 + 1 / LARGEST_PAIR), scale)
        rounded = np.rint(weight / scale)
    return rounded.astype(np.int8), scale.astype(np.float32)


def _largest_pairs(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """Largest magnitude, per column, of the sum of two neighbors (0 and 1, 2 and 3, ...) of the same sign."""
    if len(weight) % 2:
        weight = np.concatenate([weight, np.zeros((1, weight.shape[1]), dtype=weight.dtype)])
    pairs = weight.reshape(-1, 2, weight.shape[1])
    positive = np.maximum(pairs, 0).sum(axis=1).max(axis=0)
    negative = np.maximum(-pairs, 0).sum(axis=1).max(axis=0)
    return np.asarray(np.maximum(positive, negative))


def quantize_tables(model: ir.Model, *, least_rows: int = 1000) -> int:
    """Stores embedding tables with at least `least_rows` rows as int8 with a scale per row, in place; returns
    their number. A row is converted back to floats when it is looked up. The file gets smaller and
    predictions do not get slower; the rounding error is far below that of the products."""
    graph = model.graph
    num_tables = 0
    for node in [node for node in graph if node.op_type == "Gather"]:
        table = stored(node.inputs[0])
        if table is None or table.ndim != 2 or len(table) < least_rows or table.dtype != np.float32:
            continue
        if "axis" in node.attributes and node.attributes["axis"].as_int() != 0:
            continue
        scale = np.maximum(np.abs(table).max(axis=1, keepdims=True) / 127, 1e-12).astype(np.float32)
        rounded = np.rint(table / scale).astype(np.int8)
        rows = add(graph, "Gather", add_constant(graph, "table_int8", rounded), node.inputs[1])
        scales = add(graph, "Gather", add_constant(graph, "table_scale", scale), node.inputs[1])
        floats = add(graph, "Mul", add(graph, "Cast", rows, to=ir.DataType.FLOAT), scales)
        replace_uses(node.outputs[0], floats)
        num_tables += 1
    finish(model)
    return num_tables
