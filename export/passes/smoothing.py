"""Outlying channels of activations moved into the weights, exactly, so that eight bits per tensor suffice.

One scale for a whole tensor is what the fast integer product needs; a few channels far from zero then leave few steps for
the others. Channel k of the states is shifted by c_k and divided by s_k, and the weights take it back:
x W + b = ((x - c) / s) (s W) + (b + c W). Where x comes from a layer normalisation, a second one with other gains gives
(x - c) / s; where it is the context of attention, the value projection does, because attention weights sum to 1.

Source: Xiao et al., SmoothQuant, ICML 2023, equation 4, with the shift of Wei et al., Outlier Suppression+, EMNLP 2023.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from export.passes.products import Product, Range
from export.passes.view import GraphView, attribute

Array = NDArray[np.float32]
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
    readers: dict[str, list[Product]] = defaultdict(list)
    for product in products:
        readers[product.source].append(product)
    by_output = {product.output: product for product in products}
    done = 0
    for source, group in readers.items():
        if any(product.add is None for product in group):
            continue
        shift, scale = _shift_and_scale(ranges[source], [_weight(graph, p) for p in group])
        smoothed = _from_normalisation(graph, source, shift, scale)
        if smoothed is None:
            if not _from_values(graph, source, group, by_output, shift, scale):
                continue
        else:
            for product in group:
                graph.replace_uses(source, smoothed, among=[product.node])
        for product in group:
            _take_back(graph, product, shift, scale)
        done += 1
    graph.finish()
    return done


def _weight(graph: GraphView, product: Product) -> Array:
    value = graph.constant(product.node.input[1])
    assert value is not None
    return value


def _shift_and_scale(found: Range, weights: Sequence[Array]) -> tuple[Array, Array]:
    shift = (found.low + found.high) / 2
    spread = np.maximum((found.high - found.low) / 2, _NARROW)
    height = np.maximum(np.max([np.abs(weight).max(axis=1) for weight in weights], axis=0), _NARROW)
    scale = spread**STRENGTH / height ** (1 - STRENGTH)
    # The whole tensor keeps its size; only the channels change relative to each other.
    scale = scale / np.exp(np.log(scale).mean())
    return shift.astype(np.float32), scale.astype(np.float32)


def _from_normalisation(graph: GraphView, source: str, shift: Array, scale: Array) -> str | None:
    node = graph.producer(source)
    if node is None or node.op_type != "LayerNormalization" or len(node.input) != 3:
        return None
    gain, offset = graph.constant(node.input[1]), graph.constant(node.input[2])
    if gain is None or offset is None:
        return None
    return graph.add(
        "LayerNormalization",
        [
            node.input[0],
            graph.add_constant("smooth_gain", gain / scale),
            graph.add_constant("smooth_offset", (offset - shift) / scale),
        ],
        axis=attribute(node, "axis", -1),
        epsilon=attribute(node, "epsilon", 1e-5),
    )


def _from_values(
    graph: GraphView,
    source: str,
    group: Sequence[Product],
    by_output: Mapping[str, Product],
    shift: Array,
    scale: Array,
) -> bool:
    node = graph.producer(source)
    if node is None or node.op_type != "MultiHeadAttention" or len(graph.consumers(source)) != len(group):
        return False
    values = by_output.get(node.input[2])
    if values is None or values.add is None or len(graph.consumers(values.output)) != 1:
        return False
    weight, bias = _weight(graph, values), graph.constant(_bias_name(values))
    assert bias is not None
    _store(graph, values, weight / scale, (bias - shift) / scale)
    return True


def _take_back(graph: GraphView, product: Product, shift: Array, scale: Array) -> None:
    weight, bias = _weight(graph, product), graph.constant(_bias_name(product))
    assert bias is not None
    _store(graph, product, weight * scale[:, None], bias + shift @ weight)


def _bias_name(product: Product) -> str:
    assert product.add is not None
    [name] = [name for name in product.add.input if name != product.node.output[0]]
    return str(name)


def _store(graph: GraphView, product: Product, weight: Array, bias: Array) -> None:
    assert product.add is not None
    old = _bias_name(product)
    graph.replace_uses(
        product.node.input[1], graph.add_constant("smooth_weight", weight), among=[product.node]
    )
    graph.replace_uses(old, graph.add_constant("smooth_bias", bias), among=[product.add])
