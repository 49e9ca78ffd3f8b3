"""Fusion of the attention of a graph into one operator, verified numerically.

The exporters write about a dozen nodes per layer: projections split into heads, scores, mask, softmax,
context, joined heads. They become one `MultiHeadAttention` of ONNX Runtime, which needs no copies between
them. `disentangled` adds the relative positions of DeBERTa.

A softmax is a candidate if the nodes around it match softmax(scale q k^T + positions + mask) v. The match is
then verified: the formula is computed in numpy on a random batch and compared with the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from export.passes.disentangled import PositionTerm, RelativeBias, Scale, position_tables, product_of
from export.passes.graph import MICROSOFT, Array, add, finish, probe, random_feed, replace_uses, stored

LAYOUT = ("Reshape", "Transpose", "Identity", "Squeeze", "Unsqueeze", "Flatten")
#: Added to a masked score: its probability becomes zero, and half precision can represent it.
BLOCKED = -1e4
#: Maximum difference of probabilities (absolute) and of the context (relative).
TOLERANCE = 1e-4


@dataclass(slots=True)
class Reading:
    """The tensors of one attention, matched by the nodes around a softmax.

    Attributes:
        probabilities: Output of the softmax.
        query, key, value: Projections [B, S, H D] before they are split into heads.
        context: The tensor [B, S, H D] of the joined heads.
        scales: Factors on query times key.
        mask: Tensor added to the scores or, with `keep`, a boolean tensor that is True for scores to keep.
    """

    probabilities: ir.Value
    query: ir.Value | None = None
    key: ir.Value | None = None
    value: ir.Value | None = None
    context: ir.Value | None = None
    scales: list[Scale] = field(default_factory=list)
    positions: list[PositionTerm] = field(default_factory=list)
    mask: ir.Value | None = None
    keep: bool = False

    def tensors(self) -> list[ir.Value]:
        """All tensors whose values are needed to verify the match."""
        values = [self.query, self.key, self.value, self.context, self.mask, self.probabilities]
        values += [scale.value for scale in self.scales]
        values += [scale.value for term in self.positions for scale in term.scales]
        return [value for value in values if value is not None]


def fuse_attention(model: ir.Model, *, max_length: int, vocabulary: int) -> int:
    """Replaces every verified attention of a simplified graph by one operator, in place; returns their
    number. The inputs of the graph have at most `max_length` tokens with ids below `vocabulary`."""
    graph = model.graph
    softmaxes = [node for node in graph if node.op_type == "Softmax"]
    readings = [reading for node in softmaxes if (reading := read_attention(node)) is not None]
    if not readings:
        return 0
    rng = np.random.default_rng(0)
    feed = random_feed(model, 2, min(7, max_length), rng, vocabulary)
    values = probe(model, [value for reading in readings for value in reading.tensors()], feed)
    terms = [term for reading in readings for term in reading.positions]
    tables = position_tables(model, terms, max_length, rng, vocabulary) if terms else {}
    num_fused = 0
    [mask] = [value for value in graph.inputs if value.name == "attention_mask"]
    key_mask: ir.Value | None = None
    relative = RelativeBias(graph, max_length)
    for reading in readings:
        try:
            proof = _prove(reading, values, feed["attention_mask"].astype(bool), tables, max_length)
        except ValueError:
            proof = None
        if proof is not None:
            key_mask = key_mask or add(graph, "Cast", mask, to=ir.DataType.INT32)
            _rewrite(graph, reading, proof, key_mask, relative)
            num_fused += 1
    if num_fused:
        finish(model)
    return num_fused


def read_attention(softmax: ir.Node) -> Reading | None:
    """Matches the nodes around a softmax; None if they are not attention."""
    reading = Reading(softmax.outputs[0])
    if not _read_scores(softmax.inputs[0], reading, [], swapped=False) or reading.query is None:
        return None
    value = softmax.outputs[0]
    while True:
        node = _only_reader(value, ("Shape", "IsNaN"))
        if node is None:
            return None
        if node.op_type == "MatMul" and node.inputs[0] is value:
            break
        if node.op_type not in (*LAYOUT, "Where"):
            return None
        value = node.outputs[0]
    reading.value, scales = _walk_back(node.inputs[1])
    if scales:
        return None
    value = node.outputs[0]
    while (reader := _only_reader(value, ("Shape",))) is not None and reader.op_type in LAYOUT:
        value = reader.outputs[0]
    reading.context = value
    return reading


def _read_scores(value: ir.Value | None, reading: Reading, scales: Sequence[Scale], *, swapped: bool) -> bool:
    """Matches the sum before a softmax term by term; False if a term is not part of attention."""
    node = _producer(value)
    if node is None:
        return False
    if node.op_type == "Add":
        return all(_read_scores(part, reading, scales, swapped=swapped) for part in node.inputs)
    if node.op_type == "Where" and reading.mask is None and _makes_products(node.inputs[1]):
        reading.mask, reading.keep = node.inputs[0], True
        return _read_scores(node.inputs[1], reading, scales, swapped=swapped)
    if node.op_type in ("Mul", "Div") and _makes_products(node.inputs[0]):
        return _read_scores(node.inputs[0], reading, [*scales, _scale_of(node)], swapped=swapped)
    if node.op_type in ("Reshape", "Identity"):
        return _read_scores(node.inputs[0], reading, scales, swapped=swapped)
    if node.op_type == "Transpose" and _makes_products(node.inputs[0]):
        return _read_scores(node.inputs[0], reading, scales, swapped=not swapped)
    if node.op_type == "MatMul" and reading.query is None and not swapped:
        reading.query, query_scales = _walk_back(node.inputs[0])
        reading.key, key_scales = _walk_back(node.inputs[1])
        reading.scales = [*scales, *query_scales, *key_scales]
        return True
    if node.op_type == "GatherElements":
        product = _producer(node.inputs[0])
        if product is None or product.op_type != "MatMul":
            return False
        source, factors = _walk_back(product.inputs[0])
        source, table, index = map(_not_none, (source, product.inputs[1], node.inputs[1]))
        reading.positions.append(PositionTerm(source, table, index, (*scales, *factors), by_key=swapped))
        return True
    if reading.mask is None and not swapped and not scales:
        reading.mask = value
        return True
    return False


def _producer(value: ir.Value | None) -> ir.Node | None:
    return None if value is None else value.producer()


def _not_none(value: ir.Value | None) -> ir.Value:
    assert value is not None
    return value


def _scale_of(node: ir.Node) -> Scale:
    return Scale(_not_none(node.inputs[1]), node.op_type == "Div")


def _makes_products(value: ir.Value | None) -> bool:
    """Whether a tensor is a product of two computed matrices, apart from sums, factors and layout changes."""
    node = _producer(value)
    if node is None:
        return False
    if node.op_type in ("MatMul", "GatherElements"):
        return stored(node.inputs[0]) is None and stored(node.inputs[1]) is None
    if node.op_type == "Add":
        return any(map(_makes_products, node.inputs))
    if node.op_type in (*LAYOUT, "Mul", "Div"):
        return _makes_products(node.inputs[0])
    return node.op_type == "Where" and _makes_products(node.inputs[1])


def _walk_back(value: ir.Value | None) -> tuple[ir.Value | None, list[Scale]]:
    """The source of a tensor, without layout changes and factors, and these factors."""
    scales: list[Scale] = []
    while (node := _producer(value)) is not None:
        if node.op_type in ("Mul", "Div") and _feeds_layout(node.inputs[0]):
            scales.append(_scale_of(node))
        elif node.op_type not in LAYOUT:
            break
        value = node.inputs[0]
    return value, scales


def _feeds_layout(value: ir.Value | None) -> bool:
    node = _producer(value)
    return node is not None and node.op_type in (*LAYOUT, "Add", "MatMul", "Gemm", "Mul", "Div")


def _only_reader(value: ir.Value, ignored: Collection[str]) -> ir.Node | None:
    readers = [node for node in value.consumers() if node.op_type not in ignored]
    return readers[0] if len(readers) == 1 else None


#: Parameters of a verified attention: number of heads, factor on query times key, whether the mask is causal,
#: and the scaled table of each position term, keys or queries by distance [H, D, 2 P].
Proof = tuple[int, float, bool, list[Array]]


def _prove(
    reading: Reading,
    values: Mapping[ir.Value, Array],
    tokens: Array,
    tables: Mapping[PositionTerm, Array],
    max_length: int,
) -> Proof | None:
    """Computes the attention in numpy and compares; None if it differs, ValueError if shapes do not match."""
    batch, seq = tokens.shape
    probabilities = values[reading.probabilities].reshape(batch, -1, seq, seq)
    num_heads = probabilities.shape[1]
    query, key, value = (
        values[_not_none(tensor)].reshape(batch, seq, num_heads, -1).swapaxes(1, 2)
        for tensor in (reading.query, reading.key, reading.value)
    )
    scale, causal = product_of(reading.scales, values), _mask_kind(reading, values, tokens)
    if scale is None or causal is None:
        return None
    scores = scale * query @ key.swapaxes(-1, -2)
    scaled_tables = []
    for term in reading.positions:
        factor = product_of(term.scales, values)
        if factor is None or term not in tables or term.source not in (reading.query, reading.key):
            return None
        if (term.source == reading.key) != term.by_key and reading.query != reading.key:
            return None
        table = tables[term] * np.float32(factor)
        distance = np.arange(seq)[:, None] - np.arange(seq)
        columns = np.broadcast_to(max_length - distance, (batch, num_heads, seq, seq))
        bias = np.take_along_axis((key if term.by_key else query) @ table, columns, axis=-1)
        scores = scores + (bias.swapaxes(-1, -2) if term.by_key else bias)
        scaled_tables.append(table)
    visible = tokens[:, None, None, :] & (np.tri(seq, dtype=bool) if causal else True)
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    context = (weights @ value).swapaxes(1, 2).reshape(batch, seq, -1)[tokens]
    expected = values[_not_none(reading.context)].reshape(batch, seq, -1)[tokens]
    error = np.abs(weights - probabilities).swapaxes(1, 2)[tokens].max()
    error = max(error, np.abs(context - expected).max() / (np.abs(expected).max() + 1e-6))
    return (num_heads, scale, causal, scaled_tables) if error <= TOLERANCE else None


def _mask_kind(reading: Reading, values: Mapping[ir.Value, Array], tokens: Array) -> bool | None:
    """True for a causal mask, False for one that hides only padding, None for any other mask."""
    if reading.mask is None:
        return None
    batch, seq = tokens.shape
    mask = values[reading.mask]
    mask = np.broadcast_to(mask, (batch, *mask.shape[1:-2], seq, seq)) if mask.ndim > 2 else mask[None]
    if not reading.keep and (mask[mask > BLOCKED] != 0).any():
        return None
    visible = (mask if reading.keep else mask > BLOCKED).astype(bool)
    visible = np.broadcast_to(visible, (batch, *mask.shape[1:])).reshape(batch, -1, seq, seq)
    for causal in (False, True):
        expected = tokens[:, None, None, :] & (np.tri(seq, dtype=bool) if causal else True)
        expected = np.broadcast_to(expected, (batch, visible.shape[1], seq, seq))
        if (visible == expected).swapaxes(1, 2)[tokens].all():
            return causal
    return None


def _rewrite(
    graph: ir.Graph, reading: Reading, proof: Proof, key_mask: ir.Value, relative: RelativeBias
) -> None:
    num_heads, scale, causal, tables = proof
    query, key, context = map(_not_none, (reading.query, reading.key, reading.context))
    bias = relative.add(query, key, reading.positions, tables, num_heads) if reading.positions else None
    inputs = (query, key, reading.value, None, key_mask, bias)
    options = {"num_heads": num_heads, "scale": scale, "mask_filter_value": BLOCKED}
    options |= {"unidirectional": 1} if causal else {}
    replace_uses(context, add(graph, "MultiHeadAttention", *inputs, domain=MICROSOFT, **options))
