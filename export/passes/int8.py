"""Products in 8-bit integers whose answers do not depend on batch mates, nor on the processor.

Activations: one scale and zero point per tensor, fixed from calibration prompts. A scale taken from each batch (ONNX
Runtime's dynamic quantisation) lets one prompt change the rounding of all others; scales per row cost as much time as they
save. Weights: one scale per output channel.

Processors without VNNI multiply unsigned by signed bytes in pairs and keep the sum of a pair in 16 bits, cut off at 32,767.
Weights of 7 bits avoid that at the price of half of the precision. Here the scale of a channel is chosen so that no pair
can get there with any activation: positive weights of neighbours sum to at most 128, and so do negative ones. That costs
about a third of a bit, and all processors give the same integers.

Source of the pairs: Intel 64 manual, VPMADDUBSW; ONNX Runtime, "Quantize ONNX models", when and why reduce_range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from export.passes.products import Product, Range
from export.passes.view import MICROSOFT, GraphView, attribute

#: Largest sum of two neighbouring weights of the same sign: 255 x 128 fits into 16 bits with a sign.
LARGEST_PAIR = 128
#: Calibration prompts do not show everything: so much beyond their range is still represented.
MARGIN = 1.05


def quantise(graph: GraphView, products: Sequence[Product], ranges: Mapping[str, Range]) -> int:
    """Puts products into 8-bit integers, in place; returns how many.

    Args:
        graph: The graph.
        products: Its products.
        ranges: Of the products' sources.
    """
    quantised: dict[str, tuple[str, str, str]] = {}
    for product in products:
        if product.source not in quantised:
            scale, zero = activation_scale(ranges[product.source])
            names = (graph.add_constant("act_scale", scale), graph.add_constant("act_zero", zero))
            integers = graph.add("QuantizeLinear", [product.source, *names])
            quantised[product.source] = (integers, *names)
        integers, act_scale, act_zero = quantised[product.source]
        weight = graph.constant(product.weight)
        assert weight is not None
        rounded, scales = quantise_weight(weight)
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


def activation_scale(found: Range) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Scale and zero point of unsigned bytes for a tensor; 0 is always represented exactly."""
    low, high = min(float(found.low.min()), 0.0) * MARGIN, max(float(found.high.max()), 0.0) * MARGIN
    scale = max(high - low, 1e-8) / 255
    return np.float32(scale), np.array(np.clip(round(-low / scale), 0, 255), dtype=np.uint8)  # type: ignore[return-value]


def quantise_weight(weight: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
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
    """Largest sum of the same sign of two neighbours (0 and 1, 2 and 3, ...) in each column."""
    if len(weight) % 2:
        weight = np.concatenate([weight, np.zeros((1, weight.shape[1]), dtype=weight.dtype)])
    pairs = weight.reshape(-1, 2, weight.shape[1])
    positive = np.maximum(pairs, 0).sum(axis=1).max(axis=0)
    negative = np.maximum(-pairs, 0).sum(axis=1).max(axis=0)
    return np.asarray(np.maximum(positive, negative))


def quantise_tables(graph: GraphView, *, least_rows: int = 1000) -> int:
    """Stores embedding tables in bytes with a scale per row, in place; returns how many.

    A row is turned back into floats when it is looked up: that makes the file smaller and no answer slower, at a rounding
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
